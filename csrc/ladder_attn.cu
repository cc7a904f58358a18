// Attention rungs: earlier ideas, kept to be measured against attn_decode (attn.cu).
//
// Computes  the same as attn.cu
// Owns      attn_one_warp          warp: one query head of one column, all its positions; after
//                                  rope_kv
//           attn_flash_two_launch  CTA (split s, query head): positions s, s + 32, ..., four warps
//                                  in turn. Each CTA rotates its query and the new key itself, the
//                                  first head of a group writes the cache. A second launch merges
//                                  the 32 partials of a head.
// Grid      one_warp (n_q, n), 32 threads; two_launch (32, n_q), 128 threads, then n_q CTAs of
//           head_dim threads
// Layout    lane = head_dim / 32 consecutive dims (one dim, 16 lanes idle, for head_dim 16)
// Floor     2 * live * n_q * head_dim * 2 bytes: every query head reads its keys and values again
// Variants  attn_one_warp, attn_flash_two_launch
#include "attn.cuh"

namespace decodev2 {
namespace {

constexpr int kSplits = 32;
constexpr int kWarps = 4;

// One query head against keys in steps, by one warp: online softmax over whatever `add` is given.
template <int kHeadDim>
struct WarpSoftmax {
  static constexpr int kDims = kHeadDim >= 32 ? kHeadDim / 32 : 1;
  float q[kDims], acc[kDims], m, sum;

  __device__ static bool idle(int lane) { return lane * kDims >= kHeadDim; }

  // q: this head, rotated
  __device__ void start(const float* head, int lane) {
    m = kMinusInfinity, sum = 0.0f;
    const float scale = kLog2e * rsqrtf(static_cast<float>(kHeadDim));
    for (int i = 0; i < kDims; ++i) {
      q[i] = idle(lane) ? 0.0f : head[lane * kDims + i] * scale;
      acc[i] = 0.0f;
    }
  }

  __device__ void add(const uint16_t* key, const uint16_t* value, int lane) {
    float s = 0.0f, v[kDims];
    for (int i = 0; i < kDims; ++i) {
      const int d = idle(lane) ? 0 : lane * kDims + i;
      s += q[i] * bf16_low(key[d]);
      v[i] = bf16_low(value[d]);
    }
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    const float top = fmaxf(m, s), base = top == kMinusInfinity ? 0.0f : top;
    const float keep = exp2_approx(m - base), p = exp2_approx(s - base);
    m = top;
    sum = sum * keep + p;
    for (int i = 0; i < kDims; ++i) acc[i] = acc[i] * keep + p * v[i];
  }
};

template <int kHeadDim>
__global__ void __launch_bounds__(32) attn_one_warp_kernel(AttnArguments a) {
  let_dependents_launch();
  wait_for_predecessors();
  const int lane = threadIdx.x, head = blockIdx.x, kv_head = head / (a.n_q / a.n_kv);
  const int64_t column = blockIdx.y, stride = static_cast<int64_t>(a.n_kv) * kHeadDim;
  const int64_t at = (column * a.n_q + head) * kHeadDim;
  const int length = min(a.valid_len[column], a.max_seq);
  using Softmax = WarpSoftmax<kHeadDim>;
  Softmax softmax;
  softmax.start(a.q + column * a.ld_q + head * kHeadDim, lane);
  for (int row = 0; row < length; ++row) {
    const int64_t offset = row * stride + kv_head * kHeadDim;
    softmax.add(a.k_cache + offset, a.v_cache + offset, lane);
  }
  const float by = reciprocal_or_zero(softmax.sum);
  if (Softmax::idle(lane)) return;
  for (int i = 0; i < Softmax::kDims; ++i)
    a.out[at + lane * Softmax::kDims + i] = softmax.acc[i] * by;
}

template <int kHeadDim>
__global__ void __launch_bounds__(32 * kWarps) attn_flash_split_kernel(AttnArguments a) {
  constexpr int kHalf = kHeadDim / 2;
  __shared__ float query[kHeadDim];
  __shared__ uint16_t live[2][kHeadDim];
  __shared__ float acc[kWarps][kHeadDim];
  __shared__ float2 norm[kWarps];
  let_dependents_launch();
  wait_for_predecessors();
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int split = blockIdx.x, head = blockIdx.y;
  const int group = a.n_q / a.n_kv, kv_head = head / group;
  const int64_t stride = static_cast<int64_t>(a.n_kv) * kHeadDim, position = *a.position;
  const int64_t row = table_row(position, a.max_seq) * kHeadDim;
  const bool stored = in_cache(position, a.max_seq);
  const bool writes = stored && head % group == 0 && position % kSplits == split;
  for (int d = thread; d < kHalf; d += blockDim.x) {
    const float cos = a.cos[row + d], sin = a.sin[row + d];
    float q[2], k[2], v[2];
    for (int i = 0; i < 2; ++i) {
      q[i] = a.q[head * kHeadDim + d + i * kHalf];
      k[i] = a.k[kv_head * kHeadDim + d + i * kHalf];
      v[i] = a.v[kv_head * kHeadDim + d + i * kHalf];
    }
    rotate_pair(q[0], q[1], cos, sin);
    rotate_pair(k[0], k[1], cos, sin);
    for (int i = 0; i < 2; ++i) {
      query[d + i * kHalf] = q[i];
      live[0][d + i * kHalf] = to_bf16(k[i]);
      live[1][d + i * kHalf] = to_bf16(v[i]);
      if (!writes) continue;
      const int64_t slot = position * stride + kv_head * kHeadDim + d + i * kHalf;
      a.k_cache[slot] = to_bf16(k[i]);
      a.v_cache[slot] = to_bf16(v[i]);
    }
  }
  if (split == 0 && head == 0 && thread == 0) *a.valid_len = static_cast<int32_t>(position + 1);
  __syncthreads();

  const int64_t length = position + 1 < a.max_seq ? position + 1 : a.max_seq;
  using Softmax = WarpSoftmax<kHeadDim>;
  Softmax softmax;
  softmax.start(query, lane);
  for (int64_t t = split + kSplits * warp; t < length; t += kSplits * kWarps) {
    const int64_t offset = t * stride + kv_head * kHeadDim;
    const bool is_new = stored && t == position;  // sibling CTAs may be writing that row
    softmax.add(is_new ? live[0] : a.k_cache + offset, is_new ? live[1] : a.v_cache + offset, lane);
  }
  if (lane == 0) norm[warp] = make_float2(softmax.m, softmax.sum);
  if (!Softmax::idle(lane))
    for (int i = 0; i < Softmax::kDims; ++i) acc[warp][lane * Softmax::kDims + i] = softmax.acc[i];
  __syncthreads();

  float top = kMinusInfinity, sum = 0.0f, total = 0.0f;
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, norm[w].x);
  const int64_t part = static_cast<int64_t>(split) * a.n_q + head;
  for (int w = 0; w < kWarps; ++w) {
    const float by = partial_weight(norm[w].x, top);
    sum += by * norm[w].y;
    if (thread < kHeadDim) total += by * acc[w][thread];
  }
  if (thread < kHeadDim) a.partials[part * kHeadDim + thread] = total;
  if (thread == 0)
    reinterpret_cast<float2*>(a.partials + static_cast<int64_t>(kSplits) * a.n_q * kHeadDim)[part] =
        make_float2(top, sum);
}

template <int kHeadDim>
__global__ void __launch_bounds__(kHeadDim) attn_flash_merge_kernel(AttnArguments a) {
  let_dependents_launch();
  wait_for_predecessors();
  const int head = blockIdx.x, d = threadIdx.x;
  const float2* norms = reinterpret_cast<const float2*>(a.partials + static_cast<int64_t>(kSplits) *
                                                                         a.n_q * kHeadDim);
  float top = kMinusInfinity, sum = 0.0f, acc = 0.0f;
  for (int s = 0; s < kSplits; ++s) top = fmaxf(top, norms[s * a.n_q + head].x);
  for (int s = 0; s < kSplits; ++s) {
    const int64_t part = static_cast<int64_t>(s) * a.n_q + head;
    const float by = partial_weight(norms[part].x, top);
    sum += by * norms[part].y;
    acc += by * a.partials[part * kHeadDim + d];
  }
  a.out[static_cast<int64_t>(head) * kHeadDim + d] = acc * reciprocal_or_zero(sum);
}

template <int kHeadDim>
cudaError_t launch_one_warp(const AttnArguments& a, bool pdl, cudaStream_t stream) {
  return launch(attn_one_warp_kernel<kHeadDim>, dim3(a.n_q, a.n), dim3(32), 0, stream, pdl, a);
}

template <int kHeadDim>
cudaError_t launch_two(const AttnArguments& a, bool pdl, cudaStream_t stream) {
  const cudaError_t error = launch(attn_flash_split_kernel<kHeadDim>, dim3(kSplits, a.n_q),
                                   dim3(32 * kWarps), 0, stream, pdl, a);
  if (error != cudaSuccess) return error;
  return launch(attn_flash_merge_kernel<kHeadDim>, dim3(a.n_q), dim3(kHeadDim), 0, stream, pdl, a);
}

}  // namespace

cudaError_t launch_attn_one_warp(const AttnArguments& a, const AttnPlan& plan,
                                 cudaStream_t stream) {
  if (!valid_shape(a)) return cudaErrorInvalidValue;
  const bool pdl = plan.pdl && hopper_or_newer();
  switch (a.head_dim) {
    case 16:
      return launch_one_warp<16>(a, pdl, stream);
    case 32:
      return launch_one_warp<32>(a, pdl, stream);
    case 64:
      return launch_one_warp<64>(a, pdl, stream);
    case 128:
      return launch_one_warp<128>(a, pdl, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_attn_flash_two_launch(const AttnArguments& a, const AttnPlan& plan,
                                         cudaStream_t stream) {
  if (!valid_shape(a) || a.n != 1) return cudaErrorInvalidValue;
  const bool pdl = plan.pdl && hopper_or_newer();
  switch (a.head_dim) {
    case 16:
      return launch_two<16>(a, pdl, stream);
    case 32:
      return launch_two<32>(a, pdl, stream);
    case 64:
      return launch_two<64>(a, pdl, stream);
    case 128:
      return launch_two<128>(a, pdl, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace decodev2
