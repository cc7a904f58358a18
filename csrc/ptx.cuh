// Thin names for the PTX instructions that the kernels use, so that no kernel holds inline assembly it could name, and
// so that a kernel's logic can run where there is no GPU: with DECODEV2_EMULATED the same names come from
// decodev2/tests/emulator. Torch-free.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DECODEV2_HOPPER 1
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // what only compute capability 9.0 has
#define DECODEV2_WGMMA 1
#endif

#ifdef DECODEV2_EMULATED
#include "emulated_ptx.h"
#else

namespace decodev2 {

// ---- shared memory, loads -----------------------------------------------------------------------------

__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t shared[];
  return shared;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

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

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t d;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(address) : "memory");
  return d;
}

// Of what never changes: not volatile, the compiler may move it.
__device__ __forceinline__ uint32_t load_shared_constant(uint32_t address) {
  uint32_t d;
  asm("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"(address));
  return d;
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t address) {
  uint16_t d;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(d) : "r"(address) : "memory");
  return d;
}

__device__ __forceinline__ void store_shared_float4(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Weights are read once per token: keep them out of L1.
__device__ __forceinline__ uint4 load_weights_16(const void* p) {
  uint4 d;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(p));
  return d;
}

// 16 bytes global -> shared, past L1, by the thread; then, of its groups of copies, all but kPending have landed.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Words that other CTAs read or write in the same launch.
__device__ __forceinline__ void store_word(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t load_word(const uint32_t* from) {
  uint32_t d;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(d) : "l"(from) : "memory");
  return d;
}

__device__ __forceinline__ uint4 load_words(const uint32_t* from) {
  uint4 d;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(from) : "memory");
  return d;
}

// += without its result; and the same after everything that came before, for who loads it with load_acquired.
__device__ __forceinline__ void add_word(uint32_t* to, uint32_t word) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void release_add(uint32_t* to, uint32_t word) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t load_acquired(const uint32_t* from) {
  uint32_t d;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(d) : "l"(from) : "memory");
  return d;
}

// *counter + 1, or 0 past `last`; what it was before. Releases what came before, acquires what others released.
__device__ __forceinline__ uint32_t increment_wrapping(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

// ---- arithmetic ---------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float v) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// c += A B: A 16 x 16 half (row), B 16 x 8 half (col), c 16 x 8 float
__device__ __forceinline__ void mma_m16n8k16(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += A B: A 16 x 16 bf16 (row), B 16 x 8 bf16 (col), c 16 x 8 float
__device__ __forceinline__ void mma_bf16(float* c, uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A value the compiler must keep in a register instead of recomputing it inside a loop.
__device__ __forceinline__ uint32_t opaque(uint32_t v) {
  uint32_t d;
  asm volatile("mov.u32 %0, %1;" : "=r"(d) : "r"(v));
  return d;
}

// The warp's number in its CTA. The compiler knows that all lanes have the same: branches on it do not part them, and
// what is worked out of it, or used behind such a branch, may stay in uniform registers (a table's address in a loop of
// look-ups costs an addition each otherwise). All threads of the warp call it.
__device__ __forceinline__ int warp_number() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x) >> 5, 0); }

// Threads that meet at one of the CTA's 16 barriers.
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Hopper and newer: bulk copies, barriers, programmatic dependent launch ---------------------------

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

// This thread's accesses to shared memory so far come before the bulk copies that follow a barrier of these threads.
__device__ __forceinline__ void before_bulk_copies() {
#ifdef DECODEV2_HOPPER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

// The same once `loaded` is there: an arrival may otherwise overtake a load that was issued before it.
__device__ __forceinline__ void barrier_arrive_after(uint32_t barrier, uint32_t loaded) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0x9e3779b9;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "@!p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier), "r"(loaded) : "memory");
}

// *counter += `by` in shared memory; what it was before.
__device__ __forceinline__ uint32_t add_shared(uint32_t counter, uint32_t by) {
  uint32_t before;
  asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(counter), "r"(by) : "memory");
  return before;
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

// The warps of a warpgroup get more registers, or give some back, where the instruction exists (sm_90a).
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Of what several CTAs read.
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- Hopper and newer: clusters of CTAs ---------------------------------------------------------------

// The address in the cluster's window that `address` of this CTA's shared memory has in CTA `rank`.
__device__ __forceinline__ uint32_t in_cta(uint32_t address, uint32_t rank) {
  uint32_t d;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(address), "r"(rank));
  return d;
}

// All threads of all CTAs of the cluster; what they wrote to shared memory is there for each other.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// `barrier` and `address` are of in_cta(). It orders what this CTA did; a release to the cluster would be a fence of the
// whole GPU, and who waits here writes nothing that others wrote.
__device__ __forceinline__ void barrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ float4 load_cluster_float4(uint32_t address) {
  float4 d;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(d.x), "=f"(d.y), "=f"(d.z), "=f"(d.w) : "r"(address) : "memory");
  return d;
}

// bulk_copy to the same place in every CTA of `ctas` (a bit for each rank), completing on the barrier of each.
__device__ __forceinline__ void bulk_copy_to_ctas(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                                  uint32_t ctas, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1], "
      "%2, [%3], %4, %5;"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(ctas)), "l"(policy) : "memory");
}

#endif  // DECODEV2_HOPPER

#ifdef DECODEV2_WGMMA

// ---- sm_90a: products of a warpgroup ------------------------------------------------------------------
//
// A warpgroup is 4 warps in a row, the first a multiple of 4; all of its threads call together. A product runs on
// after it was issued: until wgmma_wait() says that it is done, its registers may be neither read nor written.

// What was written to registers and shared memory so far is there for the products that follow.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group: the products since the one before.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kLeft groups still run.
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// sum += A B: A 64 x 16 half, B 16 x kColumns half. Warp w of the warpgroup has rows 16 w .. 16 w + 15: of A the words
// of mma_m16n8k16, of the sum 4 floats for each 8 columns, as there. `b` describes B in shared memory.
#define DECODEV2_TEN(p) \
  "%" #p "0,%" #p "1,%" #p "2,%" #p "3,%" #p "4,%" #p "5,%" #p "6,%" #p "7,%" #p "8,%" #p "9,"
#define DECODEV2_SUM_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define DECODEV2_SUM_16(i) DECODEV2_SUM_4(i), DECODEV2_SUM_4(i + 4), DECODEV2_SUM_4(i + 8), DECODEV2_SUM_4(i + 12)
#define DECODEV2_SUM_32(i) DECODEV2_SUM_16(i), DECODEV2_SUM_16(i + 16)
template <int kColumns>
__device__ __forceinline__ void wgmma(float* sum, const uint32_t* a, uint64_t b) {
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 256);
  if constexpr (kColumns == 64)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" DECODEV2_TEN() DECODEV2_TEN(1) DECODEV2_TEN(2)
        "%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
        : DECODEV2_SUM_32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
  else if constexpr (kColumns == 128)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" DECODEV2_TEN() DECODEV2_TEN(1) DECODEV2_TEN(2)
        DECODEV2_TEN(3) DECODEV2_TEN(4) DECODEV2_TEN(5) "%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
        : DECODEV2_SUM_32(0), DECODEV2_SUM_32(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" DECODEV2_TEN() DECODEV2_TEN(1) DECODEV2_TEN(2)
        DECODEV2_TEN(3) DECODEV2_TEN(4) DECODEV2_TEN(5) DECODEV2_TEN(6) DECODEV2_TEN(7) DECODEV2_TEN(8)
        DECODEV2_TEN(9) DECODEV2_TEN(10) DECODEV2_TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127}, "
        "{%128,%129,%130,%131}, %132, 1, 1, 1, 0;"
        : DECODEV2_SUM_32(0), DECODEV2_SUM_32(32), DECODEV2_SUM_32(64), DECODEV2_SUM_32(96)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}
#undef DECODEV2_TEN
#undef DECODEV2_SUM_4
#undef DECODEV2_SUM_16
#undef DECODEV2_SUM_32

#endif  // DECODEV2_WGMMA

}  // namespace decodev2

#endif  // DECODEV2_EMULATED
