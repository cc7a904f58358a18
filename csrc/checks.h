// Argument checks shared by the torch-facing bindings of the CUDA kernels.
#pragma once
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

namespace decodev2 {

// A Python ValueError with one line of text, for arguments that do not fit.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw pybind11::value_error(c10::str(parts...));
}

#define DECODEV2_CHECK(condition, ...)                   \
  do {                                                   \
    if (!(condition)) ::decodev2::refuse(__VA_ARGS__);   \
  } while (false)

inline void check_tensor(const torch::Tensor& t, const char* name, torch::ScalarType type, int64_t min_numel,
                         const torch::Tensor& beside) {
  DECODEV2_CHECK(t.is_cuda() && t.device() == beside.device() && t.scalar_type() == type && t.is_contiguous() &&
                        t.numel() >= min_numel,
                    name, " is ", t.scalar_type(), " ", t.sizes(), " on ", t.device(), ", needs a contiguous ", type,
                    " tensor of at least ", min_numel, " elements on ", beside.device());
  DECODEV2_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name, " is not aligned to 16 bytes");
}

inline void check_launch(cudaError_t error, const char* kernel) {
  if (error != cudaSuccess) throw std::runtime_error(c10::str(kernel, ": ", cudaGetErrorString(error)));
}

template <typename T>
T* data_or_null(const std::optional<torch::Tensor>& t) {
  return t ? static_cast<T*>(const_cast<void*>(t->const_data_ptr())) : nullptr;
}

}  // namespace decodev2
