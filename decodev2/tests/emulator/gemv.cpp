// csrc/nf4_gemv.cu on the emulator, for ctypes (decodev2/tests/test_gemv_emulated.py).
#include "../../../csrc/nf4_gemv.cu"

using namespace decodev2;

extern "C" {

// One product. Pointers, null where left out: panels, x, x_half, y, y_half, norm_weight, bias, residual, candidate
// values and ids, shared sums and counters. numbers: rows, cols, tiles, candidates, kind, variant, multiprocessors.
// Why it did not end, or null.
const char* gemv(void* const* p, const int64_t* numbers, double eps, unsigned seed) {
  GemvArguments a = {};
  a.panels = static_cast<const uint8_t*>(p[0]);
  a.x = static_cast<const float*>(p[1]);
  a.x_half = static_cast<const uint8_t*>(p[2]);
  a.y = static_cast<float*>(p[3]);
  a.y_half = static_cast<uint8_t*>(p[4]);
  a.norm_weight = static_cast<const float*>(p[5]);
  a.bias = static_cast<const float*>(p[6]);
  a.residual = static_cast<const float*>(p[7]);
  a.candidate_values = static_cast<float*>(p[8]);
  a.candidate_ids = static_cast<int*>(p[9]);
  a.shared_sums = static_cast<float*>(p[10]);
  a.shared_counters = static_cast<uint32_t*>(p[11]);
  a.eps = static_cast<float>(eps);
  a.rows = static_cast<int>(numbers[0]);
  a.cols = static_cast<int>(numbers[1]);
  a.groups = (a.cols + kGroup - 1) / kGroup;
  a.tiles = static_cast<int>(numbers[2]);
  a.candidates = static_cast<int>(numbers[3]);
  const GemvPlan plan = {static_cast<GemvVariant>(numbers[5]), static_cast<int>(numbers[6]), 228 * 1024, true};
  emulator::chance.seed(seed);
  chr_nf4_gemv(a, static_cast<GemvKind>(numbers[4]), plan, nullptr);
  return emulator::stopped;
}

// The kernel that is chosen on a card of this capability, whose multiprocessors have so much shared memory.
int chosen(int groups, int capability, int shared_bytes) {
  return static_cast<int>(choose_gemv_variant(groups, capability, shared_bytes));
}
}
