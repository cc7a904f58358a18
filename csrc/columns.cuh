// What the kernels for many columns share: the sums over a column and the scale that fits it into half.
// Torch-free.
#pragma once
#include <cuda_fp16.h>
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

// A column as half, normed if there is a weight, and scaled into half's range; *unscale undoes the scaling. A CTA of
// kThreads calls it. load(v, from, i, is_weight) brings piece i of eight values, of the row or of the norm's weight;
// store(i, half2[4]) takes it. A column that is not live is 0. `scratch` holds two floats for each warp.
template <int kThreads, typename Load, typename Store>
__device__ __forceinline__ void column_to_half(const float* row, bool live, const float* norm_weight, int pieces, int cols,
                                               float eps, float* scratch, float* unscale, int thread, Load load,
                                               Store store) {
  constexpr int kWarps = kThreads / 32;
  float squares = 0.0f, largest = 0.0f;
  for (int i = thread; live && i < pieces; i += kThreads) {
    float v[8], w[8];
    load(v, row, i, false);
    if (norm_weight) load(w, norm_weight, i, true);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      squares = fmaf(v[e], v[e], squares);
      largest = fmaxf(largest, fabsf(norm_weight ? v[e] * w[e] : v[e]));
    }
  }
  squares = warp_sum(squares);
  largest = warp_max(largest);
  if ((thread & 31) == 0) {
    scratch[thread >> 5] = squares;
    scratch[kWarps + (thread >> 5)] = largest;
  }
  __syncthreads();
  squares = largest = 0.0f;
  for (int w = 0; w < kWarps; ++w) {
    squares += scratch[w];
    largest = fmaxf(largest, scratch[kWarps + w]);
  }
  const float norm = norm_weight ? rsqrtf(squares / static_cast<float>(cols) + eps) : 1.0f;
  const float2 scale = power_of_two_scale(largest * norm);
  if (thread == 0) *unscale = scale.y;
  for (int i = thread; i < pieces; i += kThreads) {
    float v[8] = {}, w[8];
    if (live) {
      load(v, row, i, false);
      if (norm_weight) {
        load(w, norm_weight, i, true);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = v[e] * norm * w[e];
      }
    }
    half2 h[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) h[e] = __floats2half2_rn(v[2 * e] * scale.x, v[2 * e + 1] * scale.x);
    store(i, h);
  }
}

}  // namespace decodev2
