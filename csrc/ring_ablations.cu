// What the parts of the ring GEMV cost: the kernel of nf4_gemv.cu (gemv.cuh) with parts of its inner loop left out, and
// with rings of other sizes.
//
// Computes  whole     y = W x, as nf4_gemv.cu
//           no table  the raw words go into the tensor cores in the place of the levels: another product
//           no MMA    seen ^= every pair of levels that was looked up; what is stored as sums is of no use
//           late      whole, but a slot of the ring is refilled once its sums are added up, not once it is read
//           loads     seen ^= every word of the panels, from shared memory; no sums at all
// Owns, grid, shared, layout, floor: as nf4_gemv.cu; the table is built and x is staged in every one, so that what is
//           missing is what the loop does with them
// Variants  warps x stages; 8x2 leaves room for a second CTA
#include "gemv.cuh"

namespace decodev2 {
namespace ablation {  // not anonymous: below sm_90 nothing refers to what is in it

struct Whole : WholeProduct {
  using Arguments = RingArguments;
};

struct Late : Whole {
  static constexpr bool kRefillsEarly = false;
};

struct NoTable : Whole {
  template <int kByte>
  __device__ __forceinline__ uint32_t levels(uint32_t, uint32_t word, uint32_t) {
    return word;
  }
};

struct Seeing : Whole {
  uint32_t seen = 0;

  __device__ __forceinline__ void finish(const RingArguments& a, int lane) {
    const uint32_t all = __reduce_xor_sync(~0u, seen);
    if (lane == 0) atomicXor(a.seen, all);
  }
};

struct NoMma : Seeing {
  __device__ __forceinline__ void multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t,
                                           uint32_t) {
    seen ^= a0 ^ a1 ^ a2 ^ a3;
    c[0] = __uint_as_float(seen);
  }
};

struct Loads : Seeing {
  static constexpr bool kSums = false;
  static constexpr int kAhead = 0;

  __device__ __forceinline__ void touch(const PanelWords& p, int t) {
#pragma unroll
    for (int b = 0; b < kPanelBlocks; ++b) seen ^= p.block[b].x ^ p.block[b].y ^ p.block[b].z ^ p.block[b].w;
    if (t < 2) seen ^= p.scale_lo ^ p.scale_hi;  // lanes with t and t + 2 have the same
  }
};

}  // namespace ablation

namespace {

template <typename Work, int kWarps, int kStages, int kPerSm = 1>
cudaError_t launch_as(const RingArguments& a, const GemvPlan& plan, cudaStream_t stream) {
  const int panels = (a.groups + kPanelBlocks - 1) / kPanelBlocks;
  return start_gemv(gemv_ring<GemvKind::kPlain, kWarps, kStages, kPerSm, Work>, a, (kWarps + 2) * 32,
                    Ring<kWarps, kStages>::bytes(panels), kPerSm, plan, stream);
}

template <typename Work>
cudaError_t launch_with(const RingArguments& a, RingSize size, const GemvPlan& plan, cudaStream_t stream) {
  switch (size) {
    case RingSize::k8x2: return launch_as<Work, 8, 2, 2>(a, plan, stream);
    case RingSize::k8x4: return launch_as<Work, 8, 4>(a, plan, stream);
    case RingSize::k16x2: return launch_as<Work, 16, 2>(a, plan, stream);
    case RingSize::k16x3: return launch_as<Work, 16, 3>(a, plan, stream);
    case RingSize::k16x4: return launch_as<Work, 16, 4>(a, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int ring_shared_bytes(RingSize size, int groups) {
  const int panels = (groups + kPanelBlocks - 1) / kPanelBlocks;
  switch (size) {
    case RingSize::k8x2: return Ring<8, 2>::bytes(panels);
    case RingSize::k8x4: return Ring<8, 4>::bytes(panels);
    case RingSize::k16x2: return Ring<16, 2>::bytes(panels);
    case RingSize::k16x3: return Ring<16, 3>::bytes(panels);
    default: return Ring<16, 4>::bytes(panels);
  }
}

bool ring_shares_tiles(RingSize size, int groups, int tiles, const GemvPlan& plan) {
  const int per_sm = size == RingSize::k8x2 ? 2 : 1;
  return panels_share_better(groups, tiles, resident_ctas(ring_shared_bytes(size, groups), per_sm, plan));
}

cudaError_t launch_ring(const RingArguments& a, RingParts parts, RingSize size, const GemvPlan& plan,
                        cudaStream_t stream) {
  if (!hopper_or_newer()) return cudaErrorInvalidValue;
  switch (parts) {
    case RingParts::kWhole: return launch_with<ablation::Whole>(a, size, plan, stream);
    case RingParts::kLate: return launch_with<ablation::Late>(a, size, plan, stream);
    case RingParts::kNoTable: return launch_with<ablation::NoTable>(a, size, plan, stream);
    case RingParts::kNoMma: return launch_with<ablation::NoMma>(a, size, plan, stream);
    case RingParts::kLoads: return launch_with<ablation::Loads>(a, size, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace decodev2
