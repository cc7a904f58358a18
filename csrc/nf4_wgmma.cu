// y = W x for many columns, W packed NF4: chunks of a prompt on the tensor cores of sm_90a. For any number of them;
// below 17 nf4_gemm.cu takes its place (linear.py).
//
// Computes  what nf4_gemm.cu computes, with one more rounding: level times scale is rounded to half.
// Owns      stage_columns: a CTA owns one column of x and writes it as half, scaled by a power of two.
//           nf4_wgmma: a pair of CTAs owns 2 x 128 rows x kColumns columns, and `splits` pairs, a cluster, the parts of
//           K. A cluster takes its items in turn. In a CTA a producer lane brings the weights, another one half of
//           the pair's columns for both of them; 8 consumer warps, two warpgroups, have a 16-row tile each. A warp
//           looks the levels of 16 rows x 64 k up, multiplies them by their scales and keeps them in registers as
//           the left operand, while the products of the 64 k before run (two sets of registers). With splits > 1
//           every CTA leaves its sums in its shared memory, and each adds a share of them, in the order of K.
//           Orders of addition depend on (rows, cols, device) alone: bits repeat, and a column's bits depend neither
//           on its neighbours nor on how many columns a call has.
// Grid      stage_columns: one CTA of 512 threads per padded column
//           nf4_wgmma: 384 threads (two warpgroups and the producers'), at most a CTA per SM, clusters of 2 * splits
// Shared    ring of columns (later the sums) | ring of weights | 64 KB pair table | barriers
// Layout    weights: panels of nf4.cuh; a CTA's stage is a panel of each of its 8 tiles.
//           columns: half tiles [k block of 64][padded columns][128 B], swizzled as right_operand() says, then
//           [padded columns] float32 that undo the scaling. Padded are 64, 128 or a multiple of 256: n alone decides.
//           y_columns: the same, all columns scaled by kActScale; 128 rows of gate and up are one k block of it.
// Floor     the largest of three. Cycles of an SM for 128 rows x 64 k x N columns, N = 64 / 128 / 256:
//             tensor cores  4 x 2 products of 64 x N x 16, N / 2 cycles each            256 /  512 / 1024
//             shared memory 128 B a cycle: 16 look-ups, 4 + 2 reads for each of 8 blocks  176 / 176 / 176
//                           columns as right operand, by each of two warpgroups           128 / 256 / 512
//                           columns and weights coming in, N + 34                           98 / 162 / 290
//                           together                                                      402 / 594 / 978
//             L2, about 25 B a cycle and SM: N x 64 B (half of the columns) + 4,352 B     338 / 502 / 830
//           so the look-ups bind 64 columns, and 128 by a little; 256 are bound by the tensor cores.
//           Qwen2.5-3B, a layer at 256 columns: 77.1 M weights, 39.5 GFLOP: 50 us at the 790 TFLOP/s that a dense
//           product reaches, 1.8 ms for all layers. Whole tiles cost more: gate and up are 172 x 2 tiles of 128 x
//           128 for 132 SMs, 3 rounds instead of 2.6.
// Variants  64, 128 or 256 columns per CTA (choose_columns)
#include "columns.cuh"
#include "device.cuh"
#include "launch.h"
#include "nf4.cuh"

namespace decodev2 {
namespace {

constexpr int kStageThreads = 512;
constexpr int kStageShared = 2 * kStageThreads / 32 * 4;
constexpr int kCtaTiles = 8;  // a warp's each
constexpr int kWarps = kCtaTiles;
constexpr int kConsumers = kWarps * 32;
constexpr int kThreads = kConsumers + 128;  // one warpgroup of producers, so that the others can take its registers
constexpr int kPair = 2;
constexpr int kMaxSplits = 4;      // clusters of up to 8 CTAs
constexpr int kColumnBytes = 128;  // 64 k of a column
constexpr int kWeightStage = kCtaTiles * kPanelBytes;

// Offsets in dynamic shared memory.
template <int kColumns>
struct Shared {
  static constexpr int kStage = kColumns * kColumnBytes;
  static constexpr int kStages = kColumns == 64 ? 8 : kColumns == 128 ? 6 : 4;  // of columns: a k block each
  static constexpr int kPanels = kColumns == 64 ? 4 : kColumns == 128 ? 3 : 2;  // stages of weights
  static constexpr int kWeights = kStages * kStage;
  static constexpr int kTable = kWeights + kPanels * kWeightStage;
  static constexpr int kStageFull = kTable + kTableBytes;  // barriers
  static constexpr int kStageFree = kStageFull + kStages * 8;
  static constexpr int kPanelFull = kStageFree + kStages * 8;
  static constexpr int kPanelFree = kPanelFull + kPanels * 8;
  static constexpr int kBytes = kPanelFree + kPanels * 8;
  static constexpr int kPieces = kColumns / 8;  // of a warp's sums: 16 x 8, 512 B
  static constexpr int kWarpSums = kPieces * 512;
  static_assert(kWarps * kWarpSums <= kWeights && kBytes <= 227 * 1024);
};

int divide_up(int a, int b) { return (a + b - 1) / b; }

int padded_columns(int n) { return n <= 64 ? 64 : n <= 128 ? 128 : divide_up(n, 256) * 256; }

// Where the scales lie behind the half tiles.
size_t column_scale_offset(int groups, int padded) { return static_cast<size_t>(groups) * padded * kColumnBytes; }

// ---- how a matrix is divided ----------------------------------------------------------------------------

// Clusters of `ctas` that run at once. Pairs are everywhere; larger ones stay inside a GPC, and what is left over there
// stays idle: an H200 of 132 SMs has room for 66 of 2 CTAs, but for 30 of 4 and 15 of 8, 120 SMs. One launched beyond
// that would start only when another has done all of its items.
int resident_clusters(int ctas, int multiprocessors) {
  const int clusters = (ctas == kPair ? multiprocessors : multiprocessors * 15 / 16) / ctas;
  return clusters > 0 ? clusters : 1;
}

// Microseconds of a launch on an H200, to compare divisions with each other: the clusters take their items in rounds,
// and an item costs its panels (0.6 each to look the levels up, 1 more for each 128 columns), 3 to fill the rings and
// meet, and 1 for each 32 columns to store. Splits need no term of their own: what it takes to add them up, shorter
// stores save. Fitted to the products of Qwen2.5-3B, 7B and 32B at 32 to 256 columns, every division timed: within 9 %
// (rms); what it chooses takes 0.5 % longer than the fastest division on average, 6.4 % at the most.
double microseconds(int pairs, int panels, int column_blocks, int columns, int splits, int multiprocessors) {
  const int rounds = divide_up(pairs * column_blocks, resident_clusters(kPair * splits, multiprocessors));
  return rounds * (divide_up(panels, splits) * (0.6 + columns / 128.0) + 3.0 + columns / 32.0);
}

// Up to 128 columns: all of them at once. More: blocks of 256 where their rounds come out even, else of 128.
int choose_columns(int padded, int pairs, int panels, int splits, int multiprocessors) {
  if (padded <= 128) return padded;
  const double wide = microseconds(pairs, panels, padded / 256, 256, splits, multiprocessors);
  return wide < microseconds(pairs, panels, padded / 128, 128, splits, multiprocessors) ? 256 : 128;
}

// The same for every n, so that n changes no bits: what takes 64, 128 and 256 columns together the least time.
int choose_splits(int pairs, int panels, int multiprocessors) {
  int best = 1;
  double least = 0.0;
  for (int splits = 1; splits <= kMaxSplits && splits <= panels; splits *= 2) {
    double all = 0.0;
    for (int padded = 64; padded <= 256; padded *= 2) {
      const int columns = choose_columns(padded, pairs, panels, splits, multiprocessors);
      all += microseconds(pairs, panels, padded / columns, columns, splits, multiprocessors);
    }
    if (splits == 1 || all < least) best = splits, least = all;
  }
  return best;
}

// ---- columns: float32 rows of x to half tiles -----------------------------------------------------------

struct StageArguments {
  const float* x;            // [n, cols], ld_x apart
  const float* norm_weight;  // [cols] or null
  uint8_t* columns;          // half tiles
  float* column_scale;       // [padded] undoes the scaling
  int64_t ld_x;
  float eps;
  int n;
  int cols;
  int groups;
  int padded;
};

// v[e] = row[k + e], 0 past the end. `aligned`: rows start at multiples of 16 bytes.
__device__ __forceinline__ void load_eight(float* v, const float* row, int k, int cols, bool aligned) {
  if (aligned && k + 8 <= cols) {
    const float4 lo = *reinterpret_cast<const float4*>(row + k), hi = *reinterpret_cast<const float4*>(row + k + 4);
    v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w;
    v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = k + e < cols ? row[k + e] : 0.0f;
  }
}

__global__ void __launch_bounds__(kStageThreads) stage_columns(const StageArguments a) {
  const int column = blockIdx.x, thread = threadIdx.x;
  let_dependents_launch();
  wait_for_predecessors();

  const int pieces = a.groups * 8;  // of 8 k
  const bool live = column < a.n, aligned = (a.ld_x & 3) == 0;
  const float* row = a.x + (live ? column : 0) * a.ld_x;
  uint8_t* const to = a.columns + static_cast<int64_t>(column) * kColumnBytes;
  column_to_half<kStageThreads>(
      row, live, a.norm_weight, pieces, a.cols, a.eps, reinterpret_cast<float*>(dynamic_shared()),
      a.column_scale + column, thread,
      [&](float* v, const float* from, int i, bool is_weight) {
        load_eight(v, from, 8 * i, a.cols, aligned || is_weight);
      },
      [&](int i, const half2* h) {
        *reinterpret_cast<uint4*>(to + (i >> 3) * static_cast<int64_t>(a.padded) * kColumnBytes + ((i ^ column) & 7) * 16) =
            *reinterpret_cast<const uint4*>(h);
      });
}

// ---- the kernel -----------------------------------------------------------------------------------------

struct KernelArguments {
  const uint8_t* panels;
  const uint8_t* columns;     // half tiles
  const float* column_scale;  // [padded]
  const float* bias;
  const float* residual;
  float* y;
  uint8_t* y_columns;
  float* y_scale;  // [padded], of y_columns
  int64_t ld_y;
  float level_scale;  // of the table, a power of two
  float undo_levels;
  int n;
  int rows;
  int groups;
  int tiles;
  int padded;
  int column_blocks;
  int items;  // pairs of CTA rows x column blocks
  int splits;
  bool swiglu;
};

#ifdef DECODEV2_WGMMA

constexpr int kConsumersMeet = 1;  // barrier of the CTA

// What a CTA of the cluster has to do; the same for all of its items.
struct Place {
  int cluster;
  int clusters;
  int member;  // of the pair
  int split;   // of K: which pair
  int panel;   // the first
  int panels_end;
};

struct Item {
  int tile;    // the CTA's first
  int column;  // its first
};

__device__ __forceinline__ Place find_place(const KernelArguments& a) {
  Place p;
  const int ctas = kPair * a.splits;
  p.cluster = blockIdx.x / ctas;
  p.clusters = gridDim.x / ctas;
  const int rank = blockIdx.x - p.cluster * ctas;
  p.member = rank & 1;
  p.split = rank >> 1;
  const int panels = (a.groups + kPanelBlocks - 1) / kPanelBlocks;
  p.panel = panels * p.split / a.splits;
  p.panels_end = panels * (p.split + 1) / a.splits;
  return p;
}

// Column blocks of the same rows are neighbours, so that the second finds the weights in the L2.
template <int kColumns>
__device__ __forceinline__ Item find_item(const KernelArguments& a, const Place& p, int item) {
  const int pair = item / a.column_blocks;
  return {(pair * kPair + p.member) * kCtaTiles, (item - pair * a.column_blocks) * kColumns};
}

struct RingPlace {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

template <int kColumns>
__device__ __forceinline__ void bring_weights(const KernelArguments& a, const Place& p, const Item& item,
                                              uint32_t shared, RingPlace& ring) {
  using S = Shared<kColumns>;
  const uint64_t policy = a.column_blocks > 1 ? evict_normal_policy() : evict_first_policy();
  const int64_t tile_bytes = static_cast<int64_t>(a.groups) * kBlockBytes;
#pragma unroll 1
  for (int panel = p.panel; panel < p.panels_end; ++panel) {
    const uint32_t full = shared + S::kPanelFull + ring.slot * 8;
    const uint32_t to = shared + S::kWeights + ring.slot * kWeightStage;
    const uint32_t bytes = min(kPanelBlocks, a.groups - panel * kPanelBlocks) * kBlockBytes;
    barrier_wait(shared + S::kPanelFree + ring.slot * 8, ring.phase ^ 1);  // the first round passes
    barrier_expect(full, kCtaTiles * bytes);
#pragma unroll 1
    for (int t = 0; t < kCtaTiles; ++t)  // past the last tile: that one again, for sums that nobody stores
      bulk_copy(to + t * kPanelBytes,
                a.panels + min(item.tile + t, a.tiles - 1) * tile_bytes + static_cast<int64_t>(panel) * kPanelBytes,
                bytes, full, policy);
    ring.advance(S::kPanels);
  }
}

// This CTA's half of the columns, for both CTAs of the pair. The other half may arrive before this CTA expects it.
template <int kColumns>
__device__ __forceinline__ void bring_columns(const KernelArguments& a, const Place& p, const Item& item,
                                              uint32_t shared, RingPlace& ring) {
  using S = Shared<kColumns>;
  const uint64_t policy = evict_normal_policy();
  constexpr int kHalf = S::kStage / kPair;
  const uint32_t ctas = 3u << kPair * p.split;
  const int end = min(p.panels_end * kPanelBlocks, a.groups);
  const uint8_t* from = a.columns + static_cast<int64_t>(item.column) * kColumnBytes + p.member * kHalf;
#pragma unroll 1
  for (int block = p.panel * kPanelBlocks; block < end; ++block) {
    const uint32_t full = shared + S::kStageFull + ring.slot * 8;
    barrier_wait(shared + S::kStageFree + ring.slot * 8, ring.phase ^ 1);
    barrier_expect(full, S::kStage);
    bulk_copy_to_ctas(shared + ring.slot * S::kStage + p.member * kHalf,
                      from + static_cast<int64_t>(block) * a.padded * kColumnBytes, kHalf, full, ctas, policy);
    ring.advance(S::kStages);
  }
}

// Describes 16 k of a stage of columns as right operand. A stage is 64 k of each column, the columns behind each other;
// the 16-byte piece i of column c lies where piece i ^ (c & 7) would, the 128-byte swizzle. `address`: of the stage,
// which is aligned to 1024, + 32 for each 16 k. Bits 0: address / 16; 16: of no meaning here, 1; 32: bytes from 8
// columns to the next 8, / 16; 62: the swizzle.
__device__ __forceinline__ uint64_t right_operand(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(1) << 16 |
         static_cast<uint64_t>(8 * kColumnBytes >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}

// The half2 of a scale, twice.
__device__ __forceinline__ half2 load_scale(uint32_t address) {
  const uint32_t twice = byte_permute(load_shared_2(address), 0, 0x1010);
  return *reinterpret_cast<const half2*>(&twice);
}

template <int kByte>
__device__ __forceinline__ uint32_t weight_pair(uint32_t table, uint32_t word, uint32_t lane4, half2 scale) {
  const uint32_t levels = look_up<kByte>(table, word, lane4);
  const half2 pair = __hmul2(*reinterpret_cast<const half2*>(&levels), scale);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 16 rows x 64 k of weights as left operands of 4 products. `codes`: of this lane; the scales: of rows g and g + 8.
__device__ __forceinline__ void decode(uint32_t (&weights)[4][4], uint32_t codes, uint32_t scale_lo, uint32_t scale_hi,
                                       uint32_t table, uint32_t lane4) {
  const uint4 words = load_shared_16(codes);
  const half2 lo = load_scale(scale_lo), hi = load_scale(scale_hi);
  const uint32_t row_lo[2] = {words.x, words.y}, row_hi[2] = {words.z, words.w};
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    uint32_t (&first)[4] = weights[2 * w], (&second)[4] = weights[2 * w + 1];
    first[0] = weight_pair<0>(table, row_lo[w], lane4, lo);
    first[1] = weight_pair<0>(table, row_hi[w], lane4, hi);
    first[2] = weight_pair<1>(table, row_lo[w], lane4, lo);
    first[3] = weight_pair<1>(table, row_hi[w], lane4, hi);
    second[0] = weight_pair<2>(table, row_lo[w], lane4, lo);
    second[1] = weight_pair<2>(table, row_hi[w], lane4, hi);
    second[2] = weight_pair<3>(table, row_lo[w], lane4, lo);
    second[3] = weight_pair<3>(table, row_hi[w], lane4, hi);
  }
}

// sum [kColumns / 8][4]: the warp's tile of the item, over this CTA's part of K.
template <int kColumns>
__device__ __forceinline__ void multiply(float (&sum)[kColumns / 2], const KernelArguments& a, const Place& p,
                                         uint32_t shared, int thread, RingPlace& stages, RingPlace& panels) {
  using S = Shared<kColumns>;
  const int lane = thread & 31, warp = thread >> 5;
  const uint32_t lane4 = opaque(lane * 4), table = shared + S::kTable;
  // lanes 0 and 1 release a stage, in one CTA of the pair each
  const uint32_t free = in_cta(shared + S::kStageFree, kPair * p.split + (lane & 1));
  [[maybe_unused]] const uint32_t other = in_cta(shared + S::kStageFree, kPair * p.split + (~lane & 1));
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sum[i] = 0.0f;
  int held = -1;  // stage of the products that still run
  const auto release = [&] {
    if (held < 0) return;
    if (kArrivals > 1) {  // every lane in both
      barrier_arrive_in_cluster(free + held * 8);
      barrier_arrive_in_cluster(other + held * 8);
    } else if (lane < kPair) {
      barrier_arrive_in_cluster(free + held * 8);
    }
  };
  const auto multiply_block = [&](const uint32_t (&weights)[4][4]) {
    barrier_wait(shared + S::kStageFull + stages.slot * 8, stages.phase);
    wgmma_begin();
#pragma unroll
    for (int m = 0; m < 4; ++m)
      wgmma<kColumns>(sum, weights[m], right_operand(shared + stages.slot * S::kStage + m * 32));
    wgmma_commit();
    wgmma_wait<1>();  // those of the block before are done
    release();
    held = stages.slot;
    stages.advance(S::kStages);
  };
  const auto panel_place = [&] { return shared + S::kWeights + panels.slot * kWeightStage + warp * kPanelBytes; };
  const auto next_panel = [&] {  // every lane has read it: its products were issued
    if (lane < kArrivals) barrier_arrive(shared + S::kPanelFree + panels.slot * 8);
    panels.advance(S::kPanels);
  };

  uint32_t weights[2][4][4];
  const int whole = min(p.panels_end, a.groups / kPanelBlocks);
#pragma unroll 1
  for (int panel = p.panel; panel < whole; ++panel) {
    barrier_wait(shared + S::kPanelFull + panels.slot * 8, panels.phase);
    const uint32_t at = panel_place(), codes = at + lane * 16;
    const uint32_t scales = at + kPanelBlocks * kBlockCodes + (lane >> 2) * kPanelBlocks * 2;
#pragma unroll
    for (int b = 0; b < kPanelBlocks; ++b) {
      decode(weights[b & 1], codes + b * kBlockCodes, scales + b * 2, scales + b * 2 + 8 * kPanelBlocks * 2, table,
             lane4);
      multiply_block(weights[b & 1]);
    }
    next_panel();
  }
  if (whole < p.panels_end) {  // the last panel of the matrix is narrower
    barrier_wait(shared + S::kPanelFull + panels.slot * 8, panels.phase);
    const int width = a.groups - whole * kPanelBlocks;
    const uint32_t at = panel_place(), codes = at + lane * 16;
    const uint32_t scales = at + width * kBlockCodes + (lane >> 2) * width * 2;
#pragma unroll 1
    for (int b = 0; b < width; ++b) {
      wgmma_wait<0>();
      decode(weights[0], codes + b * kBlockCodes, scales + b * 2, scales + b * 2 + 8 * width * 2, table, lane4);
      multiply_block(weights[0]);
    }
    next_panel();
  }
  wgmma_wait<0>();
  release();
}

// ---- finished sums --------------------------------------------------------------------------------------

// Undoes what `column`, which is even, and the next one and the levels were multiplied by.
__device__ __forceinline__ float2 column_scales(const KernelArguments& a, int column) {
  const float2 scale = *reinterpret_cast<const float2*>(a.column_scale + column);
  return make_float2(scale.x * a.undo_levels, scale.y * a.undo_levels);
}

// kPieces pieces of 16 rows x 8 columns side by side, from `column` on, in MMA order: floats 0 and 1 of a piece are
// row g, columns 2 t and 2 t + 1; 2 and 3 the same of row g + 8.
template <int kPieces>
__device__ __forceinline__ void store_rows(const KernelArguments& a, int tile, int column, int lane,
                                           const float (&sum)[kPieces][4]) {
  const int row = tile * kTileRows + (lane >> 2), first = column + (lane & 3) * 2;
  const bool lo = row < a.rows, hi = row + 8 < a.rows;
  const float bias_lo = a.bias && lo ? a.bias[row] : 0.0f, bias_hi = a.bias && hi ? a.bias[row + 8] : 0.0f;
  const int64_t at = first * a.ld_y + row, step = 8 * a.ld_y;
  float more[kPieces][4];  // all loads, then all stores: y may be the residual
#pragma unroll
  for (int j = 0; j < kPieces; ++j) more[j][0] = more[j][1] = bias_lo, more[j][2] = more[j][3] = bias_hi;
  if (a.residual) {
    const float *even = a.residual + at, *odd = even + a.ld_y;
#pragma unroll
    for (int j = 0; j < kPieces; ++j, even += step, odd += step) {
      const bool live = first + 8 * j < a.n, both = first + 8 * j + 1 < a.n;
      if (live && lo) more[j][0] += even[0];
      if (both && lo) more[j][1] += odd[0];
      if (live && hi) more[j][2] += even[8];
      if (both && hi) more[j][3] += odd[8];
    }
  }
  float *even = a.y + at, *odd = even + a.ld_y;
#pragma unroll
  for (int j = 0; j < kPieces; ++j, even += step, odd += step) {
    const bool live = first + 8 * j < a.n, both = first + 8 * j + 1 < a.n;
    const float2 scale = column_scales(a, first + 8 * j);
    if (live && lo) even[0] = fmaf(sum[j][0], scale.x, more[j][0]);
    if (both && lo) odd[0] = fmaf(sum[j][1], scale.y, more[j][1]);
    if (live && hi) even[8] = fmaf(sum[j][2], scale.x, more[j][2]);
    if (both && hi) odd[8] = fmaf(sum[j][3], scale.y, more[j][3]);
  }
}

__device__ __forceinline__ float silu(float gate) { return __fdividef(gate, 1.0f + __expf(-gate)); }

// The same where rows g are gates and rows g + 8 what they let through.
template <int kPieces>
__device__ __forceinline__ void store_units(const KernelArguments& a, int tile, int column, int lane,
                                            const float (&sum)[kPieces][4]) {
  const int g = lane >> 2, unit = tile * 8 + g, first = column + (lane & 3) * 2;
  // tiles past the last that fill its k block are zero
  const bool live = tile < a.tiles, there = a.y && unit < a.rows, fills = a.y_columns && (tile & ~7) < a.tiles;
  float* y = a.y + first * a.ld_y + unit;
  // units g and g ^ 1 exchange: the even one stores both of the first column, the odd one those of the second
  const int c = first + (g & 1);
  uint8_t* to = a.y_columns + (static_cast<int64_t>(tile >> 3) * a.padded + c) * kColumnBytes + ((tile ^ c) & 7) * 16 +
                (g >> 1) * 4;
#pragma unroll
  for (int j = 0; j < kPieces; ++j, y += 8 * a.ld_y, to += 8 * kColumnBytes) {
    const float2 scale = column_scales(a, first + 8 * j);
    const float even = silu(sum[j][0] * scale.x) * (sum[j][2] * scale.x);
    const float odd = silu(sum[j][1] * scale.y) * (sum[j][3] * scale.y);
    if (there && first + 8 * j < a.n) y[0] = even;
    if (there && first + 8 * j + 1 < a.n) y[a.ld_y] = odd;
    const half2 pair = __floats2half2_rn(even * kActScale, odd * kActScale);
    const uint32_t both = live ? *reinterpret_cast<const uint32_t*>(&pair) : 0;
    const uint32_t other = __shfl_xor_sync(~0u, both, 4);
    if (!fills) continue;
    *reinterpret_cast<uint32_t*>(to) = byte_permute(both, other, g & 1 ? 0x3276 : 0x5410);
    if (unit == 0) *reinterpret_cast<float2*>(a.y_scale + first + 8 * j) = make_float2(1 / kActScale, 1 / kActScale);
  }
}

template <int kPieces>
__device__ __forceinline__ void store_pieces(const KernelArguments& a, int tile, int column, int lane,
                                             const float (&sum)[kPieces][4]) {
  if (a.swiglu)
    store_units(a, tile, column, lane, sum);
  else
    store_rows(a, tile, column, lane, sum);
}

// Sums of a cluster's splits: every CTA has left its own in shared memory, [warp][piece][lane][16 B], and adds its
// share of the columns over all of them.
template <int kColumns>
__device__ __forceinline__ void add_splits(const KernelArguments& a, const Place& p, const Item& item, uint32_t shared,
                                           int thread) {
  constexpr int kBatch = 2;
  const int lane = thread & 31, warp = thread >> 5, pieces = Shared<kColumns>::kPieces / a.splits;
  const uint32_t sums = shared + warp * Shared<kColumns>::kWarpSums + lane * 16;
#pragma unroll 1
  for (int piece = p.split * pieces; piece < (p.split + 1) * pieces; piece += kBatch) {
    float4 part[kMaxSplits][kBatch];
#pragma unroll
    for (int s = 0; s < kMaxSplits; ++s)
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (s < a.splits) part[s][j] = load_cluster_float4(in_cta(sums + (piece + j) * 512, kPair * s + p.member));
    float sum[kBatch][4];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      sum[j][0] = part[0][j].x, sum[j][1] = part[0][j].y, sum[j][2] = part[0][j].z, sum[j][3] = part[0][j].w;
#pragma unroll
      for (int s = 1; s < kMaxSplits; ++s)
        if (s < a.splits)
          sum[j][0] += part[s][j].x, sum[j][1] += part[s][j].y, sum[j][2] += part[s][j].z, sum[j][3] += part[s][j].w;
    }
    store_pieces(a, item.tile + warp, item.column + piece * 8, lane, sum);
  }
}

template <int kColumns>
__device__ __forceinline__ void finish(const float (&sum)[kColumns / 2], const KernelArguments& a, const Place& p,
                                       const Item& item, uint32_t shared, int thread) {
  using S = Shared<kColumns>;
  constexpr int kBatch = 4;
  const int lane = thread & 31, warp = thread >> 5;
  if (a.splits == 1) {
#pragma unroll
    for (int j = 0; j < S::kPieces; j += kBatch) {
      float some[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch * 4; ++i) some[i >> 2][i & 3] = sum[j * 4 + i];
      store_pieces(a, item.tile + warp, item.column + j * 8, lane, some);
    }
    return;
  }
  meet(kConsumersMeet, kConsumers);  // the stages are read: sums take their room
#pragma unroll
  for (int j = 0; j < S::kPieces; ++j)
    store_shared_float4(shared + warp * S::kWarpSums + j * 512 + lane * 16,
                        make_float4(sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]));
  meet_cluster();
  add_splits<kColumns>(a, p, item, shared, thread);
  before_bulk_copies();
  meet_cluster();  // the sums are read: the rings may fill again
}

#endif  // DECODEV2_WGMMA

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1) nf4_wgmma(const KernelArguments a) {
#ifdef DECODEV2_WGMMA
  using S = Shared<kColumns>;
  const uint32_t shared = shared_address(dynamic_shared());
  const int thread = threadIdx.x, warp = thread >> 5;
  const Place p = find_place(a);
  let_dependents_launch();
  if (thread == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(shared + S::kStageFull + i * 8, 1);
      barrier_init(shared + S::kStageFree + i * 8, kPair * kWarps * kArrivals);
    }
    for (int i = 0; i < S::kPanels; ++i) {
      barrier_init(shared + S::kPanelFull + i * 8, 1);
      barrier_init(shared + S::kPanelFree + i * 8, kWarps * kArrivals);
    }
    barriers_visible();
  }
  meet_cluster();

  if (warp >= kWarps) {
    give_registers<40>();
    const bool weights = thread == kConsumers, columns = thread == kConsumers + 32;
    RingPlace ring;
    if (columns) wait_for_predecessors();  // weights are constants: they come before the kernels in front are done
#pragma unroll 1
    for (int i = p.cluster; i < a.items; i += p.clusters) {
      const Item item = find_item<kColumns>(a, p, i);
      if (weights) bring_weights<kColumns>(a, p, item, shared, ring);
      if (columns) bring_columns<kColumns>(a, p, item, shared, ring);
      if (a.splits > 1) {
        meet_cluster();
        meet_cluster();
      }
    }
  } else {
    take_registers<232>();
    build_pair_table(dynamic_shared() + S::kTable, thread, kConsumers, a.level_scale);
    meet(kConsumersMeet, kConsumers);
    wait_for_predecessors();
    RingPlace stages, panels;
#pragma unroll 1
    for (int i = p.cluster; i < a.items; i += p.clusters) {
      float sum[kColumns / 2];
      multiply<kColumns>(sum, a, p, shared, thread, stages, panels);
      finish<kColumns>(sum, a, p, find_item<kColumns>(a, p, i), shared, thread);
    }
  }
  meet_cluster();  // nobody leaves while others may still write here
#endif
}

// ---- launching ------------------------------------------------------------------------------------------

template <int kColumns>
cudaError_t start(const KernelArguments& a, int clusters, bool pdl, cudaStream_t stream) {
  const auto kernel = nf4_wgmma<kColumns>;
  const int bytes = Shared<kColumns>::kBytes, ctas = kPair * a.splits;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return launch_clusters(kernel, clusters * ctas, kThreads, ctas, bytes, stream, pdl, a);
}

float power_of_two(int exponent) {
  float value = 1.0f;
  for (int i = 0; i < exponent; ++i) value *= 2.0f;
  for (int i = 0; i > exponent; --i) value *= 0.5f;
  return value;
}

}  // namespace

bool wgmma_runs_on(int compute_capability, int shared_limit) {
  return compute_capability == 90 && shared_limit >= 227 * 1024;
}

size_t wgmma_columns_bytes(int groups, int n) {
  return n > 0 ? column_scale_offset(groups, padded_columns(n)) + padded_columns(n) * sizeof(float) : 0;
}

cudaError_t chr_nf4_wgmma(const WgmmaArguments& a, GemmKind kind, const WgmmaPlan& plan, cudaStream_t stream) {
  const bool swiglu = kind == GemmKind::kSwiglu;
  if (a.n <= 0 || a.rows <= 0 || a.cols <= 0 || a.groups != divide_up(a.cols, kGroup) ||
      a.tiles != divide_up(a.rows, swiglu ? kTileRows / 2 : kTileRows) || (a.y && a.ld_y < a.rows) ||
      (a.y_columns ? !swiglu : !a.y) || (swiglu && (a.bias || a.residual)) || a.level_exponent < -15 ||
      a.level_exponent > 15 || (a.x_columns && a.norm_weight) || (!a.x_columns && a.ld_x < a.cols))
    return cudaErrorInvalidValue;
  const int padded = padded_columns(a.n);
  const int pairs = divide_up(a.tiles, kPair * kCtaTiles), panels = divide_up(a.groups, kPanelBlocks);

  KernelArguments k = {};
  k.splits = plan.splits ? plan.splits : choose_splits(pairs, panels, plan.multiprocessors);
  const int columns =
      plan.columns ? plan.columns : choose_columns(padded, pairs, panels, k.splits, plan.multiprocessors);
  if ((k.splits != 1 && k.splits != 2 && k.splits != 4) || k.splits > panels ||
      (columns != 64 && columns != 128 && columns != 256) || padded % columns)
    return cudaErrorInvalidConfiguration;
  k.panels = a.panels;
  k.bias = a.bias;
  k.residual = a.residual;
  k.y = a.y;
  k.y_columns = a.y_columns;
  k.ld_y = a.ld_y;
  k.level_scale = power_of_two(a.level_exponent);
  k.undo_levels = power_of_two(-a.level_exponent);
  k.n = a.n;
  k.rows = a.rows;
  k.groups = a.groups;
  k.tiles = a.tiles;
  k.padded = padded;
  k.column_blocks = padded / columns;
  k.items = pairs * k.column_blocks;
  k.swiglu = swiglu;
  const uint8_t* const x = a.x_columns ? a.x_columns : a.workspace;
  if (reinterpret_cast<uintptr_t>(x) % 16 || (!a.x_columns && a.workspace_bytes < wgmma_columns_bytes(a.groups, a.n)))
    return cudaErrorInvalidValue;
  k.columns = x;
  k.column_scale = reinterpret_cast<const float*>(x + column_scale_offset(a.groups, padded));
  if (a.y_columns)
    k.y_scale = reinterpret_cast<float*>(a.y_columns + column_scale_offset(divide_up(a.rows, kGroup), padded));
  if (!a.x_columns) {
    StageArguments s = {};
    s.x = a.x;
    s.norm_weight = a.norm_weight;
    s.columns = a.workspace;
    s.column_scale = reinterpret_cast<float*>(a.workspace + column_scale_offset(a.groups, padded));
    s.ld_x = a.ld_x;
    s.eps = a.eps;
    s.n = a.n;
    s.cols = a.cols;
    s.groups = a.groups;
    s.padded = padded;
    const cudaError_t error = launch(stage_columns, padded, kStageThreads, kStageShared, stream, plan.pdl, s);
    if (error != cudaSuccess) return error;
  }
  const int resident = resident_clusters(kPair * k.splits, plan.multiprocessors);
  const int clusters = k.items < resident ? k.items : resident;
  switch (columns) {
    case 64:
      return start<64>(k, clusters, plan.pdl, stream);
    case 128:
      return start<128>(k, clusters, plan.pdl, stream);
    default:
      return start<256>(k, clusters, plan.pdl, stream);
  }
}

}  // namespace decodev2
