// Every launcher of the CUDA kernels, torch-free: device pointers, shapes and a stream in, an error code out.
// Nothing here allocates, synchronises or touches the default stream.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

namespace decodev2 {

// ---- nf4_gemv.cu: one column -------------------------------------------------------------------------

constexpr float kActScale = 1.0f / 16;  // half then holds 16 times its range; its smallest step is 2^-20

enum class GemvKind { kPlain, kSwiglu, kHead };
enum class GemvVariant { kDirect = 0, kRing8x2 = 1, kRing16x4 = 2, kRing16x3 = 3 };

struct GemvArguments {
  const uint8_t* panels;      // [tiles][groups * 544 B], nf4.cuh
  const float* x;             // [cols]; not read with x_half
  const uint8_t* x_half;      // or null: x times kActScale as half in fragment order, [groups * 128 B]
  float* y;                   // [rows]
  uint8_t* y_half;            // swiglu, or null: y once more, for the x_half of the next product
  const float* norm_weight;   // [cols] or null: x is normed on the way in
  const float* bias;          // [rows] or null
  const float* residual;      // [rows] or null; may be y
  float* candidate_values;    // head: [candidates], the best logit of each CTA
  int* candidate_ids;         // head: [candidates], its row, or -1
  int candidates;             // head: slots, at least 2 per multiprocessor
  float* shared_sums;         // or null: [tiles][2][16], for tiles between two CTAs
  uint32_t* shared_counters;  // or null: [tiles], zero once after allocation; with them CTAs share panels, not tiles
  float eps;                  // of the norm
  int rows;                   // output rows; for swiglu: units
  int cols;                   // K
  int groups;                 // K_pad / 64
  int tiles;                  // 16-row tiles of the panel matrix
  bool wait_first;            // nothing is read or built before the kernels before have ended; for comparison
};

struct GemvPlan {
  GemvVariant variant;
  int multiprocessors;
  int shared_bytes;  // of a multiprocessor
  bool pdl;          // programmatic dependent launch
};

// What makes a step fastest, as measured on one card. shared_bytes: of a multiprocessor.
GemvVariant choose_gemv_variant(int groups, int compute_capability, int shared_bytes);
int gemv_shared_bytes(GemvVariant variant, int groups);
// Would equal ranges of panels be faster than whole tiles? Then the call needs shared_sums and shared_counters.
bool gemv_shares_tiles(GemvKind kind, int groups, int tiles, const GemvPlan& plan);
cudaError_t chr_nf4_gemv(const GemvArguments& a, GemvKind kind, const GemvPlan& plan, cudaStream_t stream);
// One grid over the rows of q, k and v, stacked in one panel matrix, their bias added inside.
cudaError_t chr_nf4_gemv_qkv(const GemvArguments& a, const GemvPlan& plan, cudaStream_t stream);
// y[u] = silu(gate row u . x) * (up row u . x), a tile being 8 gate rows and their 8 up rows.
cudaError_t chr_nf4_gemv_swiglu(const GemvArguments& a, const GemvPlan& plan, cudaStream_t stream);

// ---- ring_ablations.cu: the ring with parts left out, and of other sizes ------------------------------

enum class RingParts { kWhole = 0, kNoTable = 1, kNoMma = 2, kLoads = 3, kLate = 4 };
// warps x stages: each warp takes one panel of a stage; 8x2 as in the step, two CTAs on a multiprocessor
enum class RingSize { k8x2 = 0, k8x4 = 1, k16x2 = 2, k16x3 = 3, k16x4 = 4 };

struct RingArguments : GemvArguments {
  uint32_t* seen;  // [1], exclusive or with every word that reached the end of what is left
};

int ring_shared_bytes(RingSize size, int groups);
// y is right for kWhole and kLate only. The plan's variant is not looked at.
cudaError_t launch_ring(const RingArguments& a, RingParts parts, RingSize size, const GemvPlan& plan, cudaStream_t stream);
bool ring_shares_tiles(RingSize size, int groups, int tiles, const GemvPlan& plan);

// ---- nf4_gemm.cu: many columns, tensor cores ------------------------------------------------------------

enum class GemmKind { kPlain, kSwiglu };
enum class GemmVariant { kPlain = 0, kBulk = 1 };

struct GemmArguments {
  const uint8_t* panels;      // [tiles][groups * 544 B], nf4.cuh
  const float* x;             // [n, cols], rows ld_x apart
  float* y;                   // [n, rows], rows ld_y apart
  const float* norm_weight;   // [cols] or null: x is normed on the way in
  const float* bias;          // [rows] or null; not with swiglu
  const float* residual;      // [n, rows], rows ld_y apart, or null; may be y; not with swiglu
  uint8_t* workspace;         // gemm_workspace_bytes(...), aligned to 16; needs no initialisation
  size_t workspace_bytes;
  int64_t ld_x;               // elements
  int64_t ld_y;               // elements
  float eps;                  // of the norm
  int n;                      // columns
  int rows;                   // output rows; for swiglu: units
  int cols;                   // K
  int groups;                 // K_pad / 64
  int tiles;                  // 16-row tiles of the panel matrix
};

struct GemmPlan {
  GemmVariant variant;
  int multiprocessors;
  int shared_limit;  // bytes of shared memory a CTA may opt in to
  bool pdl;          // programmatic dependent launch; ignored below sm_90
};

GemmVariant choose_gemm_variant(int compute_capability, int shared_limit);
// Workspace of one call; 0 for a shape or device that cannot run. Grows with n.
size_t gemm_workspace_bytes(int tiles, int groups, int n, const GemmPlan& plan);
// Two launches: x to half fragments, then the matrix. cudaErrorInvalidValue for sizes that do not fit together.
cudaError_t chr_nf4_gemm(const GemmArguments& a, GemmKind kind, const GemmPlan& plan, cudaStream_t stream);

// ---- nf4_wgmma.cu: many columns, the tensor cores of sm_90a ---------------------------------------------

// As GemmArguments, but for these; workspace: wgmma_columns_bytes(groups, n), not needed with x_columns.
struct WgmmaArguments : GemmArguments {
  const uint8_t* x_columns;  // or null: what a product of before left in y_columns, instead of x
  uint8_t* y_columns;        // swiglu, or null: y as half for the next product, wgmma_columns_bytes(its groups, n);
                             // then y may be null
  int level_exponent;        // levels are multiplied by its power of two, -15 .. 15; level times scale is half
};

struct WgmmaPlan {
  int multiprocessors;
  int columns;  // of a CTA: 64, 128 or 256; 0: chosen
  int splits;   // of K: 1, 2 or 4; 0: chosen, for a shape always the same
  bool pdl;     // programmatic dependent launch
};

// The device has what the kernel needs: compute capability 9.0.
bool wgmma_runs_on(int compute_capability, int shared_limit);
// n columns as half; grows with n.
size_t wgmma_columns_bytes(int groups, int n);
// Two launches, x to half tiles and the matrix; one with x_columns. Same bits for a column whatever the others hold.
cudaError_t chr_nf4_wgmma(const WgmmaArguments& a, GemmKind kind, const WgmmaPlan& plan, cudaStream_t stream);

// ---- attn.cu, attn_prefill.cu, ladder_attn.cu: RoPE, the KV cache and attention ----------------

struct AttnArguments {
  float* q;                  // [n, n_q * head_dim] before RoPE; rope_kv rotates it in place
  float* k;                  // [n, n_kv * head_dim] before RoPE; rope_kv rotates it in place
  const float* v;            // [n, n_kv * head_dim]
  const float* cos;          // [max_seq, head_dim], both halves filled
  const float* sin;          // [max_seq, head_dim]
  const int64_t* position;   // [n] cache slot; outside [0, max_seq) nothing is written to the cache
  int32_t* valid_len;        // [n] live prefix: written (position + 1) if RoPE is fused, else read
  uint16_t* k_cache;         // bf16 [max_seq, n_kv, head_dim] of this layer
  uint16_t* v_cache;         // bf16 [max_seq, n_kv, head_dim] of this layer
  float* out;                // [n, n_q * head_dim]
  uint8_t* out_half;         // attn_decode, or null: out once more, for the x_half of a GEMV
  float* partials;           // scratch, attn_partial_floats(...)
  uint32_t* counters;        // [n_q]; zero once after allocation, every launch leaves them zero
  int64_t ld_q;              // floats from one column of q to the next: columns may be parts of wider rows
  int64_t ld_kv;             // the same of k and v
  int n;                     // columns
  int n_q;                   // query heads
  int n_kv;                  // key / value heads, divides n_q
  int head_dim;              // 16, 32, 64 or 128
  int max_seq;               // slots in the cache
  bool ahead;                // attn_decode, set by its launcher
};

// How the splits of attn_decode become one result: the CTA that arrives last adds all of them, or
// clusters of 8 CTAs add theirs through distributed shared memory first (sm_90 and newer). kAuto:
// clusters where they exist and the cache has more than one split.
enum class AttnMerge { kAuto = 0, kLastCta = 1, kCluster = 2 };

struct AttnPlan {
  AttnMerge merge;  // attn_decode
  bool rope;        // attn_decode: rotate q, k and write k, v here; false: rope_kv has run
  int key_splits;   // attn_prefill: warps that share one row tile's keys: 1, 2, 4; 0 chooses
  bool pdl;         // programmatic dependent launch; ignored below sm_90
  bool ahead;       // attn_decode with pdl and rope: the position and the cache before it are read before the kernels
                    // ahead have ended. For a step whose first kernel lets none start before its own wait.
};

// Floats of `partials` that any attention kernel below needs.
int64_t attn_partial_floats(int n_q, int n_kv, int head_dim, int max_seq);

// One column (n = 1), one launch: RoPE, KV write, attention over the live prefix. Any n_q / n_kv.
cudaError_t chr_nf4_attn(const AttnArguments& a, const AttnPlan& plan, cudaStream_t stream);
// n columns: rotate q and k in place, write k and v to the cache.
cudaError_t chr_nf4_rope_kv(const AttnArguments& a, const AttnPlan& plan, cudaStream_t stream);
// n columns after rope_kv: each attends to the first valid_len[i] slots.
cudaError_t chr_nf4_attn_prefill(const AttnArguments& a, const AttnPlan& plan, cudaStream_t stream);
// Rung: one warp per query head and column, after rope_kv.
cudaError_t launch_attn_one_warp(const AttnArguments& a, const AttnPlan& plan, cudaStream_t stream);
// Rung: one column, RoPE and KV write inside, n_q x 32 CTAs and a second launch that merges.
cudaError_t launch_attn_flash_two_launch(const AttnArguments& a, const AttnPlan& plan,
                                         cudaStream_t stream);

// ---- step.cu: the small kernels of a step -------------------------------------------------------

struct RmsArguments {
  const float* x;       // [n, hidden]
  const float* weight;  // [hidden]
  float* y;             // [n, hidden], may be x
  float eps;
  int n;                // rows
  int hidden;           // multiple of 4, at most 16384
};

// The embedding table: NF4 panels (nf4.cuh) or, for the small synthetic models, dense float32. One
// of the two is null.
struct EmbedTable {
  const uint8_t* panels;  // tiles of 16 rows
  const float* dense;     // [rows, hidden]
  int64_t rows;           // vocabulary; an id outside [0, rows) gives zeros
  int hidden;
  int groups;             // K_pad / 64
};

struct EmbedArguments {
  EmbedTable table;
  const int64_t* token;     // [n]
  const int64_t* position;  // [n], or null
  int32_t* valid_len;       // [n], written position + 1, or null
  float* x;                 // [n, hidden]
  int n;
};

// What happens once the best id is known. next_token is always written: the id, or -1 when no
// candidate is a number above -inf. With `token` not null the step also commits: token becomes
// next_token, position += 1, finished |= next_token is in eos_ids. Once finished is set next_token
// is still computed, but token and position no longer move.
struct CommitArguments {
  int64_t* next_token;      // [1]
  int64_t* token;           // [1], or null: leave token, position and finished alone
  int64_t* position;        // [1]
  uint8_t* finished;        // [1]
  const int64_t* eos_ids;   // [8], unused slots -1
  int64_t* history;         // [history_size] or null: the id that enters at each position
  int64_t history_size;
};

// Best of the per-CTA candidates that the head GEMV leaves (id -1: none), then CommitArguments.
struct CandidateArguments {
  const float* values;  // [count]
  const int* ids;       // [count]
  int count;
  CommitArguments commit;
};

// Best of every slice of the logits: candidates for a head whose product leaves none.
struct SliceArguments {
  const float* logits;  // [vocab]
  int vocab;
  float* values;        // [count]
  int* ids;             // [count], -1 where a slice has no number above -inf
  int count;            // slices
};

cudaError_t chr_nf4_rms(const RmsArguments& a, bool pdl, cudaStream_t stream);
cudaError_t chr_nf4_embed(const EmbedArguments& a, bool pdl, cudaStream_t stream);
cudaError_t chr_nf4_commit(const CandidateArguments& a, bool pdl, cudaStream_t stream);
cudaError_t chr_nf4_candidates(const SliceArguments& a, bool pdl, cudaStream_t stream);

// ---- read_rate.cu: the ceiling -------------------------------------------------------------------

struct ReadArguments {
  const uint32_t* data;  // [quads * 4], aligned to 16 bytes
  uint32_t* checksum;    // [1], exclusive or with every word of data
  int64_t quads;         // 16-byte words
};

cudaError_t launch_read(const ReadArguments& a, int multiprocessors, cudaStream_t stream);

// ---- handoff.cu: a vector from all CTAs to all CTAs ----------------------------------------------

enum class HandoffWay { kReading = 0, kGridBarrier = 1, kCounter = 2, kOneLook = 3, kTwoLooks = 4 };

constexpr int kHandoffWarmUp = 8;   // rounds that are not in `cycles`
constexpr int kHandoffApart = 32;   // words from one control word to the next: each has a line

struct HandoffArguments {
  uint32_t* vectors;   // [2][words]; at first the start, lowest bits 0, and all ones
  uint32_t* sum;       // [1], += every word that a CTA read, without its lowest bit; not by nodes
  uint32_t* counter;   // [1], 0
  uint32_t* fault;     // [1], 0; 1 + the round in which a hand-off did not come
  long long* cycles;   // [ctas], of the rounds from kHandoffWarmUp on; not by nodes
  long long patience;  // cycles before a hand-off counts as lost
  int words;           // a power of two, at most 2048
  int rounds;
  int round;           // of a node
};

// One launch. Fails where not all CTAs can be resident.
cudaError_t launch_handoff(const HandoffArguments& a, HandoffWay way, int ctas, cudaStream_t stream);
cudaError_t launch_handoff_node(const HandoffArguments& a, int ctas, bool pdl, cudaStream_t stream);

// ---- ladder_gemv.cu: one column, row-major weights, the rungs of the lab log ----------------------

enum class LadderTable { kConstant, kShared, kShuffle, kBytePermute, kPair };

constexpr int kLadderMatrices = 3;

struct LadderMatrix {
  const uint8_t* codes;    // [rows, groups * 32 B]
  const uint16_t* scales;  // float16 [rows, groups]
  int rows;
};

struct LadderArguments {
  LadderMatrix matrix[kLadderMatrices];  // one after the other in y; swiglu: gate, up
  int matrices;
  const float* x;            // [cols]
  float* y;                  // [sum of rows]; swiglu: [rows of gate]
  const float* norm_weight;  // [cols] or null: x is normed on the way in
  const float* bias;         // as y, or null
  const float* residual;     // as y, or null; may be y
  float eps;                 // of the norm
  int cols;                  // K
  int groups;                // K_pad / 64
};

struct LadderPlan {
  LadderTable table;
  int rows;        // 1, 2, 4 or 8 that share x: per CTA with split K, else per warp
  bool split_k;    // four warps share the K of a row, or one warp a row
  bool stage_x;    // all of x in shared memory first; needs split K
  bool swiglu;     // only lut_shared, split K, x not staged
  int load_bytes;  // 4 or 16 bytes of codes per load
  int multiprocessors;
  int shared_limit;  // bytes of shared memory a CTA may opt in to
};

// Bytes (1, 4 or 16) that every row of codes is aligned to; a plan may load no more at once.
int ladder_alignment(const LadderArguments& a);
// 16 where rows are aligned to it, long enough to keep every lane busy, and x is staged: from global
// memory, lanes that own 32 k each would read x 128 B apart. Else 4.
int choose_ladder_load(const LadderArguments& a, bool split_k, bool stage_x);
int64_t ladder_shared_bytes(const LadderArguments& a, const LadderPlan& plan);
cudaError_t launch_ladder_gemv(const LadderArguments& a, const LadderPlan& plan,
                               cudaStream_t stream);
// y[u] = silu(gate_up[u]) * gate_up[units + u]
cudaError_t launch_silu_multiply(const float* gate_up, float* y, int units, cudaStream_t stream);

}  // namespace decodev2
