// y = W x for one column, W packed NF4: the kernels that read the weights of a decode step.
//
// Computes  plain   y[r]  = s * sum_k W[r][k] x[k] (+ bias[r]) (+ residual[r])
//           swiglu  y[u]  = silu(gate row u . x) * (up row u . x)
//           head    logits[r] = W[r] . x, and one (value, id) candidate per CTA for the argmax
//           x may be normed on the way in: x * rsqrt(mean(x^2) + eps) * norm_weight
// Owns      A CTA owns whole 16-row tiles, or, where tiles would not share out evenly, an equal range of panels: a
//           tile between two CTAs is finished by the one that comes last. Its consumer warps take the tiles' panels in turn; one reducer warp
//           adds the partial sums of a tile in panel order (same bits every run) and runs the epilogue.
// Grid      min(tiles, CTAs that fit the card); block (kWarps + 2) * 32: consumers, producer, reducer
// Shared    64 KB pair table | x as half, fragment order | ring of stages (kWarps panels each) | partials | barriers
// Layout    panels of nf4.cuh. x: [panel][block][2][4 t][4] half2, so lane (g, t) reads block g's 32 B for MMA
//           column g: one set of 8 registers serves the 4 blocks of a panel, block b's result is column b.
// Floor     rows * K_pad * 17 / 32 bytes (4.25 bits per weight) at the card's read rate
// Variants  direct  every warp loads its panels from global memory into registers; any architecture
//           ring    bulk copies into a ring of shared memory by one producer lane; sm_90 and newer
#include "gemv.cuh"

namespace decodev2 {
namespace {
// ---- direct: panels straight into registers -----------------------------------------------------------

template <GemvKind kKind, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 1) gemv_direct(const GemvArguments a) {
  uint8_t* const shared = dynamic_shared();
  const int thread = threadIdx.x, lane = thread & 31, warp = warp_number(), g = lane >> 2, t = lane & 3;
  const int panels = (a.groups + kPanelBlocks - 1) / kPanelBlocks;
  uint8_t* x_shared = shared + kTableBytes;
  float* partials = reinterpret_cast<float*>(x_shared + panels * 512);  // [2][kWarps][16], then scratch
  const Range range = my_share(a.tiles);
  const int64_t tile_bytes = static_cast<int64_t>(a.groups) * kBlockBytes;

  wait_first_if_asked(a);
  let_dependents_launch();
  const NormWeight weight = load_norm_weight(a, thread, kWarps * 32);
  build_pair_table(shared, thread, kWarps * 32);
  const float unscale = stage_x<kKept>(a, weight, x_shared, partials, thread, kWarps * 32);

  const uint32_t table = shared_address(shared), x_address = shared_address(x_shared);
  const uint32_t lane4 = opaque(lane * 4);
  const auto load_panel = [&](int tile, int panel) {
    PanelWords p;
    const uint8_t* at = a.panels + tile * tile_bytes + panel * kPanelBytes;
    const int blocks = min(kPanelBlocks, a.groups - panel * kPanelBlocks);
    const uint8_t* scales = at + blocks * kBlockCodes;
#pragma unroll
    for (int b = 0; b < kPanelBlocks; ++b)
      p.block[b] = b < blocks ? load_weights_16(at + b * kBlockCodes + lane * 16) : make_uint4(0, 0, 0, 0);
    const auto load = [&](int offset) { return uint32_t(*reinterpret_cast<const uint16_t*>(scales + offset)); };
    p.scale_lo = narrow_scales(load, g, blocks, t & 1);
    p.scale_hi = narrow_scales(load, g + 8, blocks, t & 1);
    return p;
  };
  Best best = {-INFINITY, -1};
  WholeProduct work;
  uint4 x[2] = {};
  int buffer = 0;
  for (int tile = range.begin; tile < range.end; ++tile, buffer ^= 1) {
    const float added = warp == 0 ? addend<kKind>(a, tile, lane) : 0.0f;
    float row_g = 0.0f, row_g8 = 0.0f;
    for (int panel = warp; panel < panels; panel += kWarps) {
      const PanelWords p = load_panel(tile, panel);
      load_x(x, x_address, panel, lane);
      const float2 sum = multiply_panel<0>(work, p, nullptr, x, table, lane4, t & 1);
      row_g += sum.x;
      row_g8 += sum.y;
    }
    float* mine = partials + (buffer * kWarps + warp) * kTileRows;
    if (t == 0) {
      mine[g] = row_g;
      mine[g + 8] = row_g8;
    }
    __syncthreads();
    if (warp == 0) {
      float sum = 0.0f;
      for (int w = 0; w < min(kWarps, panels); ++w) sum += partials[(buffer * kWarps + w) * kTileRows + (lane & 15)];
      finish_tile<kKind>(a, tile, lane, sum * unscale, added, best);
    }
  }
  if (warp == 0) finish_cta<kKind>(a, lane, best);
}

// ---- host ---------------------------------------------------------------------------------------------

int direct_shared_bytes(int panels) { return kTableBytes + panels * 512 + 2 * 16 * kTileRows * 4; }

template <GemvKind kKind>
cudaError_t dispatch(const GemvArguments& a, const GemvPlan& plan, cudaStream_t stream) {
  const int panels = (a.groups + kPanelBlocks - 1) / kPanelBlocks;
  switch (plan.variant) {
    case GemvVariant::kRing8x2:
      return start_gemv(gemv_ring<kKind, 8, 2, 2>, a, 320, Ring<8, 2>::bytes(panels), 2, plan, stream);
    case GemvVariant::kRing16x4:
      return start_gemv(gemv_ring<kKind, 16, 4, 1>, a, 576, Ring<16, 4>::bytes(panels), 1, plan, stream);
    case GemvVariant::kRing16x3:
      return start_gemv(gemv_ring<kKind, 16, 3, 1>, a, 576, Ring<16, 3>::bytes(panels), 1, plan, stream);
    default:
      return start_gemv(gemv_direct<kKind, 16>, a, 512, direct_shared_bytes(panels), 1, plan, stream);
  }
}

}  // namespace

// The choice is made for the step, not for the product: it counts what the next kernel can do meanwhile. Microseconds of
// a layer of Qwen2.5 on an H200 with each kernel for down and the chosen ones for the rest, at position 100, from one run
// of the experiment gemv_choice (a dash: does not fit):
//                                   direct   8x2  16x4  16x3
//     896 x  4864  down of 0.5B       17.4  16.7  17.1  16.8
//    1536 x  8960  down of 1.5B       23.6  22.5  22.4  23.0
//    2048 x 11008  down of 3B         26.3  25.6  26.1  26.4
//    3584 x 18944  down of 7B         51.9  51.5     -  51.2
//    5120 x 13824  down of 14B        61.6  59.0     -  57.4
//    5120 x 27648  down of 32B        91.2  86.6     -  82.7
// On the other products, all narrower, 8x2 is best or at most 2 % slower than the best. So 8x2 it is while a CTA of it for
// the next product (2,048 columns are reckoned) fits beside this one and can begin; where it does not in any case, more
// warps and more bytes on their way count. Of three stages or four, three leave more room for x and are never worse there.
GemvVariant choose_gemv_variant(int groups, int compute_capability, int shared_bytes) {
  if (compute_capability < 90) return GemvVariant::kDirect;
  const int panels = (groups + kPanelBlocks - 1) / kPanelBlocks;
  constexpr int kNext = Ring<8, 2>::bytes(2048 / (kPanelBlocks * kGroup));
  if (taken(Ring<8, 2>::bytes(panels)) + taken(kNext) <= shared_bytes) return GemvVariant::kRing8x2;
  if (taken(Ring<16, 3>::bytes(panels)) <= shared_bytes) return GemvVariant::kRing16x3;
  return GemvVariant::kDirect;
}

int gemv_shared_bytes(GemvVariant variant, int groups) {
  const int panels = (groups + kPanelBlocks - 1) / kPanelBlocks;
  switch (variant) {
    case GemvVariant::kRing8x2: return Ring<8, 2>::bytes(panels);
    case GemvVariant::kRing16x4: return Ring<16, 4>::bytes(panels);
    case GemvVariant::kRing16x3: return Ring<16, 3>::bytes(panels);
    default: return direct_shared_bytes(panels);
  }
}

bool gemv_shares_tiles(GemvKind kind, int groups, int tiles, const GemvPlan& plan) {
  if (kind != GemvKind::kPlain || plan.variant == GemvVariant::kDirect) return false;
  const int per_sm = plan.variant == GemvVariant::kRing8x2 ? 2 : 1;
  return panels_share_better(groups, tiles, resident_ctas(gemv_shared_bytes(plan.variant, groups), per_sm, plan));
}

cudaError_t chr_nf4_gemv(const GemvArguments& a, GemvKind kind, const GemvPlan& plan, cudaStream_t stream) {
  switch (kind) {
    case GemvKind::kSwiglu: return chr_nf4_gemv_swiglu(a, plan, stream);
    case GemvKind::kHead: return dispatch<GemvKind::kHead>(a, plan, stream);
    default: return dispatch<GemvKind::kPlain>(a, plan, stream);
  }
}

cudaError_t chr_nf4_gemv_qkv(const GemvArguments& a, const GemvPlan& plan, cudaStream_t stream) {
  return dispatch<GemvKind::kPlain>(a, plan, stream);
}

cudaError_t chr_nf4_gemv_swiglu(const GemvArguments& a, const GemvPlan& plan, cudaStream_t stream) {
  return dispatch<GemvKind::kSwiglu>(a, plan, stream);
}

}  // namespace decodev2
