// Torch-facing side of the CPU kernels: checks shapes and types, splits work over torch's threads, and
// calls kernels.h. Outputs are arguments; nothing here allocates tensor memory.
#include <torch/extension.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "../refuse.h"
#include "kernels.h"

namespace {

using decodev2::Isa;
using decodev2::Matrix;
using torch::Tensor;

Isa g_isa = decodev2::best_isa();
const char* const kIsaNames[] = {"portable", "avx2", "avx512"};

const decodev2::Kernels& kernels() { return decodev2::kernels_for(g_isa); }

void set_isa(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(decodev2::best_isa()); ++i)
    if (name == kIsaNames[i]) {
      g_isa = static_cast<Isa>(i);
      return;
    }
  DECODEV2_CHECK(false, "instruction set '", name, "' is unknown or not on this CPU; it has up to '",
                    kIsaNames[static_cast<int>(decodev2::best_isa())], "'");
}

std::string isa() { return kIsaNames[static_cast<int>(g_isa)]; }

void check(const Tensor& t, const char* name, torch::ScalarType type, int64_t min_numel) {
  DECODEV2_CHECK(t.device().is_cpu() && t.scalar_type() == type && t.is_contiguous() && t.numel() >= min_numel,
                    name, " is ", t.scalar_type(), " ", t.sizes(), ", needs a contiguous CPU ", type,
                    " tensor of at least ", min_numel, " elements");
}

// A float [n, width] whose rows may be part of wider ones (q, k and v share a buffer); returns the row stride.
int64_t check_rows(const Tensor& t, const char* name, int64_t n, int64_t width) {
  DECODEV2_CHECK(t.device().is_cpu() && t.scalar_type() == torch::kFloat && t.dim() == 2 && t.size(0) == n &&
                        t.size(1) == width && t.stride(1) == 1 && t.stride(0) >= width,
                    name, " is ", t.scalar_type(), " ", t.sizes(), ", needs contiguous rows of CPU Float [", n, ", ", width, "]");
  return t.stride(0);
}

Matrix matrix(const Tensor& codes, const Tensor& scales, int64_t rows) {
  DECODEV2_CHECK(codes.dim() == 3 && scales.dim() == 3 && codes.size(2) == 16 && scales.size(2) == 16 &&
                        codes.size(0) == scales.size(0) && codes.size(1) == 8 * scales.size(1) &&
                        rows > 16 * (codes.size(0) - 1) && rows <= 16 * codes.size(0),
                    "packed matrix: codes ", codes.sizes(), " and scales ", scales.sizes(), " do not fit ", rows, " rows");
  check(codes, "codes", torch::kInt32, 1);
  check(scales, "scales", torch::kHalf, 1);
  return {static_cast<const uint32_t*>(codes.const_data_ptr()), static_cast<const uint16_t*>(scales.const_data_ptr()),
          rows, scales.size(1)};
}

// Matrices that share one panel must read the same number of columns from it.
void check_same_width(const Matrix& a, const Matrix& b) {
  DECODEV2_CHECK(a.groups == b.groups, "packed matrices of ", a.groups * 64, " and ", b.groups * 64,
                    " columns cannot share one x");
}

int64_t blocks_of(const Matrix& w) { return (w.rows + 15) / 16; }

// Rows of x [n, k] laid out k-major [K_pad, n] and zero-filled behind k, as the kernels read it.
const float* make_panel(const Tensor& x, const Matrix& w, Tensor& panel) {
  const int64_t padded = w.groups * 64, n = x.size(0), k = x.dim() == 2 ? x.size(1) : 0;
  DECODEV2_CHECK(n >= 1 && n <= decodev2::kMaxColumns && k <= padded && k > padded - 64, "x is ", x.sizes(),
                    ", needs 1..", decodev2::kMaxColumns, " rows of ", padded - 63, "..", padded, " values");
  check(x, "x", torch::kFloat, 1);
  check(panel, "panel", torch::kFloat, padded * n);
  const float* in = x.const_data_ptr<float>();
  float* out = panel.mutable_data_ptr<float>();
  if (n == 1) {
    std::copy(in, in + k, out);
    std::fill(out + k, out + padded, 0.0f);
    return out;
  }
  at::parallel_for(0, w.groups, 1, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(end * 64, k);
    for (int64_t i = begin * 64; i < last; ++i)
      for (int64_t c = 0; c < n; ++c) out[i * n + c] = in[c * k + i];
    std::fill(out + std::max(last, begin * 64) * n, out + end * 64 * n, 0.0f);
  });
  return out;
}

struct Target {  // where a product goes: y [n, rows], plus an optional bias [rows]
  float* y;
  int64_t ldy;
  const float* bias;
};

Target target(const Matrix& w, Tensor& y, const std::optional<Tensor>& bias, int64_t n) {
  const int64_t stride = check_rows(y, "y", n, w.rows);
  if (bias) check(*bias, "bias", torch::kFloat, w.rows);
  return {y.mutable_data_ptr<float>(), stride, bias ? bias->const_data_ptr<float>() : nullptr};
}

void multiply(const Matrix& w, const float* panel, int64_t n, const Target& out, bool add_to_y, int64_t begin,
              int64_t end) {
  if (n == 1)
    kernels().gemv(w, panel, out.y, out.bias, add_to_y ? out.y : nullptr, begin, end);
  else
    kernels().gemm(w, panel, n, out.y, out.ldy, out.bias, add_to_y, begin, end);
}

// y = W x (+ y)
void linear(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t rows, Tensor& y, bool add_to_y,
            Tensor& panel) {
  const Matrix w = matrix(codes, scales, rows);
  const int64_t n = x.size(0);
  const float* p = make_panel(x, w, panel);
  const Target out = target(w, y, std::nullopt, n);
  at::parallel_for(0, blocks_of(w), 1,
                   [&](int64_t begin, int64_t end) { multiply(w, p, n, out, add_to_y, begin, end); });
}

// q, k, v = Wq x + bq, Wk x + bk, Wv x + bv: one pass over the row blocks of all three
void qkv(const Tensor& x, const Tensor& q_codes, const Tensor& q_scales, const Tensor& k_codes,
         const Tensor& k_scales, const Tensor& v_codes, const Tensor& v_scales, const std::optional<Tensor>& q_bias,
         const std::optional<Tensor>& k_bias, const std::optional<Tensor>& v_bias, Tensor& q, Tensor& k, Tensor& v,
         Tensor& panel) {
  const int64_t n = x.size(0);
  const Matrix w[3] = {matrix(q_codes, q_scales, q.size(1)), matrix(k_codes, k_scales, k.size(1)),
                       matrix(v_codes, v_scales, v.size(1))};
  check_same_width(w[0], w[1]);
  check_same_width(w[0], w[2]);
  const float* p = make_panel(x, w[0], panel);
  const Target out[3] = {target(w[0], q, q_bias, n), target(w[1], k, k_bias, n), target(w[2], v, v_bias, n)};
  const int64_t total = blocks_of(w[0]) + blocks_of(w[1]) + blocks_of(w[2]);
  at::parallel_for(0, total, 1, [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (int i = 0; i < 3; first += blocks_of(w[i]), ++i) {
      const int64_t from = std::max(begin - first, int64_t{0}), to = std::min(end - first, blocks_of(w[i]));
      if (from < to) multiply(w[i], p, n, out[i], false, from, to);
    }
  });
}

// y = silu(G x) * (U x)
void swiglu(const Tensor& x, const Tensor& gate_codes, const Tensor& gate_scales, const Tensor& up_codes,
            const Tensor& up_scales, Tensor& y, Tensor& panel) {
  const int64_t n = x.size(0);
  const Matrix gate = matrix(gate_codes, gate_scales, y.size(1)), up = matrix(up_codes, up_scales, y.size(1));
  check_same_width(gate, up);
  const float* p = make_panel(x, gate, panel);
  const Target out = target(gate, y, std::nullopt, n);
  at::parallel_for(0, blocks_of(gate), 1, [&](int64_t begin, int64_t end) {
    if (n == 1)
      kernels().gemv_swiglu(gate, up, p, out.y, begin, end);
    else
      kernels().gemm_swiglu(gate, up, p, n, out.y, out.ldy, begin, end);
  });
}

// The best logit so far: the lowest id wins a tie, a NaN never wins.
struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int64_t id = -1;
};

Best better(const Best& a, const Best& b) {
  if (a.id < 0) return b;
  if (b.id < 0) return a;
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.id < b.id ? a : b;
}

// logits = W x; next_token = argmax(logits), or -1 when no logit is a number above -inf
void head(const Tensor& x, const Tensor& codes, const Tensor& scales, Tensor& logits, Tensor& next_token,
          Tensor& panel) {
  DECODEV2_CHECK(x.size(0) == 1, "x is ", x.sizes(), ", the head takes 1 row");
  const Matrix w = matrix(codes, scales, logits.size(1));
  const float* p = make_panel(x, w, panel);
  const Target out = target(w, logits, std::nullopt, 1);
  check(next_token, "next_token", torch::kInt64, 1);
  const Best best = at::parallel_reduce(
      0, blocks_of(w), 1, Best{},
      [&](int64_t begin, int64_t end, Best so_far) {
        kernels().gemv(w, p, out.y, nullptr, nullptr, begin, end);
        for (int64_t row = begin * 16; row < std::min<int64_t>(end * 16, w.rows); ++row)
          if (out.y[row] > so_far.value) so_far = {out.y[row], row};
        return so_far;
      },
      better);
  *next_token.mutable_data_ptr<int64_t>() = best.id;
}

// out[i] = row ids[i] of the packed embedding; an id outside the table gives zeros, never a bad read
void embed(const Tensor& ids, const Tensor& codes, const Tensor& scales, int64_t rows, Tensor& out) {
  const Matrix w = matrix(codes, scales, rows);
  DECODEV2_CHECK(out.dim() == 2, "out is ", out.sizes(), ", needs [ids, columns]");
  const int64_t n = ids.size(0), cols = out.size(1);
  check(ids, "ids", torch::kInt64, 1);
  check(out, "out", torch::kFloat, n * cols);
  DECODEV2_CHECK(cols <= w.groups * 64, "out is ", out.sizes(), ", the table has ", w.groups * 64, " columns");
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = ids.const_data_ptr<int64_t>()[i];
    float* row = out.mutable_data_ptr<float>() + i * cols;
    if (id < 0 || id >= rows)
      std::fill(row, row + cols, 0.0f);
    else
      decodev2::decode_row(w, id, cols, row);
  }
}

// y = x * rsqrt(mean(x^2) + eps) * weight, row by row
void rms(const Tensor& x, const Tensor& weight, double eps, Tensor& y) {
  DECODEV2_CHECK(x.dim() == 2 && weight.dim() == 1 && weight.size(0) == x.size(1), "x is ", x.sizes(),
                    " and weight ", weight.sizes(), ", need [n, hidden] and [hidden]");
  const int64_t n = x.size(0), hidden = x.size(1);
  check(x, "x", torch::kFloat, 1);
  check(weight, "weight", torch::kFloat, hidden);
  check(y, "y", torch::kFloat, n * hidden);
  const float* in = x.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  for (int64_t i = 0; i < n; ++i)
    kernels().rms_norm(in + i * hidden, weight.const_data_ptr<float>(), static_cast<float>(eps), hidden, out + i * hidden);
}

// x = [a, b] -> [a cos - b sin, b cos + a sin], the two halves of one head
void rotate(const float* x, const float* cos, const float* sin, int64_t head_dim, float* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    out[i] = a * cos[i] - b * sin[i];
    out[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// Rotate q in place and k into the cache at each row's position; copy v there. A position outside the
// cache writes nothing.
void rope_kv(Tensor& q, Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin, const Tensor& position,
             Tensor& k_cache, Tensor& v_cache) {
  const int64_t n = q.size(0), max_seq = k_cache.size(0), n_kv = k_cache.size(1), head_dim = k_cache.size(2);
  const int64_t q_dim = q.size(1), kv_dim = n_kv * head_dim;
  DECODEV2_CHECK(q_dim % head_dim == 0, "q is ", q.sizes(), ", needs whole heads of ", head_dim);
  const int64_t q_stride = check_rows(q, "q", n, q_dim), k_stride = check_rows(k, "k", n, kv_dim);
  const int64_t v_stride = check_rows(v, "v", n, kv_dim);
  check(cos, "cos", torch::kFloat, max_seq * head_dim);
  check(sin, "sin", torch::kFloat, max_seq * head_dim);
  check(position, "position", torch::kInt64, n);
  check(k_cache, "k_cache", torch::kFloat, 1);
  check(v_cache, "v_cache", torch::kFloat, k_cache.numel());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = position.const_data_ptr<int64_t>()[i];
    if (at < 0 || at >= max_seq) continue;
    const float* c = cos.const_data_ptr<float>() + at * head_dim;
    const float* s = sin.const_data_ptr<float>() + at * head_dim;
    float* q_row = q.mutable_data_ptr<float>() + i * q_stride;
    for (int64_t d = 0; d < q_dim; d += head_dim) rotate(q_row + d, c, s, head_dim, q_row + d);
    float* k_row = k.mutable_data_ptr<float>() + i * k_stride;
    for (int64_t d = 0; d < kv_dim; d += head_dim) rotate(k_row + d, c, s, head_dim, k_row + d);
    std::copy(k_row, k_row + kv_dim, k_cache.mutable_data_ptr<float>() + at * kv_dim);
    const float* v_row = v.const_data_ptr<float>() + i * v_stride;
    std::copy(v_row, v_row + kv_dim, v_cache.mutable_data_ptr<float>() + at * kv_dim);
  }
}

// out = softmax(q K^T / sqrt(head_dim)) V over the first valid_len[i] slots, per row i and query head
void attn(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& valid_len, Tensor& scores,
          Tensor& out) {
  const int64_t n = q.size(0), max_seq = k_cache.size(0), n_kv = k_cache.size(1), head_dim = k_cache.size(2);
  const int64_t n_q = q.size(1) / head_dim, group = n_q / n_kv, stride = n_kv * head_dim;
  DECODEV2_CHECK(head_dim % 16 == 0 && n_q % n_kv == 0, "attention over ", n_q, " heads of ", head_dim, " with ", n_kv,
                    " KV heads: head_dim must be a multiple of 16, heads of KV heads");
  const int64_t q_stride = check_rows(q, "q", n, n_q * head_dim);
  check(k_cache, "k_cache", torch::kFloat, 1);
  check(v_cache, "v_cache", torch::kFloat, k_cache.numel());
  check(valid_len, "valid_len", torch::kInt32, n);
  check(scores, "scores", torch::kFloat, n_q * (max_seq + 16));
  check(out, "out", torch::kFloat, n * n_q * head_dim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  at::parallel_for(0, n_q, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h)
      for (int64_t i = 0; i < n; ++i) {
        const int64_t length = std::clamp<int64_t>(valid_len.const_data_ptr<int32_t>()[i], 1, max_seq);
        const int64_t at = (i * n_q + h) * head_dim, kv = h / group * head_dim;
        kernels().attend(q.const_data_ptr<float>() + i * q_stride + h * head_dim, k_cache.const_data_ptr<float>() + kv,
                         v_cache.const_data_ptr<float>() + kv, stride, length, head_dim, scale,
                         scores.mutable_data_ptr<float>() + h * (max_seq + 16), out.mutable_data_ptr<float>() + at);
      }
  });
}

// token = next_token, position += 1, history[position] = token, finished |= token is an end token. Once
// finished, token and position stay.
void commit(Tensor& token, Tensor& position, const Tensor& next_token, Tensor& finished, const Tensor& eos_ids,
            Tensor& history) {
  check(token, "token", torch::kInt64, 1);
  check(position, "position", torch::kInt64, 1);
  check(next_token, "next_token", torch::kInt64, 1);
  check(finished, "finished", torch::kUInt8, 1);
  check(eos_ids, "eos_ids", torch::kInt64, 0);
  check(history, "history", torch::kInt64, 1);
  uint8_t& done = *finished.mutable_data_ptr<uint8_t>();
  if (done) return;
  const int64_t id = *next_token.const_data_ptr<int64_t>();
  const int64_t at = *position.mutable_data_ptr<int64_t>() += 1;
  *token.mutable_data_ptr<int64_t>() = id;
  if (at >= 0 && at < history.numel()) history.mutable_data_ptr<int64_t>()[at] = id;
  const int64_t* eos = eos_ids.const_data_ptr<int64_t>();
  done = id >= 0 && std::find(eos, eos + eos_ids.numel(), id) != eos + eos_ids.numel();
}

// XOR of an int64 buffer by all threads: the read-rate probe of lab/card.py
int64_t read_all(const Tensor& buffer) {
  check(buffer, "buffer", torch::kInt64, 1);
  const int64_t* p = buffer.const_data_ptr<int64_t>();
  return at::parallel_reduce(
      0, buffer.numel(), 1 << 16, int64_t{0},
      [&](int64_t begin, int64_t end, int64_t x) {
        int64_t a = 0, b = 0, c = 0, d = 0;
        int64_t i = begin;
        for (; i + 32 <= end; i += 32) {
          __builtin_prefetch(p + i + 512);
          for (int j = 0; j < 8; ++j) {
            a ^= p[i + j];
            b ^= p[i + 8 + j];
            c ^= p[i + 16 + j];
            d ^= p[i + 24 + j];
          }
        }
        for (; i < end; ++i) a ^= p[i];
        return x ^ a ^ b ^ c ^ d;
      },
      [](int64_t x, int64_t y) { return x ^ y; });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_isa", &set_isa);
  m.def("isa", &isa);
  m.def("linear", &linear);
  m.def("qkv", &qkv);
  m.def("swiglu", &swiglu);
  m.def("head", &head);
  m.def("embed", &embed);
  m.def("rms", &rms);
  m.def("rope_kv", &rope_kv);
  m.def("attn", &attn);
  m.def("commit", &commit);
  m.def("read_all", &read_all);
}
