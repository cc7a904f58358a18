// What the kernels for many columns share: the sums over a column and the scale that fits it into half.
// Torch-free.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace decodev2 {

__device__ __forceinline__ float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// The power of two that brings `largest` into [2^14, 2^15) and its inverse, both exact. Values down
// to 2^-28 of the largest keep all bits of half; sums of 64 products stay far inside float32.
__device__ __forceinline__ float2 power_of_two_scale(float largest) {
  int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;  // largest is not negative
  if (!(largest > 0.0f)) exponent = 14;
  exponent = max(exponent, -100);
  return make_float2(__uint_as_float(static_cast<uint32_t>(127 + 14 - exponent) << 23),
                     __uint_as_float(static_cast<uint32_t>(127 - 14 + exponent) << 23));
}

}  // namespace decodev2
