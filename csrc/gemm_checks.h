// What the bindings of the products for many columns share: checks, and the arguments that have the same names.
#pragma once
#include "checks.h"
#include "launch.h"

namespace decodev2 {

inline void check_product(const torch::Tensor& x, const torch::Tensor& panels, int64_t tiles, const torch::Tensor& y,
                          int64_t kind, const std::optional<torch::Tensor>& norm_weight,
                          const std::optional<torch::Tensor>& bias) {
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
}

template <typename Arguments>
Arguments product_arguments(const torch::Tensor& x, const torch::Tensor& panels, int64_t tiles, torch::Tensor& y,
                            const std::optional<torch::Tensor>& norm_weight, double eps,
                            const std::optional<torch::Tensor>& bias, bool add_to_y, torch::Tensor& workspace) {
  Arguments a = {};
  a.panels = panels.const_data_ptr<uint8_t>();
  a.x = x.const_data_ptr<float>();
  a.y = y.mutable_data_ptr<float>();
  a.norm_weight = data_or_null<const float>(norm_weight);
  a.bias = data_or_null<const float>(bias);
  a.residual = add_to_y ? a.y : nullptr;
  a.workspace = static_cast<uint8_t*>(workspace.mutable_data_ptr());
  a.workspace_bytes = workspace.nbytes();
  a.ld_x = x.size(1);
  a.ld_y = y.size(1);
  a.eps = static_cast<float>(eps);
  a.n = static_cast<int>(x.size(0));
  a.rows = static_cast<int>(y.size(1));
  a.cols = static_cast<int>(x.size(1));
  a.groups = (a.cols + 63) / 64;
  a.tiles = static_cast<int>(tiles);
  return a;
}

}  // namespace decodev2
