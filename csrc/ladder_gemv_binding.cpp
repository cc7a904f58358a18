// Torch-facing side of ladder_gemv.cu: checks, then one launch on the current stream of x's device.
#include "checks.h"
#include "launch.h"

namespace {

using torch::Tensor;
using Optional = std::optional<Tensor>;

// Outputs and what is added to them: parts of longer vectors, so no alignment is asked for.
void check_output(const Tensor& t, const char* name, int64_t numel, const Tensor& x) {
  DECODEV2_CHECK(t.is_cuda() && t.device() == x.device() && t.scalar_type() == torch::kFloat &&
                        t.is_contiguous() && t.numel() == numel,
                    name, " is ", t.scalar_type(), " ", t.sizes(), " on ", t.device(),
                    ", needs a contiguous Float tensor of ", numel, " elements on ", x.device());
}

// y = W x over one to three row-major matrices of one width, one after the other in y; with
// `swiglu` over gate and up. load_bytes 0 chooses.
void gemv(const Tensor& x, const std::vector<Tensor>& codes, const std::vector<Tensor>& scales,
          Tensor& y, bool swiglu, const Optional& norm_weight, double eps, const Optional& bias,
          const Optional& residual, int64_t table, int64_t rows_sharing_x, bool split_k,
          bool stage_x, int64_t load_bytes) {
  using namespace decodev2;
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(x, "x"));
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  const int64_t cols = x.numel(), groups = (cols + 63) / 64;
  DECODEV2_CHECK(
      !codes.empty() && codes.size() <= kLadderMatrices && codes.size() == scales.size(), "found ",
      codes.size(), " codes and ", scales.size(), " scales, needs 1 to ", kLadderMatrices,
      " of each");
  check_tensor(x, "x", torch::kFloat, cols, x);
  LadderArguments a = {};
  int64_t outputs = 0;
  // weights may be parts of wider buffers: what they are aligned to decides load_bytes
  for (size_t m = 0; m < codes.size(); ++m) {
    const int64_t rows = codes[m].size(0);
    for (const auto& [t, name, type, width] :
         {std::tuple(&codes[m], "codes", torch::kByte, groups * 32),
          std::tuple(&scales[m], "scales", torch::kHalf, groups)})
      DECODEV2_CHECK(
          t->is_cuda() && t->device() == x.device() && t->scalar_type() == type &&
              t->is_contiguous() && t->dim() == 2 && t->size(0) == rows && t->size(1) == width,
          name, " ", m, " is ", t->scalar_type(), " ", t->sizes(), " on ", t->device(),
          ", needs contiguous ", type, " [", rows, ", ", width, "] on ", x.device());
    DECODEV2_CHECK(rows > 0, "codes ", m, " has no rows");
    a.matrix[m].codes = codes[m].const_data_ptr<uint8_t>();
    a.matrix[m].scales = static_cast<const uint16_t*>(scales[m].const_data_ptr());
    a.matrix[m].rows = static_cast<int>(rows);
    outputs += rows;
  }
  if (swiglu) {
    DECODEV2_CHECK(codes.size() == 2 && a.matrix[0].rows == a.matrix[1].rows,
                      "swiglu needs gate and up of one size");
    outputs /= 2;
  }
  check_output(y, "y", outputs, x);
  if (norm_weight) check_tensor(*norm_weight, "norm_weight", torch::kFloat, cols, x);
  if (bias) check_output(*bias, "bias", outputs, x);
  if (residual) check_output(*residual, "residual", outputs, x);
  a.matrices = static_cast<int>(codes.size());
  a.x = x.const_data_ptr<float>();
  a.y = y.mutable_data_ptr<float>();
  a.norm_weight = data_or_null<const float>(norm_weight);
  a.bias = data_or_null<const float>(bias);
  a.residual = data_or_null<const float>(residual);
  a.eps = static_cast<float>(eps);
  a.cols = static_cast<int>(cols);
  a.groups = static_cast<int>(groups);
  LadderPlan plan = {};
  plan.table = static_cast<LadderTable>(table);
  plan.rows = static_cast<int>(rows_sharing_x);
  plan.split_k = split_k;
  plan.stage_x = stage_x;
  plan.swiglu = swiglu;
  plan.load_bytes =
      load_bytes ? static_cast<int>(load_bytes) : choose_ladder_load(a, split_k, stage_x);
  plan.multiprocessors = device->multiProcessorCount;
  plan.shared_limit = static_cast<int>(device->sharedMemPerBlockOptin);
  DECODEV2_CHECK(ladder_alignment(a) >= plan.load_bytes, "codes are aligned to ",
                    ladder_alignment(a), " bytes, loads of ", plan.load_bytes, " need as many");
  DECODEV2_CHECK(ladder_shared_bytes(a, plan) <= plan.shared_limit, "table and x take ",
                    ladder_shared_bytes(a, plan), " bytes of shared memory, a CTA has ",
                    plan.shared_limit);
  check_launch(launch_ladder_gemv(a, plan, at::cuda::getCurrentCUDAStream()), "ladder_gemv");
}

// y[u] = silu(gate_up[u]) * gate_up[units + u]
void silu_multiply(const Tensor& gate_up, Tensor& y) {
  using namespace decodev2;
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(y, "y"));
  DECODEV2_CHECK(y.numel() > 0, "y has no elements");
  check_output(y, "y", y.numel(), y);
  check_output(gate_up, "gate_up", 2 * y.numel(), y);
  check_launch(launch_silu_multiply(gate_up.const_data_ptr<float>(), y.mutable_data_ptr<float>(),
                                    static_cast<int>(y.numel()), at::cuda::getCurrentCUDAStream()),
               "silu_multiply");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gemv", &gemv);
  m.def("silu_multiply", &silu_multiply);
}
