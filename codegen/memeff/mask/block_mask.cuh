// The block mask: whether segment ids, boolean masks and mask functions leave none, some or all
// elements of a tile of scores valid.
//
// XLA computes it before the kernel (jax_memeff/_cuda/block_mask.py), one byte per tile. The byte
// has two bits for the rows of each consumer if consumers test their elements separately. A row of
// blocks holds the KV blocks of a Q block, or the Q blocks of a KV block. It begins with the range
// of tiles that have a valid element, so sorted ids need no search.
#pragma once

#include <memeff/mask/interval.cuh>

namespace memeff {

// The tiles of a row in the order of a main loop, which copies tile `ahead` while it computes
// tile(), kAhead tiles behind. The first kAhead tiles are copied before start(). kInOrder: the row
// skips none.
template <class Row, bool kInOrder, int kAhead>
struct RowWalk {
  Row row;
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
    if constexpr (kInOrder) ahead = current + kAhead;  // saves a register
  }
  CUTE_DEVICE void copied() { ahead = row.after(ahead); }
  CUTE_DEVICE void advance() { current = row.after(current); }
};

// The row of the block mask that belongs to a tile with this range. Hazard: grids of packed
// sequences have tiles beyond the last row. Their range is empty, and they read row 0.
template <class Config>
CUTE_DEVICE int block_mask_row(TileRange const& range, int tile) {
  return !Config::kTokenGrid || range.begin < range.end ? tile : 0;
}

// Iterates over the tiles of a row of blocks that have a valid element. Main loops call after() or
// before() to advance and partial() to decide whether to test elements. Unless the range is empty,
// its first and last tile have a valid element. Without a block mask every tile of the range is
// visited.
template <bool kMapped>
struct BlockMaskRow : TileRange {
  template <int kAhead>
  using Walk = RowWalk<BlockMaskRow, true, kAhead>;

  BlockMaskRow() = default;
  CUTE_DEVICE BlockMaskRow(TileRange const& range, BlockMask const&, int, int, int, int)
      : TileRange(range) {}

  CUTE_DEVICE bool empty() const { return begin >= end; }

  // This row, restricted to a part of its range.
  CUTE_DEVICE BlockMaskRow within(TileRange const& part) const {
    BlockMaskRow row = *this;
    row.begin = part.begin, row.end = part.end;
    return row;
  }

  // The next tile below; below the first one a value less than `begin`.
  CUTE_DEVICE int before(int tile) const { return tile - 1; }
  // The next tile above; above the last one `end`.
  CUTE_DEVICE int after(int tile) const { return tile + 1; }

  // Whether the tile's elements must be tested against segment ids, boolean masks and mask
  // functions.
  CUTE_DEVICE bool partial(int) const { return true; }
};

template <>
struct BlockMaskRow<true> : TileRange {
  template <int kAhead>
  using Walk = RowWalk<BlockMaskRow, false, kAhead>;

  // Must match jax_memeff/_cuda/block_mask.py, which writes the bytes.
  static constexpr int kRangeBytes = sizeof(TileRange);
  enum Valid : unsigned char { kNone = 0, kAll = 1, kSome = 2 };
  static constexpr int kPartBits = 2;

  unsigned char const* tiles;

  BlockMaskRow() = default;

  // The row `index` of the block mask of a batch index and head, which has `count` tiles.
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

  // Rows begin at multiples of 8 bytes, for the aligned load of the range. One byte of padding
  // after the last tile keeps reads past the end inside the row.
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

  // Whether none, some or all elements are valid in part `part` of the tile's rows, those of one
  // consumer.
  CUTE_DEVICE Valid valid(int tile, int part) const {
    return Valid(tiles[tile] >> (part * kPartBits) & ((1 << kPartBits) - 1));
  }

 private:
  // Restores the invariant that the first and the last tile of the range have a valid element.
  CUTE_DEVICE void skip_ends() {
    while (begin < end && tiles[begin] == kNone) ++begin;
    while (begin < end && tiles[end - 1] == kNone) --end;
  }
};

}  // namespace memeff
