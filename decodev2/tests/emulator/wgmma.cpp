// csrc/nf4_wgmma.cu on the emulator, for ctypes (decodev2/tests/test_wgmma_emulated.py).
#include "../../../csrc/nf4_wgmma.cu"

using namespace decodev2;

extern "C" {

int64_t columns_bytes(int groups, int n) { return static_cast<int64_t>(wgmma_columns_bytes(groups, n)); }

// Splits of K and columns of a CTA that would be chosen.
void choose(int tiles, int groups, int n, int multiprocessors, int* out) {
  const int pairs = divide_up(tiles, kPair * kCtaTiles), panels = divide_up(groups, kPanelBlocks);
  out[0] = choose_splits(pairs, panels, multiprocessors);
  out[1] = choose_columns(padded_columns(n), pairs, panels, out[0], multiprocessors);
}

// One call. sizes: n, rows, cols, tiles, swiglu, level exponent, multiprocessors, columns, splits. Pointers, each but
// the first may be null: panels, x, y, norm weight, bias, residual, workspace, x_columns, y_columns. The error code.
int product(const int64_t* sizes, void* const* p, int64_t workspace_bytes, double eps, unsigned seed) {
  WgmmaArguments a = {};
  a.panels = static_cast<const uint8_t*>(p[0]);
  a.x = static_cast<const float*>(p[1]);
  a.y = static_cast<float*>(p[2]);
  a.norm_weight = static_cast<const float*>(p[3]);
  a.bias = static_cast<const float*>(p[4]);
  a.residual = static_cast<const float*>(p[5]);
  a.workspace = static_cast<uint8_t*>(p[6]);
  a.x_columns = static_cast<const uint8_t*>(p[7]);
  a.y_columns = static_cast<uint8_t*>(p[8]);
  a.workspace_bytes = workspace_bytes;
  a.eps = static_cast<float>(eps);
  a.n = static_cast<int>(sizes[0]);
  a.rows = static_cast<int>(sizes[1]);
  a.cols = static_cast<int>(sizes[2]);
  a.ld_x = a.cols;
  a.ld_y = a.rows;
  a.groups = divide_up(a.cols, kGroup);
  a.tiles = static_cast<int>(sizes[3]);
  a.level_exponent = static_cast<int>(sizes[5]);
  WgmmaPlan plan = {};
  plan.multiprocessors = static_cast<int>(sizes[6]);
  plan.columns = static_cast<int>(sizes[7]);
  plan.splits = static_cast<int>(sizes[8]);
  emulator::chance.seed(seed);
  return chr_nf4_wgmma(a, sizes[4] ? GemmKind::kSwiglu : GemmKind::kPlain, plan, nullptr);
}
}
