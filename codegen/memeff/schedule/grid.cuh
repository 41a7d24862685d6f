// Maps a CTA to its work tile. The grid is one-dimensional, because its y and z dimensions end at
// 65535 and batch sizes may exceed that.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/layout/query_tiles.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// The operand whose rows a tile has.
enum class GridRows { queries, keys };

// The tiles of a grid: kTile rows of each query head, or of each key head. A slice of them is a
// head of a batch index. With Config::kTokenGrid it is a head of all packed sequences, and has the
// tiles that tokens fill: if lengths differ, most tiles of the longest length would be idle.
template <class Config, GridRows kRows, int kTile>
struct GridTiles {
  using Sequences = SequenceTiles<kTile>;
  static constexpr bool kKeys = kRows == GridRows::keys;

  ProblemShape const& shape;

  CUTE_DEVICE Sequences sequences() const {
    return kKeys ? Sequences::of_keys(shape) : Sequences::of_queries(shape);
  }
  CUTE_DEVICE int heads() const { return kKeys ? shape.key_heads : shape.query_heads; }
  CUTE_DEVICE int slices() const { return heads() * (Config::kTokenGrid ? 1 : shape.batch); }

  // The number of tiles of a slice, and of a head of one batch index.
  CUTE_DEVICE int of_slice() const {
    if constexpr (Config::kTokenGrid) return sequences().count();
    return ceil_div(kKeys ? shape.key_length : shape.query_length, kTile);
  }
  CUTE_DEVICE int of_batch_index(int batch) const {
    if constexpr (!Config::kTokenGrid) return of_slice();
    return sequences().end_cta(batch) - sequences().first_cta(batch);
  }

  // The slice of a tile, and its place in the slice.
  CUTE_DEVICE int slice(WorkItem const& item) const {
    return Config::kTokenGrid ? item.head : item.batch * heads() + item.head;
  }
  CUTE_DEVICE int tile_of_slice(WorkItem const& item) const {
    if constexpr (!Config::kTokenGrid) return item.tile;
    return sequences().first_cta(item.batch) + item.tile;
  }

  // A tile of a slice, for whole warps.
  CUTE_DEVICE WorkItem item(unsigned tile, unsigned slice) const {
    if constexpr (Config::kTokenGrid) {
      return item_of_sequence(tile, slice, sequences().sequence_of_cta(tile));
    }
    return {int(tile), int(slice % unsigned(heads())), int(slice / unsigned(heads()))};
  }
  // The same for a thread alone.
  CUTE_DEVICE WorkItem item_alone(unsigned tile, unsigned slice) const {
    if constexpr (Config::kTokenGrid) {
      return item_of_sequence(tile, slice, sequences().sequence_of_cta_alone(tile));
    }
    return item(tile, slice);
  }

  // The tile as far from the last one of its batch index as this one is from the first. Under a
  // causal mask the last rows have the most keys, and start first.
  CUTE_DEVICE WorkItem from_the_last(WorkItem const& item) const {
    return {of_batch_index(item.batch) - 1 - item.tile, item.head, item.batch};
  }

  // The tile of a block, for whole warps. Tiles are innermost, so CTAs that run together read the
  // same keys and values from L2.
  CUTE_DEVICE WorkItem of_block(unsigned block) const {
    unsigned const tiles = of_slice();
    return item(block % tiles, block / tiles);
  }

 private:
  CUTE_DEVICE WorkItem item_of_sequence(unsigned tile, unsigned head, int sequence) const {
    return {int(tile) - sequences().first_cta(sequence), int(head), sequence};
  }
};

// The heaviest tile of a head under a causal mask: the first KV block, to which the most queries
// attend, or the last Q block.
enum class Heaviest { first, last };

// The work tile of a CTA under a causal mask; tile 0 has the most work. The last CTAs, some three
// for each SM, take the heaviest tiles of all their slices first, because a heavy tile that starts
// late would end long after the others. The CTAs before them stay with one slice, for L2 locality.
//
// With grouped heads a CTA that owns keys processes every query head of the group, and the CTAs of
// one slice drift apart. All CTAs then go by sections of slices whose `slice_bytes` fit L2.
template <class Tiles>
CUTE_DEVICE WorkItem causal_item(Tiles const& grid, unsigned block, int group,
                                 long long slice_bytes) {
  constexpr int kLastBlocks = 400;
  constexpr long long kSectionBytes = 32 << 20;
  int const tiles = grid.of_slice();
  int const all = grid.slices();
  int const last = min(ceil_div(kLastBlocks * group, tiles), all);
  int const rank = int(block) - (all - last) * tiles;
  if (rank < 0) return grid.of_block(block);
  int const fitting = group == 1 ? last : max(int(kSectionBytes / slice_bytes), 1);
  int const section = ceil_div(last, ceil_div(last, fitting));
  int const first = rank / tiles / section * section;
  int const here = min(section, last - first);
  int const place = rank - first * tiles;
  return grid.item(place / here, all - last + first + place % here);
}

// Whether batch indices share a broadcast bias. They then take the same tile one after the other,
// so that it is read from memory once.
template <class Config>
CUTE_DEVICE bool shares_bias(ScoreView const& bias) {
  return has_bias_tile<Config>() && !Config::kTokenGrid && bias.batch_stride == 0;
}

// The work tile of a CTA, for whole warps.
template <class Config, Heaviest kHeaviest, int kTile>
CUTE_DEVICE WorkItem work_item(ProblemShape const& shape, ScoreView const& bias, unsigned block) {
  constexpr bool kCausal = Config::kMask == MaskKind::causal;
  constexpr bool kOwnsKeys = kHeaviest == Heaviest::first;
  GridTiles<Config, kOwnsKeys ? GridRows::keys : GridRows::queries, kTile> const grid = {shape};
  WorkItem item;
  if (shares_bias<Config>(bias)) {
    item = WorkItem::of_block_by_batch(block, grid.of_slice(), shape.batch);
  } else if constexpr (kCausal) {
    // The bytes of a row of queries, dO and the dq sums.
    int const row_bytes =
        (shape.head_dim + shape.value_dim) * int(sizeof(typename Config::Element)) +
        shape.head_dim * int(sizeof(float));
    int const rows = Config::kTokenGrid ? shape.query_tokens : shape.query_length;
    item =
        causal_item(grid, block, kOwnsKeys ? shape.group : 1, (long long)max(rows, 1) * row_bytes);
  } else {
    item = grid.of_block(block);
  }
  if (kCausal && !kOwnsKeys) item = grid.from_the_last(item);
  return item;
}

}  // namespace memeff
