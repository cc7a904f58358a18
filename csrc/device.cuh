// Three things that kernels of several files need: who comes last, how many lanes say that a warp has arrived, and what
// the device can do. Torch-free.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"

namespace decodev2 {

// By one thread of each CTA, after a barrier or its own stores: true for the last of `parties`,
// which may then read what the others stored. The increment releases what came before and acquires
// what the others released; the counter is back at 0 after the last, ready for the next launch.
__device__ __forceinline__ bool comes_last(uint32_t* counter, uint32_t parties) {
  return increment_wrapping(counter, parties - 1) == parties - 1;
}

// One arrival per warp is enough: __syncwarp orders the other lanes' accesses before it. racecheck does not follow
// that step, so a build with -DDECODEV2_EVERY_LANE_ARRIVES lets it see every lane (same algorithm, more arrivals).
#ifdef DECODEV2_EVERY_LANE_ARRIVES
[[maybe_unused]] constexpr int kArrivals = 32;
#else
[[maybe_unused]] constexpr int kArrivals = 1;
#endif

// Clusters and programmatic dependent launch exist from compute capability 9.0 on.
inline bool hopper_or_newer() {
  int device, major;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

}  // namespace decodev2
