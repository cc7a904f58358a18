// Reading and nothing else: the rate that no other kernel can beat on this card.
//
// Computes  checksum ^= exclusive or of all 32-bit words of a buffer: no load can be left out
// Owns      A CTA takes chunks of kThreads * kLoads * 16 bytes in turn; thread = every kThreads-th
//           16 bytes of a chunk
// Grid      kCtas CTAs per multiprocessor, 256 threads, 32 bytes shared
// Layout    kLoads independent 16-byte loads per thread: 128 KB in flight on each multiprocessor
// Floor     the buffer's bytes at the card's read rate, which is what it measures
// Variants  one
#include "launch.h"
#include "nf4.cuh"

namespace decodev2 {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 4;  // per multiprocessor
constexpr int kLoads = 8;
constexpr int64_t kChunk = int64_t{kThreads} * kLoads;  // in 16-byte words

__device__ __forceinline__ uint32_t exclusive_or(const uint4& v) { return v.x ^ v.y ^ v.z ^ v.w; }

__global__ void __launch_bounds__(kThreads, kCtas) read_kernel(const ReadArguments a) {
  __shared__ uint32_t warps[kThreads / 32];
  const int thread = threadIdx.x;
  const uint4* data = reinterpret_cast<const uint4*>(a.data);
  uint32_t sum = 0;
  const int64_t all_chunks = gridDim.x * kChunk, all_threads = int64_t{gridDim.x} * kThreads;
  for (int64_t first = blockIdx.x * kChunk; first + kChunk <= a.quads; first += all_chunks) {
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = load_weights_16(data + first + i * kThreads + thread);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum ^= exclusive_or(v[i]);
  }
  int64_t at = a.quads / kChunk * kChunk + int64_t{blockIdx.x} * kThreads + thread;
  for (; at < a.quads; at += all_threads)  // less than one chunk is left
    sum ^= exclusive_or(load_weights_16(data + at));
  sum = __reduce_xor_sync(~0u, sum);
  if ((thread & 31) == 0) warps[thread >> 5] = sum;
  __syncthreads();
  if (thread != 0) return;
  sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum ^= warps[w];
  atomicXor(a.checksum, sum);
}

}  // namespace

cudaError_t launch_read(const ReadArguments& a, int multiprocessors, cudaStream_t stream) {
  if (a.quads < 1 || multiprocessors < 1) return cudaErrorInvalidValue;
  return launch(read_kernel, dim3(multiprocessors * kCtas), dim3(kThreads), 0, stream, false, a);
}

}  // namespace decodev2
