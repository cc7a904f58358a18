// csrc/handoff.cu on the emulator, for ctypes (decodev2/tests/test_handoff.py).
#include "../../../csrc/handoff.cu"

using namespace decodev2;

extern "C" {

// `rounds` hand-offs by `way`, or with way -1 as that many nodes. vectors [2][words], control [3][kHandoffApart], cycles
// [ctas]. Why it did not end, or null.
const char* hand_off(uint32_t* vectors, uint32_t* control, long long* cycles, int words, int way, int rounds,
                     int64_t patience, int ctas, unsigned seed) {
  HandoffArguments a = {};
  a.vectors = vectors;
  a.sum = control;
  a.counter = control + kHandoffApart;
  a.fault = control + 2 * kHandoffApart;
  a.cycles = cycles;
  a.patience = patience;
  a.words = words;
  a.rounds = rounds;
  emulator::chance.seed(seed);
  emulator::stopped = "the launch was refused";
  if (way >= 0) {
    launch_handoff(a, static_cast<HandoffWay>(way), ctas, nullptr);
    return emulator::stopped;
  }
  for (a.round = 0; a.round < rounds; ++a.round) launch_handoff_node(a, ctas, true, nullptr);
  return emulator::stopped;
}
}
