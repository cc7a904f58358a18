// Torch-facing side of nf4_wgmma.cu.
#include "gemm_checks.h"

namespace {

using namespace decodev2;
using torch::Tensor;
using Optional = std::optional<Tensor>;

int groups_of(int64_t cols) { return static_cast<int>((cols + 63) / 64); }

// Bytes of n columns of `cols` values as half: the workspace of a product, or what it leaves for the next one.
int64_t columns_bytes(int64_t cols, int64_t n) {
  return static_cast<int64_t>(wgmma_columns_bytes(groups_of(cols), static_cast<int>(n)));
}

bool runs() {
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  return wgmma_runs_on(device->major * 10 + device->minor, static_cast<int>(device->sharedMemPerBlockOptin));
}

// y = W x for every row of x [n, cols]; kind 0 plain (+ bias) (+ y with add_to_y), 1 swiglu. y [n, rows]. With
// x_columns x is read from there and gives the shape only; with y_columns (swiglu) y is written there and gives the
// shape only. Levels are multiplied by 2 to the level_exponent on the way, so that times a scale they fit half.
void gemm(const Tensor& x, const Tensor& panels, int64_t tiles, Tensor& y, int64_t kind, const Optional& norm_weight,
          double eps, const Optional& bias, bool add_to_y, Tensor& workspace, int64_t level_exponent,
          const Optional& x_columns, const Optional& y_columns, bool pdl) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(x, "x"));
  DECODEV2_CHECK(runs(), "nf4_wgmma needs compute capability 9.0");
  check_product(x, panels, tiles, y, kind, norm_weight, bias);
  const int64_t n = x.size(0), cols = x.size(1);
  DECODEV2_CHECK(level_exponent >= -15 && level_exponent <= 15, "level_exponent is ", level_exponent,
                 ", needs -15 to 15");
  if (x_columns) check_tensor(*x_columns, "x_columns", torch::kByte, columns_bytes(cols, n), x);
  if (y_columns) check_tensor(*y_columns, "y_columns", torch::kByte, columns_bytes(y.size(1), n), x);
  if (!x_columns) check_tensor(workspace, "workspace", torch::kByte, columns_bytes(cols, n), x);
  auto a = product_arguments<WgmmaArguments>(x, panels, tiles, y, norm_weight, eps, bias, add_to_y, workspace);
  a.x_columns = data_or_null<const uint8_t>(x_columns);
  a.y_columns = data_or_null<uint8_t>(y_columns);
  if (y_columns) a.y = nullptr, a.residual = nullptr;
  a.level_exponent = static_cast<int>(level_exponent);
  WgmmaPlan plan = {};
  plan.multiprocessors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  plan.pdl = pdl;
  check_launch(chr_nf4_wgmma(a, static_cast<GemmKind>(kind), plan, at::cuda::getCurrentCUDAStream()), "nf4_wgmma");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gemm", &gemm);
  m.def("columns_bytes", &columns_bytes);
  m.def("runs", &runs);
}
