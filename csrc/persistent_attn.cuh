// The attention phase of persistent.cu: one KV head's queries over one chunk of the live prefix, and the merging of
// the chunks. Hopper and newer; torch-free.
#pragma once
#include "persistent.cuh"

namespace decodev2 {

template <int kHeadDim>
struct Scratch {  // overlays the sums
  static constexpr int kPitch = kHeadDim * 2 + 16;  // bytes between query rows
  // first: [8 high, 8 low][kHeadDim] bf16, the queries
  static constexpr int kKey = 16 * kPitch;           // the newest key and value, bf16
  static constexpr int kValue = kKey + 2 * kHeadDim;
  static constexpr int kNorms = kValue + 2 * kHeadDim;  // [kAttending][8] maxima and sums
  static constexpr int kBytes = kNorms + kAttending * kHeadsPerKv * 8;
  // in the table's holes, x of a product at other times: what the warps have, [kAttending][kPairs] float2. A warp writes
  // 32 in a row at a time, so no two meet in a bank: [2][kHeadDim / 64][4][32], see pair_of
  static constexpr int kPairs = kHeadsPerKv * kHeadDim / 2;
  static_assert(kAttending * kHeadsPerKv * kHeadDim * 4 <= kHoles * 128);
};

#ifdef DECODEV2_HOPPER

// ---- attention -----------------------------------------------------------------------------------------

// One CTA takes all of it while it can do so at once: merging costs a hand-off.
__device__ __forceinline__ Chunks chunks_of(const PersistentArguments& a, int live) {
  live = max(live, 1);
  const int count = min((live + kShortChunk - 1) / kShortChunk, a.most_chunks);
  const int length = ((live + count - 1) / count + 15) / 16 * 16;
  return {length, (live + length - 1) / length};
}

// Float2 number `pair` of the holes.
__device__ __forceinline__ float2& in_holes(uint8_t* table, int pair) {
  return *reinterpret_cast<float2*>(table + (pair >> 4) * 256 + 128 + (pair & 15) * 8);
}

// This KV head's queries to the scratch: sums of writers, bias, RoPE, scale, as bf16 high and low; with `newest` also its
// new key and value, to the cache too. A lane takes eight dims of a head; the lane half a head away has those that RoPE
// joins them with.
template <int kHeadDim>
__device__ __forceinline__ void stage_queries(const PersistentArguments& a, uint32_t zero, uint8_t* scratch,
                                              const float* bias, uint16_t* key_row, uint16_t* value_row, int kv_head,
                                              bool newest, uint32_t tag, int thread) {
  using S = Scratch<kHeadDim>;
  constexpr int kLanes = kHeadDim / 8;
  const int per_kv = a.per_kv, head = thread / kLanes, d = thread % kLanes * 8;
  if ((thread & -32) >= (kHeadsPerKv + 2 * newest) * kLanes) return;  // warps as a whole: RoPE shuffles
  const bool is_query = head < kHeadsPerKv, is_key = head == kHeadsPerKv;
  const bool exists = is_query ? head < per_kv : newest && head < kHeadsPerKv + 2;
  float v[8] = {};
  if (exists) {
    const int row = (is_query ? kv_head * per_kv + head : a.n_q + (is_key ? 0 : a.n_kv) + kv_head) * kHeadDim + d;
    if (bias) {
      const float4* from = reinterpret_cast<const float4*>(bias + row);
      const float4 low = from[0], high = from[1];
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }
    const int writers = at<const uint8_t>(a.writers_at, zero)[row / kTileRows];
#pragma unroll 1
    for (int first = 0; first < writers; first += 2) {  // two writers at a time, two quads of each
      const uint32_t* from = a.qkv_sums + static_cast<int64_t>(first) * a.qkv_rows + row;
      const uint32_t wanted = writers - first > 1 ? 15 : 3;
      const auto look = [&] {
        return load_pieces<uint4, 4>(wanted, [&](int i) { return from + (i >> 1) * a.qkv_rows + (i & 1) * 4; });
      };
      const auto words = await(a, kLists, tag, look);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* to = v + (i & 1) * 4;
        to[0] += untagged(words.word[i].x), to[1] += untagged(words.word[i].y);
        to[2] += untagged(words.word[i].z), to[3] += untagged(words.word[i].w);
      }
    }
  }
  __syncwarp();
  const bool second = 2 * d >= kHeadDim;
  const float4* turn = at<const float4>(a.turns_at, zero) + d % (kHeadDim / 2) / 2;  // cos, sin; of the next dim
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other[2] = {__shfl_xor_sync(~0u, v[2 * i], kLanes / 2), __shfl_xor_sync(~0u, v[2 * i + 1], kLanes / 2)};
    const float4 by = turn[i];
    if (is_query || is_key) {
      v[2 * i] = v[2 * i] * by.x + (second ? other[0] : -other[0]) * by.y;
      v[2 * i + 1] = v[2 * i + 1] * by.z + (second ? other[1] : -other[1]) * by.w;
    }
  }
  const float scale = is_query ? rsqrtf(static_cast<float>(kHeadDim)) * kLog2e : 1.0f;
  uint32_t upper[4], lower[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_bf16(v[2 * i] * scale, v[2 * i + 1] * scale, upper[i], lower[i]);
  const uint4 high = make_uint4(upper[0], upper[1], upper[2], upper[3]);
  if (is_query) {
    *reinterpret_cast<uint4*>(scratch + head * S::kPitch + 2 * d) = high;
    *reinterpret_cast<uint4*>(scratch + (kHeadsPerKv + head) * S::kPitch + 2 * d) =
        make_uint4(lower[0], lower[1], lower[2], lower[3]);
  } else if (exists) {
    *reinterpret_cast<uint4*>(scratch + (is_key ? S::kKey : S::kValue) + 2 * d) = high;
    uint16_t* cache = is_key ? key_row : value_row;
    if (cache) *reinterpret_cast<uint4*>(cache + d) = high;
  }
}

// Which head, and which first of two dims, the float2 number `pair` of a warp's is of.
template <int kHeadDim>
__device__ __forceinline__ int2 pair_of(int pair) {
  const int t = pair >> 3 & 3, g = pair & 7, j = pair >> 5 & 3, rest = pair >> 7;
  return make_int2(2 * t + rest / (kHeadDim / 64), rest % (kHeadDim / 64) * 64 + 8 * g + 2 * j);
}

// Two neighbouring elements of attention's column, times `by`.
__device__ __forceinline__ void publish_attended(const PersistentArguments& a, int pair, float2 v, float by,
                                                 uint32_t tag) {
  const half2 both = __floats2half2_rn(v.x * by, v.y * by);
  store_word(a.attended + word_of(pair), tagged(*reinterpret_cast<const uint32_t*>(&both), tag));
}

// Keys and values of 16 positions: rows position_of(...) of one KV head.
template <int kHeadDim>
struct Rows {
  static constexpr int kKeyWords = kHeadDim / 32, kValueWords = kHeadDim / 64;
  uint4 key[2][kKeyWords];      // of position 8 u + lane / 4, 16 B number lane % 4 + 4 i
  uint4 value[kValueWords][4];  // of position 2 (lane % 4) + (r & 1) + 8 (r / 2), 16 B number lane / 4 + 8 i
};

// Those of positions below `limit`; the others are 0.
template <int kHeadDim>
__device__ __forceinline__ Rows<kHeadDim> load_rows(const uint16_t* keys, const uint16_t* values, int64_t stride,
                                                    int first, int limit, int max_seq, int lane) {
  Rows<kHeadDim> rows = {};
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int position = first + 8 * u + g;
    const uint4* row = reinterpret_cast<const uint4*>(keys + min(position, max_seq - 1) * stride) + t;
    if (position < limit)
#pragma unroll
      for (int i = 0; i < Rows<kHeadDim>::kKeyWords; ++i) rows.key[u][i] = row[4 * i];
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int position = first + 2 * t + (r & 1) + 8 * (r >> 1);
    const uint4* row = reinterpret_cast<const uint4*>(values + min(position, max_seq - 1) * stride) + g;
    if (position < limit)
#pragma unroll
      for (int i = 0; i < Rows<kHeadDim>::kValueWords; ++i) rows.value[i][r] = row[8 * i];
  }
  return rows;
}

// A warp's part of attention, up to 16 positions at a time, and what comes of it to the scratch and the holes.
// `meet_queries` waits until the queries and the newest row are in the scratch.
template <int kHeadDim, typename Meet>
__device__ __forceinline__ void attend_warp(const PersistentArguments& a, uint8_t* table, uint8_t* scratch,
                                            const uint16_t* keys, const uint16_t* values, int64_t stride, int first,
                                            int end, int newest, int warp, int lane, Meet meet_queries) {
  using S = Scratch<kHeadDim>;
  using R = Rows<kHeadDim>;
  const int g = lane >> 2, t = lane & 3, lane_of_pair = t * 8 + g, limit = min(end, newest);
  R rows = load_rows<kHeadDim>(keys, values, stride, first, limit, a.max_seq, lane);
  meet_queries();
  if (first >= end) return;
  float top = kMinusInfinity, sum = 0.0f;
#pragma unroll 1
  for (bool begins = true;; begins = false) {
    if (newest - first < 16) {  // the newest row is one of these: it comes from the scratch
      const uint4* const row = reinterpret_cast<const uint4*>(scratch + S::kKey);
#pragma unroll
      for (int i = 0; i < R::kKeyWords; ++i) {
        const uint4 key = row[4 * i + t];
#pragma unroll
        for (int u = 0; u < 2; ++u) rows.key[u][i] = first + 8 * u + g == newest ? key : rows.key[u][i];
      }
#pragma unroll
      for (int i = 0; i < R::kValueWords; ++i) {
        const uint4 value = row[kHeadDim / 8 + 8 * i + g];
#pragma unroll
        for (int r = 0; r < 4; ++r)
          rows.value[i][r] = first + 2 * t + (r & 1) + 8 * (r >> 1) == newest ? value : rows.value[i][r];
      }
    }
    // scores: rows are heads (high, then low part of the query), columns positions
    float c[2][4] = {};
    uint4 query[R::kKeyWords][2];
#pragma unroll
    for (int i = 0; i < R::kKeyWords; ++i) {
      const uint32_t at = shared_address(scratch) + g * S::kPitch + i * 64 + t * 16;
      query[i][0] = load_shared_16(at);
      query[i][1] = load_shared_16(at + 8 * S::kPitch);
    }
#pragma unroll
    for (int i = 0; i < R::kKeyWords; ++i) {
      const uint4 upper = query[i][0], lower = query[i][1];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        mma_bf16(c[u], upper.x, lower.x, upper.y, lower.y, rows.key[u][i].x, rows.key[u][i].y);
        mma_bf16(c[u], upper.z, lower.z, upper.w, lower.w, rows.key[u][i].z, rows.key[u][i].w);
      }
    }
    float p[2][2], highest = top;
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        p[u][e] = first + 8 * u + 2 * t + e < end ? c[u][e] + c[u][2 + e] : kMinusInfinity;
        highest = fmaxf(highest, p[u][e]);
      }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));  // finite: there is a position
    const float by = partial_weight(top, highest);
    sum *= by;
    top = highest;
    uint32_t upper[2], lower[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        p[u][e] = exp2_approx(p[u][e] - top);
        sum += p[u][e];
      }
      split_bf16(p[u][0], p[u][1], upper[u], lower[u]);
    }
    // values: rows are dims, columns heads; the sums go to the holes
    float2* const to = &in_holes(table, warp * S::kPairs + lane_of_pair);
    const auto place = [&](int e, int i, int j) -> float2& {  // 32 pairs lie in two holes
      return to[((e * R::kValueWords + i) * 4 + j) * (2 * 256 / static_cast<int>(sizeof(float2)))];
    };
    float acc[R::kValueWords][4][4] = {};  // [i][j]: dims 64 i + 8 g + 2 j (+ 1) of heads 2t and 2t + 1
    if (!begins) {
      const float by_head[2] = {__shfl_sync(~0u, by, 8 * t), __shfl_sync(~0u, by, 8 * t + 4)};
#pragma unroll
      for (int i = 0; i < R::kValueWords; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float2 before = place(e, i, j);
            acc[i][j][e] = by_head[e] * before.x, acc[i][j][2 + e] = by_head[e] * before.y;
          }
    }
#pragma unroll
    for (int i = 0; i < R::kValueWords; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t word[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) word[r] = reinterpret_cast<const uint32_t*>(&rows.value[i][r])[j];
        const uint32_t a0 = byte_permute(word[0], word[1], 0x5410), a1 = byte_permute(word[0], word[1], 0x7632);
        const uint32_t a2 = byte_permute(word[2], word[3], 0x5410), a3 = byte_permute(word[2], word[3], 0x7632);
        mma_bf16(acc[i][j], a0, a1, a2, a3, upper[0], upper[1]);
        mma_bf16(acc[i][j], a0, a1, a2, a3, lower[0], lower[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) place(e, i, j) = make_float2(acc[i][j][e], acc[i][j][2 + e]);
      }
    }
    first += kShortChunk;
    if (first >= end) break;
    rows = load_rows<kHeadDim>(keys, values, stride, first, limit, a.max_seq, lane);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (t == 0) reinterpret_cast<float2*>(scratch + S::kNorms)[warp * kHeadsPerKv + g] = make_float2(top, sum);
}

// One KV head's queries over one chunk of the live prefix: half of the warps attend, the others prepare the queries. Of
// several chunks the results (not divided by the sum) and (max, sum) go to heads and softmax, for merge_chunks; of the
// only one what it comes to goes to `attended`.
template <int kHeadDim, bool kTimed>
__device__ __forceinline__ void attend_chunk(const PersistentArguments& a, uint32_t zero, const Token& token, int layer,
                                             uint32_t tag, int thread) {
  using S = Scratch<kHeadDim>;
  const int warp = thread >> 5, lane = thread & 31, position = token.position, kv_head = token.kv_head;
  const int begin = token.chunk * token.chunks.length, end = min(begin + token.chunks.length, position + 1);
  const bool newest = token.chunk == token.chunks.count - 1;
  const int64_t stride = static_cast<int64_t>(a.n_kv) * kHeadDim;
  uint16_t* const keys = a.k_cache + layer * static_cast<int64_t>(a.max_seq) * stride + kv_head * kHeadDim;
  uint16_t* const values = a.v_cache + layer * static_cast<int64_t>(a.max_seq) * stride + kv_head * kHeadDim;
  uint8_t* const table = at<uint8_t>(0, zero);
  uint8_t* const scratch = at<uint8_t>(kTableBytes, zero);
  __syncthreads();  // the scratch is the buffers' place
  if (warp < kAttending) {
    attend_warp<kHeadDim>(a, table, scratch, keys, values, stride, begin + 16 * warp, end,
                          newest ? position : 1 << 30, warp, lane, [] { meet(1, kThreads); });
  } else {
    const bool kept = in_cache(position, a.max_seq);
    stage_queries<kHeadDim>(a, zero, scratch, at<const PersistentLayer>(a.layers_at, zero)[layer].qkv_bias,
                            kept ? keys + position * stride : nullptr, kept ? values + position * stride : nullptr,
                            kv_head, newest, tag, thread - 32 * kAttending);
    meet(1, kThreads);
    stamp<kTimed>(a, layer, kStamps - 4, thread == 32 * kAttending);
  }
  __syncthreads();
  stamp<kTimed>(a, layer, kStamps - 3, thread == 0);
  const int active = min(kAttending, (end - begin + 15) / 16);
  const int2 mine = pair_of<kHeadDim>(thread);
  static_assert(S::kPairs <= kThreads);
  if (thread < S::kPairs && mine.x < a.per_kv) {  // a thread's pair of neighbours, over the warps
    // all loads before the first use: what a warp without a position has left there counts nothing
    constexpr int kPartStride = S::kPairs / 16 * 256 / static_cast<int>(sizeof(float2));
    const float2* const parts = &in_holes(table, thread);
    float2 norm[kAttending], part[kAttending];
#pragma unroll
    for (int w = 0; w < kAttending; ++w) {
      norm[w] = reinterpret_cast<const float2*>(scratch + S::kNorms)[w * kHeadsPerKv + mine.x];
      part[w] = parts[w * kPartStride];
    }
    float highest = kMinusInfinity, total = 0.0f;
    float2 v = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kAttending; ++w) highest = fmaxf(highest, w < active ? norm[w].x : kMinusInfinity);
#pragma unroll
    for (int w = 0; w < kAttending; ++w) {
      const float by = w < active ? exp2_approx(norm[w].x - highest) : 0.0f;
      total += w < active ? by * norm[w].y : 0.0f;
      v.x += w < active ? by * part[w].x : 0.0f, v.y += w < active ? by * part[w].y : 0.0f;
    }
    stamp<kTimed>(a, layer, kStamps - 2, thread == 0);
    const int head = kv_head * a.per_kv + mine.x, at_dim = head * kHeadDim + mine.y;
    if (token.chunks.count == 1) {
      publish_attended(a, at_dim / 2, v, __fdividef(1.0f, total), tag);
    } else {
      uint32_t* to = a.heads + static_cast<int64_t>(token.chunk) * a.q_dim + at_dim;
      store_word(to, tagged(v.x, tag));
      store_word(to + 1, tagged(v.y, tag));
      if (mine.y == 0) {
        to = a.softmax + (static_cast<int64_t>(token.chunk) * a.n_q + head) * 2;
        store_word(to, tagged(highest, tag));
        store_word(to + 1, tagged(total, tag));
      }
    }
  }
  stamp<kTimed>(a, layer, kStamps - 1, thread == 0);
  __syncthreads();  // the scratch is free
}

// The chunks of a KV head become one column; each of its CTAs takes an equal part of it. A lane looks at one chunk.
template <int kHeadDim>
__device__ __forceinline__ void merge_chunks(const PersistentArguments& a, const Token& token, uint32_t tag,
                                             int thread) {
  const int chunks = token.chunks.count, pairs = a.per_kv * kHeadDim / 2, kv_head = token.kv_head;
  const int begin = pairs * token.chunk / chunks, end = pairs * (token.chunk + 1) / chunks;
  int lanes = 2;
#pragma unroll 1
  while (lanes < chunks) lanes *= 2;
  static_assert(kMaxChunks <= 32);
  const int chunk = thread & (lanes - 1);
#pragma unroll 1
  for (int first = begin; first < end; first += kThreads / lanes) {
    const int i = first + thread / lanes;
    const bool exists = chunk < chunks && i < end;
    const uint32_t* const from = a.heads + static_cast<int64_t>(chunk) * a.q_dim + 2 * (kv_head * pairs + i);
    const uint32_t* const norms =
        a.softmax + (static_cast<int64_t>(chunk) * a.n_q + kv_head * a.per_kv + 2 * i / kHeadDim) * 2;
    const auto v = await(a, kLists + 1, tag, [&] {
      return load_pieces<uint2, 2>(exists ? 3 : 0, [&](int piece) { return piece ? norms : from; });
    });
    __syncwarp();
    const float mine = exists ? untagged(v.word[1].x) : kMinusInfinity;
    float top = mine;
#pragma unroll 1
    for (int o = lanes / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float by = partial_weight(mine, top);
    float total = by * untagged(v.word[1].y), x = by * untagged(v.word[0].x), y = by * untagged(v.word[0].y);
#pragma unroll 1
    for (int o = lanes / 2; o; o >>= 1) {
      total += __shfl_xor_sync(~0u, total, o);
      x += __shfl_xor_sync(~0u, x, o);
      y += __shfl_xor_sync(~0u, y, o);
    }
    if (exists && chunk == 0)
      publish_attended(a, kv_head * pairs + i, make_float2(x, y), reciprocal_or_zero(total), tag);
  }
}

// The attention of a layer, for the CTAs that have a chunk.
template <int kHeadDim, bool kTimed>
__device__ __forceinline__ void attend(const PersistentArguments& a, uint32_t zero, int layer, uint32_t tag,
                                       int thread) {
  const Token token = *at<const Token>(a.token_at, zero);
  attend_chunk<kHeadDim, kTimed>(a, zero, token, layer, tag, thread);
  if (token.chunks.count > 1) merge_chunks<kHeadDim>(a, token, tag, thread);
}

#endif  // DECODEV2_HOPPER

}  // namespace decodev2
