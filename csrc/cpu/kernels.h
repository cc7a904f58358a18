// The CPU kernels behind decodev2/ops.py: torch-free, single-threaded over a range of row blocks or heads.
// binding.cpp checks arguments and splits the ranges over torch's threads.
#pragma once
#include <cstdint>

namespace decodev2 {

constexpr int kMaxColumns = 64;  // prompt columns per call; bounds the accumulators kept on the stack

// NF4 levels, index 0..15 (the codec of decodev2/nf4.py; tested against it).
alignas(64) constexpr float kLevels[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// One NF4 matrix in row-block layout (drawn in kernels.inl).
struct Matrix {
  const uint32_t* codes;   // [ceil(rows / 16)][groups * 8][16]
  const uint16_t* scales;  // [ceil(rows / 16)][groups][16] float16
  long rows;               // logical rows M
  long groups;             // K_pad / 64
};

// One table per instruction set. `begin, end` are row blocks of 16; x of gemv is [K_pad], of gemm
// k-major [K_pad][cols]; both are zero from K to K_pad.
struct Kernels {
  void (*gemv)(const Matrix& w, const float* x, float* y, const float* bias, const float* residual,
               long begin, long end);
  void (*gemv_swiglu)(const Matrix& gate, const Matrix& up, const float* x, float* y, long begin, long end);
  void (*gemm)(const Matrix& w, const float* x, long cols, float* y, long ldy, const float* bias, bool add_to_y,
               long begin, long end);
  void (*gemm_swiglu)(const Matrix& gate, const Matrix& up, const float* x, long cols, float* y, long ldy,
                      long begin, long end);
  void (*rms_norm)(const float* x, const float* weight, float eps, long n, float* y);
  void (*attend)(const float* q, const float* keys, const float* values, long stride, long length, long head_dim,
                 float scale, float* scores, float* out);
};

enum class Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

Isa best_isa();                      // the widest set this CPU has
const Kernels& kernels_for(Isa isa);

// One row of a packed matrix as floats: out[k] = level * scale, k < cols. The embedding look-up.
void decode_row(const Matrix& w, long row, long cols, float* out);

}  // namespace decodev2
