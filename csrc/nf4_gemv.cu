// y = W x for one column, W packed NF4: the kernels that read the weights of a decode step.
//
// Computes  plain   y[r]  = s * sum_k W[r][k] x[k] (+ bias[r]) (+ residual[r])
//           swiglu  y[u]  = silu(gate row u . x) * (up row u . x)
//           head    logits[r] = W[r] . x, and one (value, id) candidate per CTA for the argmax
//           x may be normed on the way in: x * rsqrt(mean(x^2) + eps) * norm_weight
// Owns      A CTA owns whole 16-row tiles, or, where tiles would not share out evenly, an equal range of panels: a
//           tile between two CTAs is finished by the one that comes last. Its consumer warps take the tiles' panels in turn; one reducer warp
//           adds the partial sums of a tile in panel order (same bits every run) and runs the epilogue.
// Grid      min(tiles, CTAs that fit the card); block (kWarps + 2) * 32: consumers, producer, reducer
// Shared    64 KB pair table | x as half, fragment order | ring of stages (kWarps panels each) | partials | barriers
// Layout    panels of nf4.cuh. x: [panel][block][2][4 t][4] half2, so lane (g, t) reads block g's 32 B for MMA
//           column g: one set of 8 registers serves the 4 blocks of a panel, block b's result is column b.
// Floor     rows * K_pad * 17 / 32 bytes (4.25 bits per weight) at the card's read rate
// Variants  direct  every warp loads its panels from global memory into registers; any architecture
//           ring    bulk copies into a ring of shared memory by one producer lane; sm_90 and newer
#include "device.cuh"
#include "launch.h"
#include "nf4.cuh"

namespace decodev2 {
namespace {

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

constexpr int kKept = 4;  // quads of x, and of the norm's weight, that a thread keeps in registers

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

// half2 `pair` (k = 2 pair, 2 pair + 1) of x in fragment order; inside a block k = 16 m + 8 h + 2 t
__device__ __forceinline__ int fragment_offset(int pair) {
  const int block = pair >> 5, m = pair >> 3 & 3, h = pair >> 2 & 1, t = pair & 3;
  return block * 128 + (m >> 1) * 64 + t * 16 + (m & 1) * 8 + h * 4;
}

__device__ __forceinline__ void store_pair(uint8_t* x_shared, int pair, float low, float high) {
  *reinterpret_cast<half2*>(x_shared + fragment_offset(pair)) = __floats2half2_rn(low, high);
}

__device__ __forceinline__ float accumulate(float local, float4 v, bool squares) {
  return squares ? local + v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w
                 : fmaxf(fmaxf(fmaxf(local, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
}

// x that a product before left as half fragments, scaled by kActScale.
__device__ float stage_half(const GemvArguments& a, uint8_t* x_shared, int thread, int threads) {
  const int live = a.groups * 8, padded = (a.groups + kPanelBlocks - 1) / kPanelBlocks * kPanelBlocks * 8;
  for (int i = thread; i < padded; i += threads)
    reinterpret_cast<uint4*>(x_shared)[i] =
        i < live ? reinterpret_cast<const uint4*>(a.x_half)[i] : make_uint4(0, 0, 0, 0);
  __syncthreads();
  return 1.0f / kActScale;
}

// Writes x [K] as half fragments (zero up to whole panels) and returns the factor that undoes its scaling.
// All threads of the CTA call it; it waits for the kernels before and ends with a barrier.
__device__ float stage_x(const GemvArguments& a, const NormWeight& weight, uint8_t* x_shared, float* scratch,
                         int thread, int threads) {
  wait_for_predecessors();
  if (a.x_half) return stage_half(a, x_shared, thread, threads);
  const bool norm = a.norm_weight != nullptr;
  const int quads = a.cols / 4, rest = a.cols - quads * 4;
  float4 kept[kKept];
  float local = 0.0f;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int q = thread + i * threads;
    kept[i] = q < quads ? reinterpret_cast<const float4*>(a.x)[q] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) local = accumulate(local, kept[i], norm);
  for (int q = thread + kKept * threads; q < quads; q += threads)
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
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int q = thread + i * threads;
    if (q < quads) store_quad(q, kept[i], weight.quad[i]);
  }
  for (int q = thread + kKept * threads; q < quads; q += threads)
    store_quad(q, reinterpret_cast<const float4*>(a.x)[q],
               norm ? reinterpret_cast<const float4*>(a.norm_weight)[q] : make_float4(1.0f, 1.0f, 1.0f, 1.0f));
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

// Sums of the panel's 256 k for rows g and g + 8, complete in lanes with t == 0.
__device__ __forceinline__ float2 multiply_panel(const PanelWords& p, const uint4* x, uint32_t table,
                                                 uint32_t lane4, bool second_pair) {
  float c[kPanelBlocks][4] = {};
#pragma unroll
  for (int b = 0; b < kPanelBlocks; ++b) {
    const uint32_t lo[2] = {p.block[b].x, p.block[b].y}, hi[2] = {p.block[b].z, p.block[b].w};
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      mma_m16n8k16(c[b], look_up<0>(table, lo[w], lane4), look_up<0>(table, hi[w], lane4),
                   look_up<1>(table, lo[w], lane4), look_up<1>(table, hi[w], lane4), x[w].x, x[w].y);
      mma_m16n8k16(c[b], look_up<2>(table, lo[w], lane4), look_up<2>(table, hi[w], lane4),
                   look_up<3>(table, lo[w], lane4), look_up<3>(table, hi[w], lane4), x[w].z, x[w].w);
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

// ---- direct: panels straight into registers -----------------------------------------------------------

template <GemvKind kKind, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) gemv_direct(const GemvArguments a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const int panels = (a.groups + kPanelBlocks - 1) / kPanelBlocks;
  uint8_t* x_shared = shared + kTableBytes;
  float* partials = reinterpret_cast<float*>(x_shared + panels * 512);  // [2][kWarps][16], then scratch
  const Range range = my_share(a.tiles);
  const int64_t tile_bytes = static_cast<int64_t>(a.groups) * kBlockBytes;

  let_dependents_launch();
  const NormWeight weight = load_norm_weight(a, thread, kWarps * 32);
  build_pair_table(shared, thread, kWarps * 32);
  const float unscale = stage_x(a, weight, x_shared, partials, thread, kWarps * 32);

  const uint32_t table = shared_address(shared), x_address = shared_address(x_shared);
  const uint32_t lane4 = opaque(lane * 4);
  const auto load_panel = [&](int tile, int panel) {
    PanelWords p;
    const uint8_t* at = a.panels + tile * tile_bytes + panel * kPanelBytes;
    const int blocks = min(kPanelBlocks, a.groups - panel * kPanelBlocks);
    const uint8_t* scales = at + blocks * kBlockCodes;
#pragma unroll
    for (int b = 0; b < kPanelBlocks; ++b)
      p.block[b] = b < blocks ? load_weights_16(at + b * kBlockCodes + lane * 16) : make_uint4(0, 0, 0, 0);
    const auto load = [&](int offset) { return uint32_t(*reinterpret_cast<const uint16_t*>(scales + offset)); };
    p.scale_lo = narrow_scales(load, g, blocks, t & 1);
    p.scale_hi = narrow_scales(load, g + 8, blocks, t & 1);
    return p;
  };
  Best best = {-INFINITY, -1};
  uint4 x[2] = {};
  int buffer = 0;
  for (int tile = range.begin; tile < range.end; ++tile, buffer ^= 1) {
    const float added = warp == 0 ? addend<kKind>(a, tile, lane) : 0.0f;
    float row_g = 0.0f, row_g8 = 0.0f;
    for (int panel = warp; panel < panels; panel += kWarps) {
      const PanelWords p = load_panel(tile, panel);
      load_x(x, x_address, panel, lane);
      const float2 sum = multiply_panel(p, x, table, lane4, t & 1);
      row_g += sum.x;
      row_g8 += sum.y;
    }
    float* mine = partials + (buffer * kWarps + warp) * kTileRows;
    if (t == 0) {
      mine[g] = row_g;
      mine[g + 8] = row_g8;
    }
    __syncthreads();
    if (warp == 0) {
      float sum = 0.0f;
      for (int w = 0; w < min(kWarps, panels); ++w) sum += partials[(buffer * kWarps + w) * kTileRows + (lane & 15)];
      finish_tile<kKind>(a, tile, lane, sum * unscale, added, best);
    }
  }
  if (warp == 0) finish_cta<kKind>(a, lane, best);
}

// ---- ring: one producer lane streams, consumers never touch global memory -----------------------------

template <int kWarps, int kStages>
struct Ring {  // byte offsets inside dynamic shared memory
  static constexpr int kStageBytes = kWarps * kPanelBytes;
  static constexpr int kPartials = kStages * kWarps * kTileRows * 4;
  static constexpr int kBarriers = 3 * kStages * 8;
  static constexpr int kScratch = (kWarps + 2) * 4;
  static __host__ __device__ constexpr int bytes(int panels) {
    return kTableBytes + panels * 512 + kStages * kStageBytes + kPartials + kBarriers + kScratch;
  }
};

// One arrival per warp is enough: __syncwarp orders the other lanes' accesses before it. racecheck does not follow
// that step, so a build with -DDECODEV2_EVERY_LANE_ARRIVES lets it see every lane (same algorithm, more arrivals).
#ifdef DECODEV2_EVERY_LANE_ARRIVES
[[maybe_unused]] constexpr int kArrivals = 32;
#else
[[maybe_unused]] constexpr int kArrivals = 1;
#endif

template <GemvKind kKind, int kWarps, int kStages, int kPerSm>
__global__ void __launch_bounds__((kWarps + 2) * 32, kPerSm) gemv_ring(const GemvArguments a) {
#ifdef DECODEV2_HOPPER
  using R = Ring<kWarps, kStages>;
  constexpr int kThreads = (kWarps + 2) * 32;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int panels = (a.groups + kPanelBlocks - 1) / kPanelBlocks;
  const int tile_bytes = a.groups * kBlockBytes;
  uint8_t* x_shared = shared + kTableBytes;
  uint8_t* ring = x_shared + panels * 512;
  float* partials = reinterpret_cast<float*>(ring + kStages * R::kStageBytes);
  const uint32_t full = shared_address(partials) + R::kPartials;  // bytes of a stage have landed
  const uint32_t summed = full + kStages * 8;                     // its consumers have stored their sums
  const uint32_t empty = summed + kStages * 8;                    // its sums are read: refill
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

  if (thread == kWarps * 32) {  // the producer lane: weights are constants, start before the wait
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(summed + i * 8, kWarps * kArrivals);
      barrier_init(empty + i * 8, kArrivals);
    }
    barriers_visible();
    const uint64_t policy = evict_first_policy();
    for (int s = 0; s < min(kStages, stages); ++s) issue(s, s, policy);
  }
  let_dependents_launch();
  const NormWeight weight = load_norm_weight(a, thread, kThreads);
  build_pair_table(shared, thread, kThreads);
  const float unscale = stage_x(a, weight, x_shared, scratch, thread, kThreads);

  if (warp == kWarps) {  // producer
    if (lane == 0) {
      const uint64_t policy = evict_first_policy();
      for (int s = kStages; s < stages; ++s) {
        const int slot = s % kStages;
        barrier_wait(empty + slot * 8, (s / kStages - 1) & 1);
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
      const int count = min(kWarps, total - s * kWarps);
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
      if (lane < kArrivals) barrier_arrive(empty + slot * 8);
      if (++slot == kStages) slot = 0, phase ^= 1;
    }
    if (in_tile != 0 && total) {  // the CTA behind has the tile's last panels
      sum += __shfl_xor_sync(~0u, sum, 16);
      finish_shared_tile<kKind>(a, tile, false, lane, sum, unscale, added, best);
    }
    finish_cta<kKind>(a, lane, best);
    return;
  }

  // consumers: warp w takes panel w of every stage
  const int g = lane >> 2, t = lane & 3;
  const uint32_t lane4 = opaque(lane * 4), lane16 = opaque(lane * 16), table = shared_address(shared);
  const uint32_t x_address = shared_address(x_shared), ring_address = shared_address(ring);
  const uint32_t full_scales = opaque(kPanelBlocks * kBlockCodes + g * 8 + (t & 1) * 4);
  const int tail = a.groups % kPanelBlocks;  // blocks of a narrow last panel, 0 when there is none
  uint4 x[2] = {};
  int panel = (from_panel + warp) % panels, tiles_ahead = (from_panel + warp) / panels;  // of this warp's panel, from
  int first = from_panel;  // the stage's first tile; and the place in its tile of the stage's first panel
  int loaded = -1, slot = 0, phase = 0;
  for (int s = 0; s < stages; ++s) {
    barrier_wait(full + slot * 8, phase);
    if (s * kWarps + warp < total) {
      const uint32_t at = ring_address + slot * R::kStageBytes + tiles_ahead * tile_bytes + (panel - first) * kPanelBytes;
      PanelWords p;
#pragma unroll
      for (int b = 0; b < kPanelBlocks; ++b) p.block[b] = load_shared_16(at + b * kBlockCodes + lane16);
      if (tail == 0 || panel < panels - 1) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(p.scale_lo) : "r"(at + full_scales) : "memory");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(p.scale_hi) : "r"(at + full_scales + 64) : "memory");
      } else {  // what lies behind the narrow panel meets x = 0 and scale 0
        const auto load = [&](int offset) { return load_shared_2(at + tail * kBlockCodes + offset); };
        p.scale_lo = narrow_scales(load, g, tail, t & 1);
        p.scale_hi = narrow_scales(load, g + 8, tail, t & 1);
      }
      if (panel != loaded) {
        load_x(x, x_address, panel, lane);
        loaded = panel;
      }
      const float2 sum = multiply_panel(p, x, table, lane4, t & 1);
      if (t == 0) {
        float* mine = partials + (slot * kWarps + warp) * kTileRows;
        mine[g] = sum.x;
        mine[g + 8] = sum.y;
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
  }
#endif
}

// ---- host ---------------------------------------------------------------------------------------------

template <typename Kernel>
cudaError_t start(Kernel kernel, const GemvArguments& a, int threads, int shared, int per_sm, const GemvPlan& plan,
                  cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int grid = min(a.tiles, plan.multiprocessors * per_sm);
  return launch(kernel, grid, threads, shared, stream, plan.pdl, a);
}

int direct_shared_bytes(int panels) { return kTableBytes + panels * 512 + 2 * 16 * kTileRows * 4; }

template <GemvKind kKind>
cudaError_t dispatch(const GemvArguments& a, const GemvPlan& plan, cudaStream_t stream) {
  const int panels = (a.groups + kPanelBlocks - 1) / kPanelBlocks;
  switch (plan.variant) {
    case GemvVariant::kRing8x2:
      return start(gemv_ring<kKind, 8, 2, 2>, a, 320, Ring<8, 2>::bytes(panels), 2, plan, stream);
    case GemvVariant::kRing16x4:
      return start(gemv_ring<kKind, 16, 4, 1>, a, 576, Ring<16, 4>::bytes(panels), 1, plan, stream);
    case GemvVariant::kRing16x3:
      return start(gemv_ring<kKind, 16, 3, 1>, a, 576, Ring<16, 3>::bytes(panels), 1, plan, stream);
    default:
      return start(gemv_direct<kKind, 16>, a, 512, direct_shared_bytes(panels), 1, plan, stream);
  }
}

}  // namespace

// Small shared memory lets two CTAs share an SM and the next kernel start early (programmatic launch); wide
// inputs need the room for x. Measured on an H200, see the notebooks.
GemvVariant choose_gemv_variant(int groups, int tiles, int compute_capability) {
  if (compute_capability < 90) return GemvVariant::kDirect;
  const int panels = (groups + kPanelBlocks - 1) / kPanelBlocks;
  if (Ring<8, 2>::bytes(panels) <= 113 * 1024 && tiles < 4096) return GemvVariant::kRing8x2;
  if (Ring<16, 4>::bytes(panels) <= 227 * 1024) return GemvVariant::kRing16x4;
  if (Ring<16, 3>::bytes(panels) <= 227 * 1024) return GemvVariant::kRing16x3;
  return GemvVariant::kDirect;
}

int gemv_shared_bytes(GemvVariant variant, int groups) {
  const int panels = (groups + kPanelBlocks - 1) / kPanelBlocks;
  switch (variant) {
    case GemvVariant::kRing8x2: return Ring<8, 2>::bytes(panels);
    case GemvVariant::kRing16x4: return Ring<16, 4>::bytes(panels);
    case GemvVariant::kRing16x3: return Ring<16, 3>::bytes(panels);
    default: return direct_shared_bytes(panels);
  }
}

bool gemv_shares_tiles(GemvKind kind, int groups, int tiles, const GemvPlan& plan) {
  if (kind != GemvKind::kPlain || plan.variant == GemvVariant::kDirect) return false;
  const int64_t ctas = plan.multiprocessors * (plan.variant == GemvVariant::kRing8x2 ? 2 : 1);
  if (tiles <= ctas) return false;  // a tile would lie between three
  // waiting for the other half of a tile costs about a microsecond, 4.4 MB of stream
  const int64_t idle_tiles = (tiles + ctas - 1) / ctas * ctas - tiles;
  return idle_tiles * groups * kBlockBytes > 5'000'000;
}

cudaError_t chr_nf4_gemv(const GemvArguments& a, GemvKind kind, const GemvPlan& plan, cudaStream_t stream) {
  switch (kind) {
    case GemvKind::kSwiglu: return chr_nf4_gemv_swiglu(a, plan, stream);
    case GemvKind::kHead: return dispatch<GemvKind::kHead>(a, plan, stream);
    default: return dispatch<GemvKind::kPlain>(a, plan, stream);
  }
}

cudaError_t chr_nf4_gemv_qkv(const GemvArguments& a, const GemvPlan& plan, cudaStream_t stream) {
  return dispatch<GemvKind::kPlain>(a, plan, stream);
}

cudaError_t chr_nf4_gemv_swiglu(const GemvArguments& a, const GemvPlan& plan, cudaStream_t stream) {
  return dispatch<GemvKind::kSwiglu>(a, plan, stream);
}

}  // namespace decodev2
