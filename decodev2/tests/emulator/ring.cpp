// csrc/ring_ablations.cu on the emulator, for ctypes (decodev2/tests/test_ring.py).
#include "../../../csrc/ring_ablations.cu"

using namespace decodev2;

extern "C" {

// One product of `cols` columns with `tiles` tiles; seen is [1], shared sums and counters may be null. Why it did not
// end, or null.
const char* ring(const uint8_t* panels, const float* x, float* y, uint32_t* seen, float* shared_sums,
                 uint32_t* shared_counters, int tiles, int cols, int parts, int size, int multiprocessors, unsigned seed) {
  RingArguments a = {};
  a.panels = panels;
  a.x = x;
  a.y = y;
  a.seen = seen;
  a.shared_sums = shared_sums;
  a.shared_counters = shared_counters;
  a.rows = 16 * tiles;
  a.cols = cols;
  a.groups = cols / 64;
  a.tiles = tiles;
  GemvPlan plan = {};
  plan.multiprocessors = multiprocessors;
  plan.shared_bytes = 228 * 1024;
  emulator::chance.seed(seed);
  emulator::stopped = "the launch was refused";
  launch_ring(a, static_cast<RingParts>(parts), static_cast<RingSize>(size), plan, nullptr);
  return emulator::stopped;
}
}
