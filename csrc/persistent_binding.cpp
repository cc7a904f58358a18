// Torch-facing side of persistent.cu: does a shape fit, what it needs, and one launch on the current stream.
#include "checks.h"
#include "persistent.h"

namespace {

using namespace decodev2;
using torch::Tensor;
using Optional = std::optional<Tensor>;

struct Shape {
  int64_t n_layers, max_seq, n_kv, head_dim, q_dim, hidden, intermediate, vocab;
};

Shape shape_of(const std::vector<int64_t>& dims) {
  DECODEV2_CHECK(dims.size() == 8, "shape has ", dims.size(), " numbers, needs 8");
  return {dims[0], dims[1], dims[2], dims[3], dims[4], dims[5], dims[6], dims[7]};
}

PersistentArguments arguments_of(const Shape& s) {
  PersistentArguments a = {};
  a.n_layers = static_cast<int>(s.n_layers);
  a.max_seq = static_cast<int>(s.max_seq);
  a.n_kv = static_cast<int>(s.n_kv);
  a.head_dim = static_cast<int>(s.head_dim);
  a.q_dim = static_cast<int>(s.q_dim);
  a.hidden = static_cast<int>(s.hidden);
  a.intermediate = static_cast<int>(s.intermediate);
  a.vocab = static_cast<int>(s.vocab);
  return a;
}

// Why this shape cannot run on the current device, or nothing.
std::string why_not(const std::vector<int64_t>& dims) {
  const cudaDeviceProp* device = ::at::cuda::getCurrentDeviceProperties();
  if (device->major < 9) return text_of("the device is sm_", device->major, device->minor, ", needs sm_90 or newer");
  if (!device->cooperativeLaunch) return "the device has no cooperative launch";
  PersistentArguments a = arguments_of(shape_of(dims));
  int shared_bytes = 0;
  const char* reason = plan_persistent(a, device->multiProcessorCount,
                                       static_cast<int>(device->sharedMemPerBlockOptin), &shared_bytes);
  return reason ? reason : "";
}

PersistentArguments planned(const std::vector<int64_t>& dims) {
  const cudaDeviceProp* device = ::at::cuda::getCurrentDeviceProperties();
  PersistentArguments a = arguments_of(shape_of(dims));
  int shared_bytes = 0;
  const char* reason = plan_persistent(a, device->multiProcessorCount,
                                       static_cast<int>(device->sharedMemPerBlockOptin), &shared_bytes);
  DECODEV2_CHECK(!reason, reason ? reason : "");
  return a;
}

// int32 words of hand-offs that `step` needs.
int64_t hand_off_words(const std::vector<int64_t>& dims) {
  PersistentArguments a = planned(dims);
  return lay_out_words(a, nullptr);
}

// uint8 on the CPU: who does what, for `step`.
Tensor tables(const std::vector<int64_t>& dims) {
  const PersistentArguments a = planned(dims);
  Tensor out = torch::empty({table_bytes(a)}, torch::kByte);
  fill_tables(a, out.mutable_data_ptr<uint8_t>());
  return out;
}

// CTAs of the grid that `step` launches.
int64_t ctas(const std::vector<int64_t>& dims) { return planned(dims).ctas; }

// One token: logits and the candidates of their argmax from token and position; with next_token also the commit of
// step.cu, inside. layers int64 [n_layers, 7] holds
// PersistentLayer; words [hand_off_words] is all ones but its first two lines, which are zero, before the first call.
void step(const std::vector<int64_t>& dims, const Tensor& layers, const Tensor& tables, const Tensor& head, const Tensor& norm,
          const Tensor& embed, Tensor& token, Tensor& position, Tensor& valid_len, const Tensor& cos,
          const Tensor& sin, Tensor& k_cache, Tensor& v_cache, Tensor& logits, Tensor& values, Tensor& ids,
          Tensor& words, double eps, int64_t patience, const Optional& timeline, const Optional& next_token, const Optional& finished,
          const Optional& eos_ids, const Optional& history) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(logits, "logits"));
  const cudaDeviceProp* device = ::at::cuda::getCurrentDeviceProperties();
  const Shape s = shape_of(dims);
  const int64_t hidden_groups = (s.hidden + 63) / 64, cache = s.n_layers * s.max_seq * s.n_kv * s.head_dim;
  check_tensor(layers, "layers", torch::kInt64, s.n_layers * 7, logits);
  check_tensor(head, "head", torch::kByte, (s.vocab + 15) / 16 * hidden_groups * 544, logits);
  check_tensor(norm, "norm", torch::kFloat, s.hidden, logits);
  check_tensor(token, "token", torch::kInt64, 1, logits);
  check_tensor(position, "position", torch::kInt64, 1, logits);
  check_tensor(valid_len, "valid_len", torch::kInt32, 1, logits);
  check_tensor(cos, "cos", torch::kFloat, s.max_seq * s.head_dim, logits);
  check_tensor(sin, "sin", torch::kFloat, s.max_seq * s.head_dim, logits);
  check_tensor(k_cache, "k_cache", torch::kBFloat16, cache, logits);
  check_tensor(v_cache, "v_cache", torch::kBFloat16, cache, logits);
  check_tensor(logits, "logits", torch::kFloat, s.vocab, logits);
  check_tensor(values, "values", torch::kFloat, device->multiProcessorCount, logits);
  check_tensor(ids, "ids", torch::kInt32, values.numel(), logits);
  PersistentArguments a = arguments_of(s);
  a.layers = static_cast<const PersistentLayer*>(layers.const_data_ptr());
  a.tables = tables.const_data_ptr<uint8_t>();
  a.head = head.const_data_ptr<uint8_t>();
  a.norm = norm.const_data_ptr<float>();
  a.embed.rows = s.vocab;
  a.embed.hidden = a.hidden;
  a.embed.groups = static_cast<int>(hidden_groups);
  if (embed.scalar_type() == torch::kByte) {
    check_tensor(embed, "embed", torch::kByte, (s.vocab + 15) / 16 * hidden_groups * 544, logits);
    a.embed.panels = embed.const_data_ptr<uint8_t>();
  } else {
    check_tensor(embed, "embed", torch::kFloat, s.vocab * s.hidden, logits);
    a.embed.dense = embed.const_data_ptr<float>();
  }
  a.token = token.const_data_ptr<int64_t>();
  a.position = position.const_data_ptr<int64_t>();
  a.valid_len = valid_len.mutable_data_ptr<int32_t>();
  a.cos = cos.const_data_ptr<float>();
  a.sin = sin.const_data_ptr<float>();
  a.k_cache = static_cast<uint16_t*>(k_cache.mutable_data_ptr());
  a.v_cache = static_cast<uint16_t*>(v_cache.mutable_data_ptr());
  a.logits = logits.mutable_data_ptr<float>();
  a.candidate_values = values.mutable_data_ptr<float>();
  a.candidate_ids = ids.mutable_data_ptr<int>();
  a.candidates = static_cast<int>(ids.numel());
  if (next_token) {  // commit the best candidate
    DECODEV2_CHECK(finished && eos_ids && history, "to commit takes finished, eos_ids and history");
    check_tensor(*next_token, "next_token", torch::kInt64, 1, logits);
    check_tensor(*finished, "finished", torch::kUInt8, 1, logits);
    check_tensor(*eos_ids, "eos_ids", torch::kInt64, 8, logits);
    check_tensor(*history, "history", torch::kInt64, 1, logits);
    a.commit = {data_or_null<int64_t>(next_token), token.mutable_data_ptr<int64_t>(), position.mutable_data_ptr<int64_t>(),
                data_or_null<uint8_t>(finished), data_or_null<const int64_t>(eos_ids), data_or_null<int64_t>(history),
                history->numel()};
  }
  a.eps = static_cast<float>(eps);
  a.patience = patience;
  int shared_bytes = 0;
  const char* reason = plan_persistent(a, device->multiProcessorCount,
                                       static_cast<int>(device->sharedMemPerBlockOptin), &shared_bytes);
  DECODEV2_CHECK(!reason, reason ? reason : "");
  check_tensor(tables, "tables", torch::kByte, table_bytes(a), logits);
  check_tensor(words, "words", torch::kInt32, lay_out_words(a, nullptr), logits);
  lay_out_words(a, static_cast<uint32_t*>(words.mutable_data_ptr()));
  if (timeline) {
    check_tensor(*timeline, "timeline", torch::kInt64, (s.n_layers + 1) * kStamps * a.ctas, logits);
    a.timeline = data_or_null<long long>(timeline);
  }
  check_launch(chr_nf4_step(a, shared_bytes, ::at::cuda::getCurrentCUDAStream()),
               "persistent step");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("step", &step);
  m.def("why_not", &why_not);
  m.def("hand_off_words", &hand_off_words);
  m.def("tables", &tables);
  m.def("ctas", &ctas);
  m.attr("stamps") = kStamps;
}
