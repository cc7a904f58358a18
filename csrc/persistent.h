// Arguments of persistent.cu, torch-free.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

#include "launch.h"

namespace decodev2 {

constexpr int kMaxChunks = 32;  // of the live prefix
constexpr int kProductStamps = 4;  // of the time line, per layer and product: its turn, x is there, multiplied, handed on
constexpr int kAttendStamps = 4;   // of attention, behind those of the five products
constexpr int kStamps = 5 * kProductStamps + kAttendStamps;
constexpr int kMaxWriters = 4;  // CTAs that may share a tile of qkv

struct PersistentLayer {  // in device memory, one per layer
  const uint8_t* matrices[4];  // qkv, o, gate/up, down
  const float* qkv_bias;   // [qkv_rows] or null
  const float* attn_norm;  // [hidden]
  const float* mlp_norm;   // [hidden]
};

struct PersistentMatrix {
  int tiles;         // of 16 rows
  int groups;        // K_pad / 64
  int panels;        // of a tile, ceil(groups / 4)
  float per_panels;  // 1 / panels
  int next_panel;    // as many panels on as there are warps: this many panels further in a tile
  int next_sums;     // and this many bytes further among the sums, for the tiles between
  int slots;         // places for the sums of one tile's warps: 8 or 16
  int batch;         // tiles whose sums fit a buffer
  int tile_bytes;
  int narrower;      // bytes that a tile's last panel has less than the others
};

struct PersistentArguments {
  const PersistentLayer* layers;
  const uint8_t* tables;      // fill_tables
  const uint8_t* head;
  const float* norm;          // [hidden], the last one
  EmbedTable embed;
  const int64_t* token;       // [1]
  const int64_t* position;    // [1]
  int32_t* valid_len;         // [1], written
  const float* cos;           // [max_seq, head_dim]
  const float* sin;
  uint16_t* k_cache;          // bf16 [layers, max_seq, n_kv, head_dim]
  uint16_t* v_cache;
  float* logits;              // [vocab]
  float* candidate_values;    // [candidates]
  int* candidate_ids;
  // hand-offs: words whose lowest bit is a parity; all ones before the first launch
  uint32_t* qkv_sums;         // [kMaxWriters][qkv_rows]
  uint32_t* heads;            // [kMaxChunks][q_dim / 2][4], of chunks that are merged: two dims, maximum and sum
  uint32_t* attended;         // [q_dim / 64][32], attention's column, half2 in fragment order
  uint32_t* x[2];             // [hidden / 64][32], of the residual for attention's norm and for the MLP's, the same
  uint32_t* squares[2];       // [hidden / 16], of the residual's tiles, for each norm
  uint32_t* act;              // [down.groups][32], the same, times kActScale
  uint32_t* launch;           // [1], 0 before the first launch, then 1 and 0 in turn
  uint32_t* done;             // [1], 0: CTAs that have left their candidate
  uint32_t* fault;            // [1], 0; 1 + the place of a hand-off that did not come
  long long* timeline;        // null, or [layers + 1][kStamps][ctas]: cycle counts, see `stamp`
  long long patience;         // cycles before a hand-off counts as lost
  float eps;                  // of the norms
  CommitArguments commit;     // next_token null: candidates are all that is left
  int candidates;
  int n_layers, hidden, q_dim, intermediate, vocab, n_kv, head_dim, max_seq;
  // from here on filled by plan_persistent
  PersistentMatrix qkv, o, gate_up, down, head_matrix;
  int ctas;                   // of the grid
  int qkv_unit;               // panels that stay together: 1, or a whole tile
  int qkv_ctas;               // the first ones, which share qkv
  int most_chunks;                  // of the live prefix, each of a CTA per KV head
  float per_hidden;                 // 1 / hidden
  int late_panels;            // of a tile of down, those that need an act of the second part
  float per_early, per_late;  // 1 / the panels of a tile that are not late; 1 / late_panels
  int first_tiles;            // gate/up tiles of the first part
  int qkv_rows, n_q, per_kv;   // per_kv: query heads of a KV head
  int most_stages;            // of a layer and the head, the CTA that has most
  int slots;                  // of the ring
  int buffer_bytes;           // of each of the two buffers of sums
  // bytes into shared memory; the table is at 0, the buffers of sums or attention's scratch behind it
  int residual_at, shares_at, writers_at, turns_at, layers_at, token_at, factors_at, ring_at, full_at, sums_at, read_at;
};

// How the shape is shared out and laid out in shared memory; why it cannot be, or null.
const char* plan_persistent(PersistentArguments& a, int multiprocessors, int shared_limit, int* shared_bytes);
// Who does what, for the kernel: of every CTA its Shares and [most_stages] of Stage; then every tile's writers and its
// first writer (a byte each).
int64_t table_bytes(const PersistentArguments& a);
void fill_tables(const PersistentArguments& a, uint8_t* tables);
// Points the hand-offs into `words`; returns how many words they need.
int64_t lay_out_words(PersistentArguments& a, uint32_t* words);
cudaError_t chr_nf4_step(const PersistentArguments& a, int shared_bytes, cudaStream_t stream);

}  // namespace decodev2
