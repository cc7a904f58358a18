// Torch-facing side of ladder_attn.cu.
#include "attn_checks.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace decodev2;
  m.def("one_warp", &run_attention<launch_attn_one_warp>);
  m.def("flash_two_launch", &run_attention<launch_attn_flash_two_launch>);
}
