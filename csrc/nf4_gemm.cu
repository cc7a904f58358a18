// y = W x for many columns, W packed NF4: prompt chunks on the tensor cores.
//
// Computes  plain   y[j][r] = s * sum_k W[r][k] x[j][k] (+ bias[r]) (+ residual[j][r])
//           swiglu  y[j][u] = silu(gate row u . x[j]) * (up row u . x[j])
//           x may be normed on the way in: x * rsqrt(mean(x^2) + eps) * norm_weight
// Owns      prepare_columns: a CTA owns one column of x and writes it as half fragments, scaled by
//           a power of two.
//           nf4_gemm: a CTA owns a row group (whole tiles) and one of `splits` ranges of K and
//           takes the column blocks in turn. Warp (k group, pair) owns up to two 16-row tiles x one
//           slice of that range x all columns of the block. Slices are added in K order: in shared
//           memory, then, with splits > 1, by the warp that arrives last. Every order of addition
//           depends on (rows, cols, device) alone: bits repeat, and a column's bits depend neither
//           on its neighbours nor on how many columns a call has.
// Grid      prepare_columns: one CTA of 512 threads per padded column.
//           nf4_gemm: min(row groups * splits, SMs) CTAs of 384 threads
// Shared    pair table | ring of weights, each warp's own | ring of column fragments, shared by the
//           warps of a k group; the sums of the warps lie over the weights at the end
// Layout    weights: panels of nf4.cuh.
//           columns: [column block][k block of 64][8 columns][2][32 lanes][16 B]; half i of lane
//           (g, t) is column g, k = 32 i + {0, 1, 8, 9, 16, 17, 24, 25} + 2 t: b0, b1 of two MMAs
// Floor     the larger of rows * K_pad * 17 / 32 bytes at the card's read rate and
//           2 * rows * cols * n operations at its tensor rate
// Variants  plain   cp.async, block by block, 32 KB table (one more shift per look-up); any card;
//                   8, 16 or 32 columns per pass over the weights
//           bulk    bulk copies of whole panels, 64 KB table; sm_90 and newer with 227 KB of shared
//                   memory; 8, 16, 32, 48 or 64 columns per pass
#include "nf4_gemm.cuh"

namespace decodev2 {
namespace {

// ---- L2 policies and arrivals --------------------------------------------------------------------

#ifdef DECODEV2_HOPPER

// Volatile: made where it is used, not held in registers.
__device__ __forceinline__ uint64_t keep_in_l2() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t drop_from_l2() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Arrives once u and v are known. An arrive may overtake loads from shared memory that are still on
// their way; u and v are sums of what was loaded last.
__device__ __forceinline__ void arrive_after(uint32_t barrier, float u, float v) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.f32 p, %1, %2;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "@!p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
      "f"(u), "f"(v)
      : "memory");
}

#endif  // DECODEV2_HOPPER

__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  const uint4 v = load_shared_16(address);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                     __uint_as_float(v.w));
}

// ---- 32 KB pair table ---------------------------------------------------------------------------

__device__ __forceinline__ void build_compact_table(uint8_t* table, int thread, int threads) {
  for (int i = thread; i < 256 * 8; i += threads) {
    const int byte = i >> 3;
    const half2 pair = __floats2half2_rn(kNf4Levels[byte & 15], kNf4Levels[byte >> 4]);
    const uint32_t v = *reinterpret_cast<const uint32_t*>(&pair);
    *reinterpret_cast<uint4*>(table + i * 16) = make_uint4(v, v, v, v);
  }
}

template <int kByte>
__device__ __forceinline__ uint32_t look_up_compact(uint32_t table, uint32_t word, uint32_t lane4) {
  const uint32_t row = kByte == 0 ? word << 7 : word >> (8 * kByte - 7);
  uint32_t d;
  asm("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(table + ((row & 0x7f80u) | lane4)));
  return d;
}

template <int kByte, GemmVariant kVariant>
__device__ __forceinline__ uint32_t level_pair(uint32_t table, uint32_t word, uint32_t lane4) {
  if constexpr (kVariant == GemmVariant::kPlain)
    return look_up_compact<kByte>(table, word, lane4);
  else
    return look_up<kByte>(table, word, lane4);
}

// ---- one step of a warp: kTiles tiles x 64 k x all columns --------------------------------------

struct KernelArguments {
  const uint8_t* panels;
  const uint8_t* columns;
  const float* column_scale;
  const float* bias;
  const float* residual;
  float* y;
  float* partials;     // [column block][split][tile][column tile][32 lanes][4]
  unsigned* arrivals;  // [column block][row group][warp]
  int64_t ld_y;
  int n;
  int rows;
  int groups;
  int tiles;
  int pairs;
  int k_groups;
  int row_groups;
  int splits;
  int column_blocks;
  int depth;
  int tiles_each;  // tiles of a row group; the first tiles_more have one more
  int tiles_more;
  int blocks_each;  // the same for blocks of K and slices
  int blocks_more;
  bool swiglu;
};

struct StepAddresses {  // in shared memory
  uint32_t codes;       // this lane's 16 B of tile 0
  uint32_t scale_lo;    // of row g, tile 0
  uint32_t scale_hi;    // of row g + 8
  uint32_t columns;     // this lane's 16 B of column tile 0
};

template <int kTiles, int kColumnTiles, GemmVariant kVariant>
__device__ __forceinline__ void multiply_step(float (&sum)[2][kColumnTiles][4],
                                              const StepAddresses& at, uint32_t table,
                                              uint32_t lane4) {
  // from tile to tile, in bytes
  constexpr int kCodesApart = kVariant == GemmVariant::kBulk ? kPanelBytes : kBlockCodes;
  constexpr int kScalesApart =
      kVariant == GemmVariant::kBulk ? kPanelBytes : Shared<GemmVariant::kPlain>::kScaleSlot;
  uint32_t a[kTiles][4][4];
  float scale_lo[kTiles], scale_hi[kTiles];
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    const uint4 words = load_shared_16(at.codes + r * kCodesApart);
    scale_lo[r] = __half2float(__ushort_as_half(load_shared_2(at.scale_lo + r * kScalesApart)));
    scale_hi[r] = __half2float(__ushort_as_half(load_shared_2(at.scale_hi + r * kScalesApart)));
    const uint32_t lo[2] = {words.x, words.y}, hi[2] = {words.z, words.w};
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      a[r][2 * w][0] = level_pair<0, kVariant>(table, lo[w], lane4);
      a[r][2 * w][1] = level_pair<0, kVariant>(table, hi[w], lane4);
      a[r][2 * w][2] = level_pair<1, kVariant>(table, lo[w], lane4);
      a[r][2 * w][3] = level_pair<1, kVariant>(table, hi[w], lane4);
      a[r][2 * w + 1][0] = level_pair<2, kVariant>(table, lo[w], lane4);
      a[r][2 * w + 1][1] = level_pair<2, kVariant>(table, hi[w], lane4);
      a[r][2 * w + 1][2] = level_pair<3, kVariant>(table, lo[w], lane4);
      a[r][2 * w + 1][3] = level_pair<3, kVariant>(table, hi[w], lane4);
    }
  }
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
    const uint4 b01 = load_shared_16(at.columns + j * kColumnTileBytes);
    const uint4 b23 = load_shared_16(at.columns + j * kColumnTileBytes + 512);
    const uint32_t b[4][2] = {{b01.x, b01.y}, {b01.z, b01.w}, {b23.x, b23.y}, {b23.z, b23.w}};
    float c[kTiles][4] = {};
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int r = 0; r < kTiles; ++r)
        mma_m16n8k16(c[r], a[r][m][0], a[r][m][1], a[r][m][2], a[r][m][3], b[m][0], b[m][1]);
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      sum[r][j][0] = fmaf(c[r][0], scale_lo[r], sum[r][j][0]);
      sum[r][j][1] = fmaf(c[r][1], scale_lo[r], sum[r][j][1]);
      sum[r][j][2] = fmaf(c[r][2], scale_hi[r], sum[r][j][2]);
      sum[r][j][3] = fmaf(c[r][3], scale_hi[r], sum[r][j][3]);
    }
  }
}

// ---- finished sums ------------------------------------------------------------------------------

__device__ __forceinline__ void add(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

__device__ __forceinline__ float silu(float gate) { return gate / (1.0f + __expf(-gate)); }

__device__ __forceinline__ void store_row(const KernelArguments& a, int row, int column,
                                          float sum) {
  if (row >= a.rows || column >= a.n) return;
  const int64_t at = column * a.ld_y + row;
  sum *= a.column_scale[column];
  if (a.bias) sum += a.bias[row];
  if (a.residual) sum += a.residual[at];
  a.y[at] = sum;
}

__device__ __forceinline__ void store_unit(const KernelArguments& a, int unit, int column,
                                           float gate, float up) {
  if (unit >= a.rows || column >= a.n) return;
  const float scale = a.column_scale[column];
  a.y[column * a.ld_y + unit] = silu(gate * scale) * (up * scale);
}

// One 16 x 8 piece of the result in MMA order: x, y are row g, columns 2t and 2t + 1; z, w the same
// of row g + 8.
__device__ __forceinline__ void store_piece(const KernelArguments& a, int tile, int column_tile,
                                            int lane, const float4& sum) {
  const int g = lane >> 2, column = column_tile * 8 + (lane & 3) * 2;
  if (a.swiglu) {
    store_unit(a, tile * 8 + g, column, sum.x, sum.z);
    store_unit(a, tile * 8 + g, column + 1, sum.y, sum.w);
  } else {
    store_row(a, tile * kTileRows + g, column, sum.x);
    store_row(a, tile * kTileRows + g, column + 1, sum.y);
    store_row(a, tile * kTileRows + g + 8, column, sum.z);
    store_row(a, tile * kTileRows + g + 8, column + 1, sum.w);
  }
}

// Adds the splits of two pieces in order; `second` may be absent.
__device__ __forceinline__ void add_splits(float4& first_sum, float4& second_sum,
                                           const float* first, const float* second, int64_t stride,
                                           int splits) {
  constexpr int kBatch = 4;  // loads in flight for each piece
  for (int s0 = 0; s0 < splits; s0 += kBatch) {
    float4 u[kBatch], v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (s0 + i < splits) {
        u[i] = __ldcg(reinterpret_cast<const float4*>(first + (s0 + i) * stride));
        if (second) v[i] = __ldcg(reinterpret_cast<const float4*>(second + (s0 + i) * stride));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (s0 + i < splits) {
        add(first_sum, u[i]);
        if (second) add(second_sum, v[i]);
      }
    }
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

// What a warp owns of one item (row group, split). Cheap to work out, so phases do that again
// instead of holding it in registers through the multiplication.
struct Place {
  int lane;
  int k_group;
  int pair;
  int row_group;
  int split;
  int tile;         // the first of this warp's
  int tiles;        // 0, 1 or 2
  int block_begin;  // of the slice of K
  int steps;        // blocks of 64 k in it
};

__device__ __forceinline__ Place find_place(const KernelArguments& a, int item, int thread) {
  Place p;
  p.lane = thread & 31;
  const int warp = thread >> 5;
  p.k_group = over_pairs(warp, a.pairs);
  p.pair = warp - p.k_group * a.pairs + turn(a.pairs, p.k_group);
  if (p.pair >= a.pairs) p.pair -= a.pairs;
  p.row_group = a.splits == 1 ? item : item / a.splits;
  p.split = item - p.row_group * a.splits;
  const int first = a.tiles_each * p.row_group + min(p.row_group, a.tiles_more);
  const int count = a.tiles_each + (p.row_group < a.tiles_more);
  const int before = over_pairs(count * p.pair, a.pairs);
  p.tile = first + before;
  p.tiles = over_pairs(count * (p.pair + 1), a.pairs) - before;
  const int slice = p.split * a.k_groups + p.k_group;
  p.block_begin = a.blocks_each * slice + min(slice, a.blocks_more);
  p.steps = a.blocks_each + (slice < a.blocks_more);
  return p;
}

__device__ __forceinline__ int64_t block_offset(int block) {
  return static_cast<int64_t>(block >> 2) * kPanelBytes + (block & 3) * kBlockCodes;
}

// Asks the L2 for the first 4 KB of this warp's weights.
__device__ __forceinline__ void prefetch_weights(const KernelArguments& a, int item, int thread) {
  const Place p = find_place(a, item, thread);
  const int64_t from = block_offset(p.block_begin) + p.lane * 128,
                end = block_offset(p.block_begin + p.steps);
  const int64_t tile_bytes = static_cast<int64_t>(a.groups) * kBlockBytes;
  for (int r = 0; r < p.tiles; ++r)
    if (from < end) prefetch_l2(a.panels + (p.tile + r) * tile_bytes + from);
}

// Adds up what the CTA's warps left in `sums`, [warp][piece][lane][4], and, split K, what the other
// CTAs left.
template <int kColumnTiles, GemmVariant kVariant>
__device__ __forceinline__ void finish_item(const KernelArguments& a, int item, int column_block,
                                            uint32_t sums, int thread) {
  const Place p = find_place(a, item, thread);
  if (p.tiles == 0) return;
  const int pieces = p.tiles * kColumnTiles, first_column_tile = column_block * kColumnTiles;
  const int64_t stride = static_cast<int64_t>(a.tiles) * kColumnTiles * 128;  // of the splits
  float* const partials =
      a.partials +
      (static_cast<int64_t>(column_block) * a.splits * a.tiles + p.tile) * kColumnTiles * 128 +
      p.lane * 4;
  const auto store = [&](int piece, const float4& sum) {
    const int r = piece >= kColumnTiles;
    store_piece(a, p.tile + r, first_column_tile + piece - r * kColumnTiles, p.lane, sum);
  };

  // the warps of a pair share out its pieces
#pragma unroll 1
  for (int piece = p.k_group; piece < pieces; piece += a.k_groups) {
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int k = 0; k < a.k_groups; ++k)
      add(total, load_shared_float4(
                     sums + warp_of(a.pairs, k, p.pair) * Shared<kVariant>::sums(kColumnTiles) +
                     piece * 512 + p.lane * 16));
    if (a.splits == 1)
      store(piece, total);
    else
      __stcg(reinterpret_cast<float4*>(partials + p.split * stride + piece * 128), total);
  }
  if (a.splits == 1) return;

  __threadfence();
  __syncwarp();
  unsigned arrived = 0;
  unsigned* arrivals =
      a.arrivals + (column_block * a.row_groups + p.row_group) * kWarps + (thread >> 5);
  if (p.lane == 0) arrived = atomicAdd(arrivals, 1u);
  arrived = __shfl_sync(~0u, arrived, 0);
  if (arrived != static_cast<unsigned>(a.splits - 1)) return;
  if (p.lane == 0) *arrivals = 0;
  __threadfence();
#pragma unroll 1
  for (int piece = p.k_group; piece < pieces; piece += 2 * a.k_groups) {
    const int other = piece + a.k_groups;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), other_sum = sum;
    add_splits(sum, other_sum, partials + piece * 128,
               other < pieces ? partials + other * 128 : nullptr, stride, a.splits);
    store(piece, sum);
    if (other < pieces) store(other, other_sum);
  }
}

template <int kColumnTiles>
__device__ __forceinline__ void clear(float (&sum)[2][kColumnTiles][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[r][j][i] = 0.0f;
}

template <int kColumnTiles, GemmVariant kVariant>
__device__ __forceinline__ void multiply_tiles(float (&sum)[2][kColumnTiles][4], int tiles,
                                               const StepAddresses& at, uint32_t table,
                                               uint32_t lane4) {
  if (tiles == 2)
    multiply_step<2, kColumnTiles, kVariant>(sum, at, table, lane4);
  else if (tiles == 1)
    multiply_step<1, kColumnTiles, kVariant>(sum, at, table, lane4);
}

// The warp's slice of K, plain copies: every lane copies the codes it will read itself, a k group
// shares columns.
template <int kColumnTiles>
__device__ __forceinline__ void multiply_plain(float (&sum)[2][kColumnTiles][4],
                                               const KernelArguments& a, int item, int column_block,
                                               uint8_t* shared, int thread, int passed) {
  using S = Shared<GemmVariant::kPlain>;
  constexpr int kStageBytes = kColumnTiles * kColumnTileBytes;
  const Place p = find_place(a, item, thread);
  const uint32_t lane4 = opaque(p.lane * 4), lane16 = opaque(p.lane * 16),
                 table = shared_address(shared);
  const uint32_t ring =
      table + S::kTable + (thread >> 5) * (a.depth + 1) * 2 * kBlockCodes + lane16;
  const uint32_t scales = table + S::kTable + S::codes(a.depth) + (thread >> 5) * 4 * S::kScaleSlot;
  const uint32_t stages =
      table + S::kTable + S::weights(a.depth) + p.k_group * a.depth * kStageBytes;
  const uint32_t tile_bytes = a.groups * kBlockBytes;
  const int block_end = p.block_begin + p.steps;
  const auto panel_width = [&](int block) { return min(kPanelBlocks, a.groups - (block & ~3)); };
  const auto scale_slot = [&](int block) {
    return scales + ((block >> 2) & 1) * 2 * S::kScaleSlot;
  };

  const auto fetch_weights = [&](int block, int slot) {
    if (block < block_end) {
      const int in_panel = block & 3, width = panel_width(block);
      const uint8_t* from = a.panels + static_cast<int64_t>(opaque(p.tile)) * tile_bytes +
                            block_offset(block) + lane16;
      const uint32_t to = ring + slot * 2 * kBlockCodes, scales_to = scale_slot(block) + lane16;
      const int scales_behind = (width - in_panel) * kBlockCodes;
      const bool new_panel = (in_panel == 0 || block == p.block_begin) && p.lane < 2 * width;
      if (p.tiles > 0) {
        copy_16(to, from);
        if (new_panel) copy_16(scales_to, from + scales_behind);
      }
      if (p.tiles > 1) {
        from += tile_bytes;
        copy_16(to + kBlockCodes, from);
        if (new_panel) copy_16(scales_to + S::kScaleSlot, from + scales_behind);
      }
    }
    commit_copies();
  };
  const auto fetch_columns = [&](int block, int stage) {
    if (block < block_end) {
      const uint8_t* from =
          a.columns + (static_cast<int64_t>(column_block) * a.groups + block) * kStageBytes;
      const uint32_t to = stages + stage * kStageBytes;
      for (uint32_t i = (p.pair * 32 + p.lane) * 16; i < kStageBytes; i += a.pairs * 512)
        copy_16(to + i, from + i);
    }
    commit_copies();
  };

  fetch_weights(p.block_begin, 0);
  if (passed == 0) {  // weights are constants: fetch them before the kernels in front are done
    prefetch_weights(a, item, thread);
    let_dependents_launch();
    build_compact_table(shared, thread, kThreads);
    __syncthreads();
    wait_for_predecessors();
  }
#pragma unroll 1
  for (int i = 0; i < a.depth - 1; ++i) {
    fetch_columns(p.block_begin + i, i);
    fetch_weights(p.block_begin + i + 1, i + 1);
  }
  int stage = 0, slot = 0;
  clear(sum);
#pragma unroll 1
  for (int block = p.block_begin; block < block_end; ++block) {
    // columns and weights of this step have landed: all but the newest 2 depth - 3 groups of copies
    if (a.depth == 2)
      wait_copies<1>();
    else if (a.depth == 3)
      wait_copies<3>();
    else
      wait_copies<5>();
    meet(1 + p.k_group, a.pairs * 32);
    // into the room of the step before
    fetch_columns(block + a.depth - 1, (stage == 0 ? a.depth : stage) - 1);
    fetch_weights(block + a.depth, (slot == 0 ? a.depth + 1 : slot) - 1);

    const int width = panel_width(block);
    StepAddresses at;
    at.codes = ring + slot * 2 * kBlockCodes;
    at.scale_lo = scale_slot(block) + ((p.lane >> 2) * width + (block & 3)) * 2;
    at.scale_hi = at.scale_lo + 16 * width;
    at.columns = stages + stage * kStageBytes + lane16;
    multiply_tiles<kColumnTiles, GemmVariant::kPlain>(sum, p.tiles, at, table, lane4);
    if (++stage == a.depth) stage = 0;
    if (++slot == a.depth + 1) slot = 0;
  }
}

#ifdef DECODEV2_HOPPER

// Bulk copies bring whole panels for one warp and one block of columns for a k group. One lane of
// each warp asks for the warp's weights, the first warp of a k group for its columns. `passed`:
// items this CTA has finished; a CTA that has several keeps its slice of K, so it tells where the
// rings stand.
template <int kColumnTiles>
__device__ __forceinline__ void multiply_bulk(float (&sum)[2][kColumnTiles][4],
                                              const KernelArguments& a, int item, int column_block,
                                              uint8_t* shared, int thread, int passed) {
  using S = Shared<GemmVariant::kBulk>;
  constexpr int kStageBytes = kColumnTiles * kColumnTileBytes;
  const Place p = find_place(a, item, thread);
  const uint32_t lane4 = opaque(p.lane * 4), table = shared_address(shared);
  // [2 slots][2 tiles] of panels, 2 barriers: a slot has landed
  const uint32_t weights = opaque(table + S::kTable + (thread >> 5) * S::kWarpWeights);
  // barriers: a stage has landed, a stage is free; then the stages
  const uint32_t columns =
      opaque(table + S::kTable + S::weights(0) + p.k_group * S::columns(a.depth, kStageBytes));
  const int block_end = p.block_begin + p.steps;
  const auto panel_width = [&](int block) { return min(kPanelBlocks, a.groups - (block & ~3)); };

  // Only lane 0 needs these, and rarely: no registers of all lanes for them.
  struct Sources {
    const uint8_t* panels;   // of the warp's first tile
    const uint8_t* columns;  // of the column block
  };
  Sources* const sources = reinterpret_cast<Sources*>(shared + (weights - table) + S::kSources);
  if (p.lane == 0) {
    sources->panels = a.panels + static_cast<int64_t>(p.tile) * a.groups * kBlockBytes;
    sources->columns = a.columns + static_cast<int64_t>(column_block) * a.groups * kStageBytes;
  }
  // from `block` to the end of its panel or of the slice
  const auto fetch_weights = [&](int block, int slot) {
    if (p.lane != 0 || block >= block_end) return;
    const uint64_t policy = a.column_blocks > 1 ? keep_in_l2() : drop_from_l2();
    const int in_panel = block & 3, width = panel_width(block),
              end = min(width, block_end - (block & ~3));
    const uint32_t scales = width * 32, tile_bytes = a.groups * kBlockBytes;
    uint32_t bytes = (end - in_panel) * kBlockCodes;
    if (end == width) bytes += scales;  // the scales follow at once
    const uint8_t* from = sources->panels + block_offset(block);
    uint32_t to = weights + slot * 2 * kPanelBytes + in_panel * kBlockCodes;
    const uint32_t full = weights + S::kSlotFull + slot * 8;
    barrier_expect(full, p.tiles * (bytes + (end == width ? 0 : scales)));
#pragma unroll 1
    for (int r = 0; r < p.tiles; ++r) {
      bulk_copy(to, from, bytes, full, policy);
      const int behind = (width - in_panel) * kBlockCodes;
      if (end != width) bulk_copy(to + behind, from + behind, scales, full, policy);
      from += tile_bytes;
      to += kPanelBytes;
    }
  };
  const bool leads = p.lane == 0 && p.pair == 0;       // the k group
  const auto fetch_columns = [&](int block, int at) {  // `at` may run into the next two rounds
    if (!leads || block >= block_end) return;
    if (at >= 2 * a.depth) at -= 2 * a.depth;
    const int phase = at >= a.depth, stage = at - phase * a.depth;
    const uint8_t* from = sources->columns + static_cast<int64_t>(block) * kStageBytes;
    const uint32_t full = columns + stage * 8;
    // free since the round before; the first round passes
    barrier_wait(columns + S::kStageFree + stage * 8, phase ^ 1);
    barrier_expect(full, kStageBytes);
    bulk_copy(columns + S::kStages + stage * kStageBytes, from, kStageBytes, full, keep_in_l2());
  };

  if (passed == 0) {
    if (p.lane == 0) {
      barrier_init(weights + S::kSlotFull, 1);
      barrier_init(weights + S::kSlotFull + 8, 1);
      if (p.pair == 0) {
#pragma unroll 1
        for (int stage = 0; stage < a.depth; ++stage) {
          barrier_init(columns + stage * 8, 1);
          barrier_init(columns + S::kStageFree + stage * 8, a.pairs);
        }
      }
      barriers_visible();
    }
    __syncthreads();
  }
  const int panels = p.steps == 0 ? 0 : (block_end - 1) / 4 - p.block_begin / 4 + 1;
  int panel = passed * panels;  // counts on; its low bit is the slot, the next one the phase
  // through two rounds of the stages: phase 0, then phase 1
  int position = passed * p.steps % (2 * a.depth);
#pragma unroll 1
  for (int i = 0; i < 2; ++i)
    fetch_weights(i == 0 ? p.block_begin : (p.block_begin | 3) + 1, (panel + i) & 1);
  if (passed == 0) {  // weights are constants: fetch them before the kernels in front are done
    let_dependents_launch();
    build_pair_table(shared, thread, kThreads);
    __syncthreads();
    wait_for_predecessors();
  }
#pragma unroll 1
  for (int i = 0; i < a.depth - 1; ++i) fetch_columns(p.block_begin + i, position + i);

  clear(sum);
#pragma unroll 1
  for (int block = p.block_begin; block < block_end; ++block) {
    // depth - 1 steps ahead, into the room of the step before
    fetch_columns(block + a.depth - 1, position + a.depth - 1);
    const uint32_t slot = weights + (panel & 1) * 2 * kPanelBytes;
    const int width = panel_width(block);
    StepAddresses at;
    at.codes = slot + (block & 3) * kBlockCodes + p.lane * 16;
    at.scale_lo = slot + width * kBlockCodes + ((p.lane >> 2) * width + (block & 3)) * 2;
    at.scale_hi = at.scale_lo + 16 * width;
    const int phase = position >= a.depth, stage = position - phase * a.depth;
    at.columns = columns + S::kStages + stage * kStageBytes + p.lane * 16;
    barrier_wait(weights + S::kSlotFull + (panel & 1) * 8, panel >> 1 & 1);
    barrier_wait(columns + stage * 8, phase);
    multiply_tiles<kColumnTiles, GemmVariant::kBulk>(sum, p.tiles, at, table, lane4);
    __syncwarp();
    if (p.lane == 0) {
      const int used = opaque(position);  // the stage, worked out again rather than held
      arrive_after(columns + S::kStageFree + (used >= a.depth ? used - a.depth : used) * 8,
                   sum[0][kColumnTiles - 1][0], sum[1][kColumnTiles - 1][0]);
    }
    if (++position == 2 * a.depth) position = 0;
    if ((block & 3) == 3) {
      fetch_weights(block + 5, panel & 1);  // the panel after the next takes this one's room
      ++panel;
    }
  }
}

#endif  // DECODEV2_HOPPER

template <int kColumnTiles, GemmVariant kVariant>
__global__ void __launch_bounds__(kThreads, 1) nf4_gemm(const KernelArguments a) {
  uint8_t* const shared = dynamic_shared();
  // items: the column blocks of one row group and split, then of the next
  for (int passed = 0;; ++passed) {
    const int item = blockIdx.x + passed / a.column_blocks * gridDim.x,
              column_block = passed % a.column_blocks;
    if (item >= a.row_groups * a.splits) break;
    float sum[2][kColumnTiles][4];
    int thread = opaque(threadIdx.x);  // so that nothing made of it is kept from item to item
    if constexpr (kVariant == GemmVariant::kPlain) {
      multiply_plain<kColumnTiles>(sum, a, item, column_block, shared, thread, passed);
      __syncthreads();  // the rings are drained: sums take their room
    } else {
#ifdef DECODEV2_HOPPER
      multiply_bulk<kColumnTiles>(sum, a, item, column_block, shared, thread, passed);
#endif
    }

    thread = opaque(threadIdx.x);
    const uint32_t sums = shared_address(shared) + Shared<kVariant>::kTable;
    const uint32_t mine =
        sums + (thread >> 5) * Shared<kVariant>::sums(kColumnTiles) + (thread & 31) * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
        store_shared_float4(mine + (r * kColumnTiles + j) * 512,
                            make_float4(sum[r][j][0], sum[r][j][1], sum[r][j][2], sum[r][j][3]));
    __syncthreads();
    const int again = opaque(passed);
    finish_item<kColumnTiles, kVariant>(a, blockIdx.x + again / a.column_blocks * gridDim.x,
                                        again % a.column_blocks, sums, thread);
    if constexpr (kVariant == GemmVariant::kBulk) before_bulk_copies();
    __syncthreads();  // the sums are read: the rings may fill again
  }
}

template <int kColumnTiles, GemmVariant kVariant>
cudaError_t start(const KernelArguments& a, const Schedule& s, bool pdl, cudaStream_t stream) {
  const auto kernel = nf4_gemm<kColumnTiles, kVariant>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, s.shared_bytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, s.grid, kThreads, s.shared_bytes, stream, pdl, a);
}

template <GemmVariant kVariant>
cudaError_t start_columns(const KernelArguments& a, const Schedule& s, bool pdl,
                          cudaStream_t stream) {
  switch (s.column_tiles) {
    case 1:
      return start<1, kVariant>(a, s, pdl, stream);
    case 2:
      return start<2, kVariant>(a, s, pdl, stream);
    case 4:
      return start<4, kVariant>(a, s, pdl, stream);
    default:
      break;
  }
  if constexpr (kVariant == GemmVariant::kBulk)
    return s.column_tiles == 6 ? start<6, kVariant>(a, s, pdl, stream)
                               : start<8, kVariant>(a, s, pdl, stream);
  return cudaErrorInvalidConfiguration;
}

enum Parts { kBothLaunches, kPrepareOnly, kMatrixOnly };  // one alone is for timing

cudaError_t launch_scheduled(const GemmArguments& a, bool swiglu, const GemmPlan& plan,
                             const Schedule& s, cudaStream_t stream, int parts = kBothLaunches) {
  const Workspace w = divide_workspace(a.tiles, a.groups, s);
  if (a.workspace_bytes < w.bytes || reinterpret_cast<uintptr_t>(a.workspace) % 16)
    return cudaErrorInvalidValue;

  PrepareArguments p = {};
  p.x = a.x;
  p.norm_weight = a.norm_weight;
  p.columns = a.workspace;
  p.column_scale = reinterpret_cast<float*>(a.workspace + w.column_scale);
  p.arrivals = reinterpret_cast<unsigned*>(a.workspace + w.arrivals);
  p.ld_x = a.ld_x;
  p.eps = a.eps;
  p.n = a.n;
  p.cols = a.cols;
  p.groups = a.groups;
  p.column_tiles = s.column_tiles;
  p.arrival_count = arrival_count(s);
  if (parts != kMatrixOnly) {
    const cudaError_t error = launch(prepare_columns, s.column_blocks * s.column_tiles * 8,
                                     kPrepareThreads, 0, stream, plan.pdl, p);
    if (error != cudaSuccess || parts == kPrepareOnly) return error;
  }

  KernelArguments k = {};
  k.panels = a.panels;
  k.columns = a.workspace;
  k.column_scale = p.column_scale;
  k.bias = a.bias;
  k.residual = a.residual;
  k.y = a.y;
  k.partials = reinterpret_cast<float*>(a.workspace + w.partials);
  k.arrivals = p.arrivals;
  k.ld_y = a.ld_y;
  k.n = a.n;
  k.rows = a.rows;
  k.groups = a.groups;
  k.tiles = a.tiles;
  k.pairs = s.pairs;
  k.k_groups = s.k_groups;
  k.row_groups = s.row_groups;
  k.splits = s.splits;
  k.column_blocks = s.column_blocks;
  k.depth = s.depth;
  k.tiles_each = a.tiles / s.row_groups;
  k.tiles_more = a.tiles % s.row_groups;
  k.blocks_each = a.groups / (s.splits * s.k_groups);
  k.blocks_more = a.groups % (s.splits * s.k_groups);
  k.swiglu = swiglu;
  return plan.variant == GemmVariant::kBulk
             ? start_columns<GemmVariant::kBulk>(k, s, plan.pdl, stream)
             : start_columns<GemmVariant::kPlain>(k, s, plan.pdl, stream);
}

}  // namespace

GemmVariant choose_gemm_variant(int compute_capability, int shared_limit) {
  return compute_capability >= 90 && shared_limit >= 227 * 1024 ? GemmVariant::kBulk
                                                                : GemmVariant::kPlain;
}

size_t gemm_workspace_bytes(int tiles, int groups, int n, const GemmPlan& plan) {
  Schedule s;
  if (tiles <= 0 || groups <= 0 || n <= 0 || !make_schedule(tiles, groups, n, plan, &s)) return 0;
  return divide_workspace(tiles, groups, s).bytes;
}

cudaError_t chr_nf4_gemm(const GemmArguments& a, GemmKind kind, const GemmPlan& plan,
                            cudaStream_t stream) {
  const bool swiglu = kind == GemmKind::kSwiglu;
  if (a.n <= 0 || a.rows <= 0 || a.cols <= 0 || a.groups != divide_up(a.cols, kGroup) ||
      a.tiles != divide_up(a.rows, swiglu ? kTileRows / 2 : kTileRows) || a.ld_x < a.cols ||
      a.ld_y < a.rows || (swiglu && (a.bias || a.residual)))
    return cudaErrorInvalidValue;
  Schedule s;
  if (!make_schedule(a.tiles, a.groups, a.n, plan, &s)) return cudaErrorInvalidConfiguration;
  return launch_scheduled(a, swiglu, plan, s, stream);
}

}  // namespace decodev2
