// csrc/persistent.cu on the emulator, for ctypes (decodev2/tests/test_persistent_emulated.py).
#include "../../../csrc/persistent.cu"

using namespace decodev2;

namespace {

PersistentArguments arguments_of(const int64_t* dims) {  // as the binding
  PersistentArguments a = {};
  int* fields[] = {&a.n_layers, &a.max_seq, &a.n_kv, &a.head_dim, &a.q_dim, &a.hidden, &a.intermediate, &a.vocab};
  for (int i = 0; i < 8; ++i) *fields[i] = static_cast<int>(dims[i]);
  return a;
}

constexpr int kSharedLimit = 232448;  // of an H100

}  // namespace

extern "C" {

// Why the shape does not fit, or null; out[0] words of hand-offs, out[1] bytes of tables, out[2] CTAs.
const char* plan(const int64_t* dims, int multiprocessors, int64_t* out) {
  PersistentArguments a = arguments_of(dims);
  int shared_bytes = 0;
  const char* reason = plan_persistent(a, multiprocessors, kSharedLimit, &shared_bytes);
  if (reason) return reason;
  out[0] = lay_out_words(a, nullptr);
  out[1] = table_bytes(a);
  out[2] = a.ctas;
  return nullptr;
}

void tables(const int64_t* dims, int multiprocessors, uint8_t* out) {
  PersistentArguments a = arguments_of(dims);
  int shared_bytes = 0;
  plan_persistent(a, multiprocessors, kSharedLimit, &shared_bytes);
  fill_tables(a, out);
}

// How often threads have waited for their turn since the library was loaded: what clock64 counts here.
long long clock_now() { return emulator::ticks; }

// One token. Pointers: layers, tables, head, norm, embed panels or null, dense embed or null, token, position,
// valid_len, cos, sin, k_cache, v_cache, logits, candidate values and ids, words; next token or null, finished, end
// tokens and history. Why it did not end, or null.
const char* step(const int64_t* dims, void* const* p, int candidates, double eps, int64_t patience,
                 int multiprocessors, unsigned seed) {
  PersistentArguments a = arguments_of(dims);
  a.layers = static_cast<const PersistentLayer*>(p[0]);
  a.tables = static_cast<const uint8_t*>(p[1]);
  a.head = static_cast<const uint8_t*>(p[2]);
  a.norm = static_cast<const float*>(p[3]);
  a.embed = {static_cast<const uint8_t*>(p[4]), static_cast<const float*>(p[5]), a.vocab, a.hidden,
             (a.hidden + 63) / 64};
  a.token = static_cast<const int64_t*>(p[6]);
  a.position = static_cast<const int64_t*>(p[7]);
  a.valid_len = static_cast<int32_t*>(p[8]);
  a.cos = static_cast<const float*>(p[9]);
  a.sin = static_cast<const float*>(p[10]);
  a.k_cache = static_cast<uint16_t*>(p[11]);
  a.v_cache = static_cast<uint16_t*>(p[12]);
  a.logits = static_cast<float*>(p[13]);
  a.candidate_values = static_cast<float*>(p[14]);
  a.candidate_ids = static_cast<int*>(p[15]);
  a.candidates = candidates;
  if (p[17])
    a.commit = {static_cast<int64_t*>(p[17]), static_cast<int64_t*>(p[6]), static_cast<int64_t*>(p[7]),
                static_cast<uint8_t*>(p[18]), static_cast<const int64_t*>(p[19]), static_cast<int64_t*>(p[20]),
                a.max_seq + 1};
  a.eps = static_cast<float>(eps);
  a.patience = patience;
  int shared_bytes = 0;
  if (const char* reason = plan_persistent(a, multiprocessors, kSharedLimit, &shared_bytes)) return reason;
  lay_out_words(a, static_cast<uint32_t*>(p[16]));
  emulator::chance.seed(seed);
  chr_nf4_step(a, shared_bytes, nullptr);
  return emulator::stopped;
}
}
