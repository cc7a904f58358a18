// Host-side questions about the current device, asked by launchers. Torch-free.
#pragma once
#include <cuda_runtime.h>

namespace decodev2 {

// Clusters and programmatic dependent launch exist from compute capability 9.0 on.
inline bool hopper_or_newer() {
  int device, major;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

}  // namespace decodev2
