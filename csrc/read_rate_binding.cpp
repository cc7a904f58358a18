// Torch-facing side of read_rate.cu.
#include "checks.h"
#include "launch.h"

namespace {

using namespace decodev2;
using torch::Tensor;

// Reads all of `buffer` [Int, a multiple of 16 bytes]; checksum[0] ^= exclusive or of its elements.
void read_all(const Tensor& buffer, Tensor& checksum) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(buffer, "buffer"));
  check_tensor(buffer, "buffer", torch::kInt, 4, buffer);
  check_tensor(checksum, "checksum", torch::kInt, 1, buffer);
  DECODEV2_CHECK(buffer.numel() % 4 == 0, "buffer has ", buffer.numel(),
                    " elements, needs a multiple of 4");
  ReadArguments a = {};
  a.data = static_cast<const uint32_t*>(buffer.const_data_ptr());
  a.checksum = static_cast<uint32_t*>(checksum.mutable_data_ptr());
  a.quads = buffer.numel() / 4;
  const int multiprocessors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  check_launch(launch_read(a, multiprocessors, at::cuda::getCurrentCUDAStream()), "read_all");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("read_all", &read_all); }
