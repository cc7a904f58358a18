// GEMV rungs: earlier and rival ideas on plain row-major .chr rows, kept to be measured against
// nf4_gemv.cu.
//
// Computes  y[r] = sum_k level[code[r][k]] * scale[r][k / 64] * x[k] (+ bias[r]) (+ residual[r]),
//           all in float32; x may be RMS-normed on the way in
//           swiglu: y[u] = silu(gate row u . x) * (up row u . x)
// Owns      split K     a CTA owns kRows rows: its four warps take the chunks of those rows in turn
//                       and add up in warp order (same bits every run)
//           one warp    a warp owns kRows rows and all their chunks, nothing to add up
// Grid      one CTA per kRows rows (split K) or 4 * kRows rows (one warp); 128 threads. lut_pair:
//           only as many CTAs as fit the card, each walks over rows: its table is dear to fill
// Shared    the table (64 B or 32 KB) | all of x as float32 if staged | sums of the warps
// Layout    as in the file: codes [rows][K_pad / 2], low nibble = even k, and
//           scales [rows][K_pad / 64]. A chunk is what a lane loads at once:
//             row  | lane 0: 16 B = 32 k | lane 1 | ...    (or 4 B = 8 k)
// Floor     rows * K_pad * 17 / 32 bytes (4.25 bits per weight) at the card's read rate
// Variants  where the 16 levels live, oldest idea first:
//             lut_constant      __constant__ memory: one address per cycle, lanes want 16
//             lut_shared        16 floats in shared memory, copied per CTA: 16 banks, no conflicts
//             lut_shuffle       one level per lane, fetched with a shuffle
//             lut_byte_permute  levels as half in 8 words, low and high bytes apart; eight byte
//                               permutes decode four codes
//             lut_pair          256 x half2, both levels of a byte, a private copy per bank (32 KB)
//           The first three are exact; half levels are off by up to 3.3e-4 of themselves.
//           x: read from global memory per use, or staged whole in shared memory
//           rows: 1, 2, 4 or 8 share each x that is loaded
//           one matrix, or up to three in one grid (q, k, v without a copy), or gate and up fused
#include <cuda_fp16.h>

#include "launch.h"
#include "nf4.cuh"

namespace decodev2 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWordCodes = 8;  // codes in a 32-bit word
constexpr uint32_t kZeroCodes = 0x77777777u;

// ---- where the levels live ----------------------------------------------------------------------

// One table: kBytes of shared memory, `fill` them (all threads, a barrier follows), then per thread
// `decode` a word into its 8 levels in k order. Whole warps call `decode` together.
template <LadderTable kTable>
struct Levels;

__constant__ float kConstantLevels[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

template <>
struct Levels<LadderTable::kConstant> {
  static constexpr int kBytes = 0;
  __device__ static void fill(uint8_t*) {}
  __device__ Levels(const uint8_t*) {}
  __device__ void decode(uint32_t word, float* level) const {
#pragma unroll
    for (int i = 0; i < kWordCodes; ++i) level[i] = kConstantLevels[word >> 4 * i & 15];
  }
};

template <>
struct Levels<LadderTable::kShared> {
  static constexpr int kBytes = 16 * sizeof(float);
  __device__ static void fill(uint8_t* shared) {
    if (threadIdx.x < 16) reinterpret_cast<float*>(shared)[threadIdx.x] = kNf4Levels[threadIdx.x];
  }
  const float* table;
  __device__ Levels(const uint8_t* shared) : table(reinterpret_cast<const float*>(shared)) {}
  __device__ void decode(uint32_t word, float* level) const {
#pragma unroll
    for (int i = 0; i < kWordCodes; ++i) level[i] = table[word >> 4 * i & 15];
  }
};

template <>
struct Levels<LadderTable::kShuffle> {
  static constexpr int kBytes = 0;
  __device__ static void fill(uint8_t*) {}
  float own;
  __device__ Levels(const uint8_t*) : own(kNf4Levels[threadIdx.x & 15]) {}
  __device__ void decode(uint32_t word, float* level) const {
#pragma unroll
    for (int i = 0; i < kWordCodes; ++i)  // the source lane is taken modulo the width: no mask
      level[i] = __shfl_sync(~0u, own, static_cast<int>(word >> 4 * i), 16);
  }
};

template <>
struct Levels<LadderTable::kBytePermute> {
  static constexpr int kBytes = 0;
  __device__ static void fill(uint8_t*) {}
  __device__ Levels(const uint8_t*) {}

  // Four codes (the low 16 bits) to one byte each. A permute indexes 8 bytes with 3 bits, so both
  // halves of the plane are looked up and bit 3 of each code picks between them.
  struct Plane {
    uint32_t word[4];  // bytes of levels 0..3, 4..7, 8..11, 12..15, lowest first
  };
  __device__ static uint32_t pick(const Plane& plane, uint32_t codes) {
    const uint32_t index = codes & 0x7777u, upper = 0x3210u | (codes & 0x8888u) >> 1;
    return byte_permute(byte_permute(plane.word[0], plane.word[1], index),
                        byte_permute(plane.word[2], plane.word[3], index), upper);
  }

  __device__ void decode(uint32_t word, float* level) const {
    // levels as half: -1.0 is 0xBC00, -0.6962 is 0xB992, ...
    constexpr Plane kLow = {{0x52339200u, 0x00D4EA8Du, 0x68E02618u, 0x00C9800Du}};
    constexpr Plane kHigh = {{0xB6B8B9BCu, 0x00ADB1B4u, 0x3533312Du, 0x3C393837u}};
#pragma unroll
    for (int i = 0; i < kWordCodes; i += 4) {
      const uint32_t low = pick(kLow, word >> 4 * i), high = pick(kHigh, word >> 4 * i);
      const uint32_t pairs[2] = {byte_permute(low, high, 0x5140), byte_permute(low, high, 0x7362)};
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const float2 two = __half22float2(*reinterpret_cast<const half2*>(&pairs[p]));
        level[i + 2 * p] = two.x;
        level[i + 2 * p + 1] = two.y;
      }
    }
  }
};

template <>
struct Levels<LadderTable::kPair> {
  static constexpr int kBytes = 256 * 32 * sizeof(half2);
  __device__ static void fill(uint8_t* shared) {
    for (int i = threadIdx.x; i < 256 * 32; i += kThreads) {
      const int byte = i >> 5;
      reinterpret_cast<half2*>(shared)[i] =
          __floats2half2_rn(kNf4Levels[byte & 15], kNf4Levels[byte >> 4]);
    }
  }
  const half2* table;  // this lane's column
  __device__ Levels(const uint8_t* shared)
      : table(reinterpret_cast<const half2*>(shared) + (threadIdx.x & 31)) {}
  __device__ void decode(uint32_t word, float* level) const {
#pragma unroll
    for (int i = 0; i < kWordCodes; i += 2) {
      const float2 two = __half22float2(table[(word >> 4 * i & 255) * 32]);
      level[i] = two.x;
      level[i + 1] = two.y;
    }
  }
};

// ---- x ------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// x[k .. k + 8), 0 from K on; times the norm's weight if there is one
__device__ __forceinline__ void read_x(const LadderArguments& a, int k, float* x) {
  const auto read = [&](const float* from, float* to) {
    if (k + kWordCodes <= a.cols) {
      reinterpret_cast<float4*>(to)[0] = reinterpret_cast<const float4*>(from + k)[0];
      reinterpret_cast<float4*>(to)[1] = reinterpret_cast<const float4*>(from + k)[1];
    } else {
#pragma unroll
      for (int i = 0; i < kWordCodes; ++i) to[i] = k + i < a.cols ? from[k + i] : 0.0f;
    }
  };
  read(a.x, x);
  if (a.norm_weight == nullptr) return;
  alignas(16) float weight[kWordCodes];
  read(a.norm_weight, weight);
#pragma unroll
  for (int i = 0; i < kWordCodes; ++i) x[i] *= weight[i];
}

// Four floats of staged x, by k / 4. Lanes with 16-byte chunks read 128 B apart; the exclusive or
// spreads eight of them over all banks.
__device__ __forceinline__ int staged_quad(int quad) { return quad ^ (quad >> 3 & 7); }

// The norm's rsqrt(mean(x^2) + eps), found by every CTA for itself: it multiplies finished sums.
__device__ float rms_factor(const LadderArguments& a, float* scratch) {
  float sum = 0.0f;
  for (int k = threadIdx.x; k < a.cols; k += kThreads) sum += a.x[k] * a.x[k];
  sum = warp_sum(sum);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int w = 0; w < kWarps; ++w) sum += scratch[w];
  return rsqrtf(sum / static_cast<float>(a.cols) + a.eps);
}

// ---- the kernel ---------------------------------------------------------------------------------

__host__ __device__ constexpr int ceil_divide(int a, int b) { return (a + b - 1) / b; }

// kRows rows of one matrix: where they start in it, and where its outputs start in y
struct Unit {
  int matrix, first_row, output;
};

__host__ __device__ inline int count_units(const LadderArguments& a, int rows, bool swiglu) {
  if (swiglu) return ceil_divide(a.matrix[0].rows, rows);
  int units = 0;
  for (int m = 0; m < a.matrices; ++m) units += ceil_divide(a.matrix[m].rows, rows);
  return units;
}

template <int kRows>
__device__ __forceinline__ Unit find_unit(const LadderArguments& a, int unit) {
  Unit at = {0, 0, 0};
  while (unit >= ceil_divide(a.matrix[at.matrix].rows, kRows)) {
    unit -= ceil_divide(a.matrix[at.matrix].rows, kRows);
    at.output += a.matrix[at.matrix++].rows;
  }
  at.first_row = unit * kRows;
  return at;
}

__device__ __forceinline__ float silu(float g) { return g / (1.0f + __expf(-g)); }

template <LadderTable kTable, int kRows, bool kSplitK, bool kStageX, int kLoadBytes, bool kSwiglu>
__global__ void __launch_bounds__(kThreads)
    ladder_gemv_kernel(const __grid_constant__ LadderArguments a) {
  constexpr int kLines = kSwiglu ? 2 * kRows : kRows;  // weight rows at a time
  constexpr int kWords = kLoadBytes / 4;
  constexpr int kChunksPerGroup = 32 / kLoadBytes;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ float sums[2][kWarps][kLines];
  float4* staged = reinterpret_cast<float4*>(shared + Levels<kTable>::kBytes);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

  const float factor = a.norm_weight ? rms_factor(a, &sums[0][0][0]) : 1.0f;
  Levels<kTable>::fill(shared);
  if (kStageX)
    for (int k = threadIdx.x * kWordCodes; k < a.groups * kGroup; k += kThreads * kWordCodes) {
      alignas(16) float x[kWordCodes];
      read_x(a, k, x);
      for (int q = 0; q < 2; ++q)
        staged[staged_quad(k / 4 + q)] = reinterpret_cast<const float4*>(x)[q];
    }
  __syncthreads();
  const Levels<kTable> levels(shared);

  const int units = count_units(a, kRows, kSwiglu), chunks = a.groups * kChunksPerGroup;
  const int first = kSplitK ? blockIdx.x : blockIdx.x * kWarps + warp;
  const int step = kSplitK ? gridDim.x : gridDim.x * kWarps;
  int buffer = 0;
  for (int unit = first; unit < units; unit += step, buffer ^= 1) {
    const Unit at = find_unit<kRows>(a, unit);
    const uint8_t* codes[kLines];
    const __half* scales[kLines];
#pragma unroll
    for (int r = 0; r < kLines; ++r) {  // missing rows repeat the last one and are not stored
      const LadderMatrix& w = a.matrix[kSwiglu ? r / kRows : at.matrix];
      const int64_t row = min(at.first_row + r % kRows, w.rows - 1);
      codes[r] = w.codes + row * a.groups * (kGroup / 2);
      scales[r] = reinterpret_cast<const __half*>(w.scales) + row * a.groups;
    }

    float acc[kLines] = {};
    // whole warps stay in the loop: the shuffle table needs every lane
    for (int start = kSplitK ? 32 * warp : 0; start < chunks; start += kSplitK ? kThreads : 32) {
      const int chunk = start + lane;
      const bool live = chunk < chunks;
      uint32_t word[kLines][kWords];
      float scale[kLines], sum[kLines] = {};
#pragma unroll
      for (int r = 0; r < kLines; ++r) {
        if constexpr (kLoadBytes == 16) {
          const uint4 v = live ? load_weights_16(codes[r] + chunk * 16)
                               : make_uint4(kZeroCodes, kZeroCodes, kZeroCodes, kZeroCodes);
          word[r][0] = v.x, word[r][1] = v.y, word[r][2] = v.z, word[r][3] = v.w;
        } else {
          word[r][0] =
              live ? __ldcs(reinterpret_cast<const uint32_t*>(codes[r]) + chunk) : kZeroCodes;
        }
        scale[r] = live ? __half2float(scales[r][chunk / kChunksPerGroup]) : 0.0f;
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        alignas(16) float x[kWordCodes] = {};
        const int k = (chunk * kWords + w) * kWordCodes;
        if (live && kStageX) {
          for (int q = 0; q < 2; ++q)
            reinterpret_cast<float4*>(x)[q] = staged[staged_quad(k / 4 + q)];
        } else if (live) {
          read_x(a, k, x);
        }
#pragma unroll
        for (int r = 0; r < kLines; ++r) {
          float level[kWordCodes];
          levels.decode(word[r][w], level);
#pragma unroll
          for (int i = 0; i < kWordCodes; ++i) sum[r] += level[i] * x[i];
        }
      }
#pragma unroll
      for (int r = 0; r < kLines; ++r) acc[r] += scale[r] * sum[r];
    }

#pragma unroll
    for (int r = 0; r < kLines; ++r) {
      acc[r] = warp_sum(acc[r]);
      if (lane == 0) sums[buffer][warp][r] = acc[r];
    }
    if (kSplitK)
      __syncthreads();  // the next round writes the other buffer, so one barrier is enough
    else
      __syncwarp();
    const int r = kSplitK ? threadIdx.x : lane, row = at.first_row + r;
    if (r >= kRows || row >= a.matrix[at.matrix].rows) continue;
    const auto total = [&](int line) {
      if (!kSplitK) return factor * sums[buffer][warp][line];
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += sums[buffer][w][line];
      return factor * sum;
    };
    const int64_t output = at.output + row;
    float y = total(r);
    if (kSwiglu) y = silu(y) * total(kRows + r);
    if (a.bias) y += a.bias[output];
    if (a.residual) y += a.residual[output];
    a.y[output] = y;
  }
}

// y[u] = silu(g[u]) * g[units + u]: what follows separate or concatenated gate and up products
__global__ void __launch_bounds__(kThreads)
    silu_multiply_kernel(const float* gate_up, float* y, int units) {
  const int u = blockIdx.x * kThreads + threadIdx.x;
  if (u < units) y[u] = silu(gate_up[u]) * gate_up[units + u];
}

// ---- from a plan to a kernel --------------------------------------------------------------------

using Kernel = void (*)(LadderArguments);

template <LadderTable kTable, int kRows, int kLoadBytes>
Kernel choose_kernel(const LadderPlan& plan) {
  if (plan.swiglu) {  // one rung of the log
    if constexpr (kTable == LadderTable::kShared)
      if (plan.split_k && !plan.stage_x)
        return ladder_gemv_kernel<kTable, kRows, true, false, kLoadBytes, true>;
    return nullptr;
  }
  if (plan.split_k)
    return plan.stage_x ? ladder_gemv_kernel<kTable, kRows, true, true, kLoadBytes, false>
                        : ladder_gemv_kernel<kTable, kRows, true, false, kLoadBytes, false>;
  return plan.stage_x ? nullptr  // not tried: a row is then as long as the copy it pays for
                      : ladder_gemv_kernel<kTable, kRows, false, false, kLoadBytes, false>;
}

template <LadderTable kTable, int kRows>
Kernel choose_width(const LadderPlan& plan) {
  return plan.load_bytes == 16 ? choose_kernel<kTable, kRows, 16>(plan)
                               : choose_kernel<kTable, kRows, 4>(plan);
}

template <LadderTable kTable>
Kernel choose_rows(const LadderPlan& plan) {
  switch (plan.rows) {
    case 1:
      return choose_width<kTable, 1>(plan);
    case 2:
      return choose_width<kTable, 2>(plan);
    case 4:
      return choose_width<kTable, 4>(plan);
    case 8:
      return choose_width<kTable, 8>(plan);
  }
  return nullptr;
}

Kernel choose(const LadderPlan& plan) {
  switch (plan.table) {
    case LadderTable::kConstant:
      return choose_rows<LadderTable::kConstant>(plan);
    case LadderTable::kShared:
      return choose_rows<LadderTable::kShared>(plan);
    case LadderTable::kShuffle:
      return choose_rows<LadderTable::kShuffle>(plan);
    case LadderTable::kBytePermute:
      return choose_rows<LadderTable::kBytePermute>(plan);
    case LadderTable::kPair:
      return choose_rows<LadderTable::kPair>(plan);
  }
  return nullptr;
}

int table_bytes(LadderTable table) {
  if (table == LadderTable::kShared) return Levels<LadderTable::kShared>::kBytes;
  return table == LadderTable::kPair ? Levels<LadderTable::kPair>::kBytes : 0;
}

}  // namespace

int ladder_alignment(const LadderArguments& a) {
  uintptr_t bits = 0;  // a row of codes is a multiple of 32 B, so only the base addresses count
  for (int m = 0; m < a.matrices; ++m) bits |= reinterpret_cast<uintptr_t>(a.matrix[m].codes);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}

int choose_ladder_load(const LadderArguments& a, bool split_k, bool stage_x) {
  const bool every_lane_busy = a.groups * 2 >= (split_k ? kThreads : 32);
  return stage_x && every_lane_busy && ladder_alignment(a) == 16 ? 16 : 4;
}

int64_t ladder_shared_bytes(const LadderArguments& a, const LadderPlan& plan) {
  return table_bytes(plan.table) + (plan.stage_x ? int64_t{4} * a.groups * kGroup : 0);
}

cudaError_t launch_ladder_gemv(const LadderArguments& a, const LadderPlan& plan,
                               cudaStream_t stream) {
  const Kernel kernel = choose(plan);
  if (kernel == nullptr || (plan.load_bytes != 4 && plan.load_bytes != 16) ||
      ladder_alignment(a) < plan.load_bytes || a.matrices < 1 || a.matrices > kLadderMatrices ||
      (plan.swiglu && (a.matrices != 2 || a.matrix[0].rows != a.matrix[1].rows)))
    return cudaErrorInvalidValue;
  const int64_t shared = ladder_shared_bytes(a, plan);
  if (shared > plan.shared_limit) return cudaErrorInvalidValue;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  const int units = count_units(a, plan.rows, plan.swiglu);
  int ctas = plan.split_k ? units : ceil_divide(units, kWarps);
  if (plan.table == LadderTable::kPair) {
    int per_multiprocessor = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kThreads,
                                                          static_cast<size_t>(shared));
    if (error != cudaSuccess) return error;
    if (per_multiprocessor * plan.multiprocessors < ctas)
      ctas = per_multiprocessor * plan.multiprocessors;
  }
  if (ctas == 0) return cudaErrorInvalidValue;
  return launch(kernel, dim3(ctas), dim3(kThreads), static_cast<size_t>(shared), stream, false, a);
}

cudaError_t launch_silu_multiply(const float* gate_up, float* y, int units, cudaStream_t stream) {
  return launch(silu_multiply_kernel, dim3(ceil_divide(units, kThreads)), dim3(kThreads), 0, stream,
                false, gate_up, y, units);
}

}  // namespace decodev2
