// The three builds of kernels.inl and the choice between them at run time.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DECODEV2_X86 1
#include <immintrin.h>
#endif

namespace decodev2 {

static float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

namespace portable {
#include "simd_portable.h"
#include "kernels.inl"
}  // namespace portable

#ifdef DECODEV2_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "simd_avx2.h"
#include "kernels.inl"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
namespace avx512 {
#include "simd_avx512.h"
#include "kernels.inl"
}  // namespace avx512
#pragma GCC pop_options
#endif

Isa best_isa() {
#ifdef DECODEV2_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

const Kernels& kernels_for(Isa isa) {
#ifdef DECODEV2_X86
  if (isa == Isa::kAvx512) return avx512::table;
  if (isa == Isa::kAvx2) return avx2::table;
#endif
  (void)isa;
  return portable::table;
}

void decode_row(const Matrix& w, long row, long cols, float* out) {
  const uint32_t* codes = w.codes + row / 16 * w.groups * 8 * 16 + row % 16;
  const uint16_t* scales = w.scales + row / 16 * w.groups * 16 + row % 16;
  for (long k = 0; k < cols; ++k)
    out[k] = kLevels[codes[k / 8 * 16] >> (4 * (k % 8)) & 15] * half_to_float(scales[k / 64 * 16]);
}

}  // namespace decodev2
