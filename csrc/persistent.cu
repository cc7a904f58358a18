// A whole greedy token in one kernel: every layer's five operations, the head and its candidates. Every CTA stays
// for the token; the weights stream through a ring that never waits for an activation.
//
// Computes  what step.forward and ops.head compute for one column (ops.py), on panel weights:
//             qkv = W rms(x) + b | attention | x += O attn | act = silu(G rms(x)) * (U rms(x)) | x += D act
// Owns      Of each matrix a CTA owns an equal range of panels; of o, gate/up, down and the head whole tiles, of qkv
//           too where that is as fast. Who has a tile of down less has more of gate/up. They come through a ring, all
//           layers one after another: the last warp that has read a slot asks for what comes into it next, so the stream
//           waits for no activation. A warp takes a panel at a time, whose codes are in its registers before x is there.
//           The residual stream: 16 rows of it belong to the CTA that has their tile of o and down. It adds the sums
//           and hands on x = residual * norm weight * a guess at 1 / rms; the norm's own factor comes to the sums of the
//           product.
//           CTA n_kv * chunk + j from the last one attends with the query heads of KV head j over one chunk of the
//           live prefix: the last ones may have no tile of o, nor of qkv.
// Grid      one CTA of 512 threads per multiprocessor, cooperative launch
// Shared    64 KB pair table, its holes holding x as half | partial sums or attention scratch | residual | who does
//           what | ring
// Layout    hand-offs are words in global memory whose lowest bit is the layer's parity: data and flag in one.
//           x      half2 words in fragment order, for attention's norm (and the last one) and for the MLP's
//           squares [hidden / 16] float32, of the residual's tiles, for each of them
//           sums   [writers][qkv_rows] float32 | heads [chunks][q_dim / 2] (two dims, maximum, sum) float32
//           attended, act   half2 words in fragment order (of act / 16)
//           A word is written once a layer. Nobody writes layer l + 1 of it before everyone has read layer l: the
//           way from a read to the next write leads through a hand-off that all CTAs take part in.
// Floor     all packed bytes of the model at the card's read rate
#include <cstring>

#include "choose.cuh"
#include "persistent.cuh"
#include "persistent_attn.cuh"
#include "persistent_plan.cuh"

namespace decodev2 {
namespace {

#ifdef DECODEV2_HOPPER

// ---- the ring ------------------------------------------------------------------------------------------

// A CTA's place in the stream of its stages. They come into the slots in turn. Slots are even in number, and the same
// eight warps read the even ones throughout: a warp that waits for a slot's round has waited for the one before, so its
// parity cannot be taken for that of an earlier one.
struct Cursor {
  int slot;         // of the next stage
  uint32_t parity;  // of the slot's round
};

__device__ __forceinline__ void advance(Cursor& cursor, int stages, int slots) {
  cursor.slot += stages;
#pragma unroll 1
  for (; cursor.slot >= slots; cursor.slot -= slots) cursor.parity ^= 1u;
}

// Behind the counters, where every lane arrives: all lanes of a slot's eight warps have read it.
__device__ __forceinline__ uint32_t seen_barrier(const PersistentArguments& a, int slot, uint32_t zero) {
  return shared_address(at<uint8_t>(a.read_at, zero)) + a.slots * 4 + slot * 8;
}

// Ask for the stage that comes `stage` stages behind the first one of `layer`, if there is such a one. One thread calls
// it, once all warps that read what is in the slot have done so.
__device__ __forceinline__ void ask_for(const PersistentArguments& a, uint32_t zero, int layer, int stage, int slot) {
  const Shares& shares = *at<const Shares>(a.shares_at, zero);
  const int2 stages = *reinterpret_cast<const int2*>(&shares.layer_stages);  // of a layer, and with the head's
#pragma unroll 1
  for (; stage >= stages.x && layer + 1 < a.n_layers; ++layer) stage -= stages.x;
  if (stage >= stages.y) return;
  const Stage asked = reinterpret_cast<const Stage*>(&shares + 1)[stage];
  const uint8_t* matrix = a.head;
  if (asked.matrix < 4) matrix = at<const PersistentLayer>(a.layers_at, zero)[layer].matrices[asked.matrix];
  const uint32_t full = shared_address(at<uint8_t>(a.full_at, zero)) + slot * 8, bytes = asked.size * 16u;
  const uint32_t to = shared_address(at<uint8_t>(a.ring_at, zero)) + slot * kStageBytes, first = asked.first * 16u;
  barrier_expect(full, bytes);
  bulk_copy(to, matrix + asked.offset * int64_t{16}, first, full, evict_first_policy());
  if (first < bytes)
    bulk_copy(to + first, matrix + asked.offset_2 * int64_t{16}, bytes - first, full, evict_first_policy());
}

// ---- products ------------------------------------------------------------------------------------------

// x of a panel as the columns of an MMA: column b has the first half of block b, column 4 + b the second one. Block b of
// x lies in the hole of table row b, its two halves swapped where b is odd, so that the four blocks of a panel meet in
// no bank.
__device__ __forceinline__ uint4 load_x(uint32_t table, int panel, int lane) {
  const int block = lane >> 2 & 3, half = lane >> 4;
  return load_shared_16(table + (panel * kPanelBlocks + block) * 256 + 128 + ((half ^ block) & 1) * 64 + (lane & 3) * 16);
}

__device__ __forceinline__ float2 scales_of(uint32_t word) {
  half2 both;
  memcpy(&both, &word, sizeof both);
  return __half22float2(both);
}

__device__ __forceinline__ uint32_t narrow_scales(uint32_t scales, int row, int blocks, int t) {
  const uint32_t first = 2 * t < blocks ? load_shared_2(scales + (row * blocks + 2 * t) * 2) : 0;
  const uint32_t second = 2 * t + 1 < blocks ? load_shared_2(scales + (row * blocks + 2 * t + 1) * 2) : 0;
  return first | second << 16;
}

// A lane's codes and scales of panel `panel` of a tile that ends with a narrow one; it is the slot's panel `in_stage`, the
// one before it that ends a tile lies `behind` + 1 panels before it, and one more every `period` panels.
__device__ __forceinline__ void load_narrow(uint4* block, uint32_t& scale_lo, uint32_t& scale_hi, uint32_t base,
                                            const PersistentMatrix& m, int panel, int behind, int period, int in_stage,
                                            int lane) {
  const int g = lane >> 2, t = lane & 1;
  base += in_stage * kPanelBytes;
#pragma unroll 1
  for (int p = behind; p < in_stage; p += period) base -= m.narrower;  // a tile's end lies before it in the slot
  const int blocks = panel == m.panels - 1 ? kPanelBlocks - m.narrower / kBlockBytes : kPanelBlocks;
#pragma unroll
  for (int b = 0; b < kPanelBlocks; ++b) block[b] = load_shared_16(base + b * kBlockCodes + lane * 16);
  scale_lo = narrow_scales(base + blocks * kBlockCodes, g, blocks, t);  // behind the last block x and the scales are 0
  scale_hi = narrow_scales(base + blocks * kBlockCodes, g + 8, blocks, t);
}

// Blocks of a panel whose levels are looked up before its x is there; the others' codes wait in registers. More of them
// make the step of Qwen2.5-3B (kStays) 1.5 to 1.9 percent faster for q, k, v and o, and all others 1 to 3 percent slower.
template <int kWhich, bool kStays>
constexpr int kEarlyBlocks = !kStays ? 1 : kWhich == kQkv ? kPanelBlocks : kWhich == kO ? kPanelBlocks / 2 : 1;

__device__ __forceinline__ void look_up_block(uint32_t* level, const uint4& block, uint32_t table, uint32_t lane4) {
  const uint32_t lo[2] = {block.x, block.y}, hi[2] = {block.z, block.w};
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    level[8 * w + 0] = look_up_here<0>(table, lo[w], lane4), level[8 * w + 1] = look_up_here<0>(table, hi[w], lane4);
    level[8 * w + 2] = look_up_here<1>(table, lo[w], lane4), level[8 * w + 3] = look_up_here<1>(table, hi[w], lane4);
    level[8 * w + 4] = look_up_here<2>(table, lo[w], lane4), level[8 * w + 5] = look_up_here<2>(table, hi[w], lane4);
    level[8 * w + 6] = look_up_here<3>(table, lo[w], lane4), level[8 * w + 7] = look_up_here<3>(table, hi[w], lane4);
  }
}

// c[w] += half w of a block of 16 rows x 64 k, by its levels or by its codes, times both halves of x of a panel's four
// blocks, a column each. One column of them is wanted; two sums spare setting the others to 0, and their chains are short.
__device__ __forceinline__ void multiply_levels(float (*c)[4], const uint32_t* level, const uint4& x) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    mma_m16n8k16(c[w], level[8 * w], level[8 * w + 1], level[8 * w + 2], level[8 * w + 3], x.x, x.y);
    mma_m16n8k16(c[w], level[8 * w + 4], level[8 * w + 5], level[8 * w + 6], level[8 * w + 7], x.z, x.w);
  }
}

__device__ __forceinline__ void multiply_codes(float (*c)[4], const uint4& block, const uint4& x, uint32_t table,
                                               uint32_t lane4) {
  const uint32_t lo[2] = {block.x, block.y}, hi[2] = {block.z, block.w};
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    mma_m16n8k16(c[w], look_up<0>(table, lo[w], lane4), look_up<0>(table, hi[w], lane4), look_up<1>(table, lo[w], lane4),
                 look_up<1>(table, hi[w], lane4), x.x, x.y);
    mma_m16n8k16(c[w], look_up<2>(table, lo[w], lane4), look_up<2>(table, hi[w], lane4), look_up<3>(table, lo[w], lane4),
                 look_up<3>(table, hi[w], lane4), x.z, x.w);
  }
}

// Sums of batches of tiles: two buffers [tiles][slots][16], taken in turn, so that the warps may be in the next
// batch while some of them add the sums of this one. Where that of a turn lies, in bytes.
__device__ __forceinline__ int buffer_at(const PersistentArguments& a, int turn) {
  return kTableBytes + (turn & 1) * a.buffer_bytes;
}

// Barriers of the two buffers: all warps' sums are there; all are read.
enum { kSummed, kFree };

__device__ __forceinline__ uint32_t sums_barrier(const PersistentArguments& a, int what, int turn, uint32_t zero) {
  return shared_address(at<uint8_t>(a.sums_at, zero)) + what * 16 + (turn & 1) * 8;
}

__device__ __forceinline__ void wait_for(const PersistentArguments& a, int what, int turn, uint32_t zero) {
  barrier_wait(sums_barrier(a, what, turn, zero), (turn >> 1 & 1) ^ (what == kFree));
}

__device__ __forceinline__ void arrive_at(const PersistentArguments& a, int what, int turn, uint32_t zero, int lane) {
  __syncwarp();
  if (lane < kArrivals) barrier_arrive(sums_barrier(a, what, turn, zero));
}

template <int kWhich>
__device__ __forceinline__ const PersistentMatrix& matrix_for(const PersistentArguments& a) {
  return kWhich == kQkv ? a.qkv : kWhich == kO ? a.o : kWhich == kDown ? a.down : kWhich == kHead ? a.head_matrix : a.gate_up;
}

// Norms: attention's (and the last one, which the head follows), the MLP's. Each has its words of x and of squares, and
// its factor 1 / rms in shared memory; the other's, from just before, is the guess that x was multiplied with.
enum { kAttentionNorm, kMlpNorm };

// x of these products comes to each warp as words of a hand-off, in fragment order; of the others it is in the holes, for
// which all warps wait together. x of gate/up comes as words where each warp needs the same ones for all its panels
// (kStays).
template <int kWhich, bool kStays>
constexpr bool kInWords = kWhich == kQkv || kWhich == kO || kWhich == kDown || (kWhich == kFirstAct && kStays);

// This lane's words of a panel of x.
template <int kWhich>
__device__ __forceinline__ uint4 look_at(const PersistentArguments& a, int panel, uint32_t tag, int lane) {
  const int block = panel * kPanelBlocks + (lane >> 2 & 3);
  if (block >= matrix_for<kWhich>(a).groups) return make_uint4(tag, tag, tag, tag);  // x is 0 there
  const uint32_t* const words = kWhich == kQkv ? a.x[kAttentionNorm] : kWhich == kFirstAct ? a.x[kMlpNorm]
                                : kWhich == kO ? a.attended : a.act;
  return load_words(words + block * 32 + (lane >> 4) * 16 + (lane & 3) * 4);
}

// Sums of a batch into a buffer: panel i of it is that of the warp whose `turned` number is i % 16. Each warp has its
// first panel's codes, and some of their levels, in registers before `enter`, which waits for x where x goes to the
// holes; x in words is waited for by every warp for itself, and asked for a panel ahead where the next one needs other
// words. The last warp that has read a slot asks for what comes into it next; `stage` is the batch's first one, counted
// from that of `layer`.
template <int kWhich, bool kNarrow, bool kStays, typename Enter, typename There>
__device__ __forceinline__ void multiply(const PersistentArguments& a, uint32_t zero, const List& list,
                                         const Batch& batch, Cursor cursor, int layer, int stage, uint32_t tag, int turn,
                                         int turned, int lane, Enter enter, There x_is_there) {
  constexpr int kEarly = kEarlyBlocks<kWhich, kStays>;
  const PersistentMatrix& m = matrix_for<kWhich>(a);
  const int count = batch.count, visited = stages_of(count) * kStagePanels;  // a stage's eight warps all come by
  const int g = lane >> 2, t = lane & 3;
  const uint32_t lane4 = opaque(lane * 4);
  const uint32_t table = shared_address(at<uint8_t>(0, zero)), ring = shared_address(at<uint8_t>(a.ring_at, zero));
  const uint32_t full = shared_address(at<uint8_t>(a.full_at, zero)), read = shared_address(at<uint8_t>(a.read_at, zero));
  const uint32_t my_codes = opaque(ring + (turned & 7) * kPanelBytes + lane * 16);  // in the ring's first slot
  const uint32_t my_scales =
      opaque(ring + (turned & 7) * kPanelBytes + kPanelBlocks * kBlockCodes + g * 8 + (t & 1) * 4);
  const bool parts = kWhich == kDown && list.early;
  const auto spot_at = [&](int index) { return parts ? spot_in_parts(a, list, index) : spot_of(m, batch, index); };
  const auto sums_at = [&](int tile) {  // of this lane's row, in bytes into shared memory
    return buffer_at(a, turn) +
           ((tile * m.slots + (turned & (m.slots - 1))) * kTileRows + g + (t & 1) * (kTileRows / 2)) * 4;
  };
  const Spot first = spot_at(turned);
  int panel = first.panel;
  int to = sums_at(first.tile);
  cursor.slot += turned >> 3;
  if (cursor.slot == a.slots) cursor.slot = 0, cursor.parity ^= 1u;

  uint4 look = make_uint4(0, 0, 0, 0);
  if constexpr (kInWords<kWhich, kStays>) look = look_at<kWhich>(a, panel, tag, lane);
  // All of a warp's panels are the same part of their tiles, and need the same words.
  constexpr bool kSameX = kWhich == kFirstAct && kStays;
  uint4 words = make_uint4(0, 0, 0, 0);
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (int index = turned;; index += kWarps) {
    uint4 block[kPanelBlocks];
    uint32_t scale_lo, scale_hi, level[kEarly][16];
    const bool visits = index < visited;
    if (visits) barrier_wait(full + cursor.slot * 8, cursor.parity);
    // A warp that takes no panel loads what lies there: registers that only some paths fill would be taken everywhere.
    // Some of it may be on its way; nobody uses it, but racecheck would tell of it.
    const uint32_t from = cursor.slot * kStageBytes;
    if (kArrivals > 1 && !visits) {
#pragma unroll
      for (int b = 0; b < kPanelBlocks; ++b) block[b] = make_uint4(0, 0, 0, 0);
      scale_lo = scale_hi = 0;
    } else if constexpr (kNarrow) {
      const int behind = parts ? (index < list.early ? kStagePanels : panel - (m.panels - a.late_panels)) : panel;
      load_narrow(block, scale_lo, scale_hi, ring + from, m, panel, behind, parts ? a.late_panels : m.panels, turned & 7,
                  lane);
    } else {
#pragma unroll
      for (int b = 0; b < kPanelBlocks; ++b) block[b] = load_shared_16(from + my_codes + b * kBlockCodes);
      scale_lo = load_shared_4(from + my_scales);
      scale_hi = load_shared_4(from + my_scales + 64);
    }
    // What was read is in registers: the slot must not be refilled under a load that is still on its way. So the counter
    // waits for what was loaded; only its last three bits count, and they grow by 1 either way.
    const uint32_t loaded = block[0].x ^ block[1].x ^ block[2].x ^ block[3].x ^ scale_lo ^ scale_hi;
    if (kArrivals > 1 && visits) barrier_arrive(seen_barrier(a, cursor.slot, zero));
    __syncwarp();
    uint32_t read_before = 0;
    if (lane == 0 && visits)
      read_before = add_shared(read + cursor.slot * 4, loaded == 0x9e3779b9u ? kStagePanels + 1 : 1);
#pragma unroll
    for (int b = 0; b < kEarly; ++b) look_up_block(level[b], block[b], table, lane4);
    if (lane == 0 && visits && (read_before & (kStagePanels - 1)) == kStagePanels - 1) {
      if (kArrivals > 1) barrier_wait(seen_barrier(a, cursor.slot, zero), cursor.parity);
      ask_for(a, zero, layer, stage + a.slots + (index >> 3), cursor.slot);
    }
    cursor.slot += 2;
    if (cursor.slot >= a.slots) cursor.slot -= a.slots, cursor.parity ^= 1u;
    const int here = panel;
    const int here_to = to;
    if constexpr (kSameX) {
      to += m.next_sums;
    } else if (parts) {
      const Spot next = spot_at(index + kWarps);
      panel = next.panel;
      to = sums_at(next.tile);
    } else {
      panel += m.next_panel;
      to += m.next_sums;
      if (panel >= m.panels) panel -= m.panels, to += m.slots * (kTileRows * 4);
    }
    if (index == turned) enter();
    if (index >= count) {
      x_is_there();
      break;
    }
    const bool goes_on = index + kWarps < count;
    if constexpr (kSameX) {
      if (index == turned)
        words = untagged(await(a, kWhich, tag, look, [&] { return look_at<kWhich>(a, here, tag, lane); }));
    } else if constexpr (kInWords<kWhich, kStays>) {
      look = await(a, kWhich, tag, look, [&] { return look_at<kWhich>(a, here, tag, lane); });
      words = untagged(look);
      if (goes_on) look = look_at<kWhich>(a, panel, tag, lane);
    } else {
      words = load_x(table, here, lane);
    }
    if (index == turned) x_is_there();
    const float2 s_lo = scales_of(scale_lo), s_hi = scales_of(scale_hi);
    const bool second = t & 1, upper = t & 2;  // of the pairs of blocks; of the halves
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float c[2][2][4] = {};  // of half w of block b + 2 i, column 4 w + b + 2 i is what is wanted
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (b + 2 * i < kEarly)
          multiply_levels(c[i], level[b + 2 * i], words);
        else
          multiply_codes(c[i], block[b + 2 * i], words, table, lane4);
      const auto mine = [&](int k) {  // indices that only differ at run time would put c into memory
        const float earlier = upper ? c[0][1][k] : c[0][0][k], later = upper ? c[1][1][k] : c[1][0][k];
        return second ? later : earlier;
      };
      sum.x += mine(b) * (b ? s_lo.y : s_lo.x);
      sum.y += mine(b + 2) * (b ? s_hi.y : s_hi.x);
    }
    if (to != here_to || !goes_on) {  // its last panel of the tile
      float mine = (second ? sum.y : sum.x) + __shfl_xor_sync(~0u, second ? sum.x : sum.y, 1);
      mine += __shfl_xor_sync(~0u, mine, 2);
      if (t < 2) *at<float>(here_to, zero) = mine;
      sum = make_float2(0.0f, 0.0f);
    }
    if (index + kWarps >= visited) break;
  }
}

// Which sums of a tile there are when its panels are number [begin, end) of the batch: bit 2 i is slot 2 i + lane / 16.
__device__ __forceinline__ uint32_t sums_there(int begin, int end, int slots, int lane) {
  const uint32_t from = ((1u << min(end - begin, slots)) - 1) << (begin & (slots - 1));
  return (from | from >> slots) >> (lane >> 4);
}

// Their sum for row lane & 15, in every lane. The loads wait for nothing between them.
__device__ __forceinline__ float add_warps(const float* tile, uint32_t there, bool all_slots, int lane) {
  float part[kWarps / 2] = {};
#pragma unroll
  for (int i = 0; i < kWarps / 2; ++i)
    if (i < kWarps / 4 || all_slots) part[i] = tile[2 * i * kTileRows + lane];
#pragma unroll
  for (int i = 0; i < kWarps / 2; ++i) part[i] = there >> 2 * i & 1 ? part[i] : 0.0f;
#pragma unroll
  for (int o = kWarps / 4; o; o /= 2)
#pragma unroll
    for (int i = 0; i < o; ++i) part[i] += part[o + i];
  return part[0] + __shfl_xor_sync(~0u, part[0], 16);
}

// ---- the residual and x --------------------------------------------------------------------------------

// The largest half instead of infinity: where the column grows a thousandfold from one norm to the next, the guess is
// that much too small.
__device__ __forceinline__ half2 to_half2(float a, float b) {
  constexpr float kLargest = 65504.0f;
  return __floats2half2_rn(fminf(fmaxf(a, -kLargest), kLargest), fminf(fmaxf(b, -kLargest), kLargest));
}

__device__ __forceinline__ uint32_t word_of_half2(half2 both) {
  uint32_t word;
  memcpy(&word, &both, sizeof word);
  return word;
}

__device__ __forceinline__ float& factor_of(const PersistentArguments& a, int norm, uint32_t zero) {
  return at<float>(a.factors_at, zero)[norm];
}

// Where row lane & 15 of a tile and its neighbour lie in x.
__device__ __forceinline__ uint32_t* x_word(const PersistentArguments& a, int norm, int tile, int lane) {
  return a.x[norm] + word_of(tile * (kTileRows / 2) + (lane & 15) / 2);
}

// A tile of the residual to its readers: x for `norm`, to this lane's word, and its sum of squares. The guess keeps x in
// the range of half, and the products can begin before the sum of squares is known. Lanes below 16 have a row each.
__device__ __forceinline__ void publish_x(const PersistentArguments& a, uint32_t* word, int norm, int tile, float row,
                                          float weight, float guess, uint32_t tag, int lane) {
  const float x = row * (weight * guess), next = __shfl_down_sync(~0u, x, 1);
  float square = lane < kTileRows ? row * row : 0.0f;
  if (lane < kTileRows && (lane & 1) == 0) store_word(word, tagged(word_of_half2(to_half2(x, next)), tag));
  for (int o = kTileRows / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
  if (lane == 0) store_word(a.squares[norm] + tile, tagged(square, tag));
}

// 1 / rms for all of this CTA. One warp calls it.
__device__ __forceinline__ void find_factor(const PersistentArguments& a, uint32_t zero, int norm, uint32_t tag,
                                            int lane) {
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < a.hidden / kTileRows; first += 4 * 32) {
    const int i = first + 4 * lane;
    const auto looks = await(a, kLists + 2, tag, [&] {
      return load_pieces<1>(i < a.hidden / kTileRows, tag, [&](int) { return a.squares[norm] + i; });
    });
    const uint4 v = looks.words[0];
    sum += (untagged(v.x) + untagged(v.y)) + (untagged(v.z) + untagged(v.w));
  }
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (lane == 0) factor_of(a, norm, zero) = rsqrtf(sum * a.per_hidden + a.eps);
}

// x of a column, 16 bytes of a thread at a time, a second time where it has more than 8 numbers a thread.
using Looks = Pieces<2>;

__device__ __forceinline__ Looks look_at_x(const PersistentArguments& a, int norm, uint32_t tag, int first) {
  const int pieces = a.hidden / 8;
  const uint32_t wanted = (first < pieces) | (first + kThreads < pieces) << 1;
  return load_pieces<2>(wanted, tag, [&](int i) { return a.x[norm] + 4 * (first + i * kThreads); });
}

__device__ __forceinline__ void stage_x(const PersistentArguments& a, uint32_t zero, int norm, uint32_t tag, int where,
                                        Looks looks, int thread) {
  const int all = a.qkv.panels * (kPanelBlocks * kGroup / 8);  // 0 behind hidden / 8
#pragma unroll 1
  for (int first = thread; first < all; first += 2 * kThreads) {
    if (first != thread) looks = look_at_x(a, norm, tag, first);
    looks = await(a, where, tag, looks, [&] { return look_at_x(a, norm, tag, first); });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int piece = first + i * kThreads, block = piece >> 3;
      if (piece < all)
        *at<uint4>(block * 256 + 128 + ((piece >> 2 & 1) ^ (block & 1)) * 64 + (piece & 3) * 16, zero) =
            untagged(looks.words[i]);
    }
  }
  __syncthreads();
}

// ---- act -----------------------------------------------------------------------------------------------

// The eight units of a gate/up tile as four half2 words, each to its place, which the first of its two lanes has.
__device__ __forceinline__ void publish_act(const PersistentArguments& a, uint32_t* word, int tile, float sum, uint32_t tag,
                                            int lane) {
  const float up = __shfl_down_sync(~0u, sum, 8);
  const float act = __fdividef(sum, 1.0f + __expf(-sum)) * up * kActScale;
  const float next = __shfl_down_sync(~0u, act, 1);
  if (lane < 8 && (lane & 1) == 0) {
    const half2 both = __floats2half2_rn(8 * tile + lane < a.intermediate ? act : 0.0f,
                                         8 * tile + lane + 1 < a.intermediate ? next : 0.0f);
    store_word(word, tagged(*reinterpret_cast<const uint32_t*>(&both), tag));
  }
}

// ---- a product of a layer, or the head ----------------------------------------------------------------

struct Place {  // of a warp in the token
  int layer, turn;  // turn: of the buffers of sums
  Cursor cursor;
};

__device__ __forceinline__ uint32_t tag_of(const PersistentArguments& a, int layer, uint32_t zero) {
  return (at<const Token>(a.token_at, zero)->parity + layer) & 1u;
}

// Of x of attention's norm, which has one more a token: the head's.
__device__ __forceinline__ uint32_t x_tag_of(const PersistentArguments& a, int layer, uint32_t zero) {
  return (at<const Token>(a.token_at, zero)->x_parity + layer) & 1u;
}

// The sums of tile v of a batch to whoever waits for them; one warp calls it. Everybody waits for what it does once all
// sums are there. So what can be known before is, and the words' place is prefetched, or the compiler would work it out
// later.
template <int kWhich>
__device__ __forceinline__ void finish_tile(const PersistentArguments& a, uint32_t zero, int layer, int turn,
                                            const List& list, const Batch& batch, int v, int lane) {
  const PersistentMatrix& m = matrix_for<kWhich>(a);
  const int tile = batch.tile + v, row = tile * kTileRows + (lane & 15);
  const int begin = v * m.panels - batch.panel;
  uint32_t there = sums_there(max(begin, 0), min(begin + m.panels, batch.count), m.slots, lane);
  const bool all_slots = m.slots > kWarps / 2;
  const float* const sums = at<float>(buffer_at(a, turn), zero) + v * m.slots * kTileRows;
  const float* const factors = &factor_of(a, 0, zero);
  const uint32_t tag = tag_of(a, layer, zero);
  if constexpr (kWhich == kO || kWhich == kDown) {
    constexpr int kNext = kWhich == kO ? kMlpNorm : kAttentionNorm;
    float* const residual = at<float>(a.residual_at, zero) + (tile - list.tile) * kTileRows + (lane & 15);
    uint32_t* const word = x_word(a, kNext, tile, lane);
    const uint32_t next_tag = kWhich == kO ? tag : x_tag_of(a, layer + 1, zero);
    const PersistentLayer* const layers = at<const PersistentLayer>(a.layers_at, zero);
    const float* norm = layers[layer].mlp_norm;
    if (kWhich == kDown) norm = layer + 1 == a.n_layers ? a.norm : layers[layer + 1].attn_norm;
    const float weight = norm[row];
    uint32_t late_there = 0;
    const bool parts = kWhich == kDown && list.early;
    if (parts) {
      const int early = a.down.panels - a.late_panels, late = list.early + v * a.late_panels;
      there = sums_there(v * early, (v + 1) * early, kWarps, lane);
      late_there = sums_there(late, late + a.late_panels, kWarps, lane);
    }
    prefetch_l2(word);
    wait_for(a, kSummed, turn, zero);
    const float before = lane < kTileRows ? *residual : 0.0f, guess = factors[1 - kNext];
    float sum = add_warps(sums, there, all_slots, lane);
    if (parts) sum += add_warps(sums + list.tiles * kWarps * kTileRows, late_there, true, lane);
    const float all = before + (kWhich == kDown ? sum / kActScale : sum);
    publish_x(a, word, kNext, tile, all, weight, guess, next_tag, lane);
    if (lane < kTileRows) *residual = all;
  } else {
    constexpr int kNorm = kWhich == kFirstAct ? kMlpNorm : kAttentionNorm;  // of x
    uint32_t* word = nullptr;
    if constexpr (kWhich == kQkv) {
      // the lowest of the tile's writers is behind how many there are
      const uint8_t* const lowest = at<const uint8_t>(a.writers_at, zero) + a.qkv.tiles;
      const int writer = static_cast<int>(blockIdx.x) - lowest[tile];
      word = a.qkv_sums + static_cast<int64_t>(writer) * a.qkv_rows + row;
    }
    if constexpr (kWhich == kFirstAct) word = a.act + word_of(tile * 4 + (lane & 7) / 2);
    if constexpr (kWhich != kHead) prefetch_l2(word);
    wait_for(a, kSummed, turn, zero);
    const float by = __fdividef(factors[kNorm], factors[1 - kNorm]);
    const float sum = add_warps(sums, there, all_slots, lane) * by;
    if constexpr (kWhich == kQkv) {
      if (lane < kTileRows && row < a.qkv_rows) store_word(word, tagged(sum, tag));
    } else if constexpr (kWhich == kFirstAct) {
      publish_act(a, word, tile, sum, tag, lane);
    } else {
      if (lane < kTileRows && row < a.vocab) a.logits[row] = sum;
    }
  }
}

// List `which` of a layer, or the head, from x to what is handed on; kWhich is the first list of the same kind. `enter` as
// in multiply and `multiplied` behind it, both once; `stamp_product` for the time line; x_tag is that of the words of x.
template <int kWhich, bool kNarrow, bool kStays, typename Enter, typename Multiplied, typename Stamp>
__device__ __forceinline__ void product(const PersistentArguments& a, uint32_t zero, int which, Place& place,
                                        uint32_t x_tag, int warp, int lane, Enter enter, Multiplied multiplied,
                                        Stamp stamp_product) {
  const PersistentMatrix& m = matrix_for<kWhich>(a);
  const List& list = at<const Shares>(a.shares_at, zero)->lists[which];
  int tiles = 0, panels = 0, stage = list.first_stage;
#pragma unroll 1
  do {
    const Batch batch = batch_of(m, list, tiles, panels);
    // who reads the first stage depends on its slot
    const int turned = warp ^ (place.cursor.slot & 1) * kStagePanels;
    wait_for(a, kFree, place.turn, zero);
    multiply<kWhich, kNarrow, kStays>(
        a, zero, list, batch, place.cursor, place.layer, stage, x_tag, place.turn, turned, lane,
        [&] {
          if (panels == 0) enter();
        },
        [&] {
          if (panels == 0) stamp_product(1, turned == 0);
        });
    if (panels == 0) multiplied(turned);
    arrive_at(a, kSummed, place.turn, zero, lane);
    stamp_product(2, turned == 0);
    const int batch_tiles =
        batch.count ? static_cast<int>((batch.panel + batch.count + m.panels - 0.5f) * m.per_panels) : 0;
#pragma unroll 1
    for (int v = kWarps - 1 - turned; v < batch_tiles; v += kWarps)  // the warps that have fewer panels come first
      finish_tile<kWhich>(a, zero, place.layer, place.turn, list, batch, v, lane);
    // where there is no tile, too, or synccheck takes the arrivals for a mistake
    if (batch_tiles == 0 && turned == 0) wait_for(a, kSummed, place.turn, zero);
    arrive_at(a, kFree, place.turn, zero, lane);
    const int stages = stages_of(batch.count);
    advance(place.cursor, stages, a.slots);
    stage += stages;
    panels += batch.count;
    tiles += m.batch;
    ++place.turn;
    stamp_product(3, turned == kWarps - 1);
  } while (panels < list.count);
}

// ---- the token -----------------------------------------------------------------------------------------

// Number k of the token's embedding: the residual before the first layer.
__device__ __forceinline__ float embedded(const PersistentArguments& a, int64_t id, int k) {
  if (id < 0 || id >= a.embed.rows) return 0.0f;
  if (a.embed.dense) return a.embed.dense[id * a.hidden + k];
  const int row = static_cast<int>(id % kTileRows), block = k / kGroup, in_block = k % kGroup;
  const int panel = block / kPanelBlocks, in_panel = block % kPanelBlocks;
  const int blocks = min(kPanelBlocks, a.embed.groups - panel * kPanelBlocks);
  const uint8_t* base = a.embed.panels + id / kTileRows * a.embed.groups * kBlockBytes + panel * kPanelBytes;
  const int at_code = in_panel * kBlockCodes + (row % 8 * 4 + in_block % 8 / 2) * 16 + row / 8 * 8 + in_block / 8;
  const int code = __ldg(base + at_code);
  const float scale = __half2float(
      __ldg(reinterpret_cast<const __half*>(base + blocks * kBlockCodes) + row * blocks + in_panel));
  return kNf4Levels[k & 1 ? code >> 4 : code & 15] * scale;
}

// Everything but activations: barriers, who does what, the first stages of the ring, tables, the token.
__device__ __forceinline__ void set_up(const PersistentArguments& a, int thread) {
  if (thread == 0) {
    for (int i = 0; i < a.slots; ++i) barrier_init(shared_address(at<uint8_t>(a.full_at, 0)) + i * 8, 1);
    for (int i = 0; i < 4; ++i) barrier_init(shared_address(at<uint8_t>(a.sums_at, 0)) + i * 8, kWarps * kArrivals);
    if (kArrivals > 1)
      for (int i = 0; i < a.slots; ++i) barrier_init(seen_barrier(a, i, 0), kStagePanels * kArrivals);
    barriers_visible();
  }
  if (thread < a.slots) at<uint32_t>(a.read_at, 0)[thread] = 0;
  const int words = shares_bytes(a) / 4;
#pragma unroll 1
  for (int i = thread; i < words; i += kThreads)
    at<uint32_t>(a.shares_at, 0)[i] =
        reinterpret_cast<const uint32_t*>(a.tables)[static_cast<int64_t>(blockIdx.x) * words + i];
#pragma unroll 1
  for (int i = thread; i < 2 * a.qkv.tiles; i += kThreads)
    at<uint8_t>(a.writers_at, 0)[i] = a.tables[static_cast<int64_t>(a.ctas) * words * 4 + i];
#pragma unroll 1
  for (int i = thread; i < a.n_layers * static_cast<int>(sizeof(PersistentLayer) / 8); i += kThreads)
    at<uint64_t>(a.layers_at, 0)[i] = reinterpret_cast<const uint64_t*>(a.layers)[i];
  __syncthreads();
  if (thread < a.slots) ask_for(a, 0, 0, thread, thread);

  build_pair_table(at<uint8_t>(0, 0), thread, kThreads);
  const int position = static_cast<int>(*a.position);
  for (int i = thread; i < a.head_dim / 2; i += kThreads) {
    const int64_t from = table_row(position, a.max_seq) * a.head_dim + i;
    at<float2>(a.turns_at, 0)[i] = make_float2(a.cos[from], a.sin[from]);
  }
  if (thread == 0) {
    const uint32_t odd = load_word(a.launch);
    const int from_last = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // the last CTAs may have no tile of o
    *at<Token>(a.token_at, 0) = {position, odd & a.n_layers, odd & (a.n_layers + 1),
                                 chunks_of(a, min(position + 1, a.max_seq)), from_last % a.n_kv, from_last / a.n_kv};
    factor_of(a, kMlpNorm, 0) = 1.0f;  // the first guess
  }
  if (blockIdx.x == 0 && thread == 0) *a.valid_len = position + 1;
  __syncthreads();
}

struct Candidate {
  float value = -INFINITY;
  int id = -1;
  // NaN and -inf never win, the lowest id wins a tie.
  __device__ __forceinline__ void take(float other, int other_id) {
    if (other_id >= 0 && (other > value || (other == value && other_id < id))) value = other, id = other_id;
  }
};

// The best of all threads', in thread 0. `scratch` holds two words a warp.
__device__ __forceinline__ Candidate best_of_cta(Candidate best, float* scratch, int thread) {
  for (int o = 16; o; o >>= 1) {
    const float value = __shfl_xor_sync(~0u, best.value, o);
    best.take(value, __shfl_xor_sync(~0u, best.id, o));
  }
  int* ids = reinterpret_cast<int*>(scratch) + kWarps;
  if (thread % 32 == 0) scratch[thread / 32] = best.value, ids[thread / 32] = best.id;
  __syncthreads();
  if (thread == 0)
#pragma unroll 1
    for (int w = 1; w < kWarps; ++w) best.take(scratch[w], ids[w]);
  return best;
}

// The best of this CTA's logits; the CTA that comes last chooses among all, if asked, and commits.
__device__ __forceinline__ void choose(const PersistentArguments& a, int thread) {
  __syncthreads();  // the logits are there
  float* scratch = at<float>(a.factors_at, 0);
  const List& list = at<const Shares>(a.shares_at, 0)->lists[kHead];
  const int begin = list.tile * kTileRows, end = min(begin + list.count / a.head_matrix.panels * kTileRows, a.vocab);
  Candidate best;
#pragma unroll 1
  for (int id = begin + thread; id < end; id += kThreads) best.take(a.logits[id], id);
  best = best_of_cta(best, scratch, thread);
  bool is_last = false;
  if (thread == 0) {
    a.candidate_values[blockIdx.x] = best.value;
    a.candidate_ids[blockIdx.x] = best.id;
    if (blockIdx.x == 0)
#pragma unroll 1
      for (int i = gridDim.x; i < a.candidates; ++i) a.candidate_ids[i] = -1;
    is_last = a.commit.next_token && comes_last(a.done, gridDim.x);
  }
  if (!__syncthreads_or(is_last)) return;
  Candidate chosen;
#pragma unroll 1
  for (int i = thread; i < static_cast<int>(gridDim.x); i += kThreads)
    chosen.take(__ldcg(a.candidate_values + i), __ldcg(a.candidate_ids + i));
  chosen = best_of_cta(chosen, scratch, thread);
  if (thread == 0) commit_id(a.commit, chosen.id);
}

#endif  // DECODEV2_HOPPER

template <int kWhich>
using Which = std::integral_constant<int, kWhich>;

template <int kHeadDim, bool kNarrow, bool kStays, bool kTimed>
__global__ void __launch_bounds__(kThreads, 1) persistent_step(const __grid_constant__ PersistentArguments a) {
#ifdef DECODEV2_HOPPER
  const int thread = threadIdx.x, lane = thread & 31, warp = warp_number();
  set_up(a, thread);
  Place place = {};
  {  // this CTA's rows of the embedding
    const List& mine = at<const Shares>(a.shares_at, 0)->lists[kDown];
    const int64_t id = *a.token;
    const float* const weight = at<const PersistentLayer>(a.layers_at, 0)->attn_norm;
#pragma unroll 1
    for (int v = warp; v < mine.count / a.down.panels; v += kWarps) {
      const int row = (mine.tile + v) * kTileRows + (lane & 15);
      const float value = embedded(a, id, row);
      if (lane < kTileRows) at<float>(a.residual_at, 0)[v * kTileRows + lane] = value;
      publish_x(a, x_word(a, kAttentionNorm, mine.tile + v, lane), kAttentionNorm, mine.tile + v, value, weight[row], 1.0f,
                x_tag_of(a, 0, 0), lane);
    }
  }

  {  // A chunk that this launch leaves out keeps no old parity that a later launch could take for its own.
    const Token& token = *at<const Token>(a.token_at, 0);
    const int chunk = token.chunk, per_kv = a.per_kv, kv_head = token.kv_head;
    if ((chunk >= token.chunks.count || token.chunks.count == 1) && chunk < kMaxChunks) {
      const uint32_t last = (token.parity + a.n_layers - 1) & 1u;
#pragma unroll 1
      for (int i = thread; i < per_kv * kHeadDim / 2; i += kThreads)
        store_words(heads_at(a, chunk, kv_head * per_kv * kHeadDim / 2 + i), make_uint4(last, last, last, last));
    }
  }

  const auto stamp_at = [&](int which) {
    return [&, which](int k, bool mine) {
      stamp<kTimed>(a, place.layer, (which == kHead ? 0 : kProductStamps * which) + k, mine && lane == 0);
    };
  };
  // The factor of a norm is found by a warp that has no panel to multiply, or the last one.
  const auto run = [&](auto kind, int which, uint32_t zero, uint32_t x_tag) {
    constexpr int kWhich = decltype(kind)::value;
    constexpr int kNorm = kWhich == kFirstAct ? kMlpNorm : kAttentionNorm;
    const bool normed = which == kWhich && (kWhich == kQkv || kWhich == kFirstAct || kWhich == kHead);
    const bool staged = normed && !kInWords<kWhich, kStays>;
    stamp_at(which)(0, warp == 0);
    Looks looks = {};
    if (staged) looks = look_at_x(a, kNorm, x_tag, thread);
    product<kWhich, kNarrow, kStays>(
        a, zero, which, place, x_tag, warp, lane,
        [&] {
          if (staged) stage_x(a, zero, kNorm, x_tag, kWhich, looks, thread);
        },
        [&](int turned) {
          if (normed && turned == kWarps - 1) find_factor(a, zero, kNorm, x_tag, lane);
        },
        stamp_at(which));
  };
#pragma unroll 1
  for (; place.layer < a.n_layers; ++place.layer) {
    uint32_t zero = opaque(0);
    const uint32_t tag = tag_of(a, place.layer, zero);
    run(Which<kQkv>(), kQkv, zero, x_tag_of(a, place.layer, zero));
    zero = opaque(0);
    if (at<const Token>(a.token_at, zero)->chunk < at<const Token>(a.token_at, zero)->chunks.count)
      attend<kHeadDim, kTimed>(a, zero, place.layer, tag, thread);
    run(Which<kO>(), kO, opaque(0), tag);
    // both parts go through the same instructions
#pragma unroll 1
    for (int which = kFirstAct; which <= kSecondAct; ++which) run(Which<kFirstAct>(), which, opaque(0), tag);
    run(Which<kDown>(), kDown, opaque(0), tag);
  }
  {
    const uint32_t zero = opaque(0);
    run(Which<kHead>(), kHead, zero, x_tag_of(a, place.layer, zero));
  }
  // everyone read it before the first hand-off, and this CTA is past the last
  if (blockIdx.x == 0 && thread == 0) store_word(a.launch, load_word(a.launch) ^ 1u);
  choose(a, thread);
#endif
}

cudaError_t launch_as(void (*kernel)(PersistentArguments), const PersistentArguments& a, int shared,
                      cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(a.ctas);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeCooperative;  // all CTAs are resident, or the launch fails
  attribute[0].val.cooperative = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int kHeadDim, bool kNarrow, bool kStays>
cudaError_t launch_timed(const PersistentArguments& a, int shared, cudaStream_t stream) {
  return a.timeline ? launch_as(persistent_step<kHeadDim, kNarrow, kStays, true>, a, shared, stream)
                    : launch_as(persistent_step<kHeadDim, kNarrow, kStays, false>, a, shared, stream);
}

template <int kHeadDim>
cudaError_t launch_for(const PersistentArguments& a, bool narrow, int shared, cudaStream_t stream) {
  if (narrow) return launch_timed<kHeadDim, true, false>(a, shared, stream);
  // A warp's panels are all the same part of their tiles, and few warps look for the same words.
  const bool stays = kWarps % a.gate_up.panels == 0 && 2 * a.gate_up.panels >= kWarps;
  return stays ? launch_timed<kHeadDim, false, true>(a, shared, stream)
               : launch_timed<kHeadDim, false, false>(a, shared, stream);
}

}  // namespace

cudaError_t chr_nf4_step(const PersistentArguments& a, int shared_bytes, cudaStream_t stream) {
  bool narrow = false;  // whether a last panel of a tile is
  for (const PersistentMatrix* m : {&a.qkv, &a.o, &a.gate_up, &a.down, &a.head_matrix}) narrow |= m->narrower != 0;
  if (a.head_dim == 64) return launch_for<64>(a, narrow, shared_bytes, stream);
  if (a.head_dim == 128) return launch_for<128>(a, narrow, shared_bytes, stream);
  return cudaErrorInvalidValue;
}

}  // namespace decodev2
