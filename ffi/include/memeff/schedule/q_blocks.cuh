// The visits of a CTA that owns a tile of keys: tiles of rows of the query heads that share its
// head.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// A tile of rows of one query head.
struct QBlock {
  int head;
  int row;
  int tile;
  bool partial = true;  // segment ids or a boolean mask make some element invalid
};

// The tiles of one head's rows that a CTA visits, of `count` that there are.
template <class Config>
CUTE_DEVICE BlockMaskRow<Config::kBlockMask> row_of_q_blocks(BackwardParams const& params,
                                                             WorkItem const& item,
                                                             TileRange const& tiles, int count,
                                                             int head) {
  return {tiles, params.block_mask, item.batch, head, item.tile, count};
}

// What of a range all heads together visit: nothing but tiles between a first and a last one that
// some head does.
template <class Config>
CUTE_DEVICE TileRange q_block_range(BackwardParams const& params, WorkItem const& item,
                                    TileRange const& tiles, int count) {
  if constexpr (!Config::kBlockMask) return tiles;
  TileRange visited = {tiles.end, tiles.begin};
  int const group = params.shape.group;
  for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
    auto const line = row_of_q_blocks<Config>(params, item, tiles, count, head);
    if (line.empty()) continue;
    visited = {min(visited.begin, line.begin), max(visited.end, line.end)};
  }
  return visited;
}

// Every head visits all tiles of a range. A cursor counts visits.
template <int kTileQuery, bool kMapped>
struct QBlocks {
  using Cursor = int;

  ProblemShape const& shape;
  WorkItem const& item;
  TileRange tiles;
  int of_head;
  int count;

  CUTE_DEVICE QBlocks(ProblemShape const& shape, BlockMask const&, WorkItem const& item,
                      TileRange const& tiles)
      : shape(shape),
        item(item),
        tiles(tiles),
        of_head(tiles.end - tiles.begin),
        count(of_head * shape.group) {}

  CUTE_DEVICE Cursor first() const { return 0; }
  CUTE_DEVICE Cursor after(Cursor cursor) const { return cursor + 1; }
  CUTE_DEVICE bool has(Cursor cursor) const { return cursor < count; }
  CUTE_DEVICE int number(Cursor cursor) const { return cursor; }

  CUTE_DEVICE QBlock at(Cursor cursor) const {
    int const head_index = shape.group == 1 ? 0 : cursor / of_head;
    int const tile = tiles.begin + cursor - head_index * of_head;
    return {item.head * shape.group + head_index, tile * kTileQuery, tile};
  }
};

// Each head has a line of the map.
template <int kTileQuery>
struct QBlocks<kTileQuery, true> {
  struct Cursor {
    BlockMaskRow<true> line;  // of the head
    int head;
    int tile;
    int number;
  };

  ProblemShape const& shape;
  BlockMask const& map;
  WorkItem const& item;
  TileRange tiles;

  CUTE_DEVICE QBlocks(ProblemShape const& shape, BlockMask const& map, WorkItem const& item,
                      TileRange const& tiles)
      : shape(shape), map(map), item(item), tiles(tiles) {}

  CUTE_DEVICE Cursor first() const { return first_from(item.head * shape.group, 0); }

  CUTE_DEVICE Cursor after(Cursor cursor) const {
    ++cursor.number;
    cursor.tile = cursor.line.after(cursor.tile);
    if (cursor.tile < cursor.line.end) return cursor;
    return first_from(cursor.head + 1, cursor.number);
  }

  CUTE_DEVICE bool has(Cursor const& cursor) const { return cursor.head < end_head(); }
  CUTE_DEVICE int number(Cursor const& cursor) const { return cursor.number; }

  CUTE_DEVICE QBlock at(Cursor const& cursor) const {
    return {cursor.head, cursor.tile * kTileQuery, cursor.tile, cursor.line.partial(cursor.tile)};
  }

 private:
  CUTE_DEVICE int end_head() const { return (item.head + 1) * shape.group; }

  // The first visit of this head, or of one behind it.
  CUTE_DEVICE Cursor first_from(int head, int number) const {
    int const count = ceil_div(shape.query_length, kTileQuery);
    while (true) {
      BlockMaskRow<true> const line(tiles, map, item.batch, min(head, end_head() - 1), item.tile,
                                    count);
      if (!line.empty() || head == end_head()) return {line, head, line.begin, number};
      ++head;
    }
  }
};

}  // namespace memeff
