// What every NF4 kernel shares: levels, the panel layout, and the pair table. Torch-free.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ptx.cuh"

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

// Byte of half2 `pair` (k = 2 pair, 2 pair + 1) of one column of x in fragment order, as the products' right operand
// takes it; inside a block k = 16 m + 8 h + 2 t.
__device__ __forceinline__ int fragment_offset(int pair) {
  const int block = pair >> 5, m = pair >> 3 & 3, h = pair >> 2 & 1, t = pair & 3;
  return block * 128 + (m >> 1) * 64 + t * 16 + (m & 1) * 8 + h * 4;
}

// ---- the pair table ----------------------------------------------------------------------------------
//
// Row = code byte, 256 B apart; column = lane: each lane has its own copy of half2(level lo, level hi), so a
// look-up never meets a bank conflict. Row pitch 256 makes the byte a whole byte of the address: one byte
// permute of (word, lane * 4) builds it. 64 KB, of which the upper 128 B of each row are free.

constexpr int kTableBytes = 65536;

// `by`: a power of two that multiplies the levels.
__device__ __forceinline__ void build_pair_table(uint8_t* table, int thread, int threads, float by = 1.0f) {
  for (int i = thread; i < 256 * 8; i += threads) {
    const int byte = i >> 3;
    const half2 pair = __floats2half2_rn(kNf4Levels[byte & 15] * by, kNf4Levels[byte >> 4] * by);
    const uint32_t v = *reinterpret_cast<const uint32_t*>(&pair);
    *reinterpret_cast<uint4*>(table + byte * 256 + (i & 7) * 16) = make_uint4(v, v, v, v);
  }
}

// half2 of the two levels in byte `kByte` of `word`. table: shared address; lane4 = lane * 4.
template <int kByte>
__device__ __forceinline__ uint32_t look_up(uint32_t table, uint32_t word, uint32_t lane4) {
  return load_shared_constant(table + byte_permute(word, lane4, 0x5504 | kByte << 4));
}

// The same, at the place where it stands.
template <int kByte>
__device__ __forceinline__ uint32_t look_up_here(uint32_t table, uint32_t word, uint32_t lane4) {
  return load_shared_4(table + byte_permute(word, lane4, 0x5504 | kByte << 4));
}

// ---- host side ---------------------------------------------------------------------------------------

// Launch in clusters of CTAs, with or without programmatic stream serialisation.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster, size_t shared,
                            cudaStream_t stream, bool pdl, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (pdl) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = cluster;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// The same without clusters (programmatic serialisation is ignored below sm_90).
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   bool pdl, Arguments... arguments) {
  return launch_clusters(kernel, grid, block, 1, shared, stream, pdl, arguments...);
}

}  // namespace decodev2
