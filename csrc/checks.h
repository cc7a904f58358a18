// Argument checks shared by the torch-facing bindings of the CUDA kernels.
#pragma once
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

#include "refuse.h"

namespace decodev2 {

// The device to work on: that of tensor t, which a launch needs to be a CUDA one.
inline torch::Device cuda_device(const torch::Tensor& t, const char* name) {
  DECODEV2_CHECK(t.is_cuda(), name, " is on ", t.device(), ", needs a CUDA device");
  return t.device();
}

inline void check_tensor(const torch::Tensor& t, const char* name, torch::ScalarType type, int64_t min_numel,
                         const torch::Tensor& beside) {
  DECODEV2_CHECK(t.is_cuda() && t.device() == beside.device() && t.scalar_type() == type && t.is_contiguous() &&
                        t.numel() >= min_numel,
                    name, " is ", t.scalar_type(), " ", t.sizes(), " on ", t.device(), ", needs a contiguous ", type,
                    " tensor of at least ", min_numel, " elements on ", beside.device());
  DECODEV2_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name, " is not aligned to 16 bytes");
}

inline void check_launch(cudaError_t error, const char* kernel) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // told here: torch must not find it after a launch of its own
  throw std::runtime_error(text_of(kernel, ": ", cudaGetErrorString(error)));
}

template <typename T>
T* data_or_null(const std::optional<torch::Tensor>& t) {
  return t ? static_cast<T*>(const_cast<void*>(t->const_data_ptr())) : nullptr;
}

}  // namespace decodev2
