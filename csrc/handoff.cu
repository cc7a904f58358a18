// A vector from all CTAs to all CTAs, round after round: what lies between two products of a step.
//
// Computes  next[i] = (v[(5 i + round) % words] * kFactor + i) & ~1: every CTA makes its own words of the next vector,
//           after it has brought all of this one into its shared memory as a product does with its x
// Owns      CTA c words [words * c / ctas, words * (c + 1) / ctas) of every vector; thread four words that are read
// Grid      one CTA per multiprocessor, 512 threads; shared 8 bytes per word, two vectors
// Layout    vectors [2][words]: round r reads vector r % 2 and writes the other one. Who writes a vector again has
//           read the one in between, which nobody had written before all had read this one: two are enough. The lowest
//           bit of a word is the parity of r / 2, for those ways that look at it.
// Floor     a store to the L2 and a load from it
// Variants  nodes   a launch per round, plain or programmatic
//           rounds  one launch: all CTAs meet at the grid's barrier or at a counter and then read; or they read until
//                   every word has its bit, one look at a time or two. Reading alone waits for nothing and reads
//                   the first vector every time.
#include "persistent.cuh"

#ifndef DECODEV2_EMULATED
#include <cooperative_groups.h>

namespace decodev2 {
__device__ __forceinline__ void all_ctas_meet() { cooperative_groups::this_grid().sync(); }
}  // namespace decodev2
#endif

namespace decodev2 {
namespace {

constexpr int kRoundThreads = 512;

#ifdef DECODEV2_HOPPER

constexpr uint32_t kFactor = 1664525;  // odd: no word is lost

__device__ __forceinline__ uint32_t tag_of(int round) { return round >> 1 & 1; }
__device__ __forceinline__ uint32_t* vector_of(const HandoffArguments& a, int round) {
  return a.vectors + (round & 1) * a.words;
}

// This CTA's words of the vector after `round`, made from all of `staged`.
__device__ __forceinline__ void write_own(const HandoffArguments& a, const uint32_t* staged, int round, uint32_t* to) {
  const int begin = a.words * static_cast<int>(blockIdx.x) / static_cast<int>(gridDim.x);
  const int end = a.words * static_cast<int>(blockIdx.x + 1) / static_cast<int>(gridDim.x);
  const uint32_t i = begin + threadIdx.x;
  if (static_cast<int>(i) >= end) return;
  const uint32_t word = staged[(5 * i + round) & (a.words - 1)] * kFactor + i;
  store_word(to + i, tagged(word, tag_of(round + 1)));
}

__device__ __forceinline__ void give_up(const HandoffArguments& a, int round) { store_word(a.fault, 1u + round); }

template <typename Load>
__device__ __forceinline__ uint4 await_by_one_look(const HandoffArguments& a, int round, Load load) {
  const long long start = clock64();
#pragma unroll 1
  for (;;) {
    const uint4 v = load();
    if (arrived(v, tag_of(round))) return v;
    if (clock64() - start > a.patience) {
      give_up(a, round);
      return v;
    }
  }
}

__device__ __forceinline__ void meet_at_counter(const HandoffArguments& a, int round) {
  __syncthreads();  // the CTA's words come before its arrival
  if (threadIdx.x == 0) {
    release_add(a.counter, 1);
    const uint32_t all = (round + 1) * gridDim.x;
    const long long start = clock64();
    while (load_acquired(a.counter) < all) {
      if (clock64() - start > a.patience) {
        give_up(a, round);
        break;
      }
    }
  }
  __syncthreads();
}

#endif

template <HandoffWay kWay>
__global__ void __launch_bounds__(kRoundThreads, 1) handoff_rounds(const HandoffArguments a) {
#ifdef DECODEV2_HOPPER
  auto* both = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int thread = threadIdx.x;
  uint32_t sum = 0;
  long long start = 0;
  for (int round = 0; round < a.rounds; ++round) {
    const bool stays = kWay == HandoffWay::kReading;  // reads the first vector, writes the other one
    if (round == kHandoffWarmUp) start = clock64();
    uint32_t* staged = both + (round & 1) * a.words;
    if (4 * (thread & -32) < a.words) {  // warps as a whole
      const bool exists = 4 * thread < a.words;
      const uint32_t* from = vector_of(a, stays ? 0 : round) + 4 * thread;
      const uint32_t tag = tag_of(round);
      const auto load = [&] { return exists ? load_words(from) : make_uint4(tag, tag, tag, tag); };
      uint4 v;
      if constexpr (kWay == HandoffWay::kTwoLooks) v = await(a, round, tag, load);
      else if constexpr (kWay == HandoffWay::kOneLook) v = await_by_one_look(a, round, load);
      else v = load();
      v = untagged(v);
      sum += v.x + v.y + v.z + v.w;
      if (exists) reinterpret_cast<uint4*>(staged)[thread] = v;
    }
    __syncthreads();
    write_own(a, staged, round, vector_of(a, stays ? 1 : round + 1));
    if constexpr (kWay == HandoffWay::kGridBarrier) all_ctas_meet();
    if constexpr (kWay == HandoffWay::kCounter) meet_at_counter(a, round);
  }
  if (thread == 0) a.cycles[blockIdx.x] = clock64() - start;
  sum = __reduce_add_sync(~0u, sum);
  if ((thread & 31) == 0) add_word(a.sum, sum);
#endif
}

__global__ void __launch_bounds__(kRoundThreads, 1) handoff_node(const HandoffArguments a) {
#ifdef DECODEV2_HOPPER
  auto* staged = reinterpret_cast<uint32_t*>(dynamic_shared());
  const int thread = threadIdx.x;
  let_dependents_launch();
  wait_for_predecessors();
  if (4 * thread < a.words)
    reinterpret_cast<uint4*>(staged)[thread] = untagged(load_words(vector_of(a, a.round) + 4 * thread));
  __syncthreads();
  write_own(a, staged, a.round, vector_of(a, a.round + 1));
#endif
}

// ---- host ---------------------------------------------------------------------------------------------

bool fits(const HandoffArguments& a, int ctas) {
  const bool power_of_two = a.words > 0 && (a.words & (a.words - 1)) == 0;
  return power_of_two && a.words <= 4 * kRoundThreads && ctas * kRoundThreads >= a.words && ctas > 0 &&
         a.words >= ctas;  // a CTA without a word of its own would be waited for by nobody
}

template <typename Kernel>
cudaError_t start(Kernel kernel, const HandoffArguments& a, int ctas, cudaLaunchAttribute* attribute,
                  cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(kRoundThreads);
  config.dynamicSmemBytes = 2 * a.words * sizeof(uint32_t);
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = attribute ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace

cudaError_t launch_handoff(const HandoffArguments& a, HandoffWay way, int ctas, cudaStream_t stream) {
  if (!fits(a, ctas) || a.rounds <= kHandoffWarmUp || !hopper_or_newer()) return cudaErrorInvalidValue;
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;  // all CTAs are resident, or the launch fails
  together.val.cooperative = 1;
  switch (way) {
    case HandoffWay::kReading: return start(handoff_rounds<HandoffWay::kReading>, a, ctas, &together, stream);
    case HandoffWay::kGridBarrier: return start(handoff_rounds<HandoffWay::kGridBarrier>, a, ctas, &together, stream);
    case HandoffWay::kCounter: return start(handoff_rounds<HandoffWay::kCounter>, a, ctas, &together, stream);
    case HandoffWay::kOneLook: return start(handoff_rounds<HandoffWay::kOneLook>, a, ctas, &together, stream);
    case HandoffWay::kTwoLooks: return start(handoff_rounds<HandoffWay::kTwoLooks>, a, ctas, &together, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_handoff_node(const HandoffArguments& a, int ctas, bool pdl, cudaStream_t stream) {
  if (!fits(a, ctas) || !hopper_or_newer()) return cudaErrorInvalidValue;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  return start(handoff_node, a, ctas, pdl ? &early : nullptr, stream);
}

}  // namespace decodev2
