// What every NF4 kernel shares: levels, the panel layout, the pair table, and thin names for the few PTX
// instructions used. Torch-free.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace decodev2 {

// ---- panels: the fragment order of the weights -------------------------------------------------------
//
//   block  16 rows x 64 k (one scale group): 512 B of codes. Lane l = 4 g + t owns bytes [16 l, 16 l + 16):
//          8 bytes of row g, then 8 of row g + 8. Byte i = 2 m + h of a row holds k = 16 m + 8 h + 2 t (low
//          nibble) and the next k (high), so MMA m of the block takes bytes 2m and 2m + 1 as they lie.
//   panel  up to 4 blocks (256 k): [blocks x 512 B][16 rows][blocks] float16 scales
//   tile   16 rows: its panels, one after another; only the last may be narrower
//   matrix its tiles in row order; missing rows of the last tile are zero (scale 0)
//
// The same codes and scales as the .chr file, in another order: 544 B per block, no byte more.

constexpr int kTileRows = 16;
constexpr int kGroup = 64;
constexpr int kBlockCodes = 512;
constexpr int kBlockBytes = 544;
constexpr int kPanelBlocks = 4;
constexpr int kPanelBytes = kPanelBlocks * kBlockBytes;

// NF4 levels, index 0..15 (decodev2/nf4.py; the tests compare them).
__device__ const float kNf4Levels[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// ---- the pair table ----------------------------------------------------------------------------------
//
// Row = code byte, 256 B apart; column = lane: each lane has its own copy of half2(level lo, level hi), so a
// look-up never meets a bank conflict. Row pitch 256 makes the byte a whole byte of the address: one byte
// permute of (word, lane * 4) builds it. 64 KB, of which the upper 128 B of each row are free.

constexpr int kTableBytes = 65536;

__device__ __forceinline__ void build_pair_table(uint8_t* table, int thread, int threads) {
  for (int i = thread; i < 256 * 8; i += threads) {
    const int byte = i >> 3;
    const half2 pair = __floats2half2_rn(kNf4Levels[byte & 15], kNf4Levels[byte >> 4]);
    const uint32_t v = *reinterpret_cast<const uint32_t*>(&pair);
    *reinterpret_cast<uint4*>(table + byte * 256 + (i & 7) * 16) = make_uint4(v, v, v, v);
  }
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// half2 of the two levels in byte `kByte` of `word`. table: shared address; lane4 = lane * 4.
template <int kByte>
__device__ __forceinline__ uint32_t look_up(uint32_t table, uint32_t word, uint32_t lane4) {
  uint32_t d;  // not volatile: the table never changes, the compiler may move the load
  asm("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(table + byte_permute(word, lane4, 0x5504 | kByte << 4)));
  return d;
}

// c += A B: A 16 x 16 half (row), B 16 x 8 half (col), c 16 x 8 float
__device__ __forceinline__ void mma_m16n8k16(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- loads -------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 d;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 d;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(d.x), "=r"(d.y) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t address) {
  uint16_t d;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(d) : "r"(address) : "memory");
  return d;
}

// Weights are read once per token: keep them out of L1.
__device__ __forceinline__ uint4 load_weights_16(const void* p) {
  uint4 d;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(p));
  return d;
}

// ---- Hopper and newer: bulk copies, barriers, programmatic dependent launch ---------------------------

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DECODEV2_HOPPER 1
#endif

// The kernels behind may start; it says nothing about data.
__device__ __forceinline__ void let_dependents_launch() {
#ifdef DECODEV2_HOPPER
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Everything the kernels before wrote is visible after this. Only constants may be read ahead of it.
__device__ __forceinline__ void wait_for_predecessors() {
#ifdef DECODEV2_HOPPER
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#ifdef DECODEV2_HOPPER

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One bulk copy global -> shared; completes on `barrier`. Addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

#endif  // DECODEV2_HOPPER

// A value the compiler must keep in a register instead of recomputing it inside a loop.
__device__ __forceinline__ uint32_t opaque(uint32_t v) {
  uint32_t d;
  asm volatile("mov.u32 %0, %1;" : "=r"(d) : "r"(v));
  return d;
}

// ---- host side ---------------------------------------------------------------------------------------

// Launch with or without programmatic stream serialisation (ignored below sm_90).
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   bool pdl, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace decodev2
