// The names of csrc/ptx.cuh on the emulator.
#pragma once
#include "emulator.h"

namespace decodev2 {

// ---- shared memory, loads -----------------------------------------------------------------------------

inline uint8_t* dynamic_shared() { return emulator::running->cta->shared; }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - dynamic_shared());
}

template <typename T>
inline T load_shared(uint32_t address) {
  T value;
  std::memcpy(&value, dynamic_shared() + address, sizeof value);
  return value;
}

inline uint4 load_shared_16(uint32_t address) { return load_shared<uint4>(address); }
inline uint2 load_shared_8(uint32_t address) { return load_shared<uint2>(address); }
inline uint32_t load_shared_4(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint32_t load_shared_2(uint32_t address) { return load_shared<uint16_t>(address); }
inline uint32_t load_shared_constant(uint32_t address) { return load_shared<uint32_t>(address); }
inline void store_shared_float4(uint32_t address, float4 v) { std::memcpy(dynamic_shared() + address, &v, sizeof v); }
inline uint4 load_weights_16(const void* p) { return *static_cast<const uint4*>(p); }
inline void prefetch_l2(const void*) {}

inline void store_word(uint32_t* to, uint32_t word) {
  if (emulator::by_chance(4)) emulator::pause();
  *to = word;
}
inline uint32_t load_word(const uint32_t* from) { return *from; }
inline uint4 load_words(const uint32_t* from) { return *reinterpret_cast<const uint4*>(from); }

inline void add_word(uint32_t* to, uint32_t word) { *to += word; }
inline void release_add(uint32_t* to, uint32_t word) {
  if (emulator::by_chance(4)) emulator::pause();
  *to += word;
}
inline uint32_t load_acquired(const uint32_t* from) { return *from; }

inline uint32_t increment_wrapping(uint32_t* counter, uint32_t last) {
  const uint32_t before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}

// ---- arithmetic ---------------------------------------------------------------------------------------

inline float exp2_approx(float v) { return std::exp2(v); }
inline uint32_t opaque(uint32_t v) { return v; }
inline int warp_number() { return static_cast<int>(threadIdx.x / emulator::kLanes); }

inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

inline void mma_m16n8k16(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulator::multiply(c, {a0, a1, a2, a3}, {b0, b1}, half_value);
}
inline void mma_bf16(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulator::multiply(c, {a0, a1, a2, a3}, {b0, b1}, bfloat_value);
}

inline void load_matrices(uint32_t (&d)[4], uint32_t address) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; ++i) d[i] = load_shared<uint32_t>(__shfl_sync(~0u, address, 8 * i + lane / 4) + lane % 4 * 4);
}
inline void load_matrices_transposed(uint32_t (&d)[4], uint32_t address) {
  const int lane = threadIdx.x & 31, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    d[i] = 0;
    for (int e = 0; e < 2; ++e)
      d[i] |= load_shared_2(__shfl_sync(~0u, address, 8 * i + 2 * t + e) + lane / 4 * 2) << 16 * e;
  }
}

inline void all_ctas_meet() { emulator::meet(emulator::everyone, emulator::grid.x * emulator::block.x); }

inline void meet(int barrier, int threads) { emulator::meet(emulator::running->cta->barriers[barrier], threads); }

inline void let_dependents_launch() {}  // launches come one after the other
inline void wait_for_predecessors() {}

// ---- barriers in shared memory, bulk copies -----------------------------------------------------------

struct SharedBarrier {
  int16_t pending;  // arrivals of this phase that are still to come
  uint16_t expected : 15, phase : 1;
  int32_t bytes;  // that are still to come
};
static_assert(sizeof(SharedBarrier) == 8);

// An address of in_cta() holds one more than the rank above bit 24; any other is of this CTA.
inline uint8_t* shared_at(uint32_t address) {
  const emulator::Cta* cta = emulator::running->cta;
  return (address >> 24 ? cta->cluster[(address >> 24) - 1].shared : cta->shared) + (address & 0xffffff);
}

inline SharedBarrier& barrier_at(uint32_t address) { return *reinterpret_cast<SharedBarrier*>(shared_at(address)); }

inline void end_phase_if_due(SharedBarrier& barrier) {
  if (barrier.pending < 0) {
    std::fprintf(stderr, "emulator: more arrivals than a barrier expects\n");
    std::abort();
  }
  if (barrier.pending || barrier.bytes) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
}

inline void barrier_init(uint32_t address, uint32_t arrivals) {
  barrier_at(address) = {static_cast<int16_t>(arrivals), static_cast<uint16_t>(arrivals), 0, 0};
}
inline void barriers_visible() {}

inline void barrier_arrive(uint32_t address) {
  if (emulator::by_chance(4)) emulator::pause();
  --barrier_at(address).pending;
  end_phase_if_due(barrier_at(address));
}
inline void barrier_arrive_after(uint32_t address, uint32_t) { barrier_arrive(address); }

inline uint32_t add_shared(uint32_t counter, uint32_t by) {
  if (emulator::by_chance(4)) emulator::pause();
  uint32_t& value = *reinterpret_cast<uint32_t*>(dynamic_shared() + counter);
  value += by;
  return value - by;
}

inline void barrier_expect(uint32_t address, uint32_t bytes) {
  barrier_at(address).bytes += bytes;
  barrier_arrive(address);
}

inline void barrier_wait(uint32_t address, uint32_t phase) {
  while (barrier_at(address).phase == (phase & 1)) emulator::pause();
  if (emulator::by_chance(4)) emulator::pause();  // lanes go on one by one
}

inline uint64_t evict_first_policy() { return 0; }
inline uint64_t evict_normal_policy() { return 0; }

// The words are there at once, the earliest that a slot can be written over; the barrier hears of it sooner or later,
// now and then after copies that were asked for much later.
inline void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  if ((to | reinterpret_cast<uintptr_t>(from) | bytes) & 15) emulator::fail("a bulk copy is not aligned to 16 bytes");
  std::memcpy(shared_at(to), from, bytes);
  emulator::arrive = [](const emulator::Arrival& due) {
    auto& there = *static_cast<SharedBarrier*>(due.barrier);
    there.bytes -= due.bytes;
    end_phase_if_due(there);
  };
  const long delay = emulator::by_chance(16) ? 120 : emulator::chance() % 4;
  emulator::arrivals.push_back({emulator::rounds + delay, &barrier_at(barrier), bytes});
}

template <int kRegisters>
inline void take_registers() {}
template <int kRegisters>
inline void give_registers() {}

inline void before_bulk_copies() {}

// ---- clusters -----------------------------------------------------------------------------------------

inline uint32_t in_cta(uint32_t address, uint32_t rank) { return address | (rank + 1) << 24; }

inline void meet_cluster() {
  emulator::meet(emulator::running->cta->cluster->cluster_meeting, emulator::cluster_size * emulator::block.x);
}

inline void barrier_arrive_in_cluster(uint32_t address) { barrier_arrive(address); }

inline float4 load_cluster_float4(uint32_t address) {
  float4 value;
  std::memcpy(&value, shared_at(address), sizeof value);
  return value;
}

inline void bulk_copy_to_ctas(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint32_t ctas,
                              uint64_t policy) {
  for (uint32_t rank = 0; rank < emulator::cluster_size; ++rank)
    if (ctas >> rank & 1) bulk_copy(in_cta(to, rank), from, bytes, in_cta(barrier, rank), policy);
}

// ---- products of a warpgroup --------------------------------------------------------------------------

inline void wgmma_begin() { emulator::running->begun = true; }

inline void wgmma_commit() {
  emulator::Fiber& fiber = *emulator::running;
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
  fiber.begun = false;  // here every group has new weights
}

inline void run_product(const emulator::Product& product) {
  emulator::multiply(product, [](uint32_t address) { return half_value(load_shared<uint16_t>(address)); });
}

template <int kLeft>
inline void wgmma_wait() {
  emulator::Fiber& fiber = *emulator::running;
  while (fiber.groups.size() > kLeft) {
    for (const emulator::Product& product : fiber.groups.front())
      if (!emulator::products_at_once) run_product(product);
    fiber.groups.erase(fiber.groups.begin());
  }
  __syncwarp();  // it is the warp that waits: what its lanes' products read has been read
}

template <int kColumns>
inline void wgmma(float* sum, const uint32_t* a, uint64_t b) {
  emulator::Fiber& fiber = *emulator::running;
  if (!fiber.begun) emulator::fail("a product was not begun");
  fiber.open.push_back({sum, a, b, kColumns});
  if (emulator::products_at_once) run_product(fiber.open.back());
}

}  // namespace decodev2
