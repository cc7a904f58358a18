// Torch-facing side of ring_ablations.cu.
#include "checks.h"
#include "launch.h"

namespace {

using namespace decodev2;
using torch::Tensor;
using Optional = std::optional<Tensor>;

RingSize size_of(int64_t size) {
  DECODEV2_CHECK(size >= 0 && size <= 4, "size is ", size, ", needs 0 to 4");
  return static_cast<RingSize>(size);
}

// Bytes of shared memory that a ring takes beside table and x of `cols` columns.
int64_t shared_bytes(int64_t size, int64_t cols) {
  return ring_shared_bytes(size_of(size), static_cast<int>((cols + 63) / 64));
}

// y [1, rows] = W x, x [1, cols] and what it adds to seen [1], with the parts of RingParts that are left.
void product(const Tensor& x, const Tensor& panels, int64_t tiles, Tensor& y, Tensor& seen, int64_t parts, int64_t size,
             bool pdl, const Optional& shared_sums, const Optional& shared_counters) {
  const c10::cuda::CUDAGuard guard(cuda_device(x, "x"));
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  const int64_t cols = x.size(-1), rows = y.size(-1), groups = cols / 64;
  DECODEV2_CHECK(parts >= 0 && parts <= 4, "parts is ", parts, ", needs 0 to 4");
  DECODEV2_CHECK(cols % 256 == 0, "x has ", cols, " columns, needs whole panels of 256");
  DECODEV2_CHECK(rows == 16 * tiles, "y has ", rows, " rows, needs the 16 rows of ", tiles, " tiles");
  check_tensor(x, "x", torch::kFloat, cols, x);
  check_tensor(panels, "panels", torch::kByte, tiles * groups * 544, x);
  check_tensor(y, "y", torch::kFloat, rows, x);
  check_tensor(seen, "seen", torch::kInt, 1, x);
  RingArguments a = {};
  a.panels = panels.const_data_ptr<uint8_t>();
  a.x = x.const_data_ptr<float>();
  a.y = y.mutable_data_ptr<float>();
  a.seen = static_cast<uint32_t*>(seen.mutable_data_ptr());
  a.rows = static_cast<int>(rows);
  a.cols = static_cast<int>(cols);
  a.groups = static_cast<int>(groups);
  a.tiles = static_cast<int>(tiles);
  GemvPlan plan = {};
  plan.multiprocessors = device->multiProcessorCount;
  plan.shared_bytes = static_cast<int>(device->sharedMemPerMultiprocessor);
  plan.pdl = pdl;
  if (shared_sums && shared_counters && ring_shares_tiles(size_of(size), a.groups, a.tiles, plan)) {
    check_tensor(*shared_sums, "shared_sums", torch::kFloat, tiles * 32, x);
    check_tensor(*shared_counters, "shared_counters", torch::kInt, tiles, x);
    a.shared_sums = data_or_null<float>(shared_sums);
    a.shared_counters = data_or_null<uint32_t>(shared_counters);
  }
  const int64_t shared = shared_bytes(size, cols);
  DECODEV2_CHECK(shared <= static_cast<int64_t>(device->sharedMemPerBlockOptin), "the ring takes ", shared,
                 " bytes of shared memory, a CTA has ", device->sharedMemPerBlockOptin);
  check_launch(launch_ring(a, static_cast<RingParts>(parts), size_of(size), plan, at::cuda::getCurrentCUDAStream()),
               "ring");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("product", &product);
  m.def("shared_bytes", &shared_bytes);
}
