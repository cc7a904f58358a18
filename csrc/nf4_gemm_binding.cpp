// Torch-facing side of nf4_gemm.cu.
#include "checks.h"
#include "launch.h"

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
  const int64_t n = x.size(0), cols = x.size(1), rows = y.size(1), groups = (cols + 63) / 64;
  const int64_t rows_per_tile = kind == 1 ? 8 : 16;
  DECODEV2_CHECK(kind == 0 || kind == 1, "kind is ", kind, ", needs 0 plain or 1 swiglu");
  DECODEV2_CHECK((rows + rows_per_tile - 1) / rows_per_tile == tiles, "y has ", rows, " rows, the matrix ", tiles,
                    " tiles of ", rows_per_tile);
  DECODEV2_CHECK(y.dim() == 2 && y.size(0) == n && y.is_cuda() && y.scalar_type() == torch::kFloat &&
                        y.is_contiguous(),
                    "y is ", y.sizes(), ", needs contiguous Float [", n, ", ", rows, "]");
  check_tensor(x, "x", torch::kFloat, n * cols, x);
  check_tensor(panels, "panels", torch::kByte, tiles * groups * 544, x);
  if (norm_weight) check_tensor(*norm_weight, "norm_weight", torch::kFloat, cols, x);
  if (bias) check_tensor(*bias, "bias", torch::kFloat, rows, x);
  const GemmPlan plan = plan_of(at::cuda::getCurrentDeviceProperties(), pdl);
  GemmArguments a = {};
  a.panels = panels.const_data_ptr<uint8_t>();
  a.x = x.const_data_ptr<float>();
  a.y = y.mutable_data_ptr<float>();
  a.norm_weight = data_or_null<const float>(norm_weight);
  a.bias = data_or_null<const float>(bias);
  a.residual = add_to_y ? a.y : nullptr;
  a.workspace = static_cast<uint8_t*>(workspace.mutable_data_ptr());
  a.workspace_bytes = workspace.nbytes();
  a.ld_x = cols;
  a.ld_y = rows;
  a.eps = static_cast<float>(eps);
  a.n = static_cast<int>(n);
  a.rows = static_cast<int>(rows);
  a.cols = static_cast<int>(cols);
  a.groups = static_cast<int>(groups);
  a.tiles = static_cast<int>(tiles);
  DECODEV2_CHECK(a.workspace_bytes >= gemm_workspace_bytes(a.tiles, a.groups, a.n, plan), "workspace has ",
                    a.workspace_bytes, " bytes, the product needs ", gemm_workspace_bytes(a.tiles, a.groups, a.n, plan));
  check_launch(chr_nf4_gemm(a, static_cast<GemmKind>(kind), plan, at::cuda::getCurrentCUDAStream()), "nf4_gemm");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gemm", &gemm);
  m.def("workspace_bytes", &workspace_bytes);
}
