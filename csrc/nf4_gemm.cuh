// What comes before the products of nf4_gemm.cu: how a matrix is divided, where things lie in shared memory and in the
// workspace, and x as half fragments. Torch-free.
#pragma once
#include "columns.cuh"
#include "launch.h"
#include "nf4.cuh"

namespace decodev2 {
namespace {

constexpr int kWarps = 12;
constexpr int kThreads = kWarps * 32;
constexpr int kPrepareThreads = 512;
constexpr int kColumnTileBytes = 1024;  // 64 k x 8 columns of half
constexpr int kMaxDepth = 4;
constexpr int kPlainColumnTiles = 4;  // most of them per pass without bulk copies: registers

// ---- how a matrix is divided --------------------------------------------------------------------

struct Schedule {
  int pairs;          // warps side by side in rows; each has two tiles
  int k_groups;       // kWarps / pairs: warps side by side in K
  int row_groups;     // CTAs' worth of rows
  int splits;         // CTAs side by side in K
  int column_tiles;   // of 8 columns, in a column block
  int column_blocks;  // passes over the weights
  int depth;          // column stages
  int grid;
  int shared_bytes;
};

// Regions of dynamic shared memory, in this order: table, weights, columns. Afterwards the sums of
// the warps, [warp][piece][lane][4 floats], lie over the weights: with kBulk, each warp's over its
// own.
template <GemmVariant kVariant>
struct Shared;

template <>
struct Shared<GemmVariant::kPlain> {
  static constexpr int kTable = kTableBytes / 2;
  static constexpr int kScaleSlot = 128;                       // 16 rows x 4 scales
  static constexpr int kScales = kWarps * 2 * 2 * kScaleSlot;  // [warp][2 panels][2 tiles]
  static __host__ __device__ constexpr int codes(int depth) {
    return kWarps * 2 * kBlockCodes * (depth + 1);
  }
  static __host__ __device__ constexpr int weights(int depth) { return codes(depth) + kScales; }
  static __host__ __device__ constexpr int columns(int depth, int stage_bytes) {
    return depth * stage_bytes;
  }
  // from warp to warp
  static __host__ __device__ constexpr int sums(int column_tiles) { return 2 * column_tiles * 512; }
};

template <>
struct Shared<GemmVariant::kBulk> {
  static constexpr int kTable = kTableBytes;
  static constexpr int kSlotFull = 2 * 2 * kPanelBytes;  // barriers behind a warp's panels
  static constexpr int kSources = kSlotFull + 16;        // where weights and columns come from
  static constexpr int kWarpWeights = kSources + 112;
  static constexpr int kStageFree = kMaxDepth * 8;  // barriers in front of a k group's stages
  static constexpr int kStages = 4 * kStageFree;
  static __host__ __device__ constexpr int weights(int) { return kWarps * kWarpWeights; }
  static __host__ __device__ constexpr int columns(int depth, int stage_bytes) {
    return kStages + depth * stage_bytes;
  }
  // from warp to warp; spares the barriers
  static __host__ __device__ constexpr int sums(int) { return kWarpWeights; }
};

template <GemmVariant kVariant>
int shared_bytes(int k_groups, int column_tiles, int depth) {
  using S = Shared<kVariant>;
  const int stream =
      S::weights(depth) + k_groups * S::columns(depth, column_tiles * kColumnTileBytes);
  const int sums = kWarps * S::sums(column_tiles);
  return S::kTable + (stream > sums ? stream : sums);
}

int divide_up(int a, int b) { return (a + b - 1) / b; }

// Warp w runs on scheduler w % 4. Uneven pairs spread over the schedulers when each k group starts
// at another one; with six pairs they already do.
__host__ __device__ __forceinline__ int turn(int pairs, int k_group) {
  return pairs == 4 ? k_group : 0;
}

// x / pairs without the slow division
__host__ __device__ __forceinline__ int over_pairs(int x, int pairs) {
  return static_cast<int>(pairs == 6 ? static_cast<unsigned>(x) / 6 : static_cast<unsigned>(x) / 4);
}

__host__ __device__ __forceinline__ int warp_of(int pairs, int k_group, int pair) {
  const int at = pair - turn(pairs, k_group);
  return k_group * pairs + (at < 0 ? at + pairs : at);
}

// Cycles of one CTA for a division, to compare divisions with each other: a step costs a scheduler
// about 220 cycles for each tile its warps have (48 columns), and a warp 800; L2 delivers about 32
// B per cycle and SM. The columns of the call have no say, so that they cannot change the order of
// additions.
double cycles(int tiles, int groups, const Schedule& s, int multiprocessors) {
  const int rows = divide_up(tiles, s.row_groups), blocks = divide_up(groups, s.splits);
  const int passes = divide_up(s.row_groups * s.splits, multiprocessors);
  int load[4] = {}, most = 0;
  for (int k = 0; k < s.k_groups; ++k)
    for (int pair = 0; pair < s.pairs; ++pair)
      load[warp_of(s.pairs, k, pair) % 4] += rows * (pair + 1) / s.pairs - rows * pair / s.pairs;
  for (const int tiles_here : load) most = tiles_here > most ? tiles_here : most;
  const double step = most * 220.0 > 800.0 ? most * 220.0 : 800.0;
  const double multiply = divide_up(groups, s.splits * s.k_groups) * step;
  const double memory = blocks * (rows * 544.0 + 6144.0) / 32.0;
  return passes * ((multiply > memory ? multiply : memory) + 1500.0) +
         (s.splits > 1 ? 2500.0 + 100.0 * s.splits : 0.0);
}

void divide(int tiles, int groups, int multiprocessors, Schedule* best) {
  double best_cycles = 1e30;
  for (const int pairs : {6, 4}) {
    Schedule s = *best;
    s.pairs = pairs;
    s.k_groups = kWarps / pairs;
    const int needed = divide_up(tiles, 2 * pairs);
    int max_splits = needed < multiprocessors ? multiprocessors / needed : 1;
    if (max_splits > divide_up(groups, s.k_groups)) max_splits = divide_up(groups, s.k_groups);
    for (s.splits = 1; s.splits <= max_splits; ++s.splits) {
      s.row_groups = s.splits > 1 ? multiprocessors / s.splits
                                  : divide_up(needed, multiprocessors) * multiprocessors;
      if (s.row_groups > tiles) s.row_groups = tiles;
      const double c = cycles(tiles, groups, s, multiprocessors);
      if (c < best_cycles) {
        best_cycles = c;
        *best = s;
      }
    }
  }
}

// False when the device has too little shared memory.
bool make_schedule(int tiles, int groups, int n, const GemmPlan& plan, Schedule* s) {
  *s = {};
  divide(tiles, groups, plan.multiprocessors, s);
  const auto bytes = [&](int column_tiles, int depth) {
    return plan.variant == GemmVariant::kBulk
               ? shared_bytes<GemmVariant::kBulk>(s->k_groups, column_tiles, depth)
               : shared_bytes<GemmVariant::kPlain>(s->k_groups, column_tiles, depth);
  };
  int widest = 0;
  for (const int column_tiles : {1, 2, 4, 6, 8})
    if (bytes(column_tiles, 2) <= plan.shared_limit &&
        (column_tiles <= kPlainColumnTiles || plan.variant == GemmVariant::kBulk))
      widest = column_tiles;
  if (widest == 0) return false;
  const int all_column_tiles = divide_up(n, 8);
  s->column_blocks = divide_up(all_column_tiles, widest);
  for (const int column_tiles : {8, 6, 4, 2, 1})
    if (column_tiles >= divide_up(all_column_tiles, s->column_blocks))
      s->column_tiles = column_tiles;
  for (s->depth = kMaxDepth; s->depth > 2 && bytes(s->column_tiles, s->depth) > plan.shared_limit;)
    --s->depth;
  s->shared_bytes = bytes(s->column_tiles, s->depth);
  const int items = s->row_groups * s->splits;
  s->grid = items < plan.multiprocessors ? items : plan.multiprocessors;
  return true;
}

struct Workspace {  // byte offsets
  size_t partials, column_scale, arrivals, bytes;
};

size_t align_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

int arrival_count(const Schedule& s) {
  return s.splits > 1 ? s.column_blocks * s.row_groups * kWarps : 0;
}

Workspace divide_workspace(int tiles, int groups, const Schedule& s) {
  const size_t column_tiles = static_cast<size_t>(s.column_blocks) * s.column_tiles;
  Workspace w;
  w.partials = align_256(column_tiles * groups * kColumnTileBytes);
  w.column_scale =
      align_256(w.partials + (s.splits > 1 ? column_tiles * s.splits * tiles * 512 : 0));
  w.arrivals = align_256(w.column_scale + column_tiles * 8 * sizeof(float));
  w.bytes = align_256(w.arrivals + arrival_count(s) * sizeof(unsigned));
  return w;
}

// ---- columns: float32 rows of x to half fragments -----------------------------------------------

struct PrepareArguments {
  const float* x;            // [n, cols], ld_x apart
  const float* norm_weight;  // [cols] or null
  uint8_t* columns;          // fragments
  float* column_scale;       // [padded columns] undoes the scaling
  unsigned* arrivals;        // [arrival_count], zeroed here
  int64_t ld_x;
  float eps;
  int n;
  int cols;
  int groups;
  int column_tiles;
  int arrival_count;
};

// Eight values of one 16-byte fragment: k0 + {0, 1, 8, 9, 16, 17, 24, 25}.
__device__ __forceinline__ void load_eight(float* v, const float* row, int k0, int cols,
                                           bool even) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = k0 + 8 * i;
    if (even && k < cols) {
      const float2 pair = *reinterpret_cast<const float2*>(row + k);
      v[2 * i] = pair.x;
      v[2 * i + 1] = pair.y;
    } else {
      v[2 * i] = k < cols ? row[k] : 0.0f;
      v[2 * i + 1] = k + 1 < cols ? row[k + 1] : 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kPrepareThreads) prepare_columns(const PrepareArguments a) {
  __shared__ float scratch[2 * kPrepareThreads / 32];
  const int column = blockIdx.x, thread = threadIdx.x;
  let_dependents_launch();
  wait_for_predecessors();
  for (int i = column * kPrepareThreads + thread; i < a.arrival_count;
       i += gridDim.x * kPrepareThreads)
    a.arrivals[i] = 0;

  const int fragments = a.groups * 8;  // of this column: [k block][2][4 t]
  const bool live = column < a.n, even = ((a.ld_x | a.cols) & 1) == 0;
  const float* row = a.x + (live ? column : 0) * a.ld_x;
  const int block_columns = a.column_tiles * 8;
  const int column_block = column / block_columns, in_block = column - column_block * block_columns;
  const int64_t block_bytes = static_cast<int64_t>(a.column_tiles) * kColumnTileBytes;
  uint8_t* to = a.columns + column_block * a.groups * block_bytes +
                (in_block >> 3) * kColumnTileBytes + (in_block & 7) * 64;
  column_to_half<kPrepareThreads>(
      row, live, a.norm_weight, fragments, a.cols, a.eps, scratch, a.column_scale + column, thread,
      [&](float* v, const float* from, int i, bool) {
        load_eight(v, from, (i >> 2) * 32 + (i & 3) * 2, a.cols, even);
      },
      [&](int i, const half2* h) {
        *reinterpret_cast<uint4*>(to + (i >> 3) * block_bytes + ((i >> 2) & 1) * 512 + (i & 3) * 16) =
            *reinterpret_cast<const uint4*>(h);
      });
}

}  // namespace
}  // namespace decodev2
