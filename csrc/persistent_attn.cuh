// The attention phase of persistent.cu: one KV head's queries over one chunk of the live prefix, and the merging of
// the chunks. Hopper and newer; torch-free.
#pragma once
#include "persistent.cuh"

namespace decodev2 {

template <int kHeadDim>
struct Scratch {  // overlays the sums
  static constexpr int kPitch = kHeadDim * 2 + 64;  // bytes between query rows: two of them meet in no bank
  // first: [8 high, 8 low][kHeadDim] bf16, the queries
  static constexpr int kKey = 16 * kPitch;           // the newest key and value, bf16
  static constexpr int kValue = kKey + 2 * kHeadDim;
  static constexpr int kWeightPitch = kShortChunk * 2 + 16;
  static constexpr int kWeights = kValue + 2 * kHeadDim;  // [8 high, 8 low][kShortChunk] bf16, of the positions
  static constexpr int kTops = kWeights + 16 * kWeightPitch;  // [8][kAttending] float, the warps' largest scores
  static constexpr int kSums = kTops + kHeadsPerKv * kAttending * 4;  // the same, sums of their weights
  static constexpr int kBytes = kSums + kHeadsPerKv * kAttending * 4;
  // in the table's holes, x of a product at other times: the chunk's values, [kShortChunk][kHeadDim] bf16
  static_assert(kShortChunk * kHeadDim * 2 <= kHoles * 128);
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

// What a chunk has of pair `pair` of attention's column.
__device__ __forceinline__ uint32_t* heads_at(const PersistentArguments& a, int chunk, int pair) {
  return a.heads + (static_cast<int64_t>(chunk) * (a.q_dim / 2) + pair) * 4;
}

// 16 bytes number `piece` of value `row` of the chunk, in the holes. Eight rows of one piece meet in no bank.
template <int kHeadDim>
__device__ __forceinline__ uint8_t* value_at(uint8_t* table, int row, int piece) {
  return table + (row * (kHeadDim / 64) + (piece >> 3)) * 256 + 128 + ((piece ^ row) & 7) * 16;
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
  const float4* turn = at<const float4>(a.turns_at, zero) + d % (kHeadDim / 2) / 2;  // cos, sin; of the next dim
  const float4 turns[4] = {turn[0], turn[1], turn[2], turn[3]};
  float v[8] = {};
  const int row = (is_query ? kv_head * per_kv + head : a.n_q + (is_key ? 0 : a.n_kv) + kv_head) * kHeadDim + d;
  int writers = 0;
  if (exists) {
    if (bias) {
      const float4* from = reinterpret_cast<const float4*>(bias + row);
      const float4 low = from[0], high = from[1];
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }
    writers = at<const uint8_t>(a.writers_at, zero)[row / kTileRows];
  }
#pragma unroll 1
  for (int first = 0; __any_sync(~0u, first < writers); first += 2) {  // two writers at a time, two quads of each
    const uint32_t* from = a.qkv_sums + static_cast<int64_t>(first) * a.qkv_rows + row;
    const uint32_t wanted = writers - first > 1 ? 15 : writers > first ? 3 : 0;
    const auto words = await(a, kLists, tag, [&] {
      return load_pieces<4>(wanted, tag, [&](int i) { return from + (i >> 1) * a.qkv_rows + (i & 1) * 4; });
    });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* to = v + (i & 1) * 4;
      to[0] += untagged(words.words[i].x), to[1] += untagged(words.words[i].y);
      to[2] += untagged(words.words[i].z), to[3] += untagged(words.words[i].w);
    }
  }
  const bool second = 2 * d >= kHeadDim;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other[2] = {__shfl_xor_sync(~0u, v[2 * i], kLanes / 2), __shfl_xor_sync(~0u, v[2 * i + 1], kLanes / 2)};
    const float4 by = turns[i];
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

// Two neighbouring elements of attention's column, times `by`.
__device__ __forceinline__ void publish_attended(const PersistentArguments& a, int pair, float2 v, float by,
                                                 uint32_t tag) {
  const half2 both = __floats2half2_rn(v.x * by, v.y * by);
  store_word(a.attended + word_of(pair), tagged(*reinterpret_cast<const uint32_t*>(&both), tag));
}

// Keys of 16 positions of one KV head.
template <int kHeadDim>
struct Keys {
  static constexpr int kWords = kHeadDim / 32;
  uint4 word[2][kWords];  // of position 8 u + lane / 4, 16 B number lane % 4 + 4 i
};

// Keys from position `first` on; those from `limit` on are 0.
template <int kHeadDim>
__device__ __forceinline__ Keys<kHeadDim> load_keys(const uint16_t* keys, int64_t stride, int first, int limit,
                                                    int lane) {
  Keys<kHeadDim> loaded = {};
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int position = first + 8 * u + lane / 4;
    const uint4* row = reinterpret_cast<const uint4*>(keys + position * stride) + lane % 4;
    if (position < limit)
#pragma unroll
      for (int i = 0; i < Keys<kHeadDim>::kWords; ++i) loaded.word[u][i] = row[4 * i];
  }
  return loaded;
}

// A warp's 16 values, from row `row` of the chunk and position `first` on, to the holes; those from `limit` on are 0.
template <int kHeadDim>
__device__ __forceinline__ void stage_values(uint8_t* table, const uint16_t* values, int64_t stride, int row, int first,
                                             int limit, int lane) {
  constexpr int kPieces = kHeadDim / 8, kRows = 32 / kPieces;
  const int piece = lane % kPieces, in_warp = lane / kPieces;
  uint4 value[16 / kRows];
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i) {
    const int position = first + in_warp + kRows * i;
    value[i] = make_uint4(0, 0, 0, 0);
    if (position < limit) value[i] = reinterpret_cast<const uint4*>(values + position * stride)[piece];
  }
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i)
    *reinterpret_cast<uint4*>(value_at<kHeadDim>(table, row + in_warp + kRows * i, piece)) = value[i];
}

// The queries' scores with 16 keys: p[u][e] is that of head lane / 4 with position 8 u + 2 (lane % 4) + e.
template <int kHeadDim>
__device__ __forceinline__ void score(float p[2][2], const uint8_t* scratch, const Keys<kHeadDim>& keys, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float c[2][4] = {}, d[2][4] = {};  // rows are heads (high, then low part of the query), columns positions
#pragma unroll
  for (int i = 0; i < Keys<kHeadDim>::kWords; ++i) {
    const uint4 upper = reinterpret_cast<const uint4*>(scratch + g * Scratch<kHeadDim>::kPitch)[4 * i + t];
    const uint4 lower = reinterpret_cast<const uint4*>(scratch + (8 + g) * Scratch<kHeadDim>::kPitch)[4 * i + t];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4& key = keys.word[u][i];
      mma_bf16(c[u], upper.x, lower.x, upper.y, lower.y, key.x, key.y);
      mma_bf16(d[u], upper.z, lower.z, upper.w, lower.w, key.z, key.w);
    }
  }
#pragma unroll
  for (int u = 0; u < 2; ++u)
#pragma unroll
    for (int e = 0; e < 2; ++e) p[u][e] = (c[u][e] + d[u][e]) + (c[u][2 + e] + d[u][2 + e]);
}

// One KV head's queries over one chunk of the live prefix, up to kShortChunk positions at a time. Half of the warps fetch
// keys and values while the others prepare the queries. A warp then has 16 positions' scores, and later 16 dims' sums over
// all positions. Of several chunks the results (not divided by the sum), maximum and sum go to heads, for merge_chunks; of
// the only one what it comes to goes to `attended`.
template <int kHeadDim, bool kTimed>
__device__ __forceinline__ void attend_chunk(const PersistentArguments& a, uint32_t zero, const Token& token, int layer,
                                             uint32_t tag, int thread) {
  using S = Scratch<kHeadDim>;
  constexpr int kAttendingThreads = 32 * kAttending, kDimWarps = kHeadDim / 16;
  static_assert(kAttending == 8 && kDimWarps <= kAttending);
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int position = token.position, kv_head = token.kv_head;
  const int begin = token.chunk * token.chunks.length, end = min(begin + token.chunks.length, position + 1);
  const bool newest = token.chunk == token.chunks.count - 1, attends = warp < kAttending;
  const int limit = min(end, min(position, a.max_seq));  // what lies behind it is not in the cache
  const int64_t stride = static_cast<int64_t>(a.n_kv) * kHeadDim;
  uint16_t* const keys = a.k_cache + layer * static_cast<int64_t>(a.max_seq) * stride + kv_head * kHeadDim;
  uint16_t* const values = a.v_cache + layer * static_cast<int64_t>(a.max_seq) * stride + kv_head * kHeadDim;
  uint8_t* const table = at<uint8_t>(0, zero);
  uint8_t* const scratch = at<uint8_t>(kTableBytes, zero);
  float* const tops = reinterpret_cast<float*>(scratch + S::kTops) + g * kAttending;
  float* const sums = reinterpret_cast<float*>(scratch + S::kSums);

  float top = kMinusInfinity;  // of head g
  float total[2] = {};         // of heads 2 t, 2 t + 1
  float out[2][2] = {};        // [e][i]: dim 16 warp + g + 8 i of head 2 t + e
#pragma unroll 1
  for (int first = begin; first < end; first += kShortChunk) {
    __syncthreads();  // the scratch is the buffers' place, the holes are x's, or the round before was read
    const int mine = first + 16 * warp;
    Keys<kHeadDim> loaded = {};
    if (attends) {
      loaded = load_keys<kHeadDim>(keys, stride, mine, limit, lane);
      stage_values<kHeadDim>(table, values, stride, 16 * warp, mine, limit, lane);
    } else if (first == begin) {
      const bool kept = in_cache(position, a.max_seq);
      stage_queries<kHeadDim>(a, zero, scratch, at<const PersistentLayer>(a.layers_at, zero)[layer].qkv_bias,
                              kept ? keys + position * stride : nullptr, kept ? values + position * stride : nullptr,
                              kv_head, newest, tag, thread - kAttendingThreads);
    }
    __syncthreads();
    stamp<kTimed>(a, layer, kStamps - 4, first == begin && thread == 0);
    float p[2][2], by = 1.0f;
    if (attends) {
      const bool has_newest = newest && static_cast<unsigned>(position - mine) < 16;  // it comes from the scratch
      const uint4* const row = reinterpret_cast<const uint4*>(scratch + S::kKey);
      if (has_newest) {
#pragma unroll
        for (int i = 0; i < Keys<kHeadDim>::kWords; ++i) {
          const uint4 key = row[4 * i + t];
#pragma unroll
          for (int u = 0; u < 2; ++u)
            if (mine + 8 * u + g == position) loaded.word[u][i] = key;
        }
      }
      score<kHeadDim>(p, scratch, loaded, lane);
      float highest = kMinusInfinity;
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (mine + 8 * u + 2 * t + e >= end) p[u][e] = kMinusInfinity;
          highest = fmaxf(highest, p[u][e]);
        }
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      if (t == 0) tops[warp] = highest;
      if (has_newest && lane < kHeadDim / 8)
        *reinterpret_cast<uint4*>(value_at<kHeadDim>(table, position - first, lane)) = row[kHeadDim / 8 + lane];
    }
    if (attends) {
      meet(1, kAttendingThreads);
      const float4 low = reinterpret_cast<const float4*>(tops)[0], high = reinterpret_cast<const float4*>(tops)[1];
      const float highest = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)),
                                  fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
      by = partial_weight(top, fmaxf(highest, top));
      top = fmaxf(highest, top);  // finite: there is a position
      float sum = 0.0f;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          p[u][e] = exp2_approx(p[u][e] - top);
          sum += p[u][e];
        }
        uint32_t upper, lower;
        split_bf16(p[u][0], p[u][1], upper, lower);
        uint32_t* const to =
            reinterpret_cast<uint32_t*>(scratch + S::kWeights + g * S::kWeightPitch) + 8 * warp + 4 * u + t;
        to[0] = upper;
        to[8 * S::kWeightPitch / 4] = lower;
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (t == 0) sums[g * kAttending + warp] = sum;
      meet(1, kAttendingThreads);
    }
    stamp<kTimed>(a, layer, kStamps - 3, first == begin && thread == 0);
    if (warp >= kDimWarps) continue;

    float acc[4][4] = {};  // rows are dims, columns heads; by the weights' high and low parts, of even and odd k
    const int matrix_row = (lane >> 4) * 8 + (lane & 7), matrix = lane >> 3 & 1;
    const uint32_t weights = shared_address(scratch + S::kWeights + matrix_row * S::kWeightPitch) + matrix * 16;
    const uint32_t dims = shared_address(value_at<kHeadDim>(table, matrix_row, 2 * warp + matrix));
#pragma unroll
    for (int k = 0; k < kShortChunk / 16; ++k) {
      uint32_t value[4], weight[4];
      load_matrices_transposed(value, dims + k * (16 * kHeadDim / 64 * 256));  // 16 values on
      load_matrices(weight, weights + 32 * k);
      mma_bf16(acc[k & 1], value[0], value[1], value[2], value[3], weight[0], weight[1]);
      mma_bf16(acc[2 + (k & 1)], value[0], value[1], value[2], value[3], weight[2], weight[3]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float by_head = __shfl_sync(~0u, by, 8 * t + 4 * e);
      const float4* const parts = reinterpret_cast<const float4*>(sums) + 2 * (2 * t + e);
      const float4 one = parts[0], other = parts[1];
      total[e] = total[e] * by_head + (((one.x + one.y) + (one.z + one.w)) + ((other.x + other.y) + (other.z + other.w)));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        out[e][i] = out[e][i] * by_head + ((acc[0][2 * i + e] + acc[1][2 * i + e]) + (acc[2][2 * i + e] + acc[3][2 * i + e]));
    }
  }
  stamp<kTimed>(a, layer, kStamps - 2, thread == 0);
  if (warp < kDimWarps) {
    const bool odd = g & 1;  // who has an odd dim gives it away and takes the even one 8 dims further
    const int dim = 16 * warp + (odd ? g + 7 : g);
    float2 pair[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float taken = __shfl_xor_sync(~0u, odd ? out[e][0] : out[e][1], 4);
      pair[e] = odd ? make_float2(taken, out[e][1]) : make_float2(out[e][0], taken);
    }
    const auto at_pair = [&](int e) { return ((kv_head * a.per_kv + 2 * t + e) * kHeadDim + dim) / 2; };
    if (token.chunks.count == 1) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (2 * t + e < a.per_kv) publish_attended(a, at_pair(e), pair[e], __fdividef(1.0f, total[e]), tag);
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float top_of_head = __shfl_sync(~0u, top, 8 * t + 4 * e);
        if (2 * t + e < a.per_kv)
          store_words(heads_at(a, token.chunk, at_pair(e)), make_uint4(tagged(pair[e].x, tag), tagged(pair[e].y, tag),
                                                                       tagged(top_of_head, tag), tagged(total[e], tag)));
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
    const auto words = await(a, kLists + 1, tag, [&] {
      return load_pieces<1>(exists, tag, [&](int) { return heads_at(a, chunk, kv_head * pairs + i); });
    });
    const uint4 v = words.words[0];
    const float mine = exists ? untagged(v.z) : kMinusInfinity;
    float top = mine;
#pragma unroll 1
    for (int o = lanes / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float by = partial_weight(mine, top);
    float total = by * untagged(v.w), x = by * untagged(v.x), y = by * untagged(v.y);
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
