// The host's side of persistent.cu: does a shape fit, who does what, and where everything lies in shared memory.
#pragma once
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "persistent.cuh"
#include "persistent_attn.cuh"

namespace decodev2 {
namespace {

PersistentMatrix matrix_of(int rows, int cols) {
  PersistentMatrix m;
  m.tiles = (rows + kTileRows - 1) / kTileRows;
  m.groups = (cols + kGroup - 1) / kGroup;
  m.panels = (m.groups + kPanelBlocks - 1) / kPanelBlocks;
  m.per_panels = 1.0f / static_cast<float>(m.panels);
  m.next_panel = kWarps % m.panels;
  m.slots = kWarps % m.panels ? kWarps : std::max(m.panels, kWarps / 2);
  m.next_sums = kWarps / m.panels * m.slots * kTileRows * 4;
  m.tile_bytes = m.groups * kBlockBytes;
  m.narrower = (m.panels * kPanelBlocks - m.groups) * kBlockBytes;
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

// An equal share of all tiles, in units of panels.
List share_of(const PersistentMatrix& m, int unit, int cta, int ctas) {
  const int64_t units = static_cast<int64_t>(m.tiles) * m.panels / unit;
  const int begin = share(units, cta, ctas) * unit, end = share(units, cta + 1, ctas) * unit;
  return {begin / m.panels, begin % m.panels, end - begin};
}

// The same of down, whose tiles come in two parts where a CTA has several and there are sums for all parts at once. A
// stage has pieces of two parts at most, so they are not narrow.
List share_of_down(const PersistentArguments& a, int cta) {
  List list = share_of(a.down, a.down.panels, cta, a.ctas);
  const int tiles = list.count / a.down.panels, early = a.down.panels - a.late_panels;
  if (tiles > 1 && 2 * tiles <= a.down.batch && std::min(early, a.late_panels) >= kStagePanels - 1)
    list.early = tiles * early, list.tiles = tiles;
  return list;
}

// Tiles of the second part of gate/up for each CTA: most for those that have least of the first part and of down. The
// others have the first part of down to do meanwhile; who has none of it must not be later than they are with that.
std::vector<int> second_tiles(const PersistentArguments& a) {
  const int most = ceil_divide(a.down.tiles, std::min(a.ctas, a.down.tiles));
  std::vector<int> tiles(a.ctas), load(a.ctas);
  for (int c = 0; c < a.ctas; ++c)
    load[c] = (share(a.first_tiles, c + 1, a.ctas) - share(a.first_tiles, c, a.ctas)) * a.gate_up.panels +
              std::max((share(a.down.tiles, c + 1, a.ctas) - share(a.down.tiles, c, a.ctas)) * a.down.panels,
                       most * a.late_panels + 2 * kWarps);
  for (int i = a.first_tiles; i < a.gate_up.tiles; ++i) {
    const size_t least = std::min_element(load.begin(), load.end()) - load.begin();
    ++tiles[least];
    load[least] += a.gate_up.panels;
  }
  return tiles;
}

int most_writers(const PersistentMatrix& m, int unit, int ctas) {
  const int64_t per_tile = m.panels / unit, units = m.tiles * per_tile;
  int most = 0;
  for (int64_t tile = 0; tile < m.tiles; ++tile)
    most = std::max(most, owner_of((tile + 1) * per_tile - 1, units, ctas) - owner_of(tile * per_tile, units, ctas) + 1);
  return most;
}

// Panels of the warp that has most.
int rounds(const PersistentMatrix& m, int unit, int ctas) { return ceil_divide(most_panels(m, unit, ctas), kWarps); }

// Whole tiles have one writer, so less is read; a finer division is worth it where the CTA that has most then takes fewer
// rounds of its warps.
int choose_unit(const PersistentMatrix& m, int ctas) {
  return rounds(m, m.panels, ctas) <= rounds(m, 1, ctas) || most_writers(m, 1, ctas) > kMaxWriters ? m.panels : 1;
}

// CTAs that share qkv. Three quarters will do where each of their warps then has one panel at most: the last ones attend,
// and are there when q is.
int choose_qkv_ctas(const PersistentArguments& a) {
  int ctas = a.ctas;
  if (a.first_tiles < ctas) return ctas;  // all must have a part of it, see plan_persistent
  while (4 * (ctas - 1) >= 3 * a.ctas && rounds(a.qkv, a.qkv_unit, ctas - 1) == 1) --ctas;
  return ctas;
}

// The stages of a list, batch by batch, to `out` if there is one; how many.
int fill_stages(const PersistentArguments& a, const PersistentMatrix& m, const List& list, int matrix, Stage* out) {
  int stages = 0;
  for (int tiles = 0, panels = 0; panels < list.count; tiles += m.batch) {
    const Batch batch = batch_of(m, list, tiles, panels);
    for (int done = 0; done < batch.count; done += kStagePanels, ++stages) {
      Stage stage = {};
      stage.matrix = matrix;
      int64_t next = 0;  // in bytes, where the panel before ended
      for (int i = done; i < std::min(done + kStagePanels, batch.count); ++i) {
        const Spot spot = list.early ? spot_in_parts(a, list, i) : spot_of(m, batch, i);
        const int tile = batch.tile + spot.tile - (i >= list.early ? list.tiles : 0);
        const int64_t from = static_cast<int64_t>(tile) * m.tile_bytes + spot.panel * kPanelBytes;
        if (i == done) stage.offset = static_cast<uint32_t>(from / 16);
        if (i > done && from != next) {
          stage.first = stage.size;
          stage.offset_2 = static_cast<uint32_t>(from / 16);
        }
        const int bytes = kPanelBytes - (spot.panel == m.panels - 1 ? m.narrower : 0);
        stage.size += bytes / 16;
        next = from + bytes;
      }
      if (!stage.offset_2) stage.first = stage.size;
      if (out) out[stages] = stage;
    }
    panels += batch.count;
  }
  return stages;
}

// Shares and stages of a CTA to `out` if there is room; how many stages. `second` is what second_tiles says.
int fill_shares(const PersistentArguments& a, const std::vector<int>& second, int cta, uint8_t* out) {
  Shares shares = {};
  shares.lists[kQkv] = share_of(a.qkv, a.qkv_unit, cta, a.qkv_ctas);
  shares.lists[kO] = share_of(a.o, a.o.panels, cta, a.ctas);
  const int begin = share(a.first_tiles, cta, a.ctas), end = share(a.first_tiles, cta + 1, a.ctas);
  const int before = a.first_tiles + std::accumulate(second.begin(), second.begin() + cta, 0);
  const int width = a.gate_up.panels;
  shares.lists[kFirstAct] = {begin, 0, (end - begin) * width};
  shares.lists[kSecondAct] = {before, 0, second[cta] * width};
  shares.lists[kDown] = share_of_down(a, cta);
  shares.lists[kHead] = share_of(a.head_matrix, a.head_matrix.panels, cta, a.ctas);
  const PersistentMatrix* const matrices[] = {&a.qkv, &a.o, &a.gate_up, &a.down, &a.head_matrix};
  constexpr int kMatrix[kLists] = {0, 1, 2, 2, 3, 4};
  Stage* stages = out ? reinterpret_cast<Stage*>(out + sizeof(Shares)) : nullptr;
  for (int which = 0; which < kLists; ++which) {
    if (which == kHead) shares.layer_stages = shares.stages;
    shares.lists[which].first_stage = shares.stages;
    shares.stages += fill_stages(a, *matrices[kMatrix[which]], shares.lists[which], kMatrix[which],
                                 stages ? stages + shares.stages : nullptr);
  }
  if (out) std::memcpy(out, &shares, sizeof shares);
  return shares.stages;
}

// Shared memory, with room for `sums` sums of a warp for a tile in each buffer; how many bytes.
int lay_out(PersistentArguments& a, int sums, int shared_limit) {
  for (PersistentMatrix* m : {&a.qkv, &a.o, &a.gate_up, &a.down, &a.head_matrix}) m->batch = sums / m->slots;
  const std::vector<int> second = second_tiles(a);
  a.most_stages = 0;
  for (int cta = 0; cta < a.ctas; ++cta) a.most_stages = std::max(a.most_stages, fill_shares(a, second, cta, nullptr));
  constexpr int kFewest = 2 * kFewestSums * kTileRows * 4;
  static_assert(Scratch<64>::kBytes <= kFewest && Scratch<128>::kBytes <= kFewest);
  a.buffer_bytes = sums * kTileRows * 4;
  int end = kTableBytes + 2 * a.buffer_bytes;
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
  return a.ring_at + a.slots * kSlotBytes;
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
  // What a CTA has still to do when the last act arrives: a panel of a tile of down for each of its warps. The acts of the
  // first part of gate/up are those of the other panels.
  a.late_panels = std::min(kWarps, (a.down.panels + 1) / 2);
  a.per_late = 1.0f / static_cast<float>(a.late_panels);
  a.per_early = 1.0f / static_cast<float>(std::max(a.down.panels - a.late_panels, 1));
  a.first_tiles = (a.down.panels - a.late_panels) * (kPanelBlocks * kGroup / 8);
  // qkv, or the first part of gate/up, must have work for all CTAs: what they hand on waits for the sums of o or down, so
  // no CTA falls a layer behind, where the sums it waits for would be written over. o and down themselves do not wait for
  // them.
  int sharing = 0;
  for (a.ctas = multiprocessors;; a.ctas = sharing) {
    a.qkv_unit = choose_unit(a.qkv, a.ctas);
    sharing = std::max(a.qkv.tiles * a.qkv.panels / a.qkv_unit, a.first_tiles);
    if (sharing >= a.ctas) break;
  }
  if (a.ctas < a.n_kv) return "there are more KV heads than multiprocessors with a share of the layer";
  a.most_chunks = std::min(kMaxChunks, a.ctas / a.n_kv);
  a.qkv_ctas = choose_qkv_ctas(a);
  a.per_hidden = 1.0f / static_cast<float>(a.hidden);
  *shared_bytes = lay_out(a, kFewestSums, shared_limit);
  if (a.slots < 4) return "shared memory has no room for the ring";
  // What the ring leaves goes to the sums: the more tiles a batch has, the fewer batches there are.
  const int more = kFewestSums + (shared_limit - *shared_bytes) / (2 * kTileRows * 4), slots = a.slots;
  *shared_bytes = lay_out(a, more, shared_limit);
  if (a.slots < slots) *shared_bytes = lay_out(a, kFewestSums, shared_limit);
  return nullptr;
}

int64_t table_bytes(const PersistentArguments& a) {
  return static_cast<int64_t>(a.ctas) * shares_bytes(a) + 2 * a.qkv.tiles;
}

void fill_tables(const PersistentArguments& a, uint8_t* tables) {
  const std::vector<int> second = second_tiles(a);
  for (int cta = 0; cta < a.ctas; ++cta, tables += shares_bytes(a)) fill_shares(a, second, cta, tables);
  const int64_t per_tile = a.qkv.panels / a.qkv_unit, units = a.qkv.tiles * per_tile;
  for (int tile = 0; tile < a.qkv.tiles; ++tile, ++tables) {
    const int first = owner_of(tile * per_tile, units, a.qkv_ctas);
    tables[0] = static_cast<uint8_t>(owner_of((tile + 1) * per_tile - 1, units, a.qkv_ctas) - first + 1);
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
  a.heads = take(static_cast<int64_t>(kMaxChunks) * a.q_dim * 2);
  a.attended = take(static_cast<int64_t>(a.o.groups) * 32);
  a.act = take(static_cast<int64_t>(a.down.groups) * 32);
  for (int norm = 0; norm < 2; ++norm) {
    a.x[norm] = take(a.hidden / 2);
    a.squares[norm] = take(a.hidden / kTileRows);
  }
  return used;
}

}  // namespace decodev2
