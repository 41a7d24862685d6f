// The block mask: whether segment ids and boolean masks make none, some or all elements of a tile
// of scores valid.
//
// XLA computes it before the kernel (jax_memeff/_cuda/block_mask.py), one byte per tile, with two
// bits for the rows of each consumer if consumers test their elements by themselves. A row of
// blocks has the KV blocks of a Q block, or the Q blocks of a KV block. It begins with the range of
// its tiles that have a valid element, so sorted ids need no search.
#pragma once

#include <memeff/mask/interval.cuh>

namespace memeff {

// The tiles of a row in the order of a main loop, which copies tile `ahead` while it computes
// tile(), kAhead tiles before. The first kAhead tiles are copied before start(). kInOrder: the row
// skips none.
template <class Row, bool kInOrder, int kAhead>
struct RowWalk {
  Row const& row;
  int current;
  int ahead;

  CUTE_DEVICE explicit RowWalk(Row const& row) : row(row), current(row.begin), ahead(row.begin) {}

  CUTE_DEVICE void copied_first() { ahead = row.after(ahead); }
  CUTE_DEVICE void start() {}

  CUTE_DEVICE bool more() const { return current < row.end; }
  CUTE_DEVICE int tile() const { return current; }
  CUTE_DEVICE bool partial() const { return row.partial(current); }
  // Whether the tile has no valid element, though it was copied.
  CUTE_DEVICE bool masked() const { return false; }

  CUTE_DEVICE void begin_block() {
    if constexpr (kInOrder) ahead = current + kAhead;  // one register less
  }
  CUTE_DEVICE void copied() { ahead = row.after(ahead); }
  CUTE_DEVICE void advance() { current = row.after(current); }
};

// The tiles of a range that have a valid element. The first and the last tile of the range do,
// unless it is empty.
template <bool kMapped>
struct BlockMaskRow : TileRange {
  template <int kAhead>
  using Walk = RowWalk<BlockMaskRow, true, kAhead>;

  BlockMaskRow() = default;
  CUTE_DEVICE BlockMaskRow(TileRange const& range, BlockMask const&, int, int, int, int)
      : TileRange(range) {}

  CUTE_DEVICE bool empty() const { return begin >= end; }

  // The tiles of this row in a part of its range.
  CUTE_DEVICE BlockMaskRow within(TileRange const& part) const {
    BlockMaskRow row = *this;
    row.begin = part.begin, row.end = part.end;
    return row;
  }

  // The next tile below; less than `begin` below the first.
  CUTE_DEVICE int before(int tile) const { return tile - 1; }
  // The next tile above; `end` above the last.
  CUTE_DEVICE int after(int tile) const { return tile + 1; }

  // Whether segment ids or a boolean mask may make an element of the tile invalid.
  CUTE_DEVICE bool partial(int) const { return true; }
};

template <>
struct BlockMaskRow<true> : TileRange {
  template <int kAhead>
  using Walk = RowWalk<BlockMaskRow, false, kAhead>;

  // As in jax_memeff/_cuda/block_mask.py.
  static constexpr int kRangeBytes = sizeof(TileRange);
  enum Valid : unsigned char { kNone = 0, kAll = 1, kSome = 2 };
  static constexpr int kPartBits = 2;

  unsigned char const* tiles;

  BlockMaskRow() = default;

  // Row of blocks `index` of a batch index and head, with `count` tiles.
  CUTE_DEVICE BlockMaskRow(TileRange const& range, BlockMask const& map, int batch, int head,
                           int index, int count)
      : TileRange(range) {
    long long const line =
        (long long)batch * map.batch_rows + (long long)head * map.head_rows + index;
    unsigned char const* const data =
        static_cast<unsigned char const*>(map.data) + line * line_bytes(count);
    TileRange const mapped = *reinterpret_cast<TileRange const*>(data);
    tiles = data + kRangeBytes;
    begin = max(begin, mapped.begin);
    end = min(end, mapped.end);
    skip_ends();
  }

  // There is one more byte after the last tile, and rows begin at multiples of 8 bytes.
  CUTE_DEVICE static int line_bytes(int count) { return kRangeBytes + (count / 8 + 1) * 8; }

  CUTE_DEVICE bool empty() const { return begin >= end; }

  CUTE_DEVICE BlockMaskRow within(TileRange const& part) const {
    BlockMaskRow row = *this;
    row.begin = part.begin, row.end = part.end;
    row.skip_ends();
    return row;
  }

  CUTE_DEVICE int before(int tile) const {
    while (--tile > begin && tiles[tile] == kNone) continue;
    return tile;
  }
  CUTE_DEVICE int after(int tile) const {
    while (++tile < end - 1 && tiles[tile] == kNone) continue;
    return tile;
  }

  CUTE_DEVICE bool partial(int tile) const { return tiles[tile] != kAll; }

  // Which elements of a part of the tile's rows are valid.
  CUTE_DEVICE Valid valid(int tile, int part) const {
    return Valid(tiles[tile] >> (part * kPartBits) & ((1 << kPartBits) - 1));
  }

 private:
  CUTE_DEVICE void skip_ends() {
    while (begin < end && tiles[begin] == kNone) ++begin;
    while (begin < end && tiles[end - 1] == kNone) --end;
  }
};

}  // namespace memeff
