// The work of a CTA of kernels/fmha_bwd_sm90.cuh.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/schedule/q_blocks.cuh>

namespace memeff {

// The work on a KV block: the Q blocks that attend to its keys, for every head of the group.
template <class Config, class Kernel>
struct KvBlockWorkSm90 {
  using Mask = typename Kernel::Mask;
  using Splits = typename Kernel::Splits;
  static constexpr int kTileQuery = Kernel::kTileQuery;
  static constexpr int kTileKey = Kernel::kTileKey;

  WorkItem item;
  int column;
  TileRange tiles;

  CUTE_DEVICE KvBlockWorkSm90(BackwardParams const& params, WorkItem const& item)
      : item(item), column(item.tile * kTileKey) {
    ProblemShape const& shape = params.shape;
    tiles = Mask(params.mask, shape, item.batch).query_tiles(column, kTileKey, kTileQuery);
    tiles = q_block_range<Config>(params, item, tiles, params.query_tiles);
    static_assert(!Config::kSplitQ || !Config::kBlockMask);  // a split may have no Q block
    tiles = Splits::query_tiles(params, tiles);
  }

  CUTE_DEVICE BlockMaskRow<Config::kBlockMask> row_of_blocks(BackwardParams const& params,
                                                             int head) const {
    return row_of_q_blocks<Config>(params, item, tiles, params.query_tiles, head);
  }

  CUTE_DEVICE auto walk(BackwardParams const& params, int head) const {
    return walk_of_q_blocks<Config>(params, item, tiles, head);
  }

  CUTE_DEVICE ScoreTilePosition position(int head, int tile) const {
    return {item.batch, head, tile * kTileQuery, column};
  }

  // The first head from `head` on that has a Q block, or the end of the group.
  CUTE_DEVICE int head_with_blocks(BackwardParams const& params, int head) const {
    if constexpr (Config::kBlockMask) {
      while (head < (item.head + 1) * params.shape.group && row_of_blocks(params, head).empty()) {
        ++head;
      }
    }
    return head;
  }
};

}  // namespace memeff
