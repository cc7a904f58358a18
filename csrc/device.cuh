// Two things that kernels of several files need: who comes last, and what the device can do.
// Torch-free.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace decodev2 {

// By one thread of each CTA, after a barrier or its own stores: true for the last of `parties`,
// which may then read what the others stored. The increment releases what came before and acquires
// what the others released; the counter is back at 0 after the last, ready for the next launch.
__device__ __forceinline__ bool comes_last(uint32_t* counter, uint32_t parties) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(parties - 1)
               : "memory");
  return before == parties - 1;
}

// Clusters and programmatic dependent launch exist from compute capability 9.0 on.
inline bool hopper_or_newer() {
  int device, major;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

}  // namespace decodev2
