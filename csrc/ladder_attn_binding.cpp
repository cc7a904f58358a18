// Torch-facing side of ladder_attn.cu.
#include "attn_checks.h"

namespace {

// 32 splits of m, l and the accumulators
int64_t two_launch_floats(int n_q, int, int head_dim, int) { return int64_t{32} * n_q * (head_dim + 2); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace decodev2;
  m.def("one_warp", &run_attention<launch_attn_one_warp, two_launch_floats>);
  m.def("flash_two_launch", &run_attention<launch_attn_flash_two_launch, two_launch_floats>);
}
