// Torch-facing side of handoff.cu.
#include "checks.h"
#include "launch.h"

namespace {

using namespace decodev2;
using torch::Tensor;

// vectors [2, words], of which the first holds the start; control [3]: sum, counter and fault, far apart.
HandoffArguments arguments_of(const Tensor& vectors, const Tensor& control) {
  const int64_t words = vectors.numel() / 2;
  check_tensor(vectors, "vectors", torch::kInt, 8, vectors);
  check_tensor(control, "control", torch::kInt, 3 * kHandoffApart, vectors);
  DECODEV2_CHECK((words & (words - 1)) == 0 && words <= 2048 && 2 * words == vectors.numel(),
                 "a vector has ", words, " words, needs a power of two up to 2048");
  HandoffArguments a = {};
  a.vectors = static_cast<uint32_t*>(const_cast<void*>(vectors.const_data_ptr()));
  a.sum = static_cast<uint32_t*>(const_cast<void*>(control.const_data_ptr()));
  a.counter = a.sum + kHandoffApart;
  a.fault = a.counter + kHandoffApart;
  a.words = static_cast<int>(words);
  return a;
}

int multiprocessors() { return at::cuda::getCurrentDeviceProperties()->multiProcessorCount; }

// `rounds` hand-offs in one launch by HandoffWay `way`; cycles [multiprocessors] of all but the first few.
void rounds(Tensor& vectors, Tensor& control, Tensor& cycles, int64_t way, int64_t rounds, int64_t patience) {
  const c10::cuda::CUDAGuard guard(cuda_device(vectors, "vectors"));
  HandoffArguments a = arguments_of(vectors, control);
  check_tensor(cycles, "cycles", torch::kInt64, multiprocessors(), vectors);
  DECODEV2_CHECK(way >= 0 && way <= 4, "way is ", way, ", needs 0 to 4");
  DECODEV2_CHECK(rounds > kHandoffWarmUp, "rounds is ", rounds, ", needs more than ", kHandoffWarmUp);
  a.cycles = reinterpret_cast<long long*>(cycles.mutable_data_ptr<int64_t>());
  a.rounds = static_cast<int>(rounds);
  a.patience = patience;
  check_launch(launch_handoff(a, static_cast<HandoffWay>(way), multiprocessors(), at::cuda::getCurrentCUDAStream()),
               "handoff");
}

// Hand-off number `round` as a launch of its own.
void node(Tensor& vectors, Tensor& control, int64_t round, bool pdl) {
  const c10::cuda::CUDAGuard guard(cuda_device(vectors, "vectors"));
  HandoffArguments a = arguments_of(vectors, control);
  a.round = static_cast<int>(round);
  check_launch(launch_handoff_node(a, multiprocessors(), pdl, at::cuda::getCurrentCUDAStream()), "handoff");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("rounds", &rounds);
  m.def("node", &node);
  m.attr("warm_up") = kHandoffWarmUp;
  m.attr("apart") = kHandoffApart;
}
