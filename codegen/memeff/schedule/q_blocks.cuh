// The Q blocks of a CTA that owns a KV block: tiles of query rows of all query heads of its key
// head.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// A tile of query rows of one head.
struct QBlock {
  int head;
  int row;
  int tile;
  bool partial = true;  // elements must be tested against masks that are arrays or functions
};

// The Q blocks of one head that a CTA iterates over, of `count` in total.
template <class Config>
CUTE_DEVICE BlockMaskRow<Config::kBlockMask> row_of_q_blocks(BackwardParams const& params,
                                                             WorkItem const& item,
                                                             TileRange const& tiles, int count,
                                                             int head) {
  int const index = block_mask_row<Config>(tiles, item.tile);
  return {tiles, params.block_mask, item.batch, head, index, count};
}

// The part of a range that some head needs: from the first to the last Q block that not all heads
// skip.
template <class Config>
CUTE_DEVICE TileRange q_block_range(BackwardParams const& params, WorkItem const& item,
                                    TileRange const& tiles, int count) {
  if constexpr (!Config::kBlockMask) return tiles;
  TileRange range = {tiles.end, tiles.begin};
  int const group = params.shape.group;
  for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
    auto const blocks = row_of_q_blocks<Config>(params, item, tiles, count, head);
    if (blocks.empty()) continue;
    range = {min(range.begin, blocks.begin), max(range.end, blocks.end)};
  }
  return range;
}

// Walks over the Q blocks of one head like RowWalk, but the first one has the rows of the CTA's own
// keys, and after the last one comes the first of the range. So CTAs of different KV blocks are at
// different Q blocks. The current one alone says whether there are more: a counter beside it would
// spill in the main loop at head dim 64.
template <class Config>
struct StaggeredQBlocks {
  static constexpr int kEnd = -1;

  TileRange tiles;
  int first;
  int current;

  CUTE_DEVICE StaggeredQBlocks(TileRange const& tiles, WorkItem const& item) : tiles(tiles) {
    int const own = item.tile * Config::kTileKey / Config::kTileQuery;
    int const count = tiles.end - tiles.begin;
    first = tiles.begin + own % max(count, 1);
    current = count > 0 ? first : kEnd;
  }

  CUTE_DEVICE bool more() const { return current != kEnd; }
  CUTE_DEVICE int tile() const { return current; }
  CUTE_DEVICE bool partial() const { return true; }
  CUTE_DEVICE void advance() {
    current = current + 1 == tiles.end ? tiles.begin : current + 1;
    if (current == first) current = kEnd;
  }
};

// The Q blocks of one head in the order of a main loop.
template <class Config>
CUTE_DEVICE auto walk_of_q_blocks(BackwardParams const& params, WorkItem const& item,
                                  TileRange const& tiles, int head) {
  if constexpr (Config::kStaggersQBlocks) {
    static_assert(!Config::kBlockMask);
    return StaggeredQBlocks<Config>(tiles, item);
  } else {
    using Walk = typename BlockMaskRow<Config::kBlockMask>::template Walk<0>;
    return Walk(row_of_q_blocks<Config>(params, item, tiles, params.query_tiles, head));
  }
}

// Calls use(query_head, tile, position) for each Q block of a CTA. `position` is the index of the Q
// block among all Q blocks of the key head. If additions to dq have an order, it is that of
// positions in every CTA.
template <class Config, class Use>
CUTE_DEVICE void for_each_q_block(BackwardParams const& params, WorkItem const& item,
                                  TileRange const& tiles, Use const& use) {
  CUTE_NO_UNROLL
  for (int head = 0; head < params.shape.group; ++head) {
    int const query_head = item.head * params.shape.group + head;
    CUTE_NO_UNROLL
    for (auto walk = walk_of_q_blocks<Config>(params, item, tiles, query_head); walk.more();
         walk.advance()) {
      use(query_head, walk.tile(), head * params.query_tiles + walk.tile());
    }
  }
}

// Iterates over the Q blocks of a CTA. Without a block mask every head has all Q blocks of a range,
// and a cursor is a counter.
//
// The heads of a group take turns at each Q block, the last one first. Causal ranges end at the
// same Q block, so the CTAs of a key head start there together and do not drift apart over the
// heads, whose queries, dO and dq sums would not fit L2 together. If the additions to dq have an
// order (schedule/dq_semaphore.cuh), a CTA processes head by head from the first Q block on: others
// begin there later, and nobody waits.
template <class Config, bool kBlockMask = Config::kBlockMask>
struct QBlocks {
  using Cursor = int;
  static constexpr int kTileQuery = Config::kTileQuery;

  ProblemShape const& shape;
  WorkItem const& item;
  TileRange tiles;
  int head_blocks;
  int count;

  CUTE_DEVICE QBlocks(ProblemShape const& shape, BlockMask const&, WorkItem const& item,
                      TileRange const& tiles)
      : shape(shape),
        item(item),
        tiles(tiles),
        head_blocks(tiles.end - tiles.begin),
        count(head_blocks * shape.group) {}

  CUTE_DEVICE Cursor first() const { return 0; }
  CUTE_DEVICE Cursor after(Cursor cursor) const { return cursor + 1; }
  CUTE_DEVICE bool has(Cursor cursor) const { return cursor < count; }
  CUTE_DEVICE int number(Cursor cursor) const { return cursor; }

  CUTE_DEVICE QBlock at(Cursor cursor) const {
    if constexpr (Config::kDeterministicDq) {
      int const head_index = shape.group == 1 ? 0 : cursor / head_blocks;
      return block(head_index, tiles.begin + cursor - head_index * head_blocks);
    } else {
      int const step = unsigned(cursor) / unsigned(shape.group);
      return block(cursor - step * shape.group, tiles.end - 1 - step);
    }
  }

 private:
  CUTE_DEVICE QBlock block(int head_index, int tile) const {
    return {item.head * shape.group + head_index, tile * kTileQuery, tile};
  }
};

// With a block mask each head has a row of it, and a cursor is a position in that row.
template <class Config>
struct QBlocks<Config, true> {
  static constexpr int kTileQuery = Config::kTileQuery;

  // A Q block of one head, and how many came before it.
  struct Cursor {
    BlockMaskRow<true> blocks;  // of the head
    int head;
    int tile;
    int number;
  };

  ProblemShape const& shape;
  BlockMask const& block_mask;
  WorkItem const& item;
  TileRange tiles;

  CUTE_DEVICE QBlocks(ProblemShape const& shape, BlockMask const& block_mask, WorkItem const& item,
                      TileRange const& tiles)
      : shape(shape), block_mask(block_mask), item(item), tiles(tiles) {}

  CUTE_DEVICE Cursor first() const { return first_from(item.head * shape.group, 0); }

  CUTE_DEVICE Cursor after(Cursor cursor) const {
    ++cursor.number;
    cursor.tile = cursor.blocks.after(cursor.tile);
    if (cursor.tile < cursor.blocks.end) return cursor;
    return first_from(cursor.head + 1, cursor.number);
  }

  CUTE_DEVICE bool has(Cursor const& cursor) const { return cursor.head < end_head(); }
  CUTE_DEVICE int number(Cursor const& cursor) const { return cursor.number; }

  CUTE_DEVICE QBlock at(Cursor const& cursor) const {
    return {cursor.head, cursor.tile * kTileQuery, cursor.tile, cursor.blocks.partial(cursor.tile)};
  }

 private:
  CUTE_DEVICE int end_head() const { return (item.head + 1) * shape.group; }

  // The first Q block of this head, or of the next head that has one.
  CUTE_DEVICE Cursor first_from(int head, int number) const {
    int const count = ceil_div(shape.query_length, kTileQuery);
    while (true) {
      BlockMaskRow<true> const blocks(tiles, block_mask, item.batch, min(head, end_head() - 1),
                                      item.tile, count);
      if (!blocks.empty() || head == end_head()) return {blocks, head, blocks.begin, number};
      ++head;
    }
  }
};

}  // namespace memeff
