// What the bindings of attn.cu and ladder_attn.cu check, and how they fill AttnArguments.
#pragma once
#include "checks.h"
#include "launch.h"

namespace decodev2 {

// Columns of q, k and v may be parts of wider rows (one qkv buffer).
inline AttnArguments attn_arguments(torch::Tensor& q, torch::Tensor& k, const torch::Tensor& v, const torch::Tensor& cos,
                                    const torch::Tensor& sin, const torch::Tensor& position, torch::Tensor& valid_len,
                                    torch::Tensor& k_cache, torch::Tensor& v_cache, torch::Tensor& partials,
                                    torch::Tensor& counters, torch::Tensor& out) {
  const int64_t n = q.size(0), max_seq = k_cache.size(0), n_kv = k_cache.size(1), head_dim = k_cache.size(2);
  const int64_t q_dim = q.size(1), n_q = q_dim / head_dim;
  DECODEV2_CHECK(q_dim % head_dim == 0 && n_q % n_kv == 0, n_q, " query heads of ", head_dim, " do not share ", n_kv,
                    " KV heads");
  for (const torch::Tensor* t : {static_cast<const torch::Tensor*>(&q), static_cast<const torch::Tensor*>(&k), &v})
    DECODEV2_CHECK(t->is_cuda() && t->scalar_type() == torch::kFloat && t->dim() == 2 && t->size(0) == n &&
                          t->stride(1) == 1 && (n == 1 || t == &q || t->stride(0) == k.stride(0)),
                      "q, k and v need Float rows, k and v of one stride, found ", t->sizes(), " ", t->strides());
  DECODEV2_CHECK(k.size(1) == n_kv * head_dim && v.size(1) == n_kv * head_dim, "k is ", k.sizes(), " and v ",
                    v.sizes(), ", need ", n_kv * head_dim, " columns");
  check_tensor(cos, "cos", torch::kFloat, max_seq * head_dim, q);
  check_tensor(sin, "sin", torch::kFloat, max_seq * head_dim, q);
  DECODEV2_CHECK(position.scalar_type() == torch::kInt64 && position.numel() >= n && position.is_cuda(),
                    "position needs ", n, " Long elements");
  DECODEV2_CHECK(valid_len.scalar_type() == torch::kInt32 && valid_len.numel() >= n && valid_len.is_cuda(),
                    "valid_len needs ", n, " Int elements");
  check_tensor(k_cache, "k_cache", torch::kBFloat16, 1, q);
  check_tensor(v_cache, "v_cache", torch::kBFloat16, k_cache.numel(), q);
  check_tensor(counters, "counters", torch::kInt32, n_q, q);
  check_tensor(out, "out", torch::kFloat, n * q_dim, q);
  check_tensor(partials, "partials", torch::kFloat, 1, q);
  AttnArguments a = {};
  a.q = q.mutable_data_ptr<float>();
  a.k = k.mutable_data_ptr<float>();
  a.v = v.const_data_ptr<float>();
  a.cos = cos.const_data_ptr<float>();
  a.sin = sin.const_data_ptr<float>();
  a.position = position.const_data_ptr<int64_t>();
  a.valid_len = valid_len.mutable_data_ptr<int32_t>();
  a.k_cache = static_cast<uint16_t*>(k_cache.mutable_data_ptr());
  a.v_cache = static_cast<uint16_t*>(v_cache.mutable_data_ptr());
  a.out = out.mutable_data_ptr<float>();
  a.partials = partials.mutable_data_ptr<float>();
  a.counters = static_cast<uint32_t*>(counters.mutable_data_ptr());
  a.ld_q = q.stride(0);
  a.ld_kv = k.stride(0);
  a.n = static_cast<int>(n);
  a.n_q = static_cast<int>(n_q);
  a.n_kv = static_cast<int>(n_kv);
  a.head_dim = static_cast<int>(head_dim);
  a.max_seq = static_cast<int>(max_seq);
  return a;
}

// RoPE inside or not, AttnMerge, and how it starts: 0 plain, 1 programmatic launch, 2 that and ahead (AttnPlan).
// kPartialFloats says how much scratch the kernel needs.
template <cudaError_t (*kLaunch)(const AttnArguments&, const AttnPlan&, cudaStream_t),
          int64_t (*kPartialFloats)(int n_q, int n_kv, int head_dim, int max_seq)>
void launch_attention(const AttnArguments& a, const torch::Tensor& partials, bool rope, int64_t merge, int64_t start) {
  const int64_t floats = kPartialFloats(a.n_q, a.n_kv, a.head_dim, a.max_seq);
  DECODEV2_CHECK(partials.numel() >= floats, "partials has ", partials.numel(), " floats, attention needs ", floats);
  AttnPlan plan = {};
  plan.merge = static_cast<AttnMerge>(merge);
  plan.rope = rope;
  plan.pdl = start > 0;
  plan.ahead = start == 2;
  check_launch(kLaunch(a, plan, at::cuda::getCurrentCUDAStream()), "attention");
}

// One attention launcher as a Python function.
template <cudaError_t (*kLaunch)(const AttnArguments&, const AttnPlan&, cudaStream_t),
          int64_t (*kPartialFloats)(int n_q, int n_kv, int head_dim, int max_seq)>
void run_attention(torch::Tensor& q, torch::Tensor& k, const torch::Tensor& v, const torch::Tensor& cos,
                   const torch::Tensor& sin, const torch::Tensor& position, torch::Tensor& valid_len,
                   torch::Tensor& k_cache, torch::Tensor& v_cache, torch::Tensor& partials, torch::Tensor& counters,
                   torch::Tensor& out, bool rope, int64_t merge, int64_t start) {
  const c10::cuda::CUDAGuard guard(decodev2::cuda_device(q, "q"));
  launch_attention<kLaunch, kPartialFloats>(
      attn_arguments(q, k, v, cos, sin, position, valid_len, k_cache, v_cache, partials, counters, out), partials, rope,
      merge, start);
}

}  // namespace decodev2
