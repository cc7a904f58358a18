// Torch-facing side of nf4_gemm.cu.
#include "gemm_checks.h"

namespace {

using namespace decodev2;
using torch::Tensor;
using Optional = std::optional<Tensor>;

GemmPlan plan_of(const cudaDeviceProp* device, bool pdl) {
  GemmPlan plan = {};
  plan.multiprocessors = device->multiProcessorCount;
  plan.shared_limit = static_cast<int>(device->sharedMemPerBlockOptin);
  plan.variant = choose_gemm_variant(device->major * 10 + device->minor, plan.shared_limit);
  plan.pdl = pdl && device->major >= 9;
  return plan;
}

// Bytes of scratch that a product of n columns with a matrix of `tiles` x `groups` needs on the current device.
int64_t workspace_bytes(int64_t tiles, int64_t groups, int64_t n) {
  return static_cast<int64_t>(gemm_workspace_bytes(static_cast<int>(tiles), static_cast<int>(groups),
                                                   static_cast<int>(n),
                                                   plan_of(at::cuda::getCurrentDeviceProperties(), false)));
}

// y = W x for every row of x [n, cols]; kind 0 plain (+ bias) (+ y with add_to_y), 1 swiglu. y [n, rows].
void gemm(const Tensor& x, const Tensor& panels, int64_t tiles, Tensor& y, int64_t kind, const Optional& norm_weight,
          double eps, const Optional& bias, bool add_to_y, Tensor& workspace, bool pdl) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(x, "x"));
  check_product(x, panels, tiles, y, kind, norm_weight, bias);
  const GemmPlan plan = plan_of(at::cuda::getCurrentDeviceProperties(), pdl);
  const auto a =
      product_arguments<GemmArguments>(x, panels, tiles, y, norm_weight, eps, bias, add_to_y, workspace);
  DECODEV2_CHECK(a.workspace_bytes >= gemm_workspace_bytes(a.tiles, a.groups, a.n, plan), "workspace has ",
                    a.workspace_bytes, " bytes, the product needs ", gemm_workspace_bytes(a.tiles, a.groups, a.n, plan));
  check_launch(chr_nf4_gemm(a, static_cast<GemmKind>(kind), plan, at::cuda::getCurrentCUDAStream()), "nf4_gemm");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gemm", &gemm);
  m.def("workspace_bytes", &workspace_bytes);
}
