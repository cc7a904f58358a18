// Torch-facing side of nf4_gemv.cu: checks, then one launch on the current stream of x's device.
#include "checks.h"
#include "launch.h"

namespace {

using torch::Tensor;
using Optional = std::optional<Tensor>;

decodev2::GemvVariant chosen_on(const cudaDeviceProp& device, int64_t cols) {
  return decodev2::choose_gemv_variant(static_cast<int>((cols + 63) / 64), device.major * 10 + device.minor,
                                       static_cast<int>(device.sharedMemPerMultiprocessor));
}

// y = W x with the epilogue of `kind` (0 plain, 1 swiglu, 2 head). x [1, cols], y [1, rows]. `start`: 0 after the
// kernels before, 1 programmatic launch, 2 the same but with nothing done ahead of them.
void gemv(const Tensor& x, const Tensor& panels, int64_t tiles, Tensor& y, int64_t kind, const Optional& norm_weight,
          double eps, const Optional& bias, const Optional& residual, const Optional& candidate_values,
          const Optional& candidate_ids, int64_t variant, int64_t start, const Optional& x_half, const Optional& y_half,
          const Optional& shared_sums, const Optional& shared_counters) {
  using namespace decodev2;
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(x, "x"));
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  const int64_t cols = x.size(-1), rows = y.size(-1), groups = (cols + 63) / 64;
  const int64_t rows_per_tile = kind == 1 ? 8 : 16;
  DECODEV2_CHECK(kind >= 0 && kind <= 2, "kind is ", kind, ", needs 0 plain, 1 swiglu or 2 head");
  DECODEV2_CHECK((rows + rows_per_tile - 1) / rows_per_tile == tiles, "y has ", rows, " rows, the matrix ", tiles,
                    " tiles of ", rows_per_tile);
  DECODEV2_CHECK(start >= 0 && start <= 2, "start is ", start, ", needs 0 plain, 1 programmatic or 2 waiting first");
  check_tensor(x, "x", torch::kFloat, cols, x);
  check_tensor(panels, "panels", torch::kByte, tiles * groups * 544, x);
  check_tensor(y, "y", torch::kFloat, rows, x);
  if (norm_weight) check_tensor(*norm_weight, "norm_weight", torch::kFloat, cols, x);
  if (bias) check_tensor(*bias, "bias", torch::kFloat, rows, x);
  if (residual) check_tensor(*residual, "residual", torch::kFloat, rows, x);
  if (x_half) check_tensor(*x_half, "x_half", torch::kByte, groups * 128, x);
  if (y_half) check_tensor(*y_half, "y_half", torch::kByte, (rows + 63) / 64 * 128, x);
  DECODEV2_CHECK(!x_half || !norm_weight, "x_half is not normed; found a norm_weight");
  DECODEV2_CHECK(!y_half || kind == 1, "y_half comes with swiglu only");
  const int64_t candidates = 2 * device->multiProcessorCount;
  if (kind == 2) {
    DECODEV2_CHECK(candidate_values && candidate_ids, "the head needs candidate buffers");
    check_tensor(*candidate_values, "candidate_values", torch::kFloat, candidates, x);
    check_tensor(*candidate_ids, "candidate_ids", torch::kInt, candidates, x);
  }
  GemvArguments a = {};
  a.panels = panels.const_data_ptr<uint8_t>();
  a.x = x.const_data_ptr<float>();
  a.y = y.mutable_data_ptr<float>();
  a.x_half = data_or_null<const uint8_t>(x_half);
  a.y_half = data_or_null<uint8_t>(y_half);
  a.norm_weight = data_or_null<const float>(norm_weight);
  a.bias = data_or_null<const float>(bias);
  a.residual = data_or_null<const float>(residual);
  a.candidate_values = data_or_null<float>(candidate_values);
  a.candidate_ids = data_or_null<int>(candidate_ids);
  a.candidates = candidate_ids ? static_cast<int>(candidate_ids->numel()) : 0;
  a.eps = static_cast<float>(eps);
  a.rows = static_cast<int>(rows);
  a.cols = static_cast<int>(cols);
  a.groups = static_cast<int>(groups);
  a.tiles = static_cast<int>(tiles);
  GemvPlan plan = {};
  plan.variant = variant < 0 ? chosen_on(*device, cols) : static_cast<GemvVariant>(variant);
  plan.multiprocessors = device->multiProcessorCount;
  plan.shared_bytes = static_cast<int>(device->sharedMemPerMultiprocessor);
  plan.pdl = start > 0 && device->major >= 9;
  a.wait_first = start == 2;
  if (shared_sums && shared_counters && gemv_shares_tiles(static_cast<GemvKind>(kind), a.groups, a.tiles, plan)) {
    check_tensor(*shared_sums, "shared_sums", torch::kFloat, tiles * 32, x);
    check_tensor(*shared_counters, "shared_counters", torch::kInt, tiles, x);
    a.shared_sums = data_or_null<float>(shared_sums);
    a.shared_counters = data_or_null<uint32_t>(shared_counters);
  }
  const int shared = gemv_shared_bytes(plan.variant, a.groups);
  DECODEV2_CHECK(shared <= static_cast<int>(device->sharedMemPerBlockOptin), "a product of ", cols,
                    " columns takes ", shared, " bytes of shared memory, a CTA has ",
                    device->sharedMemPerBlockOptin);
  check_launch(chr_nf4_gemv(a, static_cast<GemvKind>(kind), plan, at::cuda::getCurrentCUDAStream()), "nf4_gemv");
}

// GemvVariant of a product of `cols` columns on the current device, where none is asked for.
int64_t chosen(int64_t cols) {
  return static_cast<int64_t>(chosen_on(*at::cuda::getCurrentDeviceProperties(), cols));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gemv", &gemv);
  m.def("chosen", &chosen);
}
