// What y = W x for one column is made of, and its ring kernel: for nf4_gemv.cu, which says what is computed, who owns what
// and how it lies in memory, and for ring_ablations.cu. Torch-free.
#pragma once
#include <algorithm>

#include "device.cuh"
#include "launch.h"
#include "nf4.cuh"

namespace decodev2 {

// ---- x into shared memory ----------------------------------------------------------------------------

// A power of two that brings the largest |x| into [2^13, 2^14), undone exactly: half keeps its 11 bits
// whatever the size of the activations (its own range is 6e-8 .. 65504).
__device__ __forceinline__ float power_of_two_scale(float largest) {
  if (!(largest > 0.0f) || isinf(largest)) return 1.0f;
  int exponent;
  frexpf(largest, &exponent);  // largest < 2^exponent
  return ldexpf(1.0f, 14 - max(exponent, -100));
}

__device__ __forceinline__ float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// Quads of x, and of the norm's weight, that a thread keeps in registers; what is beyond them it reads twice.
constexpr int kKept = 2;
// The same of x in the ring for wide inputs, which no norm goes with: all of 27,648.
constexpr int kKeptWide = 12;
// Blocks of a warp's first panel whose levels are looked up before x is there, 16 registers each.
constexpr int kBlocksAhead = 1;
// The two share the registers of a thread. A captured step of Qwen2.5-3B on an H200, two runs, by blocks / quads:
// none / 4 1,068 and 1,078 us, 1 / 2 1,033 and 1,022, 1 / 3 1,034 and 1,034, 2 / 3 1,094 and 1,091.

// The part of the norm's weight that a thread keeps: a constant, on its way before x is there.
struct NormWeight {
  float4 quad[kKept];
};

__device__ __forceinline__ NormWeight load_norm_weight(const GemvArguments& a, int thread, int threads) {
  NormWeight weight;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int q = thread + i * threads;
    if (a.norm_weight && q < a.cols / 4) {
      const uint4 bits = load_weights_16(a.norm_weight + 4 * q);  // volatile: stays ahead of the wait
      weight.quad[i] = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                                   __uint_as_float(bits.w));
    }
  }
  return weight;
}

__device__ __forceinline__ void store_pair(uint8_t* x_shared, int pair, float low, float high) {
  *reinterpret_cast<half2*>(x_shared + fragment_offset(pair)) = __floats2half2_rn(low, high);
}

__device__ __forceinline__ float accumulate(float local, float4 v, bool squares) {
  return squares ? local + v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w
                 : fmaxf(fmaxf(fmaxf(local, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
}

// x that a product before left as half fragments, scaled by kActScale.
__device__ __forceinline__ float stage_half(const GemvArguments& a, uint8_t* x_shared, int thread, int threads) {
  const int live = a.groups * 8, padded = (a.groups + kPanelBlocks - 1) / kPanelBlocks * kPanelBlocks * 8;
  for (int i = thread; i < padded; i += threads)
    reinterpret_cast<uint4*>(x_shared)[i] =
        i < live ? reinterpret_cast<const uint4*>(a.x_half)[i] : make_uint4(0, 0, 0, 0);
  __syncthreads();
  return 1.0f / kActScale;
}

// Writes x [K] as half fragments (zero up to whole panels) and returns the factor that undoes its scaling.
// All threads of the CTA call it; it waits for the kernels before and ends with a barrier.
template <int kKeptX>
__device__ __forceinline__ float stage_x(const GemvArguments& a, const NormWeight& weight, uint8_t* x_shared, float* scratch,
                         int thread, int threads) {
  wait_for_predecessors();
  if (a.x_half) return stage_half(a, x_shared, thread, threads);
  const bool norm = a.norm_weight != nullptr;
  const int quads = a.cols / 4, rest = a.cols - quads * 4;
  float4 kept[kKeptX];
  float local = 0.0f;
#pragma unroll
  for (int i = 0; i < kKeptX; ++i) {
    const int q = thread + i * threads;
    kept[i] = q < quads ? reinterpret_cast<const float4*>(a.x)[q] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#pragma unroll
  for (int i = 0; i < kKeptX; ++i) local = accumulate(local, kept[i], norm);
  for (int q = thread + kKeptX * threads; q < quads; q += threads)
    local = accumulate(local, reinterpret_cast<const float4*>(a.x)[q], norm);
  if (thread < rest) {
    const float v = a.x[quads * 4 + thread];
    local = norm ? local + v * v : fmaxf(local, fabsf(v));
  }
  local = norm ? warp_sum(local) : warp_max(local);
  if ((thread & 31) == 0) scratch[thread >> 5] = local;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < threads / 32; ++w) total = norm ? total + scratch[w] : fmaxf(total, scratch[w]);
  const float factor = norm ? rsqrtf(total / static_cast<float>(a.cols) + a.eps) : power_of_two_scale(total);

  const auto store_quad = [&](int q, float4 x, float4 w) {
    if (norm) x = make_float4(x.x * factor * w.x, x.y * factor * w.y, x.z * factor * w.z, x.w * factor * w.w);
    else x = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    store_pair(x_shared, 2 * q, x.x, x.y);
    store_pair(x_shared, 2 * q + 1, x.z, x.w);
  };
  const auto weight_of = [&](int q) {
    return norm ? reinterpret_cast<const float4*>(a.norm_weight)[q] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
  };
#pragma unroll
  for (int i = 0; i < kKeptX; ++i) {
    const int q = thread + i * threads;
    if (q < quads) store_quad(q, kept[i], i < kKept ? weight.quad[i < kKept ? i : 0] : weight_of(q));
  }
  for (int q = thread + kKeptX * threads; q < quads; q += threads)
    store_quad(q, reinterpret_cast<const float4*>(a.x)[q], weight_of(q));
  const int pairs = (a.groups + kPanelBlocks - 1) / kPanelBlocks * kPanelBlocks * (kGroup / 2);
  for (int pair = 2 * quads + thread; pair < pairs; pair += threads) {  // what is left, and zeros
    float x[2];
    for (int e = 0; e < 2; ++e) {
      const int k = 2 * pair + e;
      x[e] = k < a.cols ? a.x[k] * factor * (norm ? a.norm_weight[k] : 1.0f) : 0.0f;
    }
    store_pair(x_shared, pair, x[0], x[1]);
  }
  __syncthreads();
  return norm ? 1.0f : 1.0f / factor;
}

// ---- one panel ---------------------------------------------------------------------------------------

struct PanelWords {
  uint4 block[kPanelBlocks];  // this lane's 16 B of each block: two words of row g, two of row g + 8
  uint32_t scale_lo;          // half2: groups 2t, 2t + 1 of row g (t < 2)
  uint32_t scale_hi;          // the same of row g + 8
};

// What a warp makes of a panel's words. ring_ablations.cu has others, which leave parts of it out.
struct WholeProduct {
  using Arguments = GemvArguments;
  static constexpr bool kSums = true;  // else `touch` takes the words, and no sum is made
  static constexpr bool kRefillsEarly = true;  // a slot once its words are in registers, else once its sums are added
  static constexpr int kAhead = kBlocksAhead;

  template <int kByte>
  __device__ __forceinline__ uint32_t levels(uint32_t table, uint32_t word, uint32_t lane4) {
    return look_up<kByte>(table, word, lane4);
  }
  __device__ __forceinline__ void multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                           uint32_t b1) {
    mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
  }
  __device__ __forceinline__ void finish(const Arguments&, int) {}
};

// Pairs of levels of a block, as the four products take them.
template <typename Work>
__device__ __forceinline__ void look_up_block(Work& work, uint32_t* pair, const uint4& words, uint32_t table,
                                              uint32_t lane4) {
  const uint32_t lo[2] = {words.x, words.y}, hi[2] = {words.z, words.w};
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    pair[8 * w + 0] = work.template levels<0>(table, lo[w], lane4);
    pair[8 * w + 1] = work.template levels<0>(table, hi[w], lane4);
    pair[8 * w + 2] = work.template levels<1>(table, lo[w], lane4);
    pair[8 * w + 3] = work.template levels<1>(table, hi[w], lane4);
    pair[8 * w + 4] = work.template levels<2>(table, lo[w], lane4);
    pair[8 * w + 5] = work.template levels<2>(table, hi[w], lane4);
    pair[8 * w + 6] = work.template levels<3>(table, lo[w], lane4);
    pair[8 * w + 7] = work.template levels<3>(table, hi[w], lane4);
  }
}

// Sums of the panel's 256 k for rows g and g + 8, complete in lanes with t == 0. The pairs of its first kAhead blocks
// have been looked up.
template <int kAhead, typename Work>
__device__ __forceinline__ float2 multiply_panel(Work& work, const PanelWords& p, const uint32_t (*ahead)[16],
                                                 const uint4* x, uint32_t table, uint32_t lane4, bool second_pair) {
  float c[kPanelBlocks][4] = {};
#pragma unroll
  for (int b = 0; b < kPanelBlocks; ++b) {
    uint32_t here[16];
    if (b >= kAhead) look_up_block(work, here, p.block[b], table, lane4);
    const uint32_t* pair = b < kAhead ? ahead[b] : here;
#pragma unroll
    for (int w = 0; w < 2; ++w, pair += 8) {
      work.multiply(c[b], pair[0], pair[1], pair[2], pair[3], x[w].x, x[w].y);
      work.multiply(c[b], pair[4], pair[5], pair[6], pair[7], x[w].z, x[w].w);
    }
  }
  // Column b of block b: lane t = 0 holds blocks 0 and 1, lane t = 1 blocks 2 and 3.
  const float2 s_lo = __half22float2(*reinterpret_cast<const half2*>(&p.scale_lo));
  const float2 s_hi = __half22float2(*reinterpret_cast<const half2*>(&p.scale_hi));
  float row_g = (second_pair ? c[2][0] : c[0][0]) * s_lo.x + (second_pair ? c[3][1] : c[1][1]) * s_lo.y;
  float row_g8 = (second_pair ? c[2][2] : c[0][2]) * s_hi.x + (second_pair ? c[3][3] : c[1][3]) * s_hi.y;
  row_g += __shfl_xor_sync(~0u, row_g, 1);
  row_g8 += __shfl_xor_sync(~0u, row_g8, 1);
  return make_float2(row_g, row_g8);
}

// x registers of one panel: lane (g, t) with g < 4 takes block g, the others stay zero.
__device__ __forceinline__ void load_x(uint4* x, uint32_t x_shared, int panel, int lane) {
  if (lane < 16) {
    const uint32_t at = x_shared + panel * 512 + (lane >> 2) * 128 + (lane & 3) * 16;
    x[0] = load_shared_16(at);
    x[1] = load_shared_16(at + 64);
  }
}

// half2 of scales 2t, 2t + 1 of one row in a panel that has only `blocks` of them; missing ones are 0
template <typename Load>
__device__ __forceinline__ uint32_t narrow_scales(Load load, int row, int blocks, int t) {
  const uint32_t first = 2 * t < blocks ? load((row * blocks + 2 * t) * 2) : 0;
  const uint32_t second = 2 * t + 1 < blocks ? load((row * blocks + 2 * t + 1) * 2) : 0;
  return first | second << 16;
}

// ---- epilogue: 16 finished sums of a tile in lanes 0..15 ----------------------------------------------

struct Best {
  float value;
  int id;
};

__device__ __forceinline__ float silu(float g) { return g / (1.0f + __expf(-g)); }

// What the epilogue adds to this lane's row of a tile. Asked for when the tile begins: it is there when the sums are.
template <GemvKind kKind>
__device__ __forceinline__ float addend(const GemvArguments& a, int tile, int lane) {
  const int row = tile * kTileRows + lane;
  if (kKind == GemvKind::kSwiglu || lane >= kTileRows || row >= a.rows) return 0.0f;
  return (a.bias ? a.bias[row] : 0.0f) + (a.residual ? a.residual[row] : 0.0f);
}

template <GemvKind kKind>
__device__ __forceinline__ void finish_tile(const GemvArguments& a, int tile, int lane, float sum, float added,
                                            Best& best) {
  if (kKind == GemvKind::kSwiglu) {
    const float up = __shfl_down_sync(~0u, sum, 8);
    const int unit = tile * 8 + lane;
    const float act = silu(sum) * up;
    if (lane < 8 && unit < a.rows) a.y[unit] = act;
    if (a.y_half) {
      const float next = __shfl_down_sync(~0u, act, 1);
      if (lane < 8 && (lane & 1) == 0) {  // units beyond the last have no weights: 0
        const half2 pair = __floats2half2_rn(act * kActScale, next * kActScale);
        *reinterpret_cast<half2*>(a.y_half + fragment_offset(tile * 4 + lane / 2)) = pair;
      }
    }
    return;
  }
  const int row = tile * kTileRows + lane;
  if (lane >= kTileRows || row >= a.rows) return;
  sum += added;
  a.y[row] = sum;
  if (kKind == GemvKind::kHead && sum > best.value) best = {sum, row};  // rows ascend: lowest id wins a tie
}

template <GemvKind kKind>
__device__ __forceinline__ void finish_cta(const GemvArguments& a, int lane, Best best) {
  if constexpr (kKind == GemvKind::kHead) {
    for (int o = 16; o; o >>= 1) {
      const float value = __shfl_xor_sync(~0u, best.value, o);
      const int id = __shfl_xor_sync(~0u, best.id, o);
      if (id >= 0 && (best.id < 0 || value > best.value || (value == best.value && id < best.id)))
        best = {value, id};
    }
    if (lane == 0) {
      a.candidate_values[blockIdx.x] = best.value;
      a.candidate_ids[blockIdx.x] = best.id;
    }
    if (blockIdx.x == 0)  // another grid may have filled more slots before
      for (int i = gridDim.x + lane; i < a.candidates; i += 32) a.candidate_ids[i] = -1;
  }
}

// Programmatic launch without its point: started early, and idle until the kernels before have ended.
__device__ __forceinline__ void wait_first_if_asked(const GemvArguments& a) {
  if (!a.wait_first) return;
  let_dependents_launch();
  wait_for_predecessors();
}

struct Range {
  int begin, end;
};

// This CTA's share of `units` tiles or panels.
__device__ __forceinline__ Range my_share(int units) {
  return {static_cast<int>(static_cast<int64_t>(units) * blockIdx.x / gridDim.x),
          static_cast<int>(static_cast<int64_t>(units) * (blockIdx.x + 1) / gridDim.x)};
}

// A tile whose panels end in one CTA and begin in the one before it: both leave their sums, the one that comes last
// adds them in the order of the panels (same bits every run) and finishes the tile. By one whole warp.
template <GemvKind kKind>
__device__ __forceinline__ void finish_shared_tile(const GemvArguments& a, int tile, bool is_end, int lane, float sum,
                                                   float unscale, float added, Best& best) {
  float* sums = a.shared_sums + tile * 2 * kTileRows;
  if (lane < kTileRows) __stcg(sums + is_end * kTileRows + lane, sum);
  __syncwarp();
  int last = 0;
  if (lane == 0) last = comes_last(a.shared_counters + tile, 2);
  if (!__shfl_sync(~0u, last, 0)) return;
  const int row = lane & (kTileRows - 1);
  const float whole = __ldcg(sums + row) + __ldcg(sums + kTileRows + row);
  finish_tile<kKind>(a, tile, lane, whole * unscale, added, best);
}

// ---- ring: one producer lane streams, consumers never touch global memory -----------------------------

template <int kWarps, int kStages>
struct Ring {  // byte offsets inside dynamic shared memory
  static constexpr int kKeptX = kStages == 3 ? kKeptWide : kKept;
  static constexpr int kStageBytes = kWarps * kPanelBytes;
  static constexpr int kPartials = kStages * kWarps * kTileRows * 4;
  static constexpr int kBarriers = 4 * kStages * 8;
  static constexpr int kScratch = (kWarps + 2) * 4;
  static __host__ __device__ constexpr int bytes(int panels) {
    return kTableBytes + panels * 512 + kStages * kStageBytes + kPartials + kBarriers + kScratch;
  }
};

template <GemvKind kKind, int kWarps, int kStages, int kPerSm, typename Work = WholeProduct>
__global__ void __launch_bounds__((kWarps + 2) * 32, kPerSm) gemv_ring(const typename Work::Arguments a) {
#ifdef DECODEV2_HOPPER
  using R = Ring<kWarps, kStages>;
  constexpr int kAhead = R::kKeptX > kKept ? 0 : Work::kAhead;  // x needs the registers
  constexpr int kThreads = (kWarps + 2) * 32;
  uint8_t* const shared = dynamic_shared();
  const int thread = threadIdx.x, lane = thread & 31, warp = warp_number();
  const int panels = (a.groups + kPanelBlocks - 1) / kPanelBlocks;
  const int tile_bytes = a.groups * kBlockBytes;
  uint8_t* x_shared = shared + kTableBytes;
  uint8_t* ring = x_shared + panels * 512;
  float* partials = reinterpret_cast<float*>(ring + kStages * R::kStageBytes);
  const uint32_t full = shared_address(partials) + R::kPartials;  // bytes of a stage have landed
  const uint32_t empty = full + kStages * 8;                      // its consumers have its words in registers
  const uint32_t summed = empty + kStages * 8;                    // they have stored their sums
  const uint32_t added_up = summed + kStages * 8;                 // the reducer has read those
  float* scratch = reinterpret_cast<float*>(shared + R::bytes(panels) - R::kScratch);

  const bool by_panels = a.shared_counters != nullptr;  // else by whole tiles
  const Range range = my_share(by_panels ? a.tiles * panels : a.tiles);  // panels are shared out or tiles
  const int from_panel = by_panels ? range.begin % panels : 0, from_tile = by_panels ? range.begin / panels : range.begin;
  const int total = (range.end - range.begin) * (by_panels ? 1 : panels);  // panels of this CTA, in stream order
  const int stages = (total + kWarps - 1) / kWarps;
  const uint8_t* stream = a.panels + static_cast<int64_t>(from_tile) * tile_bytes;
  const auto offset_of = [&](int panel) {  // in the stream; a tile's last panel may be narrow
    panel += from_panel;
    return static_cast<int64_t>(panel / panels) * tile_bytes + panel % panels * kPanelBytes;
  };
  const auto issue = [&](int stage, int slot, uint64_t policy) {
    const int64_t from = offset_of(stage * kWarps), to = offset_of(min((stage + 1) * kWarps, total));
    barrier_expect(full + slot * 8, static_cast<uint32_t>(to - from));
    bulk_copy(shared_address(ring) + slot * R::kStageBytes, stream + from, static_cast<uint32_t>(to - from),
              full + slot * 8, policy);
  };

  wait_first_if_asked(a);
  if (thread == kWarps * 32) {  // the producer lane: weights are constants, start before the wait
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, kWarps * kArrivals);
      barrier_init(summed + i * 8, kWarps * kArrivals);
      barrier_init(added_up + i * 8, kArrivals);
    }
    barriers_visible();
    const uint64_t policy = evict_first_policy();
    for (int s = 0; s < min(kStages, stages); ++s) issue(s, s, policy);
  }
  let_dependents_launch();
  const NormWeight weight = load_norm_weight(a, thread, kThreads);
  build_pair_table(shared, thread, kThreads);

  // consumers: warp w takes panel w of every stage
  const int g = lane >> 2, t = lane & 3;
  const uint32_t lane4 = opaque(lane * 4), lane16 = opaque(lane * 16), table = shared_address(shared);
  const uint32_t x_address = shared_address(x_shared), ring_address = shared_address(ring);
  const uint32_t full_scales = opaque(kPanelBlocks * kBlockCodes + g * 8 + (t & 1) * 4);
  const int tail = a.groups % kPanelBlocks;  // blocks of a narrow last panel, 0 when there is none
  Work work;
  int panel = (from_panel + warp) % panels, tiles_ahead = (from_panel + warp) / panels;  // of this warp's panel, from
  int first = from_panel;  // the stage's first tile; and the place in its tile of the stage's first panel
  int slot = 0, phase = 0;
  // Words of this warp's panel of stage s, if it takes one. Other paths fill the registers, too: the compiler would
  // otherwise take them for filled everywhere.
  const auto read_stage = [&](int s) {
    barrier_wait(full + slot * 8, phase);
    PanelWords p = {};
    uint32_t read = 0;
    if (s * kWarps + warp < total) {
      const uint32_t at = ring_address + slot * R::kStageBytes + tiles_ahead * tile_bytes + (panel - first) * kPanelBytes;
#pragma unroll
      for (int b = 0; b < kPanelBlocks; ++b) p.block[b] = load_shared_16(at + b * kBlockCodes + lane16);
      if (tail == 0 || panel < panels - 1) {
        p.scale_lo = load_shared_4(at + full_scales);
        p.scale_hi = load_shared_4(at + full_scales + 64);
      } else {  // what lies behind the narrow panel meets x = 0 and scale 0
        const auto load = [&](int offset) { return load_shared_2(at + tail * kBlockCodes + offset); };
        p.scale_lo = narrow_scales(load, g, tail, t & 1);
        p.scale_hi = narrow_scales(load, g + 8, tail, t & 1);
      }
      read = p.block[0].x ^ p.block[1].x ^ p.block[2].x ^ p.block[3].x ^ p.scale_lo ^ p.scale_hi;
    }
    if (Work::kRefillsEarly) {
      __syncwarp();
      if (lane < kArrivals) barrier_arrive_after(empty + slot * 8, read);
    }
    return p;
  };
  PanelWords p = {};
  uint32_t ahead[kAhead ? kAhead : 1][16] = {};
  if (kAhead) {
    __syncthreads();  // the table is there, and the barriers
    if (warp < kWarps && stages) {
      p = read_stage(0);
#pragma unroll
      for (int b = 0; b < kAhead; ++b) look_up_block(work, ahead[b], p.block[b], table, lane4);
    }
  }
  const float unscale = stage_x<R::kKeptX>(a, weight, x_shared, scratch, thread, kThreads);

  if (warp == kWarps) {  // producer
    if (lane == 0) {
      const uint64_t policy = evict_first_policy();
      for (int s = kStages; s < stages; ++s) {
        const int slot = s % kStages;
        barrier_wait((Work::kRefillsEarly ? empty : added_up) + slot * 8, (s / kStages - 1) & 1);
        issue(s, slot, policy);
      }
    }
    return;
  }

  if (warp == kWarps + 1) {  // reducer: lanes 0..15 take even panels of row `lane`, 16..31 odd ones
    Best best = {-INFINITY, -1};
    float sum = 0.0f;
    int slot = 0, phase = 0, in_tile = from_panel, tile = from_tile;
    bool from_middle = from_panel != 0;  // the CTA before has the tile's first panels
    float added = total ? addend<kKind>(a, tile, lane) : 0.0f;
    for (int s = 0; s < stages; ++s) {
      barrier_wait(summed + slot * 8, phase);
      const int count = Work::kSums ? min(kWarps, total - s * kWarps) : 0;
      const float* row = partials + slot * kWarps * kTileRows + (lane & 15);
      for (int q = 0; q < count;) {
        const int run = min(count - q, panels - in_tile);
        for (int i = lane >> 4; i < run; i += 2) sum += row[(q + i) * kTileRows];
        q += run;
        in_tile += run;
        if (in_tile == panels) {
          sum += __shfl_xor_sync(~0u, sum, 16);
          if (from_middle)
            finish_shared_tile<kKind>(a, tile, true, lane, sum, unscale, added, best);
          else
            finish_tile<kKind>(a, tile, lane, sum * unscale, added, best);
          sum = 0.0f;
          in_tile = 0;
          from_middle = false;
          if (++tile < a.tiles) added = addend<kKind>(a, tile, lane);
        }
      }
      __syncwarp();
      if (lane < kArrivals) barrier_arrive(added_up + slot * 8);
      if (++slot == kStages) slot = 0, phase ^= 1;
    }
    if (Work::kSums && in_tile != 0 && total) {  // the CTA behind has the tile's last panels
      sum += __shfl_xor_sync(~0u, sum, 16);
      finish_shared_tile<kKind>(a, tile, false, lane, sum, unscale, added, best);
    }
    finish_cta<kKind>(a, lane, best);
    return;
  }

  uint4 x[2] = {};
  int loaded = -1;
  const auto finish_stage = [&](int s, auto multiply) {
    if (Work::kRefillsEarly && s >= kStages)  // the slot's sums of the round before are added up
      barrier_wait(added_up + slot * 8, phase ^ 1);
    if (s * kWarps + warp < total) {
      if constexpr (Work::kSums) {
        if (panel != loaded) {
          load_x(x, x_address, panel, lane);
          loaded = panel;
        }
        const float2 sum = multiply();
        if (t == 0) {
          float* mine = partials + (slot * kWarps + warp) * kTileRows;
          mine[g] = sum.x;
          mine[g + 8] = sum.y;
        }
      } else {
        work.touch(p, t);
      }
    }
    __syncwarp();
    if (lane < kArrivals) barrier_arrive(summed + slot * 8);
    // on to the next stage: this warp's panel and the stage's first one both move by kWarps panels
    int stage_tiles = 0;
    for (first += kWarps; first >= panels; first -= panels) ++stage_tiles;
    for (panel += kWarps; panel >= panels; panel -= panels) ++tiles_ahead;
    tiles_ahead -= stage_tiles;
    if (++slot == kStages) slot = 0, phase ^= 1;
  };
  if (kAhead && stages)
    finish_stage(0, [&] { return multiply_panel<kAhead>(work, p, ahead, x, table, lane4, t & 1); });
  for (int s = kAhead ? 1 : 0; s < stages; ++s) {
    p = read_stage(s);
    finish_stage(s, [&] { return multiply_panel<0>(work, p, nullptr, x, table, lane4, t & 1); });
  }
  work.finish(a, lane);
#endif
}

// ---- host ---------------------------------------------------------------------------------------------

// What a CTA that asks for `shared` bytes takes of its multiprocessor's.
constexpr int taken(int shared) { return shared + 1024; }

// CTAs of `shared` bytes that the card holds at a time, `per_sm` of them on a multiprocessor at most. A grid of more would
// leave some for a second wave.
inline int resident_ctas(int shared, int per_sm, const GemvPlan& plan) {
  return plan.multiprocessors * std::clamp(plan.shared_bytes / taken(shared), 1, per_sm);
}

template <typename Kernel, typename Arguments>
cudaError_t start_gemv(Kernel kernel, const Arguments& a, int threads, int shared, int per_sm, const GemvPlan& plan,
                       cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int grid = min(a.tiles, resident_ctas(shared, per_sm, plan));
  return launch(kernel, grid, threads, shared, stream, plan.pdl, a);
}

// Would equal ranges of panels keep the CTAs busier than whole tiles? Waiting for the other half of a tile costs about
// a microsecond, 4.4 MB of stream.
inline bool panels_share_better(int groups, int tiles, int64_t ctas) {
  if (tiles <= ctas) return false;  // a tile would lie between three
  const int64_t idle_tiles = (tiles + ctas - 1) / ctas * ctas - tiles;
  return idle_tiles * groups * kBlockBytes > 5'000'000;
}

}  // namespace decodev2
