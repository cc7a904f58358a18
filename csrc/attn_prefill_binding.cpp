// Torch-facing side of attn_prefill.cu. The buffers are those of attn.cu; no partial results are kept.
#include "attn_checks.h"

namespace {

int64_t no_partials(int, int, int, int) { return 0; }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace decodev2;
  m.def("rope_kv", &run_attention<chr_nf4_rope_kv, no_partials>);
  m.def("prefill", &run_attention<chr_nf4_attn_prefill, no_partials>);
}
