// Sixteen float lanes as one zmm register. Included by kernels.cpp inside `namespace avx512`, with the
// instruction set switched on for that namespace only.

struct Lanes { __m512 v; };
struct Words { __m512i v; };  // 16 packed dwords: 8 consecutive k of 16 rows

constexpr int kGemvBlocks = 4;  // row blocks in flight: hides the latency of one FMA chain per block
constexpr int kGemmBlocks = 2;  // x kGemmCols accumulators must fit 32 registers
constexpr int kGemmCols = 12;

inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// a * 2^round(n) for integral n in the exponent range
inline Lanes round_nearest(Lanes a) { return {_mm512_roundscale_ps(a.v, 0x08)}; }
inline Lanes scale_by_power(Lanes a, Lanes n) { return {_mm512_scalef_ps(a.v, n.v)}; }

inline Words load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }

// The 16 NF4 levels live in one register; vpermps reads only the low 4 bits of every index, so the
// nibble needs a shift but no mask.
struct Table { __m512 levels; };
inline Table make_table(const float* levels) { return {_mm512_loadu_ps(levels)}; }
template <int kNibble>
inline Lanes look_up(const Table& table, Words w) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(w.v, 4 * kNibble), table.levels)};
}
