// Attention of a prompt chunk: n columns, after their keys and values are in the cache.
//
// Computes  rope_kv  q and k of column i turned by position[i] (rotate-half), k and v to the cache
//           prefill  out[i][h] = sum_t softmax_t(q[i][h] . K[t][kv] / sqrt(head_dim)) V[t][kv],
//                    kv = h / group, t < live length of column i
// Owns      rope_kv  thread: one rotated pair, or two values to copy
//           prefill  CTA: 16, 32 or 64 rows of one kv head, row = (column, head of the group);
//                    warp = 16 rows, or a part of their keys
// Grid      rope_kv (pairs / 256, n), 256 threads
//           prefill (row tiles, n_kv), 128 threads, 512 * head_dim bytes
// Layout    64 keys and values per stage in shared memory, 16-byte units swizzled for ldmatrix;
//           queries and weights as bf16 high and low parts, so both operands are exact to 16 bits
// Floor     2 * live * n_kv * head_dim * 2 bytes per pass; 4 * n * live * n_q * head_dim operations
// Variants  1, 2 or 4 warps that share one row tile's keys
#include "attn.cuh"

namespace decodev2 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 64;  // keys of a stage
constexpr int kRopeThreads = 256;

// ---- rope_kv ------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kRopeThreads) rope_kv_kernel(AttnArguments a) {
  let_dependents_launch();
  wait_for_predecessors();
  const int64_t column = blockIdx.y, position = a.position[column];
  if (!in_cache(position, a.max_seq)) return;
  const int half = a.head_dim / 2, pairs = (a.n_q + 2 * a.n_kv) * half;
  const int index = blockIdx.x * kRopeThreads + threadIdx.x;
  if (index >= pairs) return;
  const int head = index / half, d = index - head * half;
  const float cos = __ldg(a.cos + position * a.head_dim + d);
  const float sin = __ldg(a.sin + position * a.head_dim + d);
  const int64_t kv_width = static_cast<int64_t>(a.n_kv) * a.head_dim;
  if (head < a.n_q) {
    float* q = a.q + column * a.ld_q + head * a.head_dim + d;
    rotate_pair(q[0], q[half], cos, sin);
    return;
  }
  const bool is_key = head < a.n_q + a.n_kv;
  const int64_t kv_head = head - a.n_q - (is_key ? 0 : a.n_kv), offset = kv_head * a.head_dim + d;
  float first, second;
  if (is_key) {
    float* k = a.k + column * a.ld_kv + offset;
    first = k[0], second = k[half];
    rotate_pair(first, second, cos, sin);
    k[0] = first, k[half] = second;
  } else {
    const float* v = a.v + column * a.ld_kv + offset;
    first = v[0], second = v[half];
  }
  uint16_t* slot = (is_key ? a.k_cache : a.v_cache) + position * kv_width + offset;
  slot[0] = to_bf16(first);
  slot[half] = to_bf16(second);
}

// ---- prefill ------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_16_or_zero(uint32_t to, const void* from, bool readable) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(readable ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Byte offset of 16-byte unit u of row r in a [64][head_dim] bf16 tile: eight rows of one unit
// column lie in eight different 16-byte bank groups.
template <int kHeadDim>
__device__ __forceinline__ int tile_offset(int r, int u) {
  constexpr int kUnits = kHeadDim / 8;
  constexpr int kRowsPerLine = kUnits >= 8 ? 1 : 8 / kUnits;  // rows in 128 bytes
  constexpr int kMask = kUnits >= 8 ? 7 : kUnits - 1;
  return (r * kUnits + (u ^ ((r / kRowsPerLine) & kMask))) * 16;
}

template <int kHeadDim, int kKeySplits>
__global__ void __launch_bounds__(kThreads, 2) attn_prefill_kernel(AttnArguments a) {
  constexpr int kRowTiles = kWarps / kKeySplits, kRows = 16 * kRowTiles;
  constexpr int kWarpKeys = kTile / kKeySplits;
  constexpr int kSteps = kHeadDim / 16, kUnits = kHeadDim / 8;
  constexpr int kTileBytes = kTile * kHeadDim * 2;
  constexpr int kChains = kWarpKeys == 16 ? 2 : 1;  // few keys: high and low parts side by side
  // [2 stages][keys, values][64][head_dim]
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  let_dependents_launch();
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int g = lane >> 2, t = lane & 3;
  const int group = a.n_q / a.n_kv, rows = a.n * group, kv_head = blockIdx.y;
  const int row0 = (gridDim.x - 1 - blockIdx.x) * kRows;  // long prefixes first
  const int key0 = warp % kKeySplits * kWarpKeys;
  const int64_t stride = static_cast<int64_t>(a.n_kv) * kHeadDim;
  const uint16_t* k_cache = a.k_cache + kv_head * kHeadDim;
  const uint16_t* v_cache = a.v_cache + kv_head * kHeadDim;
  const uint32_t tiles_at = shared_address(shared_bytes);

  wait_for_predecessors();
  // the longest prefix among the CTA's rows, and that of this lane's two rows
  int limit = 0;
  const int last_column = min(row0 + kRows, rows) - 1;
  for (int i = row0 / group + lane; i <= last_column / group; i += 32)
    limit = max(limit, a.valid_len[i]);
  for (int o = 16; o; o >>= 1) limit = max(limit, __shfl_xor_sync(~0u, limit, o));
  limit = min(limit, a.max_seq);
  int length[2];
  int64_t row_offset[2];  // of the row's head in out
  uint32_t q_high[kSteps][4], q_low[kSteps][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row0 + warp / kKeySplits * 16 + g + 8 * i;
    const bool exists = row < rows;
    const int column = exists ? row / group : 0, head = row % group;
    length[i] = exists ? min(a.valid_len[column], a.max_seq) : 0;
    row_offset[i] = (static_cast<int64_t>(column) * a.n_q + kv_head * group + head) * kHeadDim;
    const float* q_row = a.q + column * a.ld_q + (kv_head * group + head) * kHeadDim;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float2 v = make_float2(0.0f, 0.0f);
        if (exists) v = *reinterpret_cast<const float2*>(q_row + 16 * s + 8 * e + 2 * t);
        split_bf16(v.x, v.y, q_high[s][2 * e + i], q_low[s][2 * e + i]);
      }
  }

  const auto load_tile = [&](int tile) {
    const uint32_t stage = tiles_at + (tile & 1) * 2 * kTileBytes;
#pragma unroll
    for (int i = thread; i < kTile * kUnits; i += kThreads) {
      const int r = i / kUnits, u = i % kUnits, key = tile * kTile + r;
      const bool readable = key < limit;
      const int64_t at = (readable ? key : 0) * stride + u * 8;
      copy_16_or_zero(stage + tile_offset<kHeadDim>(r, u), k_cache + at, readable);
      copy_16_or_zero(stage + kTileBytes + tile_offset<kHeadDim>(r, u), v_cache + at, readable);
    }
  };

  const float scale = kLog2e * rsqrtf(static_cast<float>(kHeadDim));
  const int tiles = (limit + kTile - 1) / kTile;
  const int warp_length = __reduce_max_sync(~0u, max(length[0], length[1]));
  float acc[2 * kSteps][4] = {};
  float m[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};
  if (tiles > 0) load_tile(0);
  copies_commit();
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) load_tile(tile + 1);
    copies_commit();
    copies_wait<1>();
    __syncthreads();
    const int first_key = tile * kTile + key0;
    if (first_key < warp_length) {
      const uint32_t keys = tiles_at + (tile & 1) * 2 * kTileBytes, values = keys + kTileBytes;
      float chains[kChains][kWarpKeys / 8][4] = {};
      // B operand of two products at once: lanes 0-7 name rows 0-7 dims 0-7, 8-15 the same rows
      // dims 8-15, 16-31 rows 8-15
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int n = 0; n < kWarpKeys / 16; ++n) {
          uint32_t b[4];
          load_matrices(
              b, keys + tile_offset<kHeadDim>(key0 + 16 * n + (lane & 7) + ((lane >> 4) << 3),
                                              2 * step + ((lane >> 3) & 1)));
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            mma_bf16(chains[0][2 * n + e], q_high[step][0], q_high[step][1], q_high[step][2],
                     q_high[step][3], b[2 * e], b[2 * e + 1]);
            mma_bf16(chains[kChains - 1][2 * n + e], q_low[step][0], q_low[step][1], q_low[step][2],
                     q_low[step][3], b[2 * e], b[2 * e + 1]);
          }
        }
      float (&s)[kWarpKeys / 8][4] = chains[0];
      if constexpr (kChains > 1) {
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[n][e] += chains[1][n][e];
      }
      float keep[2], base[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = m[i];
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const bool live = first_key + 8 * n + 2 * t + e < length[i];
            s[n][2 * i + e] = live ? s[n][2 * i + e] * scale : kMinusInfinity;
            top = fmaxf(top, s[n][2 * i + e]);
          }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        base[i] = top == kMinusInfinity ? 0.0f : top;
        keep[i] = exp2_approx(m[i] - base[i]);  // 0 while m is -inf
        m[i] = top;
        sum[i] *= keep[i];
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            s[n][2 * i + e] = exp2_approx(s[n][2 * i + e] - base[i]);
            sum[i] += s[n][2 * i + e];
          }
      }
#pragma unroll
      for (int j = 0; j < 2 * kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[j][e] *= keep[e >> 1];
#pragma unroll
      for (int n = 0; n < kWarpKeys / 16; ++n) {
        uint32_t p_high[4], p_low[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          split_bf16(s[2 * n + (e >> 1)][2 * (e & 1)], s[2 * n + (e >> 1)][2 * (e & 1) + 1],
                     p_high[e], p_low[e]);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          // lanes 0-7 name keys 0-7 dims 0-7, 8-15 keys 8-15, 16-31 the same keys' dims 8-15
          uint32_t b[4];
          load_matrices_transposed(b, values + tile_offset<kHeadDim>(key0 + 16 * n + (lane & 15),
                                                                     2 * step + (lane >> 4)));
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            mma_bf16(acc[2 * step + e], p_high[0], p_high[1], p_high[2], p_high[3], b[2 * e],
                     b[2 * e + 1]);
            mma_bf16(acc[2 * step + e], p_low[0], p_low[1], p_low[2], p_low[3], b[2 * e],
                     b[2 * e + 1]);
          }
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
  }

  float weight[2] = {1.0f, 1.0f};
  if constexpr (kKeySplits > 1) {
    // The warps of a row tile add their partials, in order, through the memory of the tiles.
    copies_wait<0>();
    float2* norms = reinterpret_cast<float2*>(shared_bytes);       // [4 warps][16 rows]
    float* parts = reinterpret_cast<float*>(norms + kWarps * 16);  // [4 warps][16][head_dim]
    __syncthreads();
    if (t == 0) {
      norms[warp * 16 + g] = make_float2(m[0], sum[0]);
      norms[warp * 16 + g + 8] = make_float2(m[1], sum[1]);
    }
#pragma unroll
    for (int j = 0; j < 2 * kSteps; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(parts + (warp * 16 + g + 8 * i) * kHeadDim + 8 * j + 2 * t) =
            make_float2(acc[j][2 * i], acc[j][2 * i + 1]);
    __syncthreads();
    for (int i = thread; i < kRows * kHeadDim / 4; i += kThreads) {
      const int r = i / (kHeadDim / 4), d = i % (kHeadDim / 4) * 4, row = row0 + r;
      if (row >= rows) break;
      const int first_warp = r / 16 * kKeySplits;
      float top = kMinusInfinity;
      for (int w = first_warp; w < first_warp + kKeySplits; ++w)
        top = fmaxf(top, norms[w * 16 + r % 16].x);
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      float total = 0.0f;
      for (int w = first_warp; w < first_warp + kKeySplits; ++w) {
        const float2 norm = norms[w * 16 + r % 16];
        const float by = partial_weight(norm.x, top);
        total += by * norm.y;
        add_scaled(v, by,
                   *reinterpret_cast<const float4*>(parts + (w * 16 + r % 16) * kHeadDim + d));
      }
      const float by = reciprocal_or_zero(total);
      const int64_t at =
          (static_cast<int64_t>(row / group) * a.n_q + kv_head * group + row % group) * kHeadDim +
          d;
      *reinterpret_cast<float4*>(a.out + at) = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      weight[i] = reciprocal_or_zero(sum[i]);
      if (row0 + warp * 16 + g + 8 * i >= rows) continue;
#pragma unroll
      for (int j = 0; j < 2 * kSteps; ++j)
        *reinterpret_cast<float2*>(a.out + row_offset[i] + 8 * j + 2 * t) =
            make_float2(acc[j][2 * i] * weight[i], acc[j][2 * i + 1] * weight[i]);
    }
  }
}

// ---- launching ----------------------------------------------------------------------------------

template <int kHeadDim, int kKeySplits>
cudaError_t launch_prefill_as(const AttnArguments& a, bool pdl, cudaStream_t stream) {
  constexpr int kRows = 16 * kWarps / kKeySplits, kShared = 4 * kTile * kHeadDim * 2;
  constexpr int kMerge = kKeySplits > 1 ? kWarps * 16 * (8 + kHeadDim * 4) : 0;
  constexpr int kBytes = kShared > kMerge ? kShared : kMerge;
  const auto kernel = attn_prefill_kernel<kHeadDim, kKeySplits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(ceil_div(a.n * (a.n_q / a.n_kv), kRows), a.n_kv);
  return launch(kernel, grid, dim3(kThreads), kBytes, stream, pdl, a);
}

template <int kHeadDim>
cudaError_t launch_prefill(const AttnArguments& a, int key_splits, bool pdl, cudaStream_t stream) {
  if (key_splits == 0) {  // as many CTAs as a large card has multiprocessors, if the rows give them
    const int tiles = a.n * (a.n_q / a.n_kv) / 16 * a.n_kv;
    key_splits = tiles >= 4 * 128 ? 1 : tiles >= 2 * 128 ? 2 : 4;
  }
  if (key_splits == 1) return launch_prefill_as<kHeadDim, 1>(a, pdl, stream);
  if (key_splits == 2) return launch_prefill_as<kHeadDim, 2>(a, pdl, stream);
  return launch_prefill_as<kHeadDim, 4>(a, pdl, stream);
}

}  // namespace

cudaError_t chr_nf4_rope_kv(const AttnArguments& a, const AttnPlan& plan, cudaStream_t stream) {
  if (!valid_shape(a) || a.head_dim < 2 || a.head_dim % 2) return cudaErrorInvalidValue;
  const int pairs = (a.n_q + 2 * a.n_kv) * (a.head_dim / 2);
  return launch(rope_kv_kernel, dim3(ceil_div(pairs, kRopeThreads), a.n), dim3(kRopeThreads), 0,
                stream, plan.pdl && hopper_or_newer(), a);
}

cudaError_t chr_nf4_attn_prefill(const AttnArguments& a, const AttnPlan& plan, cudaStream_t stream) {
  if (!valid_shape(a)) return cudaErrorInvalidValue;
  const bool pdl = plan.pdl && hopper_or_newer();
  switch (a.head_dim) {
    case 16:
      return launch_prefill<16>(a, plan.key_splits, pdl, stream);
    case 32:
      return launch_prefill<32>(a, plan.key_splits, pdl, stream);
    case 64:
      return launch_prefill<64>(a, plan.key_splits, pdl, stream);
    case 128:
      return launch_prefill<128>(a, plan.key_splits, pdl, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace decodev2
