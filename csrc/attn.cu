// Attention of a decode step: one column, RoPE and KV write inside.
//
// Computes  out[h] = sum_t softmax_t(q[h] . K[t][kv] / sqrt(head_dim)) V[t][kv], kv = h / group,
//           t < live length. RoPE (rotate-half) turns q and k by the position.
// Owns      CTA (split s, kv head): the group's query heads (8 at a time) x positions
//           64 s .. 64 s + 63, then the tiles `splits` further on; warp = 16 positions x all dims x
//           8 heads
// Grid      (splits, n_kv, ceil(group / 8)), 128 threads, 22 KB; static, so a captured launch
//           serves every position: CTAs past the live prefix leave at once. A cluster is 8 splits.
// Layout    m16n8k16: A rows 0-7 = the 8 heads as bf16 high parts, rows 8-15 = their low parts
//           (float minus high), B = keys or values as they lie in the cache, so both operands are
//           exact to 16 bits and no product is wasted:
//             scores  lane (g, t): key g of 8, dims [8 t, 8 t + 8) of each 32: one 16-byte load
//                     feeds two products. Any order of the dims will do, the queries use the same.
//             output  lane (g, t): values 2t, 2t+1, 2t+8, 2t+9, dims [8 g, 8 g + 8) of each 64;
//                     column g of product j is dim 8 g + j, made of two rows by one byte permute.
//                     No shared memory, no transposition.
//           The scores come out as the A operand of the second product.
//           partials: [parts][n_q][head_dim] un-normalised, then [parts][n_q] (maximum, sum).
// Floor     2 * live * n_kv * head_dim * 2 bytes
// Variants  attn_one_warp, attn_flash_two_launch (ladder_attn.cu); rope_kv (attn_prefill.cu), then
//           this without RoPE; merged by the CTA that arrives last; merged in clusters first
#include "attn.cuh"

namespace decodev2 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 64;        // positions a CTA takes at a time
constexpr int kHeads = 8;        // query heads of one CTA in decoding
constexpr int kClusterCtas = 8;  // splits that merge through distributed shared memory
constexpr int kMaxSplits = 64;   // a warp merges them, two per lane

// ---- decode: splits and scratch -----------------------------------------------------------------

// One tile per split up to a bound, then several: enough CTAs to fill a card, few enough to merge
// quickly.
int decode_splits(int n_kv, int max_seq) {
  const int bound = n_kv <= 2 ? kMaxSplits : kMaxSplits / 2;
  const int tiles = ceil_div(max_seq, kTile);
  return tiles < bound ? tiles : bound;
}

// ---- decode: registers of a lane ----------------------------------------------------------------

template <int kHeadDim>
struct Lane {
  // Keys and queries: kKeyDims consecutive dims of each of kKeyChunks runs of 4 * kKeyDims.
  static constexpr int kKeyDims = kHeadDim >= 32 ? 8 : 4;
  static constexpr int kKeyChunks = kHeadDim / (4 * kKeyDims);
  static constexpr int kKeyWords = kKeyDims / 2;
  // Values: kValueDims consecutive dims of each of kValueChunks runs of 8 * kValueDims.
  static constexpr int kValueDims = kHeadDim >= 64 ? 8 : kHeadDim / 8;
  static constexpr int kValueChunks = kHeadDim / (8 * kValueDims);
  static constexpr int kValueWords = kValueDims / 2;
  static constexpr int kProducts = kHeadDim / 8;

  uint32_t query_high[kKeyChunks][kKeyWords];
  uint32_t query_low[kKeyChunks][kKeyWords];
  uint32_t keys[2][kKeyChunks][kKeyWords];        // rows g and g + 8 of the warp's 16
  uint32_t values[4][kValueChunks][kValueWords];  // rows 2t, 2t + 1, 2t + 8, 2t + 9
  float acc[kProducts][4];                        // 0, 1: high part of head g, 2, 3: low
};

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&d)[kWords], const uint16_t* p) {
  if constexpr (kWords == 4) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(p));
    d[0] = v.x, d[1] = v.y, d[2] = v.z, d[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(p));
    d[0] = v.x, d[1] = v.y;
  } else {
    d[0] = __ldcg(reinterpret_cast<const unsigned int*>(p));
  }
}

template <int kWords>
__device__ __forceinline__ void load_words_or_zero(uint32_t (&d)[kWords], const uint16_t* p,
                                                   bool readable) {
  if (readable) {
    load_words(d, p);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) d[i] = 0;
  }
}

// `cache` is already at the kv head; rows at or past `readable` are not touched.
template <int kHeadDim>
__device__ __forceinline__ void load_keys(Lane<kHeadDim>& r, const uint16_t* cache, int64_t stride,
                                          int first_row, int readable, int g, int t) {
  using L = Lane<kHeadDim>;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + 8 * i + g;
    const uint16_t* p = cache + row * stride + L::kKeyDims * t;
#pragma unroll
    for (int c = 0; c < L::kKeyChunks; ++c)
      load_words_or_zero(r.keys[i][c], p + 4 * L::kKeyDims * c, row < readable);
  }
}

__device__ __forceinline__ int value_row(int i, int t) { return 2 * t + (i & 1) + (i >> 1) * 8; }

template <int kHeadDim>
__device__ __forceinline__ void load_values(Lane<kHeadDim>& r, const uint16_t* cache,
                                            int64_t stride, int first_row, int readable, int g,
                                            int t) {
  using L = Lane<kHeadDim>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + value_row(i, t);
    const uint16_t* p = cache + row * stride + L::kValueDims * g;
#pragma unroll
    for (int c = 0; c < L::kValueChunks; ++c)
      load_words_or_zero(r.values[i][c], p + 8 * L::kValueDims * c, row < readable);
  }
}

// Query of head g in float, all dims of this lane; zero for a head that does not exist.
template <int kHeadDim>
__device__ __forceinline__ void load_query(
    float (&q)[Lane<kHeadDim>::kKeyChunks][Lane<kHeadDim>::kKeyDims], const float* head,
    bool exists, int t) {
  using L = Lane<kHeadDim>;
#pragma unroll
  for (int c = 0; c < L::kKeyChunks; ++c)
#pragma unroll
    for (int i = 0; i < L::kKeyDims; i += 4) {
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (exists)
        v = *reinterpret_cast<const float4*>(head + 4 * L::kKeyDims * c + L::kKeyDims * t + i);
      q[c][i] = v.x, q[c][i + 1] = v.y, q[c][i + 2] = v.z, q[c][i + 3] = v.w;
    }
}

// The angles of a lane's dims: of the first half of the head, or of all its dims when there is one
// chunk.
template <int kHeadDim>
struct Angles {
  static constexpr int kChunks = (Lane<kHeadDim>::kKeyChunks + 1) / 2;
  float cos[kChunks][Lane<kHeadDim>::kKeyDims], sin[kChunks][Lane<kHeadDim>::kKeyDims];
};

template <int kHeadDim>
__device__ __forceinline__ void load_angles(Angles<kHeadDim>& r, const float* cos, const float* sin,
                                            int t) {
  using L = Lane<kHeadDim>;
#pragma unroll
  for (int p = 0; p < Angles<kHeadDim>::kChunks; ++p)
#pragma unroll
    for (int i = 0; i < L::kKeyDims; i += 4) {
      const int dim = 4 * L::kKeyDims * p + L::kKeyDims * t + i;
      const float4 c = __ldg(reinterpret_cast<const float4*>(cos + dim));
      const float4 s = __ldg(reinterpret_cast<const float4*>(sin + dim));
      r.cos[p][i] = c.x, r.cos[p][i + 1] = c.y, r.cos[p][i + 2] = c.z, r.cos[p][i + 3] = c.w;
      r.sin[p][i] = s.x, r.sin[p][i + 1] = s.y, r.sin[p][i + 2] = s.z, r.sin[p][i + 3] = s.w;
    }
}

// RoPE in registers: the pair of a dim is in this lane (two or more chunks) or two lanes on.
template <int kHeadDim>
__device__ __forceinline__ void rotate_query(
    float (&q)[Lane<kHeadDim>::kKeyChunks][Lane<kHeadDim>::kKeyDims], const Angles<kHeadDim>& r,
    int t) {
  using L = Lane<kHeadDim>;
#pragma unroll
  for (int p = 0; p < Angles<kHeadDim>::kChunks; ++p)
#pragma unroll
    for (int i = 0; i < L::kKeyDims; ++i) {
      if constexpr (L::kKeyChunks > 1) {
        rotate_pair(q[p][i], q[p + L::kKeyChunks / 2][i], r.cos[p][i], r.sin[p][i]);
      } else {
        const float other = __shfl_xor_sync(~0u, q[0][i], 2);
        q[0][i] = q[0][i] * r.cos[0][i] + (t < 2 ? -other : other) * r.sin[0][i];
      }
    }
}

template <int kHeadDim>
__device__ __forceinline__ void split_query(
    Lane<kHeadDim>& r, const float (&q)[Lane<kHeadDim>::kKeyChunks][Lane<kHeadDim>::kKeyDims]) {
  using L = Lane<kHeadDim>;
#pragma unroll
  for (int c = 0; c < L::kKeyChunks; ++c)
#pragma unroll
    for (int w = 0; w < L::kKeyWords; ++w)
      split_bf16(q[c][2 * w], q[c][2 * w + 1], r.query_high[c][w], r.query_low[c][w]);
}

// Scores of head g with keys 2t, 2t + 1 (first two) and 2t + 8, 2t + 9 of the warp's 16, in units
// of log2.
template <int kHeadDim>
__device__ __forceinline__ void score(const Lane<kHeadDim>& r, float scale, float (&s)[4]) {
  using L = Lane<kHeadDim>;
  float c[2][2][4] = {};  // two chains for each 8 keys
#pragma unroll
  for (int chunk = 0; chunk < L::kKeyChunks; ++chunk)
#pragma unroll
    for (int w = 0; w < L::kKeyWords; w += 2)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        mma_bf16(c[i][(w >> 1) & 1], r.query_high[chunk][w], r.query_low[chunk][w],
                 r.query_high[chunk][w + 1], r.query_low[chunk][w + 1], r.keys[i][chunk][w],
                 r.keys[i][chunk][w + 1]);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      s[2 * i + e] = ((c[i][0][e] + c[i][1][e]) + (c[i][0][e + 2] + c[i][1][e + 2])) * scale;
}

// acc += P V for the warp's 16 positions.
template <int kHeadDim>
__device__ __forceinline__ void add_values(Lane<kHeadDim>& r, const float (&p)[4]) {
  using L = Lane<kHeadDim>;
  uint32_t a0, a1, a2, a3;
  split_bf16(p[0], p[1], a0, a1);
  split_bf16(p[2], p[3], a2, a3);
#pragma unroll
  for (int c = 0; c < L::kValueChunks; ++c)
#pragma unroll
    for (int j = 0; j < L::kValueDims; ++j) {
      const uint32_t halves = j & 1 ? 0x7632u : 0x5410u;
      const uint32_t b0 = byte_permute(r.values[0][c][j >> 1], r.values[1][c][j >> 1], halves);
      const uint32_t b1 = byte_permute(r.values[2][c][j >> 1], r.values[3][c][j >> 1], halves);
      mma_bf16(r.acc[c * L::kValueDims + j], a0, a1, a2, a3, b0, b1);
    }
}

// ---- decode: output -----------------------------------------------------------------------------

// Number `unit` of out's quads.
__device__ __forceinline__ void store_quad(const AttnArguments& a, int64_t unit, const float4& v) {
  reinterpret_cast<float4*>(a.out)[unit] = v;
  if (!a.out_half) return;
  const int pair = static_cast<int>(2 * unit);
  *reinterpret_cast<half2*>(a.out_half + fragment_offset(pair)) =
      __floats2half2_rn(v.x * kActScale, v.y * kActScale);
  *reinterpret_cast<half2*>(a.out_half + fragment_offset(pair + 1)) =
      __floats2half2_rn(v.z * kActScale, v.w * kActScale);
}

// ---- decode: merging ----------------------------------------------------------------------------

template <int kHeadDim>
struct DecodeShared {
  float4 acc[kWarps][kHeads][kHeadDim / 4];  // 16-byte units, swizzled
  float4 inbox[kClusterCtas][kHeadDim / 4];  // what the cluster's CTAs send for this CTA's head
  float2 inbox_norm[kClusterCtas];           // their (maximum, sum)
  uint64_t inbox_full;                       // mbarrier: counts the bytes sent
  float2 norm[kWarps][kHeads];
  float weight[kHeads][kMaxSplits];
  alignas(16) uint16_t live[2][kHeadDim];  // the new key (rotated) and value
  uint32_t last;
};

// Where unit u of head h lies: the lanes of one store fall into different banks.
__device__ __forceinline__ int swizzled_unit(int u, int h) {
  return u ^ ((u >> 3) & 1) ^ ((h & 1) << 1);
}

template <int kHeadDim>
__device__ __forceinline__ void store_warp_partial(DecodeShared<kHeadDim>& shared,
                                                   const Lane<kHeadDim>& r, float m, float sum,
                                                   int warp, int g, int t) {
  using L = Lane<kHeadDim>;
  if (t == 0) shared.norm[warp][g] = make_float2(m, sum);
  // column 2t of product j is dim (2t) * kValueDims + j, column 2t + 1 follows: 2 * kValueDims dims
  // in a row
#pragma unroll
  for (int c = 0; c < L::kValueChunks; ++c) {
    float dims[2 * L::kValueDims];
#pragma unroll
    for (int j = 0; j < L::kValueDims; ++j) {
      const float* acc = r.acc[c * L::kValueDims + j];
      dims[j] = acc[0] + acc[2];
      dims[L::kValueDims + j] = acc[1] + acc[3];
    }
#pragma unroll
    for (int i = 0; i < 2 * L::kValueDims; i += 4) {
      const int u = (8 * L::kValueDims * c + 2 * L::kValueDims * t + i) / 4;
      shared.acc[warp][g][swizzled_unit(u, g)] =
          make_float4(dims[i], dims[i + 1], dims[i + 2], dims[i + 3]);
    }
  }
}

// Unit u of head h over the CTA's warps, in warp order.
template <int kHeadDim>
__device__ __forceinline__ float4 merge_warps(const DecodeShared<kHeadDim>& shared, int h, int u,
                                              float2& norm) {
  float2 part[kWarps];
  float top = kMinusInfinity;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    part[w] = shared.norm[w][h];
    top = fmaxf(top, part[w].x);
  }
  float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float weight = partial_weight(part[w].x, top);
    sum += weight * part[w].y;
    add_scaled(acc, weight, shared.acc[w][h][swizzled_unit(u, h)]);
  }
  norm = make_float2(top, sum);
  return acc;
}

// The last CTA of a kv head: all heads over all parts, in part order.
template <int kHeadDim>
__device__ __forceinline__ void merge_all_parts(const AttnArguments& a,
                                                DecodeShared<kHeadDim>& shared, const float2* norms,
                                                int first_head, int heads, int parts) {
  const int lane = threadIdx.x & 31;
  for (int h = threadIdx.x >> 5; h < heads; h += kWarps) {
    float2 part[kMaxSplits / 32];
    float top = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) {
      const int p = lane + 32 * i;
      part[i] = p < parts ? __ldcg(norms + static_cast<int64_t>(p) * a.n_q + first_head + h)
                          : make_float2(kMinusInfinity, 0.0f);
      top = fmaxf(top, part[i].x);
    }
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) {
      part[i].x = partial_weight(part[i].x, top);
      sum += part[i].x * part[i].y;
    }
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    const float scale = reciprocal_or_zero(sum);
#pragma unroll
    for (int i = 0; i < kMaxSplits / 32; ++i) shared.weight[h][lane + 32 * i] = part[i].x * scale;
  }
  __syncthreads();
  constexpr int kUnits = kHeadDim / 4;
  const int64_t part_units = static_cast<int64_t>(a.n_q) * kUnits;
  const int64_t first_unit = static_cast<int64_t>(first_head) * kUnits;
  const float4* partials = reinterpret_cast<const float4*>(a.partials) + first_unit;
  for (int i = threadIdx.x; i < heads * kUnits; i += kThreads) {
    const float* weight = shared.weight[i / kUnits];
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int p = 0; p < parts; ++p)
      add_scaled(acc, weight[p], __ldcg(partials + p * part_units + i));
    store_quad(a, first_unit + i, acc);
  }
}

#ifdef DECODEV2_HOPPER

// The mbarriers of all CTAs are set up once arrive and wait have passed. No other memory is ordered
// by it, which keeps it cheap.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address that `p` of this CTA's shared memory has in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t peer_address(const void* p, uint32_t rank) {
  uint32_t d;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(shared_address(p)), "r"(rank));
  return d;
}

// Stores into a peer's shared memory; the bytes are counted by the peer's mbarrier when they are
// there.
__device__ __forceinline__ void send_16(uint32_t to, const float4& v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send_8(uint32_t to, const float2& v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(to),
      "f"(v.x), "f"(v.y), "r"(barrier)
      : "memory");
}

// Up to 8 partials of one dim, in order. norm[i], value[i] beyond `parts` are ignored.
__device__ __forceinline__ float merge_eight(const float2 (&norm)[kClusterCtas],
                                             const float (&value)[kClusterCtas], int parts,
                                             float2& merged) {
  float top = kMinusInfinity;
#pragma unroll
  for (int i = 0; i < kClusterCtas; ++i)
    if (i < parts) top = fmaxf(top, norm[i].x);
  float acc = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kClusterCtas; ++i)
    if (i < parts) {
      const float weight = partial_weight(norm[i].x, top);
      sum += weight * norm[i].y;
      acc += weight * value[i];
    }
  merged = make_float2(top, sum);
  return acc;
}

// Number `at` of out.
__device__ __forceinline__ void store_one(const AttnArguments& a, int64_t at, float v) {
  a.out[at] = v;
  if (!a.out_half) return;
  const int k = static_cast<int>(at);
  *reinterpret_cast<__half*>(a.out_half + fragment_offset(k >> 1) + (k & 1) * 2) = __float2half_rn(v * kActScale);
}

// CTA r of every cluster merges head r: what the cluster's CTAs have sent, then, if there are
// several live clusters, the last of them to arrive adds their results. Thread = dim.
template <int kHeadDim>
__device__ __forceinline__ void merge_cluster(const AttnArguments& a,
                                              DecodeShared<kHeadDim>& shared, float2* norms,
                                              int first_head, int splits_live) {
  const int cluster = blockIdx.x / kClusterCtas, dim = threadIdx.x;
  const int head = first_head + blockIdx.x % kClusterCtas;
  const int sources = min(kClusterCtas, splits_live - cluster * kClusterCtas);
  const uint32_t full = shared_address(&shared.inbox_full);
  if (dim == 0)
    barrier_expect(full, sources * (sizeof shared.inbox[0] + sizeof shared.inbox_norm[0]));
  barrier_wait(full, 0);
  if (kHeadDim < kThreads && dim >= kHeadDim && splits_live <= kClusterCtas) return;
  float2 norm[kClusterCtas], total;
  float value[kClusterCtas];
  const bool takes_part = dim < kHeadDim;
#pragma unroll
  for (int i = 0; i < kClusterCtas; ++i)
    if (i < sources) {
      norm[i] = shared.inbox_norm[i];
      value[i] = takes_part ? reinterpret_cast<const float*>(shared.inbox[i])[dim] : 0.0f;
    }
  float acc = merge_eight(norm, value, sources, total);
  const int clusters = (splits_live + kClusterCtas - 1) / kClusterCtas;
  if (clusters > 1) {
    const int64_t part_floats = static_cast<int64_t>(a.n_q) * kHeadDim;
    float* partial = a.partials + static_cast<int64_t>(head) * kHeadDim + dim;
    if (takes_part) partial[cluster * part_floats] = acc;
    if (dim == 0) norms[static_cast<int64_t>(cluster) * a.n_q + head] = total;
    if (!arrive_last(a.counters + head, clusters, &shared.last) || !takes_part) return;
#pragma unroll
    for (int i = 0; i < kClusterCtas; ++i)
      if (i < clusters) {
        norm[i] = __ldcg(norms + static_cast<int64_t>(i) * a.n_q + head);
        value[i] = __ldcg(partial + i * part_floats);
      }
    acc = merge_eight(norm, value, clusters, total);
  }
  if (takes_part)
    store_one(a, static_cast<int64_t>(head) * kHeadDim + dim, acc * reciprocal_or_zero(total.y));
}

static_assert(kMaxSplits / kClusterCtas <= kClusterCtas, "merge_eight takes the clusters too");

#endif  // DECODEV2_HOPPER

// ---- decode -------------------------------------------------------------------------------------

template <int kHeadDim, int kCluster, bool kRope>
__global__ void __launch_bounds__(kThreads, 2) attn_decode_kernel(AttnArguments a, int group) {
  using L = Lane<kHeadDim>;
  constexpr int kHalf = kHeadDim / 2;
  constexpr int kUnits = kHeadDim / 4;
  __shared__ DecodeShared<kHeadDim> shared;
  let_dependents_launch();
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int g = lane >> 2, t = lane & 3;
  const int split = blockIdx.x, splits = gridDim.x, kv_head = blockIdx.y, head_block = blockIdx.z;
  const int first_head = kv_head * group + head_block * kHeads;
  const int heads = min(kHeads, group - head_block * kHeads);
  const int64_t stride = static_cast<int64_t>(a.n_kv) * kHeadDim;
  const uint16_t* k_cache = a.k_cache + kv_head * kHeadDim;
  const uint16_t* v_cache = a.v_cache + kv_head * kHeadDim;

#ifdef DECODEV2_HOPPER
  if (kCluster > 1) {
    if (thread == 0) {
      barrier_init(shared_address(&shared.inbox_full), 1);
      barriers_visible();
    }
    cluster_arrive();
  }
#endif

  // new row: thread d < half owns the pair d of the key, thread half + d the pair d of the value
  const int pair = thread < kHalf ? thread : thread - kHalf;
  float query[L::kKeyChunks][L::kKeyDims], first = 0.0f, second = 0.0f;
  const auto load_columns = [&] {
    wait_for_predecessors();
    load_query<kHeadDim>(query, a.q + static_cast<int64_t>(first_head + g) * kHeadDim, g < heads, t);
    if (kRope && thread < kHeadDim) {
      const float* row = (thread < kHalf ? a.k : a.v) + kv_head * kHeadDim;
      first = row[pair];
      second = row[pair + kHalf];
    }
  };
  // With a.ahead the position and the rows before it have stood since the step began, and what the kernels before are
  // still writing is q, k and v. Otherwise all is asked for at once. What is read ahead of the wait comes from the L2:
  // the L1 may hold what it held in the step before.
  if (!a.ahead) load_columns();
  const int64_t position = kRope ? __ldcg(a.position) : 0;
  const int given_length = kRope ? 0 : __ldcg(a.valid_len);

  const bool stored = kRope && in_cache(position, a.max_seq);
  const int64_t wanted = kRope ? position + 1 : given_length;
  const int length = static_cast<int>(wanted < 0 ? 0 : wanted < a.max_seq ? wanted : a.max_seq);
  const int readable = stored ? length - 1 : length;  // the new row may be being written
  const int splits_live = max(1, min(splits, (length + kTile - 1) / kTile));
  const bool has_work = split < splits_live;
  if (kCluster == 1 || splits_live == 1) {
    if (!has_work) return;
  } else if (split / kCluster * kCluster >= splits_live) {
    return;
  }

  if (has_work) {
    L r;
    int row0 = split * kTile + warp * 16;
    load_keys<kHeadDim>(r, k_cache, stride, row0, readable, g, t);
    load_values<kHeadDim>(r, v_cache, stride, row0, readable, g, t);
    const int64_t table = table_row(position, a.max_seq) * kHeadDim;
    Angles<kHeadDim> angles;
    if (kRope) load_angles<kHeadDim>(angles, a.cos + table, a.sin + table, t);
    if (a.ahead) load_columns();
    const int live_tile = stored ? static_cast<int>(position) / kTile : -1;
    const bool owner = live_tile < splits ? live_tile == split : live_tile % splits == split;
    if (owner && thread < kHeadDim) {
      if (thread < kHalf) rotate_pair(first, second, a.cos[table + pair], a.sin[table + pair]);
      const uint16_t low = to_bf16(first), high = to_bf16(second);
      uint16_t* live = shared.live[thread < kHalf ? 0 : 1];
      live[pair] = low;
      live[pair + kHalf] = high;
      if (head_block == 0) {
        uint16_t* slot =
            (thread < kHalf ? a.k_cache : a.v_cache) + position * stride + kv_head * kHeadDim;
        slot[pair] = low;
        slot[pair + kHalf] = high;
      }
    }
    if (kRope) rotate_query<kHeadDim>(query, angles, t);
    split_query<kHeadDim>(r, query);
    if (owner) __syncthreads();

#pragma unroll
    for (int j = 0; j < L::kProducts; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) r.acc[j][e] = 0.0f;
    float m = kMinusInfinity, sum = 0.0f;  // of head g; sum over this lane's keys only
    const float scale = kLog2e * rsqrtf(static_cast<float>(kHeadDim));
    const int live_row = stored ? static_cast<int>(position) : -1;
    for (int tile = split;;) {
      const int next = tile + splits;
      const bool more = next * kTile < length, any = row0 < length;
      const bool has_live = live_row >= row0 && live_row < row0 + 16;
      float s[4];
      if (any) {
        if (has_live) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (row0 + 8 * i + g == live_row)
#pragma unroll
              for (int c = 0; c < L::kKeyChunks; ++c)
#pragma unroll
                for (int w = 0; w < L::kKeyWords; ++w)
                  r.keys[i][c][w] = *reinterpret_cast<const uint32_t*>(
                      &shared.live[0][4 * L::kKeyDims * c + L::kKeyDims * t + 2 * w]);
        }
        score<kHeadDim>(r, scale, s);
      }
      const int next_row = next * kTile + warp * 16;
      if (more) load_keys<kHeadDim>(r, k_cache, stride, next_row, readable, g, t);
      if (any) {
        float top = m;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (row0 + value_row(i, t) < length) top = fmaxf(top, s[i]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float base = top == kMinusInfinity ? 0.0f : top;
        const float keep = exp2_approx(m - base);  // 0 while m is -inf
        m = top;
        sum *= keep;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[i] = row0 + value_row(i, t) < length ? exp2_approx(s[i] - base) : 0.0f;
          sum += s[i];
        }
#pragma unroll
        for (int j = 0; j < L::kProducts; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) r.acc[j][e] *= keep;
        if (has_live) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (row0 + value_row(i, t) == live_row)
#pragma unroll
              for (int c = 0; c < L::kValueChunks; ++c)
#pragma unroll
                for (int w = 0; w < L::kValueWords; ++w)
                  r.values[i][c][w] = *reinterpret_cast<const uint32_t*>(
                      &shared.live[1][8 * L::kValueDims * c + L::kValueDims * g + 2 * w]);
        }
        add_values<kHeadDim>(r, s);
      }
      if (!more) break;
      load_values<kHeadDim>(r, v_cache, stride, next_row, readable, g, t);
      tile = next;
      row0 = next_row;
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    store_warp_partial<kHeadDim>(shared, r, m, sum, warp, g, t);
    if (kRope && split == 0 && blockIdx.y == 0 && blockIdx.z == 0 && thread == 0)
      *a.valid_len = static_cast<int32_t>(wanted);
  } else if (a.ahead) {
    wait_for_predecessors();
  }
  __syncthreads();
#ifdef DECODEV2_HOPPER
  if (kCluster > 1 && splits_live > 1) cluster_wait();
#endif

  float2* norms = reinterpret_cast<float2*>(a.partials + static_cast<int64_t>(splits / kCluster) *
                                                             a.n_q * kHeadDim);
  if (has_work) {
    float4* partial = reinterpret_cast<float4*>(a.partials) +
                      (static_cast<int64_t>(split) * a.n_q + first_head) * kUnits;
    for (int i = thread; i < heads * kUnits; i += kThreads) {
      const int h = i / kUnits, u = i % kUnits;
      float2 norm;
      float4 acc = merge_warps<kHeadDim>(shared, h, u, norm);
      if (splits_live == 1) {
        const float by = reciprocal_or_zero(norm.y);
        store_quad(a, static_cast<int64_t>(first_head) * kUnits + i,
                   make_float4(acc.x * by, acc.y * by, acc.z * by, acc.w * by));
      } else if constexpr (kCluster == 1) {
        partial[i] = acc;
        if (u == 0) norms[static_cast<int64_t>(split) * a.n_q + first_head + h] = norm;
      } else {
#ifdef DECODEV2_HOPPER
        const int me = split % kCluster;
        const uint32_t barrier = peer_address(&shared.inbox_full, h);
        send_16(peer_address(&shared.inbox[me][u], h), acc, barrier);
        if (u == 0) send_8(peer_address(&shared.inbox_norm[me], h), norm, barrier);
#endif
      }
    }
  }
  if (splits_live == 1) return;
  if constexpr (kCluster == 1) {
    if (arrive_last(a.counters + first_head, splits_live, &shared.last))
      merge_all_parts<kHeadDim>(a, shared, norms, first_head, heads, splits_live);
  } else {
#ifdef DECODEV2_HOPPER
    if (split % kCluster < heads)
      merge_cluster<kHeadDim>(a, shared, norms, first_head, splits_live);
#endif
  }
}

// ---- launching ----------------------------------------------------------------------------------

template <int kHeadDim, int kCluster, bool kRope>
cudaError_t launch_decode_as(const AttnArguments& a, bool pdl, cudaStream_t stream) {
  const int splits = decode_splits(a.n_kv, a.max_seq);
  const int group = a.n_q / a.n_kv;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ceil_div(splits, kCluster) * kCluster, a.n_kv, ceil_div(group, kHeads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (pdl) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (kCluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = kCluster;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, attn_decode_kernel<kHeadDim, kCluster, kRope>, a, group);
}

template <int kHeadDim>
cudaError_t launch_decode(const AttnArguments& a, bool cluster, bool rope, bool pdl,
                          cudaStream_t stream) {
  if (cluster)
    return rope ? launch_decode_as<kHeadDim, kClusterCtas, true>(a, pdl, stream)
                : launch_decode_as<kHeadDim, kClusterCtas, false>(a, pdl, stream);
  return rope ? launch_decode_as<kHeadDim, 1, true>(a, pdl, stream)
              : launch_decode_as<kHeadDim, 1, false>(a, pdl, stream);
}

}  // namespace

int64_t attn_partial_floats(int n_q, int n_kv, int head_dim, int max_seq) {
  const int splits = decode_splits(n_kv, max_seq);
  const int64_t parts = splits > 32 ? splits : 32;  // 32: attn_flash_two_launch
  return parts * n_q * (head_dim + 2);
}

cudaError_t chr_nf4_attn(const AttnArguments& given, const AttnPlan& plan, cudaStream_t stream) {
  if (!valid_shape(given) || given.n != 1) return cudaErrorInvalidValue;
  const bool hopper = hopper_or_newer(), pdl = plan.pdl && hopper;
  AttnArguments a = given;
  a.ahead = plan.ahead && plan.rope && pdl;  // without RoPE the newest row was written by a kernel of its own
  if (plan.merge == AttnMerge::kCluster && !hopper) return cudaErrorNotSupported;
  const bool cluster =
      plan.merge == AttnMerge::kCluster ||
      (plan.merge == AttnMerge::kAuto && hopper && decode_splits(a.n_kv, a.max_seq) > 1);
  switch (a.head_dim) {
    case 16:
      return launch_decode<16>(a, cluster, plan.rope, pdl, stream);
    case 32:
      return launch_decode<32>(a, cluster, plan.rope, pdl, stream);
    case 64:
      return launch_decode<64>(a, cluster, plan.rope, pdl, stream);
    case 128:
      return launch_decode<128>(a, cluster, plan.rope, pdl, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace decodev2
