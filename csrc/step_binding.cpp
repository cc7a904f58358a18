// Torch-facing side of step.cu: norm, embedding rows, candidates, choosing and committing.
#include "checks.h"
#include "launch.h"

namespace {

using namespace decodev2;
using torch::Tensor;
using Optional = std::optional<Tensor>;

// y = x * rsqrt(mean(x^2) + eps) * weight, row by row
void rms(const Tensor& x, const Tensor& weight, double eps, Tensor& y, bool pdl) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(x, "x"));
  check_tensor(x, "x", torch::kFloat, 1, x);
  check_tensor(weight, "weight", torch::kFloat, x.size(1), x);
  check_tensor(y, "y", torch::kFloat, x.numel(), x);
  RmsArguments a = {};
  a.x = x.const_data_ptr<float>();
  a.weight = weight.const_data_ptr<float>();
  a.y = y.mutable_data_ptr<float>();
  a.eps = static_cast<float>(eps);
  a.n = static_cast<int>(x.size(0));
  a.hidden = static_cast<int>(x.size(1));
  check_launch(chr_nf4_rms(a, pdl, at::cuda::getCurrentCUDAStream()), "rms");
}

// `table` is a panel matrix (uint8) or a dense float32 [vocab, hidden]
EmbedTable embed_table(const Tensor& table, int64_t rows, int64_t hidden, const Tensor& beside) {
  EmbedTable t = {};
  t.rows = rows;
  t.hidden = static_cast<int>(hidden);
  t.groups = static_cast<int>((hidden + 63) / 64);
  if (table.scalar_type() == torch::kByte) {
    check_tensor(table, "table", torch::kByte, (rows + 15) / 16 * t.groups * 544, beside);
    t.panels = table.const_data_ptr<uint8_t>();
  } else {
    check_tensor(table, "table", torch::kFloat, rows * hidden, beside);
    t.dense = table.const_data_ptr<float>();
  }
  return t;
}

// x[i] = embedding row of token[i]; with a position also valid_len[i] = position[i] + 1
void embed(const Tensor& token, const Optional& position, const Optional& valid_len, const Tensor& table, int64_t rows, Tensor& x,
           bool pdl) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(x, "x"));
  const int64_t n = token.numel();
  check_tensor(x, "x", torch::kFloat, n, x);
  DECODEV2_CHECK(token.scalar_type() == torch::kInt64 && x.dim() == 2 && x.size(0) == n, "token is ",
                    token.scalar_type(), " ", token.sizes(), ", needs Long ids for the ", x.size(0), " rows of x");
  DECODEV2_CHECK(position.has_value() == valid_len.has_value(), "position and valid_len come together");
  if (position) {
    check_tensor(*position, "position", torch::kInt64, n, x);
    check_tensor(*valid_len, "valid_len", torch::kInt32, n, x);
  }
  EmbedArguments a = {};
  a.table = embed_table(table, rows, x.size(1), x);
  a.token = token.const_data_ptr<int64_t>();
  a.position = data_or_null<const int64_t>(position);
  a.valid_len = data_or_null<int32_t>(valid_len);
  a.x = x.mutable_data_ptr<float>();
  a.n = static_cast<int>(n);
  check_launch(chr_nf4_embed(a, pdl, at::cuda::getCurrentCUDAStream()), "embed");
}

// Best of the head's candidates -> next_token; with `commit` also token, position and finished.
void choose(const Tensor& values, const Tensor& ids, Tensor& next_token, Tensor& token, Tensor& position,
            Tensor& finished, const Tensor& eos_ids, Tensor& history, bool commit, bool pdl) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(values, "values"));
  check_tensor(values, "values", torch::kFloat, 1, values);
  check_tensor(ids, "ids", torch::kInt32, values.numel(), values);
  check_tensor(next_token, "next_token", torch::kInt64, 1, values);
  check_tensor(token, "token", torch::kInt64, 1, values);
  check_tensor(position, "position", torch::kInt64, 1, values);
  check_tensor(finished, "finished", torch::kUInt8, 1, values);
  check_tensor(eos_ids, "eos_ids", torch::kInt64, 8, values);
  check_tensor(history, "history", torch::kInt64, 1, values);
  CandidateArguments a = {};
  a.values = values.const_data_ptr<float>();
  a.ids = ids.const_data_ptr<int>();
  a.count = static_cast<int>(values.numel());
  a.commit.next_token = next_token.mutable_data_ptr<int64_t>();
  a.commit.token = commit ? token.mutable_data_ptr<int64_t>() : nullptr;
  a.commit.position = position.mutable_data_ptr<int64_t>();
  a.commit.finished = finished.mutable_data_ptr<uint8_t>();
  a.commit.eos_ids = eos_ids.const_data_ptr<int64_t>();
  a.commit.history = history.mutable_data_ptr<int64_t>();
  a.commit.history_size = history.numel();
  check_launch(chr_nf4_commit(a, pdl, at::cuda::getCurrentCUDAStream()), "choose");
}

// Best logit and id of every slice: what a head without candidates of its own leaves for `choose`.
void candidates(const Tensor& logits, Tensor& values, Tensor& ids, bool pdl) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(logits, "logits"));
  check_tensor(logits, "logits", torch::kFloat, 1, logits);
  check_tensor(values, "values", torch::kFloat, 1, logits);
  check_tensor(ids, "ids", torch::kInt32, values.numel(), logits);
  SliceArguments a = {};
  a.logits = logits.const_data_ptr<float>();
  a.vocab = static_cast<int>(logits.numel());
  a.values = values.mutable_data_ptr<float>();
  a.ids = ids.mutable_data_ptr<int>();
  a.count = static_cast<int>(values.numel());
  check_launch(chr_nf4_candidates(a, pdl, at::cuda::getCurrentCUDAStream()), "candidates");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("rms", &rms);
  m.def("embed", &embed);
  m.def("candidates", &candidates);
  m.def("choose", &choose);
}
