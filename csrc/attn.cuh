// What the attention kernels share: bf16 packing, the bf16 tensor-core product, RoPE of one pair,
// and the arithmetic of merging online-softmax partials. Torch-free.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "device.cuh"
#include "launch.h"
#include "nf4.cuh"

namespace decodev2 {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMinusInfinity = -__builtin_huge_valf();

// Weight of a partial with maximum m when the maximum of all is `top`. A partial that saw no key
// has m = -inf and weighs 0; -inf - -inf is never formed.
__device__ __forceinline__ float partial_weight(float m, float top) {
  return m == kMinusInfinity ? 0.0f : exp2_approx(m - top);
}

__device__ __forceinline__ float reciprocal_or_zero(float sum) {
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

__device__ __forceinline__ void add_scaled(float4& sum, float w, const float4& v) {
  sum.x += w * v.x, sum.y += w * v.y, sum.z += w * v.z, sum.w += w * v.w;
}

// ---- bf16 ---------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ uint16_t to_bf16(float v) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

// Two floats as bf16 `high` plus bf16 `low`: together 16 bits of mantissa, so that a product with
// bf16 keys or values is as good as float32. An infinite or NaN value has no remainder (inf - inf
// would be NaN).
__device__ __forceinline__ void split_bf16(float a, float b, uint32_t& high, uint32_t& low) {
  high = pack_bf16(a, b);
  const float a_high = bf16_low(high), b_high = bf16_high(high);
  low = pack_bf16(fabsf(a_high) <= 3.0e38f ? a - a_high : 0.0f,
                  fabsf(b_high) <= 3.0e38f ? b - b_high : 0.0f);
}

// ---- matrices from shared memory ----------------------------------------------------------------

#ifndef DECODEV2_EMULATED  // there as the names of ptx.cuh are

// Four 8 x 8 matrices of 16-bit numbers; lanes 8 i .. 8 i + 7 have the addresses of the rows of
// number i, 16 bytes each. Of matrix i, d[i] is the lane's pair 2 t, 2 t + 1 (t = lane % 4) of row
// lane / 4.
__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

#endif  // DECODEV2_EMULATED

// ---- RoPE ---------------------------------------------------------------------------------------

// rotate-half: the pair (x[d], x[d + head_dim / 2]) turns by the angle of d. cos and sin are the
// table's first half (both halves hold the same values).
__device__ __forceinline__ void rotate_pair(float& first, float& second, float cos, float sin) {
  const float a = first, b = second;
  first = a * cos - b * sin;
  second = b * cos + a * sin;
}

// Row of the RoPE tables for a position; a position outside the tables takes the nearest row.
__device__ __forceinline__ int64_t table_row(int64_t position, int max_seq) {
  return position < 0 ? 0 : position >= max_seq ? max_seq - 1 : position;
}

__device__ __forceinline__ bool in_cache(int64_t position, int max_seq) {
  return position >= 0 && position < max_seq;
}

// ---- last arrival -------------------------------------------------------------------------------

// By all threads of a CTA after their partials are stored: true in the CTA that comes last.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, uint32_t parties,
                                            uint32_t* shared_flag) {
  __syncthreads();
  if (threadIdx.x == 0) *shared_flag = comes_last(counter, parties);
  __syncthreads();
  return *shared_flag != 0;
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- host side ----------------------------------------------------------------------------------

inline bool valid_shape(const AttnArguments& a) {
  return a.n >= 1 && a.n_kv >= 1 && a.n_q >= a.n_kv && a.n_q % a.n_kv == 0 && a.max_seq >= 1;
}

}  // namespace decodev2
