// Torch-facing side of attn.cu.
#include "attn_checks.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace decodev2;
  m.def("decode", &run_attention<chr_nf4_attn, attn_partial_floats>);
  m.def("partial_floats", [](int n_q, int n_kv, int head_dim, int max_seq) {
    return attn_partial_floats(n_q, n_kv, head_dim, max_seq);
  });
}
