// The host's side of persistent.cu: does a shape fit, who does what, and where everything lies in shared memory.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>

#include "persistent.cuh"
#include "persistent_attn.cuh"

namespace decodev2 {
namespace {

PersistentMatrix matrix_of(int rows, int cols) {
  PersistentMatrix m;
  m.tiles = (rows + kTileRows - 1) / kTileRows;
  m.groups = (cols + kGroup - 1) / kGroup;
  m.panels = (m.groups + kPanelBlocks - 1) / kPanelBlocks;
  return m;
}

int ceil_divide(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Panels of the CTA that has most, and CTAs of the tile that has most, when units of `unit` panels are shared out.
int most_panels(const PersistentMatrix& m, int unit, int ctas) {
  return ceil_divide(static_cast<int64_t>(m.tiles) * m.panels / unit, ctas) * unit;
}

// Where CTA `cta` begins when `units` are shared out. With fewer units than CTAs the first ones take one each, so that
// the owners of neighbouring units are neighbours.
int share(int64_t units, int cta, int ctas) {
  const int64_t taking = std::min<int64_t>(units, ctas);
  return taking ? static_cast<int>(units * std::min<int64_t>(cta, taking) / taking) : 0;
}

// CTA that owns unit u.
int owner_of(int64_t u, int64_t units, int ctas) {
  const int64_t taking = std::min<int64_t>(units, ctas);
  return static_cast<int>(((u + 1) * taking - 1) / units);
}

// The share of CTA `cta` of tiles [from, to).
List share_of(const PersistentMatrix& m, int unit, int from, int to, int cta, int ctas) {
  const int64_t units = static_cast<int64_t>(to - from) * m.panels / unit;
  const int begin = share(units, cta, ctas) * unit, end = share(units, cta + 1, ctas) * unit;
  List list = {};
  list.tile = from + begin / m.panels;
  list.panel = begin % m.panels;
  list.count = end - begin;
  list.width = m.panels;
  list.per_width = 1.0f / static_cast<float>(m.panels);
  list.slots = kWarps % m.panels ? kWarps : m.panels;
  list.batch = kBufferSlots / list.slots;
  list.next_panel = kWarps % m.panels;
  list.next_sums = kWarps / m.panels * list.slots * kTileRows;
  list.tile_bytes = m.groups * kBlockBytes;
  list.narrower = (m.panels * kPanelBlocks - m.groups) * kBlockBytes;
  return list;
}

int most_writers(const PersistentMatrix& m, int unit, int ctas) {
  const int64_t per_tile = m.panels / unit, units = m.tiles * per_tile;
  int most = 0;
  for (int64_t tile = 0; tile < m.tiles; ++tile)
    most = std::max(most, owner_of((tile + 1) * per_tile - 1, units, ctas) - owner_of(tile * per_tile, units, ctas) + 1);
  return most;
}

// Whole tiles have one writer, so less is read; a finer division is worth it where the CTA that has most then takes fewer
// rounds of its warps.
int choose_unit(const PersistentMatrix& m, int ctas) {
  const auto rounds = [&](int unit) { return ceil_divide(most_panels(m, unit, ctas), kWarps); };
  return rounds(m.panels) <= rounds(1) || most_writers(m, 1, ctas) > kMaxWriters ? m.panels : 1;
}

// The stages of a list, batch by batch, to `out` if there is one; how many.
int fill_stages(const List& list, int matrix, Stage* out) {
  int stages = 0;
  for (int tiles = 0, panels = 0; panels < list.count; tiles += list.batch) {
    const Batch batch = batch_of(list, tiles, panels);
    for (int done = 0; done < batch.count; done += kStagePanels, ++stages) {
      const int panel = batch.panel + done, count = std::min(kStagePanels, batch.count - done);
      const auto offset = [&](int p) {
        return static_cast<int64_t>(batch.tile + p / list.width) * list.tile_bytes + p % list.width * kPanelBytes;
      };
      const int64_t from = offset(panel), size = offset(panel + count) - from;
      if (out)
        out[stages] = {static_cast<uint32_t>(from / 16), static_cast<uint16_t>(size / 16), static_cast<uint16_t>(matrix)};
    }
    panels += batch.count;
  }
  return stages;
}

// Shares and stages of a CTA to `out` if there is room; how many stages.
int fill_shares(const PersistentArguments& a, int cta, uint8_t* out) {
  // who has a tile more than others in the first half of gate/up has none more in the second
  const int second = a.gate_up.tiles - a.first_tiles, more = second % a.ctas, fewest = std::min(more, a.ctas - more);
  const int turn = fewest ? ceil_divide(a.ctas, 2 * fewest) : 0;
  Shares shares = {};
  shares.lists[kQkv] = share_of(a.qkv, a.qkv_unit, 0, a.qkv.tiles, cta, a.ctas);
  shares.lists[kO] = share_of(a.o, a.o.panels, 0, a.o.tiles, cta, a.ctas);
  shares.lists[kFirstAct] = share_of(a.gate_up, a.gate_up.panels, 0, a.first_tiles, cta, a.ctas);
  shares.lists[kSecondAct] =
      share_of(a.gate_up, a.gate_up.panels, a.first_tiles, a.gate_up.tiles, (cta + turn) % a.ctas, a.ctas);
  shares.lists[kDown] = share_of(a.down, a.down.panels, 0, a.down.tiles, cta, a.ctas);
  shares.lists[kHead] = share_of(a.head_matrix, a.head_matrix.panels, 0, a.head_matrix.tiles, cta, a.ctas);
  constexpr int kMatrix[kLists] = {0, 1, 2, 2, 3, 4};
  Stage* stages = out ? reinterpret_cast<Stage*>(out + sizeof(Shares)) : nullptr;
  for (int which = 0; which < kLists; ++which) {
    if (which == kHead) shares.layer_stages = shares.stages;
    shares.lists[which].first_stage = shares.stages;
    shares.stages += fill_stages(shares.lists[which], kMatrix[which], stages ? stages + shares.stages : nullptr);
  }
  if (out) std::memcpy(out, &shares, sizeof shares);
  return shares.stages;
}

}  // namespace

const char* plan_persistent(PersistentArguments& a, int multiprocessors, int shared_limit, int* shared_bytes) {
  if (a.n_layers < 1) return "there is no layer";
  if (a.head_dim != 64 && a.head_dim != 128) return "head_dim is neither 64 nor 128";
  if (a.n_kv < 1 || a.q_dim % a.head_dim || a.q_dim / a.head_dim % a.n_kv) return "query heads do not share KV heads";
  a.n_q = a.q_dim / a.head_dim;
  a.per_kv = a.n_q / a.n_kv;
  if (a.n_q / a.n_kv > kHeadsPerKv) return "more than 8 query heads share a KV head";
  if (a.hidden % kGroup || a.intermediate % kGroup || a.q_dim % kGroup) return "a width is no multiple of 64";
  a.qkv_rows = a.q_dim + 2 * a.n_kv * a.head_dim;
  a.qkv = matrix_of(a.qkv_rows, a.hidden);
  a.o = matrix_of(a.hidden, a.q_dim);
  a.gate_up = matrix_of(2 * ((a.intermediate + 7) / 8 * 8), a.hidden);
  a.down = matrix_of(a.hidden, a.intermediate);
  a.head_matrix = matrix_of(a.vocab, a.hidden);
  if (a.qkv.panels * kPanelBlocks > kHoles) return "hidden is more than the table's holes can take";
  a.first_tiles = a.gate_up.tiles / 2;  // of the half whose act travels while the other half is computed
  // qkv, or a half of gate/up, must have work for all CTAs: what they hand on waits for the sums of o or down, so no CTA
  // falls a layer behind, where the sums it waits for would be written over. o and down themselves do not wait for them.
  int sharing = 0;
  for (a.ctas = multiprocessors;; a.ctas = sharing) {
    a.qkv_unit = choose_unit(a.qkv, a.ctas);
    sharing = std::max({a.qkv.tiles * a.qkv.panels / a.qkv_unit, a.first_tiles, a.gate_up.tiles - a.first_tiles});
    if (sharing >= a.ctas) break;
  }
  if (a.ctas < a.n_kv) return "there are more KV heads than multiprocessors with a share of the layer";
  a.most_chunks = std::min(kMaxChunks, a.ctas / a.n_kv);
  a.per_hidden = 1.0f / static_cast<float>(a.hidden);
  a.most_stages = 0;
  for (int cta = 0; cta < a.ctas; ++cta) a.most_stages = std::max(a.most_stages, fill_shares(a, cta, nullptr));
  static_assert(Scratch<64>::kBytes <= 2 * kBufferBytes && Scratch<128>::kBytes <= 2 * kBufferBytes);
  int end = kTableBytes + 2 * kBufferBytes;
  const auto place = [&](int64_t bytes) {
    const int at = end;
    end += static_cast<int>((bytes + 15) / 16 * 16);
    return at;
  };
  a.residual_at = place(ceil_divide(a.down.tiles, std::min(a.ctas, a.down.tiles)) * kTileRows * 4);
  a.shares_at = place(shares_bytes(a));
  a.writers_at = place(2 * a.qkv.tiles);
  a.turns_at = place(a.head_dim * 4);
  a.layers_at = place(a.n_layers * sizeof(PersistentLayer));
  a.token_at = place(sizeof(Token));
  a.factors_at = place(2 * (kWarps + 1) * 4);  // the two factors; of the choice two words a warp
  a.sums_at = place(2 * 2 * 8);
  end = (end + 127) / 128 * 128;
  a.slots = (shared_limit - end) / kSlotBytes / 2 * 2;  // so that a slot is always the same group's
  a.ring_at = end;
  a.full_at = a.ring_at + a.slots * kStageBytes;
  a.read_at = a.full_at + a.slots * 8;
  *shared_bytes = a.ring_at + a.slots * kSlotBytes;
  return a.slots >= 4 ? nullptr : "shared memory has no room for the ring";
}

int64_t table_bytes(const PersistentArguments& a) {
  return static_cast<int64_t>(a.ctas) * shares_bytes(a) + 2 * a.qkv.tiles;
}

void fill_tables(const PersistentArguments& a, uint8_t* tables) {
  for (int cta = 0; cta < a.ctas; ++cta, tables += shares_bytes(a)) fill_shares(a, cta, tables);
  const int64_t per_tile = a.qkv.panels / a.qkv_unit, units = a.qkv.tiles * per_tile;
  for (int tile = 0; tile < a.qkv.tiles; ++tile, ++tables) {
    const int first = owner_of(tile * per_tile, units, a.ctas);
    tables[0] = static_cast<uint8_t>(owner_of((tile + 1) * per_tile - 1, units, a.ctas) - first + 1);
    tables[a.qkv.tiles] = static_cast<uint8_t>(first);
  }
}

int64_t lay_out_words(PersistentArguments& a, uint32_t* words) {
  int64_t used = 0;
  const auto take = [&](int64_t count) {
    uint32_t* from = words ? words + used : nullptr;
    used += (count + 31) / 32 * 32;
    return from;
  };
  a.launch = take(2);  // beside each other: both are 0 before the first launch
  a.done = a.launch ? a.launch + 1 : nullptr;
  a.fault = take(1);
  a.qkv_sums = take(static_cast<int64_t>(kMaxWriters) * a.qkv_rows);
  a.heads = take(static_cast<int64_t>(kMaxChunks) * a.q_dim);
  a.softmax = take(static_cast<int64_t>(kMaxChunks) * a.n_q * 2);
  a.attended = take(static_cast<int64_t>(a.o.groups) * 32);
  a.act = take(static_cast<int64_t>(a.down.groups) * 32);
  for (int norm = 0; norm < 2; ++norm) {
    a.x[norm] = take(a.hidden / 2);
    a.squares[norm] = take(a.hidden / kTileRows);
  }
  return used;
}

}  // namespace decodev2
