// The small kernels of a step: norm, embedding rows, and choosing and committing the next id.
//
// Computes  rms         y[i] = x[i] * rsqrt(mean(x[i]^2) + eps) * weight
//           embed_rows  x[i] = row token[i] of the table; valid_len[i] = position[i] + 1
//           commit      next_token = best candidate of the head; then, if asked, token, position,
//                       and finished (rules at CommitArguments, launch.h)
//           candidates  the best logit and id of each slice of the logits, for commit: what the
//                       head GEMV leaves by itself, and other products of the head do not
// Owns      rms, embed_rows: one CTA per row. commit: one CTA. candidates: CTA = a slice
// Grid      CTAs x threads: rms n x (hidden / 4 in whole warps, at most 1024), embed_rows n x 256,
//           commit 1 x 256, candidates as many as there are slots x 256. Shared: under 200 bytes
// Layout    a candidate is one 64-bit key: the logit's bits, made to order as integers, above the
//           complement of its id. The greatest key is the greatest logit and, in a tie, the lowest
//           id, whatever the order of the reduction; 0 is "none" (NaN and -inf never win).
// Floor     rms 8 * hidden bytes; embed_rows 4.25 / 8 * hidden; candidates 4 * vocab: all far below
//           a launch
#include <cuda_fp16.h>

#include "choose.cuh"
#include "device.cuh"
#include "launch.h"
#include "nf4.cuh"

namespace decodev2 {
namespace {

using Key = unsigned long long;

constexpr int kThreads = 256;
constexpr int kRmsQuads = 4;  // float4 per thread at most

// ---- rms ----------------------------------------------------------------------------------------

template <int kQuads>
__global__ void __launch_bounds__(1024) rms_kernel(RmsArguments a) {
  __shared__ float sums[32];
  let_dependents_launch();
  const int quads = a.hidden / 4, thread = threadIdx.x;
  float4 weight[kQuads], x[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {  // a constant: may be read ahead
    const int at = thread + i * blockDim.x;
    if (at < quads) {
      const uint4 bits = load_weights_16(a.weight + 4 * at);  // volatile: stays ahead of the wait
      weight[i] = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y),
                              __uint_as_float(bits.z), __uint_as_float(bits.w));
    }
  }
  wait_for_predecessors();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * quads;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int at = thread + i * blockDim.x;
    x[i] = at < quads ? reinterpret_cast<const float4*>(a.x)[row + at]
                      : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    sum += (x[i].x * x[i].x + x[i].y * x[i].y) + (x[i].z * x[i].z + x[i].w * x[i].w);
  }
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if ((thread & 31) == 0) sums[thread >> 5] = sum;
  __syncthreads();
  // every warp adds the warps' sums itself: no second barrier
  sum = (thread & 31) < blockDim.x / 32 ? sums[thread & 31] : 0.0f;
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  const float by = rsqrtf(sum / static_cast<float>(a.hidden) + a.eps);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int at = thread + i * blockDim.x;
    if (at < quads)
      reinterpret_cast<float4*>(a.y)[row + at] =
          make_float4(x[i].x * by * weight[i].x, x[i].y * by * weight[i].y,
                      x[i].z * by * weight[i].z, x[i].w * by * weight[i].w);
  }
}

// ---- embedding ----------------------------------------------------------------------------------

__device__ __forceinline__ void stage_levels(float* levels) {
  if (threadIdx.x < 16) levels[threadIdx.x] = kNf4Levels[threadIdx.x];
  __syncthreads();
}

// x = row `id` of the table, by all threads of the CTA. levels: the NF4 levels in shared memory. A
// thread takes the 8 bytes (16 columns) of one block that one lane of a product would.
__device__ void gather_row(const EmbedTable& table, int64_t id, float* x, const float* levels) {
  const bool exists = id >= 0 && id < table.rows;
  if (!exists || table.dense) {
    for (int k = threadIdx.x; k < table.hidden; k += blockDim.x)
      x[k] = exists ? table.dense[id * table.hidden + k] : 0.0f;
    return;
  }
  const int row = static_cast<int>(id % kTileRows), g = row % 8;
  const uint8_t* tile = table.panels + id / kTileRows * table.groups * kBlockBytes;
  for (int i = threadIdx.x; i < table.groups * 4; i += blockDim.x) {
    const int block = i / 4, t = i % 4, panel = block / kPanelBlocks,
              in_panel = block % kPanelBlocks;
    const int blocks = min(kPanelBlocks, table.groups - panel * kPanelBlocks);
    const uint8_t* base = tile + panel * kPanelBytes;
    const uint2 codes = __ldg(reinterpret_cast<const uint2*>(base + in_panel * kBlockCodes +
                                                             (4 * g + t) * 16 + row / 8 * 8));
    const float scale = __half2float(__ldg(
        reinterpret_cast<const __half*>(base + blocks * kBlockCodes) + row * blocks + in_panel));
#pragma unroll
    for (int byte = 0; byte < 8; ++byte) {
      const uint32_t code = (byte < 4 ? codes.x : codes.y) >> (8 * (byte & 3));
      const int k = block * kGroup + 8 * byte + 2 * t;
      if (k < table.hidden) x[k] = levels[code & 15] * scale;
      if (k + 1 < table.hidden) x[k + 1] = levels[code >> 4 & 15] * scale;
    }
  }
}

__global__ void __launch_bounds__(kThreads) embed_rows_kernel(EmbedArguments a) {
  __shared__ float levels[16];
  stage_levels(levels);
  wait_for_predecessors();
  // Not before: kernels behind may then read ahead of their own wait what the step before has left, position and cache.
  let_dependents_launch();
  const int64_t column = blockIdx.x;
  if (a.valid_len && threadIdx.x == 0)
    a.valid_len[column] = static_cast<int32_t>(a.position[column] + 1);
  gather_row(a.table, a.token[column], a.x + column * a.table.hidden, levels);
}

// ---- the best id --------------------------------------------------------------------------------

__device__ __forceinline__ Key make_key(float value, int id) {
  if (!(value > -__builtin_huge_valf())) return 0;      // NaN or -inf
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 ties with 0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ int64_t key_id(Key key) {
  return key == 0 ? -1 : static_cast<int64_t>(~static_cast<uint32_t>(key));
}

// Greatest key of the CTA, in all threads.
__device__ __forceinline__ Key block_best(Key key, Key* scratch) {
  for (int o = 16; o; o >>= 1) key = max(key, __shfl_xor_sync(~0u, key, o));
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = key;
  __syncthreads();
  key = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) key = max(key, scratch[w]);
  return key;
}

__global__ void __launch_bounds__(kThreads) commit_kernel(CandidateArguments a) {
  __shared__ Key scratch[kThreads / 32];
  let_dependents_launch();
  wait_for_predecessors();
  Key best = 0;
  for (int i = threadIdx.x; i < a.count; i += kThreads) {
    const int id = a.ids[i];
    if (id >= 0) best = max(best, make_key(a.values[i], id));
  }
  const int64_t id = key_id(block_best(best, scratch));
  if (threadIdx.x == 0) commit_id(a.commit, id);
}

__global__ void __launch_bounds__(kThreads) candidates_kernel(SliceArguments a) {
  __shared__ Key scratch[kThreads / 32];
  let_dependents_launch();
  wait_for_predecessors();
  Key best = 0;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < a.vocab; i += gridDim.x * kThreads)
    best = max(best, make_key(a.logits[i], i));
  const int64_t id = key_id(block_best(best, scratch));
  if (threadIdx.x != 0) return;
  a.ids[blockIdx.x] = static_cast<int>(id);
  a.values[blockIdx.x] = id < 0 ? 0.0f : a.logits[id];
}

// ---- launching ----------------------------------------------------------------------------------

bool valid_table(const EmbedTable& t) {
  return t.hidden >= 1 && t.rows >= 0 && (t.panels != nullptr) != (t.dense != nullptr) &&
         (t.dense || t.groups * kGroup >= t.hidden);
}

bool valid_commit(const CommitArguments& c) {
  return c.next_token && (!c.token || (c.position && c.finished && c.eos_ids));
}

template <int kQuads>
cudaError_t launch_rms_as(const RmsArguments& a, int threads, bool pdl, cudaStream_t stream) {
  return launch(rms_kernel<kQuads>, dim3(a.n), dim3(threads), 0, stream, pdl, a);
}

}  // namespace

cudaError_t chr_nf4_rms(const RmsArguments& a, bool pdl, cudaStream_t stream) {
  if (a.n < 1 || a.hidden < 4 || a.hidden % 4 || a.hidden > 4 * 1024 * kRmsQuads)
    return cudaErrorInvalidValue;
  const int quads = a.hidden / 4, threads = quads >= 1024 ? 1024 : (quads + 31) / 32 * 32;
  const int each = (quads + threads - 1) / threads;
  pdl = pdl && hopper_or_newer();
  if (each == 1) return launch_rms_as<1>(a, threads, pdl, stream);
  if (each == 2) return launch_rms_as<2>(a, threads, pdl, stream);
  return launch_rms_as<kRmsQuads>(a, threads, pdl, stream);
}

cudaError_t chr_nf4_embed(const EmbedArguments& a, bool pdl, cudaStream_t stream) {
  if (a.n < 1 || !valid_table(a.table) || (a.valid_len && !a.position))
    return cudaErrorInvalidValue;
  return launch(embed_rows_kernel, dim3(a.n), dim3(kThreads), 0, stream, pdl && hopper_or_newer(),
                a);
}

cudaError_t chr_nf4_commit(const CandidateArguments& a, bool pdl, cudaStream_t stream) {
  if (a.count < 1 || !valid_commit(a.commit)) return cudaErrorInvalidValue;
  return launch(commit_kernel, dim3(1), dim3(kThreads), 0, stream, pdl && hopper_or_newer(), a);
}

cudaError_t chr_nf4_candidates(const SliceArguments& a, bool pdl, cudaStream_t stream) {
  if (a.vocab < 1 || a.count < 1) return cudaErrorInvalidValue;
  return launch(candidates_kernel, dim3(a.count), dim3(kThreads), 0, stream,
                pdl && hopper_or_newer(), a);
}

}  // namespace decodev2
