// Committing the next id, for the kernels that choose it: step.cu and persistent.cu. Torch-free.
#pragma once
#include "launch.h"

namespace decodev2 {

constexpr int kEosIds = 8;

// By one thread, once nobody reads token and position any more. id -1: no logit is finite.
__device__ __forceinline__ void commit_id(const CommitArguments& c, int64_t id) {
  *c.next_token = id;
  if (!c.token || *c.finished) return;
  bool end = false;
  for (int i = 0; i < kEosIds; ++i) end |= id >= 0 && c.eos_ids[i] == id;
  const int64_t position = *c.position + 1;
  *c.token = id;
  *c.position = position;
  if (end) *c.finished = 1;
  if (c.history && position >= 0 && position < c.history_size) c.history[position] = id;
}

}  // namespace decodev2
