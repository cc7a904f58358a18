// What the phases of persistent.cu share: words that carry data and flag in one, the waiting for them, and who owns
// which panels. Hopper and newer; torch-free.
#pragma once
#include <algorithm>

#include "attn.cuh"
#include "device.cuh"
#include "launch.h"
#include "nf4.cuh"
#include "persistent.h"

namespace decodev2 {

constexpr int kWarps = 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kStagePanels = 8;               // two groups of eight warps take stages in turn: even ones, odd ones
constexpr int kStageBytes = kStagePanels * kPanelBytes;
constexpr int kHoles = 256;                   // 128 B each beside the table's rows, 64 numbers of x as half
constexpr int kFewestSums = 104;              // of a warp for a tile, that fit one of the two buffers

constexpr int kAttending = 8;                 // warps that attend, 16 positions of a chunk at a time
constexpr int kShortChunk = 16 * kAttending;  // positions that they take at once: of a chunk, while there are CTAs
constexpr int kHeadsPerKv = 8;                // query heads of a KV head at most (columns of an MMA)

struct List {        // the panels a CTA takes of one matrix, in stream order; the same in every layer
  int tile, panel;   // of the first one: panel `panel` of tile `tile`
  int count;
  int first_stage;   // of the layer's stages
  int early, tiles;  // of down in two parts: all tiles' panels but the last a.late_panels ones come first
};

struct Batch {       // of a list: whole tiles, but where the list begins or ends within one
  int tile, panel;   // of the first one
  int count;         // panels
};

struct Spot {        // of a panel of a batch
  int tile;          // whose sums it adds to; late parts have their own, behind the others
  int panel;         // of a tile
};

// Gate/up comes in two parts: the first one's act travels while the second one is computed.
enum { kQkv, kO, kFirstAct, kSecondAct, kDown, kHead, kLists };

struct alignas(16) Shares {  // of a CTA
  List lists[kLists];
  int layer_stages;  // of one layer
  int stages;        // and with those of the head, which follow
};

struct alignas(16) Stage {  // what comes into a slot of the ring, from one place or two; all in 16 bytes
  uint32_t offset;    // in its matrix
  uint32_t offset_2;  // of the second piece
  uint32_t size : 12, first : 12;  // of it the first piece
  uint32_t matrix : 8;             // of PersistentLayer; 4 is the head
};

// With its barrier, its counter, and another barrier where every lane arrives: a counter is not followed either.
constexpr int kSlotBytes = kStageBytes + 8 + 4 + (kArrivals > 1 ? 8 : 0);

struct Chunks {  // of the live prefix
  int length, count;
};

struct Token {  // of a launch, in shared memory
  int position;
  uint32_t parity;    // of the first layer
  uint32_t x_parity;  // of the first x of attention's norm, of which a token has one more
  Chunks chunks;
  int kv_head, chunk;  // that this CTA attends to, if there is such a chunk
};

// Of a CTA, in the tables and in shared memory.
__host__ __device__ __forceinline__ int shares_bytes(const PersistentArguments& a) {
  return static_cast<int>(sizeof(Shares) + a.most_stages * sizeof(Stage));
}

// ---- lists ---------------------------------------------------------------------------------------------

// The batch that starts `tiles` tiles and `panels` panels behind the list's beginning.
__host__ __device__ __forceinline__ Batch batch_of(const PersistentMatrix& m, const List& list, int tiles, int panels) {
  const int panel = tiles ? 0 : list.panel, left = list.count - panels, most = m.batch * m.panels - panel;
  return {list.tile + tiles, panel, left < most ? left : most};
}

// Panel `index` of a batch.
__host__ __device__ __forceinline__ Spot spot_of(const PersistentMatrix& m, const Batch& batch, int index) {
  index += batch.panel;
  const int tile = static_cast<int>((index + 0.5f) * m.per_panels);
  return {tile, index - tile * m.panels};
}

// The same of down in two parts.
__host__ __device__ __forceinline__ Spot spot_in_parts(const PersistentArguments& a, const List& list, int index) {
  const bool late = index >= list.early;
  const int early_width = a.down.panels - a.late_panels;
  index -= late ? list.early : 0;
  const int tile = static_cast<int>((index + 0.5f) * (late ? a.per_late : a.per_early));
  return late ? Spot{tile + list.tiles, early_width + index - tile * a.late_panels} : Spot{tile, index - tile * early_width};
}

__host__ __device__ __forceinline__ int stages_of(int count) { return (count + kStagePanels - 1) / kStagePanels; }

#ifdef DECODEV2_HOPPER

constexpr unsigned kHalfRound = 150;  // nanoseconds, of a look at a word that another CTA writes

// What lies at `offset` of shared memory. `zero` is 0, but the compiler does not know that: it would otherwise work out
// all addresses ahead of the loop over products and have no registers left inside.
template <typename T>
__device__ __forceinline__ T* at(int offset, uint32_t zero) {
  return reinterpret_cast<T*>(dynamic_shared() + (offset + zero));
}

// ---- one bit of every word says which layer wrote it --------------------------------------------------

__device__ __forceinline__ uint32_t tagged(uint32_t v, uint32_t tag) { return (v & ~1u) | tag; }
__device__ __forceinline__ uint32_t tagged(float v, uint32_t tag) { return tagged(__float_as_uint(v), tag); }

// Four words, which are read as one.
__device__ __forceinline__ void store_words(uint32_t* to, const uint4& words) {
  store_word(to, words.x), store_word(to + 1, words.y), store_word(to + 2, words.z), store_word(to + 3, words.w);
}

// What the words carry: the same bits whatever the tag.
__device__ __forceinline__ float untagged(uint32_t word) { return __uint_as_float(word & ~1u); }
__device__ __forceinline__ uint4 untagged(const uint4& v) {
  return make_uint4(v.x & ~1u, v.y & ~1u, v.z & ~1u, v.w & ~1u);
}

// The lowest bit is 0 where all words are of the layer.
__device__ __forceinline__ uint32_t other_layer(const uint4& v, uint32_t tag) {
  return (v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag);
}

// Up to kCount pieces that are waited for together.
template <int kCount>
struct Pieces {
  uint4 words[kCount];
};

template <int kCount>
__device__ __forceinline__ uint32_t other_layer(const Pieces<kCount>& v, uint32_t tag) {
  uint32_t other = other_layer(v.words[0], tag);
#pragma unroll
  for (int i = 1; i < kCount; ++i) other |= opaque(other_layer(v.words[i], tag));  // not one chain through all words
  return other;
}

// `opaque`: the compiler would test the words' bits one by one.
template <typename Words>
__device__ __forceinline__ bool arrived(const Words& v, uint32_t tag) {
  return (opaque(other_layer(v, tag)) & 1u) == 0;
}

// The same for all lanes of a warp, which all call it.
template <typename Words>
__device__ __forceinline__ bool all_arrived(const Words& v, uint32_t tag) {
  return __all_sync(~0u, arrived(v, tag));
}

// Piece i lies at address(i); those whose bit is not set in `wanted` are 0, and there.
template <int kCount, typename Address>
__device__ __forceinline__ Pieces<kCount> load_pieces(uint32_t wanted, uint32_t tag, Address address) {
  Pieces<kCount> v;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v.words[i] = make_uint4(tag, tag, tag, tag);
    if (wanted >> i & 1) v.words[i] = load_words(address(i));
  }
  return v;
}

// Whether to wait no more: a hand-off has been lost, this one or another. `a` has the patience, in cycles, and the fault.
template <typename Arguments>
__device__ __forceinline__ bool gives_up(const Arguments& a, int where, long long start) {
  const long long waited = clock64() - start;
  if (waited > a.patience) store_word(a.fault, 1u + where);
  return __any_sync(~0u, waited > a.patience >> 10 && load_word(a.fault));
}

// What load() brings once all of it is of this layer; `first` is a look that was taken before. All lanes of a warp call
// it and go on together. Two looks are on their way at a time, half a round trip apart. A hand-off that never comes is
// written to the fault and given up, and so is then, in a thousandth of the patience, every other one: the kernel ends,
// the host raises.
template <typename Arguments, typename Load>
__device__ __forceinline__ auto await_again(const Arguments& a, int where, uint32_t tag, Load load) {
  const long long start = clock64();
  auto first = load();
  __nanosleep(kHalfRound);
  auto second = load();
#pragma unroll 1
  for (uint32_t looks = 0;; ++looks) {
    if (all_arrived(first, tag)) return first;
    first = load();
    if (all_arrived(second, tag)) return second;
    second = load();
    if (looks % 16 == 0 && gives_up(a, where, start)) return first;  // what is done here the looks wait for
  }
}

template <typename Arguments, typename Words, typename Load>
__device__ __forceinline__ Words await(const Arguments& a, int where, uint32_t tag, Words first, Load load) {
  if (!all_arrived(first, tag)) first = await_again(a, where, tag, load);
  return first;
}

template <typename Arguments, typename Load>
__device__ __forceinline__ auto await(const Arguments& a, int where, uint32_t tag, Load load) {
  return await(a, where, tag, load(), load);
}

// sum += what a writer has; nothing of a piece that was not wanted, whose words are 0.
__device__ __forceinline__ void add_untagged(float4& sum, const uint4& v) {
  sum.x += untagged(v.x), sum.y += untagged(v.y), sum.z += untagged(v.z), sum.w += untagged(v.w);
}

// Where half2 `pair` (k = 2 pair) of a column lies in the words of a hand-off: block by block in fragment order, as
// load_x of persistent.cu takes them.
__device__ __forceinline__ int word_of(int pair) {
  return (pair >> 5) * 32 + (pair >> 4 & 1) * 16 + (pair & 3) * 4 + (pair >> 3 & 1) * 2 + (pair >> 2 & 1);
}

// Cycles, for the time line, in a kernel of its own: what is only asked for at run time costs registers all the same.
template <bool kTimed>
__device__ __forceinline__ void stamp(const PersistentArguments& a, int layer, int place, bool mine) {
  if (kTimed && mine)
    a.timeline[(static_cast<int64_t>(layer) * kStamps + place) * gridDim.x + blockIdx.x] = clock64();
}

#endif  // DECODEV2_HOPPER

}  // namespace decodev2
