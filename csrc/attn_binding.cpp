// Torch-facing side of attn.cu.
#include "attn_checks.h"

namespace {

using namespace decodev2;
using torch::Tensor;

// `decode` with RoPE inside, its output once more as half for the x_half of a GEMV: uint8 [q_dim / 64 * 128].
void decode_to_half(Tensor& q, Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin, const Tensor& position,
                    Tensor& valid_len, Tensor& k_cache, Tensor& v_cache, Tensor& partials, Tensor& counters, Tensor& out,
                    Tensor& out_half, int64_t merge, int64_t start) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(q, "q"));
  AttnArguments a =
      attn_arguments(q, k, v, cos, sin, position, valid_len, k_cache, v_cache, partials, counters, out);
  check_tensor(out_half, "out_half", torch::kByte, (q.size(1) + 63) / 64 * 128, q);
  a.out_half = out_half.mutable_data_ptr<uint8_t>();
  launch_attention<chr_nf4_attn, attn_partial_floats>(a, partials, true, merge, start);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("decode", &run_attention<chr_nf4_attn, attn_partial_floats>);
  m.def("decode_to_half", &decode_to_half);
  m.def("partial_floats", [](int n_q, int n_kv, int head_dim, int max_seq) {
    return attn_partial_floats(n_q, n_kv, head_dim, max_seq);
  });
}
