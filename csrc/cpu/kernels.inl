// The CPU kernels, written once over 16 lanes. kernels.cpp includes this file once per instruction set.
//
// Weight layout (made at load from the rows of a .chr file, no byte more than the padding to 16 rows):
//
//   codes  [row block][K_pad / 8][16 rows]  uint32: 8 consecutive k of one row, low nibble first
//   scales [row block][K_pad / 64][16 rows] float16
//
// A lane is a row, so a row's dot product runs over k in order, in one lane, whatever the number of
// columns: y = sum over groups g of scale[g] * (sum over k in g of level[k] * x[k]). GEMV and GEMM add
// in exactly this order. That is why a prompt gives the same bits in chunks of 1, 7 or 32.

// Sum over one group for kBlocks row blocks and one column: sum[b] += level * x, k ascending.
template <int kBlocks>
inline void add_word(const Table& table, const uint32_t* const* codes, long word, const float* x, Lanes* sum) {
  Words w[kBlocks];
#pragma GCC unroll 8
  for (int b = 0; b < kBlocks; ++b) w[b] = load_words(codes[b] + word * 16);
#define DECODEV2_NIBBLE(s)                                                    \
  {                                                                           \
    const Lanes xs = splat(x[word * 8 + s]);                                  \
    _Pragma("GCC unroll 8") for (int b = 0; b < kBlocks; ++b)                 \
        sum[b] = fma(look_up<s>(table, w[b]), xs, sum[b]);                    \
  }
  DECODEV2_NIBBLE(0) DECODEV2_NIBBLE(1) DECODEV2_NIBBLE(2) DECODEV2_NIBBLE(3)
  DECODEV2_NIBBLE(4) DECODEV2_NIBBLE(5) DECODEV2_NIBBLE(6) DECODEV2_NIBBLE(7)
#undef DECODEV2_NIBBLE
}

// kBlocks row blocks times one column x [K_pad] -> y[b], 16 rows each.
template <int kBlocks>
inline void gemv_blocks(const Table& table, const uint32_t* const* codes, const uint16_t* const* scales,
                        const float* x, long groups, Lanes* y) {
#pragma GCC unroll 8
  for (int b = 0; b < kBlocks; ++b) y[b] = zero();
  for (long g = 0; g < groups; ++g) {
    Lanes sum[kBlocks];
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) sum[b] = zero();
    for (long word = g * 8; word < g * 8 + 8; ++word) add_word<kBlocks>(table, codes, word, x, sum);
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) y[b] = fma(load_half(scales[b] + g * 16), sum[b], y[b]);
  }
}

inline void block_pointers(const Matrix& w, long block, const uint32_t** codes, const uint16_t** scales) {
  *codes = w.codes + block * w.groups * 8 * 16;
  *scales = w.scales + block * w.groups * 16;
}

// Store 16 rows of one column, plus bias and / or what is already there; the last block may be ragged.
inline void store_rows(float* y, Lanes value, long row, long rows, const float* bias, const float* residual) {
  if (row + 16 <= rows) {
    if (bias) value = add(value, load(bias + row));
    if (residual) value = add(value, load(residual + row));
    store(y + row, value);
    return;
  }
  float lane[16];
  store(lane, value);
  for (long i = 0; row + i < rows; ++i) {
    float v = lane[i];
    if (bias) v += bias[row + i];
    if (residual) v += residual[row + i];
    y[row + i] = v;
  }
}

template <int kBlocks>
inline void gemv_range(const Matrix& w, const Table& table, const float* x, float* y, const float* bias,
                       const float* residual, long block) {
  const uint32_t* codes[kBlocks];
  const uint16_t* scales[kBlocks];
  Lanes sum[kBlocks];
  for (int b = 0; b < kBlocks; ++b) block_pointers(w, block + b, &codes[b], &scales[b]);
  gemv_blocks<kBlocks>(table, codes, scales, x, w.groups, sum);
  for (int b = 0; b < kBlocks; ++b) store_rows(y, sum[b], (block + b) * 16, w.rows, bias, residual);
}

// y = W x for row blocks [begin, end); bias and residual may be null, residual may be y itself.
static void gemv(const Matrix& w, const float* x, float* y, const float* bias, const float* residual,
                 long begin, long end) {
  const Table table = make_table(kLevels);
  long block = begin;
  for (; block + kGemvBlocks <= end; block += kGemvBlocks)
    gemv_range<kGemvBlocks>(w, table, x, y, bias, residual, block);
  if (kGemvBlocks > 2 && block + 2 <= end) {
    gemv_range<2>(w, table, x, y, bias, residual, block);
    block += 2;
  }
  for (; block < end; ++block) gemv_range<1>(w, table, x, y, bias, residual, block);
}

// exp(x) to about 2 ulp: 2^n * p(r), x = n ln2 + r, |r| <= ln2 / 2, degree-7 Taylor polynomial.
inline Lanes exp(Lanes x) {
  x = min(splat(88.0f), max(splat(-87.0f), x));  // in this order a NaN stays a NaN
  const Lanes n = round_nearest(mul(x, splat(1.44269504f)));
  Lanes r = fma(n, splat(-0.693359375f), x);  // ln2 in two parts, the first exact in few bits
  r = fma(n, splat(2.12194440e-4f), r);
  Lanes p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return scale_by_power(p, n);
}

// silu(g) * u
inline Lanes swiglu(Lanes g, Lanes u) {
  const Lanes one = splat(1.0f);
  return mul(div(g, add(one, exp(sub(zero(), g)))), u);
}

// y = silu(G x) * (U x) for row blocks [begin, end). Gate and up rows share every x in registers.
static void gemv_swiglu(const Matrix& gate, const Matrix& up, const float* x, float* y, long begin, long end) {
  const Table table = make_table(kLevels);
  long block = begin;
  const uint32_t* codes[4];
  const uint16_t* scales[4];
  Lanes sum[4];
  for (; kGemvBlocks == 4 && block + 2 <= end; block += 2) {
    for (int b = 0; b < 2; ++b) {
      block_pointers(gate, block + b, &codes[b], &scales[b]);
      block_pointers(up, block + b, &codes[2 + b], &scales[2 + b]);
    }
    gemv_blocks<4>(table, codes, scales, x, gate.groups, sum);
    for (int b = 0; b < 2; ++b)
      store_rows(y, swiglu(sum[b], sum[2 + b]), (block + b) * 16, gate.rows, nullptr, nullptr);
  }
  for (; block < end; ++block) {
    block_pointers(gate, block, &codes[0], &scales[0]);
    block_pointers(up, block, &codes[1], &scales[1]);
    gemv_blocks<2>(table, codes, scales, x, gate.groups, sum);
    store_rows(y, swiglu(sum[0], sum[1]), block * 16, gate.rows, nullptr, nullptr);
  }
}

// ---- several columns ----

// One group's levels of kGemmBlocks row blocks as floats, [64][kBlocks][16]: decoded once, used by every
// column.
template <int kBlocks>
inline void decode_group(const Table& table, const uint32_t* const* codes, long g, float* levels) {
  for (int j = 0; j < 8; ++j)
    for (int b = 0; b < kBlocks; ++b) {
      const Words w = load_words(codes[b] + (g * 8 + j) * 16);
      float* out = levels + (j * 8 * kBlocks + b) * 16;
      store(out + 0 * kBlocks * 16, look_up<0>(table, w));
      store(out + 1 * kBlocks * 16, look_up<1>(table, w));
      store(out + 2 * kBlocks * 16, look_up<2>(table, w));
      store(out + 3 * kBlocks * 16, look_up<3>(table, w));
      store(out + 4 * kBlocks * 16, look_up<4>(table, w));
      store(out + 5 * kBlocks * 16, look_up<5>(table, w));
      store(out + 6 * kBlocks * 16, look_up<6>(table, w));
      store(out + 7 * kBlocks * 16, look_up<7>(table, w));
    }
}

// acc [kCols][kBlocks][16] += scale * (levels of the group times x [64][stride], kCols columns of it)
template <int kBlocks, int kCols>
inline void multiply_group(const float* levels, const float* x, long stride, const Lanes* scale, float* acc) {
  Lanes sum[kCols][kBlocks];
#pragma GCC unroll 16
  for (int c = 0; c < kCols; ++c)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sum[c][b] = zero();
  for (int k = 0; k < 64; ++k) {
    Lanes level[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) level[b] = load(levels + (k * kBlocks + b) * 16);
#pragma GCC unroll 16
    for (int c = 0; c < kCols; ++c) {
      const Lanes xs = splat(x[k * stride + c]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum[c][b] = fma(level[b], xs, sum[c][b]);
    }
  }
#pragma GCC unroll 16
  for (int c = 0; c < kCols; ++c)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      float* a = acc + (c * kBlocks + b) * 16;
      store(a, fma(scale[b], sum[c][b], load(a)));
    }
}

template <int kBlocks, int kCols>
inline void multiply_tail(int cols, const float* levels, const float* x, long stride, const Lanes* scale, float* acc) {
  if constexpr (kCols > 0) {
    if (cols == kCols) return multiply_group<kBlocks, kCols>(levels, x, stride, scale, acc);
    multiply_tail<kBlocks, kCols - 1>(cols, levels, x, stride, scale, acc);
  }
}

// acc [cols][kBlocks][16] = W x for kBlocks row blocks; x is k-major [K_pad][cols].
template <int kBlocks>
inline void gemm_blocks(const Matrix& w, const Table& table, long block, const float* x, long cols, float* acc) {
  const uint32_t* codes[kBlocks];
  const uint16_t* scales[kBlocks];
  for (int b = 0; b < kBlocks; ++b) block_pointers(w, block + b, &codes[b], &scales[b]);
  std::memset(acc, 0, sizeof(float) * cols * kBlocks * 16);
  alignas(64) float levels[64 * kBlocks * 16];
  for (long g = 0; g < w.groups; ++g) {
    decode_group<kBlocks>(table, codes, g, levels);
    Lanes scale[kBlocks];
    for (int b = 0; b < kBlocks; ++b) scale[b] = load_half(scales[b] + g * 16);
    const float* xg = x + g * 64 * cols;
    long c = 0;
    for (; c + kGemmCols <= cols; c += kGemmCols)
      multiply_group<kBlocks, kGemmCols>(levels, xg + c, cols, scale, acc + c * kBlocks * 16);
    multiply_tail<kBlocks, kGemmCols - 1>(cols - c, levels, xg + c, cols, scale, acc + c * kBlocks * 16);
  }
}

template <int kBlocks>
inline void gemm_range(const Matrix& w, const Table& table, const float* x, long cols, float* y, long ldy,
                       const float* bias, bool add_to_y, long block) {
  alignas(64) float acc[kMaxColumns * kBlocks * 16];
  gemm_blocks<kBlocks>(w, table, block, x, cols, acc);
  for (long c = 0; c < cols; ++c)
    for (int b = 0; b < kBlocks; ++b)
      store_rows(y + c * ldy, load(acc + (c * kBlocks + b) * 16), (block + b) * 16, w.rows, bias,
                 add_to_y ? y + c * ldy : nullptr);
}

// y [cols][ldy] = W x (+ bias) (+ y) for row blocks [begin, end); x is k-major [K_pad][cols].
static void gemm(const Matrix& w, const float* x, long cols, float* y, long ldy, const float* bias, bool add_to_y,
                 long begin, long end) {
  const Table table = make_table(kLevels);
  long block = begin;
  for (; block + kGemmBlocks <= end; block += kGemmBlocks)
    gemm_range<kGemmBlocks>(w, table, x, cols, y, ldy, bias, add_to_y, block);
  for (; block < end; ++block) gemm_range<1>(w, table, x, cols, y, ldy, bias, add_to_y, block);
}

// y [cols][ldy] = silu(G x) * (U x) for row blocks [begin, end).
static void gemm_swiglu(const Matrix& gate, const Matrix& up, const float* x, long cols, float* y, long ldy,
                        long begin, long end) {
  const Table table = make_table(kLevels);
  alignas(64) float g[kMaxColumns * kGemmBlocks * 16], u[kMaxColumns * kGemmBlocks * 16];
  const auto finish = [&](long block, int blocks) {
    for (long c = 0; c < cols; ++c)
      for (int b = 0; b < blocks; ++b) {
        const long at = (c * blocks + b) * 16;
        store_rows(y + c * ldy, swiglu(load(g + at), load(u + at)), (block + b) * 16, gate.rows, nullptr, nullptr);
      }
  };
  long block = begin;
  for (; block + kGemmBlocks <= end; block += kGemmBlocks) {
    gemm_blocks<kGemmBlocks>(gate, table, block, x, cols, g);
    gemm_blocks<kGemmBlocks>(up, table, block, x, cols, u);
    finish(block, kGemmBlocks);
  }
  for (; block < end; ++block) {
    gemm_blocks<1>(gate, table, block, x, cols, g);
    gemm_blocks<1>(up, table, block, x, cols, u);
    finish(block, 1);
  }
}

// ---- the rest of the step ----

// Sum of the 16 lanes in a fixed order.
inline float sum_lanes(Lanes a) {
  float lane[16];
  store(lane, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// y = x * rsqrt(mean(x^2) + eps) * weight, n elements
static void rms_norm(const float* x, const float* weight, float eps, long n, float* y) {
  Lanes squares = zero();
  long i = 0;
  for (; i + 16 <= n; i += 16) squares = fma(load(x + i), load(x + i), squares);
  float total = sum_lanes(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  const Lanes f = splat(factor);
  for (i = 0; i + 16 <= n; i += 16) store(y + i, mul(mul(load(x + i), f), load(weight + i)));
  for (; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

// One query head over the live prefix: out = softmax(scale * q K^T) V. K and V rows are `stride` floats
// apart; `scores` holds at least length + 16 floats. head_dim is a multiple of 16.
static void attend(const float* q, const float* keys, const float* values, long stride, long length, long head_dim,
                   float scale, float* scores, float* out) {
  const float lowest = -std::numeric_limits<float>::infinity();
  float highest = lowest;
  for (long t = 0; t < length; ++t) {
    const float* key = keys + t * stride;
    Lanes dot = zero();
    for (long d = 0; d < head_dim; d += 16) dot = fma(load(q + d), load(key + d), dot);
    scores[t] = sum_lanes(dot) * scale;
    highest = std::max(highest, scores[t]);
  }
  const long padded = (length + 15) / 16 * 16;
  for (long t = length; t < padded; ++t) scores[t] = highest;
  Lanes total = zero();
  for (long t = 0; t < padded; t += 16) {
    const Lanes p = exp(sub(load(scores + t), splat(highest)));
    store(scores + t, p);
    if (t + 16 <= length) total = add(total, p);
  }
  float sum = sum_lanes(total);
  for (long t = length / 16 * 16; t < length; ++t) sum += scores[t];
  const float inverse = 1.0f / sum;
  for (long d = 0; d < head_dim; d += 64) {
    const long lanes = std::min(64l, head_dim - d) / 16;
    Lanes acc[4] = {zero(), zero(), zero(), zero()};
    for (long t = 0; t < length; ++t) {
      const Lanes p = splat(scores[t]);
      const float* value = values + t * stride + d;
      if (lanes == 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) acc[i] = fma(p, load(value + 16 * i), acc[i]);
      } else {
        for (long i = 0; i < lanes; ++i) acc[i] = fma(p, load(value + 16 * i), acc[i]);
      }
    }
    for (long i = 0; i < lanes; ++i) store(out + d + 16 * i, mul(acc[i], splat(inverse)));
  }
}

static const Kernels table = {gemv, gemv_swiglu, gemm, gemm_swiglu, rms_norm, attend};
