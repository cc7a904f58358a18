// Sixteen float lanes as two ymm registers, for CPUs with AVX2, FMA and F16C. Included by kernels.cpp
// inside `namespace avx2`. Same lanes, same order of additions: results equal the AVX-512 path bit for bit.

struct Lanes { __m256 lo, hi; };
struct Words { __m256i lo, hi; };

constexpr int kGemvBlocks = 4;
constexpr int kGemmBlocks = 1;  // x kGemmCols x 2 accumulators must fit 16 registers
constexpr int kGemmCols = 6;

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Lanes load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline Lanes round_nearest(Lanes a) {
  return {_mm256_round_ps(a.lo, 0x08), _mm256_round_ps(a.hi, 0x08)};
}
inline __m256 scale_half(__m256 a, __m256 n) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
inline Lanes scale_by_power(Lanes a, Lanes n) { return {scale_half(a.lo, n.lo), scale_half(a.hi, n.hi)}; }

inline Words load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}

// vpermps on ymm reads 3 index bits: look up in both halves of the table, then blend on bit 3, moved to
// the sign position.
struct Table { __m256 low, high; };
inline Table make_table(const float* levels) {
  return {_mm256_loadu_ps(levels), _mm256_loadu_ps(levels + 8)};
}
template <int kNibble>
inline __m256 look_up_half(const Table& table, __m256i w) {
  const __m256i index = _mm256_srli_epi32(w, 4 * kNibble);
  const __m256i bit3 = _mm256_slli_epi32(w, 28 - 4 * kNibble);
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                          _mm256_permutevar8x32_ps(table.high, index), _mm256_castsi256_ps(bit3));
}
template <int kNibble>
inline Lanes look_up(const Table& table, Words w) {
  return {look_up_half<kNibble>(table, w.lo), look_up_half<kNibble>(table, w.hi)};
}
