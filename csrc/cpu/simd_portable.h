// Sixteen float lanes as a plain array: any CPU, any compiler. Included by kernels.cpp inside
// `namespace portable`. The reference for the vector paths; the compiler vectorises the loops it can.

struct Lanes { float v[16]; };
struct Words { uint32_t v[16]; };

constexpr int kGemvBlocks = 1;
constexpr int kGemmBlocks = 1;
constexpr int kGemmCols = 4;

#define DECODEV2_LANES(expression)                    \
  Lanes r;                                            \
  for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
  return r

inline Lanes zero() { DECODEV2_LANES(0.0f); }
inline Lanes splat(float x) { DECODEV2_LANES(x); }
inline Lanes load(const float* p) { DECODEV2_LANES(p[i]); }
inline void store(float* p, const Lanes& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Lanes add(const Lanes& a, const Lanes& b) { DECODEV2_LANES(a.v[i] + b.v[i]); }
inline Lanes sub(const Lanes& a, const Lanes& b) { DECODEV2_LANES(a.v[i] - b.v[i]); }
inline Lanes mul(const Lanes& a, const Lanes& b) { DECODEV2_LANES(a.v[i] * b.v[i]); }
inline Lanes div(const Lanes& a, const Lanes& b) { DECODEV2_LANES(a.v[i] / b.v[i]); }
inline Lanes max(const Lanes& a, const Lanes& b) { DECODEV2_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Lanes min(const Lanes& a, const Lanes& b) { DECODEV2_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) { DECODEV2_LANES(a.v[i] * b.v[i] + c.v[i]); }
inline Lanes load_half(const uint16_t* p) { DECODEV2_LANES(half_to_float(p[i])); }
inline Lanes round_nearest(const Lanes& a) { DECODEV2_LANES(std::nearbyint(a.v[i])); }
inline Lanes scale_by_power(const Lanes& a, const Lanes& n) {
  DECODEV2_LANES(std::ldexp(a.v[i], static_cast<int>(n.v[i])));
}

inline Words load_words(const uint32_t* p) {
  Words w;
  std::memcpy(w.v, p, sizeof w.v);
  return w;
}

struct Table { const float* levels; };
inline Table make_table(const float* levels) { return {levels}; }
template <int kNibble>
inline Lanes look_up(const Table& table, const Words& w) {
  DECODEV2_LANES(table.levels[(w.v[i] >> (4 * kNibble)) & 15]);
}

#undef DECODEV2_LANES
