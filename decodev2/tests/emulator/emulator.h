// As much of CUDA as the Hopper kernels of csrc/ use (persistent, GEMV, wgmma, handoff), on one CPU thread: every CUDA
// thread is a fiber, warps take turns in a random order that a seed decides, and what a warp does together (shuffles,
// tensor-core products) waits for all of its lanes. Lanes are otherwise free to run apart, which is less than a GPU
// promises in practice and all that it promises on paper: code that forgets a __syncwarp, a barrier or a hand-off gives
// other results for other seeds, or stops. x86-64 only. Arithmetic is float32; bf16 and half round to nearest.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL

using std::isinf;
using std::max;
using std::min;

// ---- vector and half types ------------------------------------------------------------------------------

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct int2 { int x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline uint32_t __float_as_uint(float v) { return bits_as<uint32_t>(v); }
inline float __uint_as_float(uint32_t v) { return bits_as<float>(v); }

struct __half { uint16_t bits; };
struct __half2 { __half x, y; };
struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
using half = __half;
using half2 = __half2;

inline float half_value_of(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float size = exponent == 31   ? (mantissa ? NAN : INFINITY)
                     : exponent == 0  ? std::ldexp(static_cast<float>(mantissa), -24)
                                      : std::ldexp(1024.0f + mantissa, exponent - 25);
  return h >> 15 ? -size : size;
}

inline float half_value(uint16_t h) {
  static const std::vector<float> values = [] {
    std::vector<float> all(65536);
    for (int i = 0; i < 65536; ++i) all[i] = half_value_of(i);
    return all;
  }();
  return values[h];
}

inline uint16_t half_bits(float v) {
  const uint16_t sign = __float_as_uint(v) >> 16 & 0x8000;
  const float size = std::fabs(v);
  if (std::isnan(v)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size == 0.0f) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int step = max(exponent - 11, -24);  // of the last bit
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -step)));
  return sign | (((step + 24) << 10) + steps);
}

inline uint16_t bfloat_bits(float v) {
  if (std::isnan(v)) return 0x7fff;
  const uint32_t bits = __float_as_uint(v);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline float bfloat_value(uint16_t b) { return __uint_as_float(static_cast<uint32_t>(b) << 16); }

inline float __half2float(__half v) { return half_value(v.bits); }
inline __half2 __floats2half2_rn(float x, float y) { return {{half_bits(x)}, {half_bits(y)}}; }
inline float2 __half22float2(__half2 v) { return {half_value(v.x.bits), half_value(v.y.bits)}; }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return {bfloat_bits(v)}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {{bfloat_bits(x)}, {bfloat_bits(y)}}; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline __half2 __hmul2(__half2 a, __half2 b) {
  const float2 x = __half22float2(a), y = __half22float2(b);
  return __floats2half2_rn(x.x * y.x, x.y * y.y);
}
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
inline float frexpf(float v, int* exponent) { return std::frexp(v, exponent); }
inline float ldexpf(float v, int exponent) { return std::ldexp(v, exponent); }
template <typename T>
inline T __ldg(const T* p) { return *p; }
template <typename T>
inline T __ldcg(const T* p) { return *p; }
template <typename T>
inline void __stcg(T* p, T value) { *p = value; }

// ---- fibers ---------------------------------------------------------------------------------------------

namespace emulator {

constexpr int kLanes = 32;
constexpr size_t kStack = 32768;
constexpr size_t kGuard = 1024;  // bytes behind a CTA's shared memory that nobody may write

struct Meeting {  // of threads that wait for each other
  int count = 0;
  unsigned times = 0;
};

struct Warp {
  Meeting meeting;
  uint32_t in[kLanes][10], out[kLanes][16];
};

struct Arrival {  // of a bulk copy's bytes at a barrier in shared memory
  long round;
  void* barrier;
  uint32_t bytes;
};

struct Cta {
  unsigned index;
  Cta* cluster;             // its first CTA
  Meeting cluster_meeting;  // of that one
  uint8_t* shared;
  std::vector<Warp> warps;
  Meeting barriers[16];
  bool any = false;  // of __syncthreads_or
};

struct Product {  // of a warpgroup, for one of its threads
  float* sum;
  const uint32_t* a;
  uint64_t b;
  int columns;
};

struct Fiber {
  void* stack_pointer;
  dim3 thread;
  Cta* cta;
  bool done;
  bool begun;                                // what a product reads is there
  std::vector<Product> open;                 // group of products that is not closed yet
  std::vector<std::vector<Product>> groups;  // that still run, the oldest first
};

inline Fiber* running;
inline void* scheduler;  // its stack pointer while a fiber runs
inline dim3 grid, block;
inline unsigned cluster_size = 1;
inline bool products_at_once;  // or as late as they may be: when they are waited for
inline std::function<void()> kernel;
inline std::mt19937 chance;
inline long long ticks;      // how often a fiber has paused
inline std::vector<Arrival> arrivals;
inline void (*arrive)(const Arrival&);
inline long rounds;          // that all fibers had their turn
inline Meeting everyone;    // all threads of the grid
inline const char* stopped;  // why the last launch did not end; null if it did

extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.weak emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

inline void pause() {
  ++ticks;
  emulator_switch(&running->stack_pointer, scheduler);
}

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

inline bool by_chance(unsigned one_in) { return chance() % one_in == 0; }

inline void fiber_main() {
  kernel();
  if (!running->open.empty() || !running->groups.empty()) fail("a thread leaves while its products run");
  running->done = true;
  for (;;) emulator_switch(&running->stack_pointer, scheduler);
}

// Runs `grid` CTAs of `block` threads until all have ended; gives up after `patience` rounds.
inline void run(size_t shared_bytes, long patience = 5000) {
  const int threads = block.x, warps = threads / kLanes, ctas = grid.x;
  std::vector<Cta> all(ctas);
  std::vector<std::unique_ptr<uint8_t, void (*)(void*)>> memory;
  const auto allocate = [&](size_t bytes) {
    memory.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024)), std::free);
    return memory.back().get();
  };
  std::vector<Fiber> fibers(static_cast<size_t>(ctas) * threads);
  uint8_t* stacks = allocate(fibers.size() * kStack);
  products_at_once = by_chance(2);
  for (int c = 0; c < ctas; ++c) {
    all[c].index = c;
    all[c].cluster = &all[c - c % cluster_size];
    all[c].shared = allocate(shared_bytes + kGuard);
    std::memset(all[c].shared, 0xff, shared_bytes + kGuard);  // NaN: shared memory is not cleared
    all[c].warps.resize(warps);
  }
  for (size_t i = 0; i < fibers.size(); ++i) {
    auto* top = reinterpret_cast<uint64_t*>(stacks + (i + 1) * kStack);
    *--top = 0;
    *--top = reinterpret_cast<uint64_t>(&fiber_main);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    fibers[i] = {top, dim3(i % threads), &all[i / threads], false, false, {}, {}};
  }
  std::vector<int> order(ctas * warps);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::vector<long> awake(order.size());
  arrivals.clear();
  stopped = nullptr;
  everyone = {};
  size_t left = fibers.size();
  for (long round = 0; left; ++round) {
    rounds = round;
    for (size_t i = 0; i < arrivals.size();) {
      if (arrivals[i].round > round) {
        ++i;
        continue;
      }
      arrive(arrivals[i]);
      arrivals.erase(arrivals.begin() + i);
    }
    if (round == patience) {
      stopped = "threads wait for something that does not come";
      return;
    }
    if (round % 16 == 0) std::shuffle(order.begin(), order.end(), chance);
    const bool some_rest = round % 64 > 20;
    for (int warp : order) {
      if (round < awake[warp] || (some_rest && by_chance(8))) continue;
      if (by_chance(16 * order.size())) awake[warp] = round + 60;  // others come round a ring meanwhile
      for (int lane = 0; lane < kLanes; ++lane) {
        Fiber& fiber = fibers[static_cast<size_t>(warp) * kLanes + lane];
        if (fiber.done) continue;
        running = &fiber;
        emulator_switch(&scheduler, fiber.stack_pointer);
        left -= fiber.done;
      }
    }
  }
  for (const Cta& cta : all)
    for (size_t i = 0; i < kGuard; ++i)
      if (cta.shared[shared_bytes + i] != 0xff) fail("a CTA wrote behind its shared memory");
}

inline void meet(Meeting& meeting, int count) {
  const unsigned now = meeting.times;
  if (++meeting.count == count) {
    meeting.count = 0;
    ++meeting.times;
  }
  while (meeting.times == now) pause();
}

// All 32 lanes bring `words` words; the last of them computes every lane's result.
template <typename Compute>
inline const uint32_t* together(const void* brought, int words, Compute compute) {
  const unsigned thread = running->thread.x, lane = thread % kLanes;
  Warp& warp = running->cta->warps[thread / kLanes];
  std::memcpy(warp.in[lane], brought, words * 4);
  if (warp.meeting.count == kLanes - 1) compute(warp);
  meet(warp.meeting, kLanes);
  return warp.out[lane];
}

inline uint32_t shuffle(uint32_t value, unsigned from) {
  const uint32_t brought[2] = {value, from};
  return *together(brought, 2, [](Warp& w) {
    for (auto lane = 0; lane < kLanes; ++lane) w.out[lane][0] = w.in[w.in[lane][1] % kLanes][0];
  });
}

// c += A B of m16n8k16; `value` is what 16 bits stand for.
template <typename Value>
inline void multiply(float* c, const uint32_t (&a)[4], const uint32_t (&b)[2], Value value) {
  uint32_t brought[10] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  std::memcpy(brought + 6, c, 16);
  const uint32_t* result = together(brought, 10, [value](Warp& w) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < kLanes; ++lane)
      for (int e = 0; e < 2; ++e) {
        const int g = lane / 4, k = lane % 4 * 2 + e;
        const auto of = [&](int word) { return value(static_cast<uint16_t>(w.in[lane][word] >> 16 * e)); };
        left[g][k] = of(0), left[g + 8][k] = of(1), left[g][k + 8] = of(2), left[g + 8][k + 8] = of(3);
        right[k][g] = of(4), right[k + 8][g] = of(5);
      }
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        w.out[lane][i] = __float_as_uint(bits_as<float>(w.in[lane][6 + i]) + sum);
      }
  });
  std::memcpy(c, result, 16);
}

// sum += A B of a warpgroup's product of 64 x columns x 16. `half_at` reads shared memory. K-major operands with the
// 128-byte swizzle: bits 4 to 6 of an address are those of the plain layout, changed by its bits 7 to 9.
template <typename HalfAt>
inline void multiply(const Product& product, HalfAt half_at) {
  if (product.b >> 62 != 1 || (product.b >> 49 & 7) || product.columns % 8) fail("an operand of another layout");
  const uint32_t start = (product.b & 0x3fff) << 4, apart = (product.b >> 32 & 0x3fff) << 4;  // 8 columns from 8
  const uint32_t* rows = together(product.a, 4, [](Warp& w) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < 16; ++i) w.out[lane][i] = w.in[lane / 4 * 4 + i / 4][i % 4];
  });
  float lo[16], hi[16];
  for (int k = 0; k < 16; ++k) {
    const uint32_t* words = rows + k % 8 / 2 * 4 + k / 8 * 2;
    lo[k] = half_value(words[0] >> k % 2 * 16), hi[k] = half_value(words[1] >> k % 2 * 16);
  }
  const int t = running->thread.x % 4;
  for (int c = 0; c < product.columns; c += 8)
    for (int e = 0; e < 2; ++e) {
      float of_lo = 0.0f, of_hi = 0.0f;
      for (int k = 0; k < 16; ++k) {
        const uint32_t plain = start + c / 8 * apart + (2 * t + e) * 128 + k * 2;
        const float right = half_at(plain ^ (plain >> 7 & 7) << 4);
        of_lo += lo[k] * right, of_hi += hi[k] * right;
      }
      product.sum[c / 2 + e] += of_lo, product.sum[c / 2 + 2 + e] += of_hi;
    }
}

}  // namespace emulator

struct ThreadIndex { operator unsigned() const { return emulator::running->thread.x; } };
struct CtaIndex { operator unsigned() const { return emulator::running->cta->index; } };
struct GridSize { operator unsigned() const { return emulator::grid.x; } };
inline struct { ThreadIndex x; } threadIdx;
inline struct { CtaIndex x; } blockIdx;
inline struct { GridSize x; } gridDim;

inline void __syncthreads() { emulator::meet(emulator::running->cta->barriers[0], emulator::block.x); }
inline int __syncthreads_or(int value) {
  bool& any = emulator::running->cta->any;
  if (value) any = true;
  __syncthreads();
  const bool result = any;
  __syncthreads();  // all have read it
  if (threadIdx.x == 0) any = false;
  __syncthreads();
  return result;
}
inline void __syncwarp() { emulator::together("", 0, [](emulator::Warp&) {}); }
inline void __nanosleep(unsigned) { emulator::pause(); }
inline long long clock64() {
  emulator::pause();
  return emulator::ticks;
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int lane) {
  return bits_as<T>(emulator::shuffle(bits_as<uint32_t>(value), lane));
}
template <typename T>
inline T __shfl_xor_sync(unsigned all, T value, int mask) {
  return __shfl_sync(all, value, threadIdx.x % emulator::kLanes ^ mask);
}
inline uint32_t __reduce_add_sync(unsigned all, uint32_t value) {
  for (int mask = 16; mask; mask >>= 1) value += __shfl_xor_sync(all, value, mask);
  return value;
}
inline uint32_t __reduce_xor_sync(unsigned all, uint32_t value) {
  for (int mask = 16; mask; mask >>= 1) value ^= __shfl_xor_sync(all, value, mask);
  return value;
}
inline bool __any_sync(unsigned all, bool value) {
  uint32_t any = value;
  for (int mask = 16; mask; mask >>= 1) any |= __shfl_xor_sync(all, any, mask);
  return any;
}
inline bool __all_sync(unsigned all, bool value) { return !__any_sync(all, !value); }
inline void atomicXor(uint32_t* to, uint32_t value) { *to ^= value; }
template <typename T>
inline T __shfl_down_sync(unsigned all, T value, int by) {
  const int lane = threadIdx.x % emulator::kLanes;
  return __shfl_sync(all, value, lane + by < emulator::kLanes ? lane + by : lane);
}

// ---- launches -------------------------------------------------------------------------------------------

using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorLaunchTimeout = 702 };
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
  cudaDevAttrComputeCapabilityMajor,
};

struct cudaLaunchAttribute {
  int id;
  struct { int cooperative, programmaticStreamSerializationAllowed; dim3 clusterDim; } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 9, cudaSuccess; }

template <typename Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }

template <typename Kernel, typename... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, const Arguments&... arguments) {
  emulator::grid = config->gridDim;
  emulator::block = config->blockDim;
  emulator::cluster_size = 1;
  for (int i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      emulator::cluster_size = config->attrs[i].val.clusterDim.x;
  emulator::kernel = [=] { kernel(arguments...); };
  emulator::run(config->dynamicSmemBytes);
  return emulator::stopped ? cudaErrorLaunchTimeout : cudaSuccess;
}
