// The KV blocks of a work tile of the Hopper forward, from the last to the first.
#pragma once

#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/mask/block_mask.cuh>

namespace memeff {

// The producer threads and each consumer iterate over an object of their own. With consumer groups,
// kConsumerGroups consumers have the same rows and take alternate blocks. Otherwise each consumer
// has 64 rows of its own, and with kPassesOver it skips blocks at the end that only the rows of
// others attend to. A block mask has bits for the rows of each consumer.
template <class Config, class Mask, int kGroups_ = Config::kConsumerGroups>
struct KvBlocks : cute::conditional_t<Config::kBlockMask, BlockMaskRow<true>, TileRange> {
  using Tiles = cute::conditional_t<Config::kBlockMask, BlockMaskRow<true>, TileRange>;
  static constexpr int kConsumerGroups = kGroups_;
  static constexpr bool kPassesOver =
      (Config::kMask != MaskKind::none || Config::kBlockMask) && kConsumerGroups == 1;
  static_assert(!Config::kBlockMask || kConsumerGroups == 1);

  CUTE_DEVICE KvBlocks(ForwardParams const& params, Mask const& mask, WorkItem const& item)
      : Tiles(tiles_of(params, mask, item)) {}

  CUTE_DEVICE KvBlocks(ForwardParams const& params, Mask const& mask, WorkItem const& item,
                       int group)
      : KvBlocks(params, mask, item) {
    if constexpr (kConsumerGroups > 1) {
      this->begin += kConsumerGroups - 1 - group;
      this->end -= group;
    }
  }

  // The first block of a consumer. Hazard: it must skip fewer blocks than the ring has stages, or
  // the consumers deadlock. While it waits for the next keys, it has not released values of the
  // previous work tile, and other consumers may need that buffer to go on.
  CUTE_DEVICE int first(Mask const& mask, WorkItem const& item, int warpgroup) const {
    if constexpr (!kPassesOver) return this->end - 1;
    int const row = item.tile * Config::kTileQuery + warpgroup * kWarpgroupRows;
    int const attended = mask.key_tiles(row, kWarpgroupRows, Config::kTileKey).end;
    if constexpr (Config::kBlockMask) {
      int tile = this->end - 1;
      for (int passed = 1; passed < Config::kStages && tile > this->begin; ++passed) {
        if (tile < attended && !is_empty(tile, warpgroup)) break;
        tile = this->before(tile);
      }
      return tile;
    }
    return max(min(attended, this->end) - 1, max(this->begin, this->end - Config::kStages));
  }

  // The number of blocks of the work tile from this one upwards.
  CUTE_DEVICE int passed(int tile) const {
    if constexpr (!Config::kBlockMask) return this->end - tile;
    int count = 0;
    for (int other = this->end - 1; other >= tile; other = next(other)) ++count;
    return count;
  }

  // The block after this one, or after a position above the first.
  CUTE_DEVICE int next(int tile, int groups = kConsumerGroups) const {
    if constexpr (Config::kBlockMask) return this->before(tile);
    return tile - groups;
  }

  // Whether masks that are arrays or functions must be tested for the rows of a consumer.
  CUTE_DEVICE bool is_partial(int tile, int warpgroup) const {
    if constexpr (Config::kBlockMask) return this->valid(tile, warpgroup) == Tiles::kSome;
    return true;
  }
  // Whether these masks leave no valid element in the rows of a consumer.
  CUTE_DEVICE bool is_empty(int tile, int warpgroup) const {
    if constexpr (Config::kBlockMask) return this->valid(tile, warpgroup) == Tiles::kNone;
    return false;
  }

 private:
  // The blocks of a work tile. If its rows attend to nothing, it has one block whose scores are all
  // masked. Consumer groups must have equally many blocks and are padded with such blocks.
  CUTE_DEVICE static Tiles tiles_of(ForwardParams const& params, Mask const& mask,
                                    WorkItem const& item) {
    TileRange const range =
        mask.key_tiles(item.tile * Config::kTileQuery, Config::kTileQuery, Config::kTileKey);
    if constexpr (kConsumerGroups > 1) {
      int const count =
          max(ceil_div(range.end - range.begin, kConsumerGroups), 1) * kConsumerGroups;
      return {range.begin, range.begin + count};
    }
    if constexpr (Config::kBlockMask) {
      int const tiles = ceil_div(params.shape.key_length, Config::kTileKey);
      int const index = block_mask_row<Config>(range, item.tile);
      Tiles line(range, params.block_mask, item.batch, item.head, index, tiles);
      // The block after the last is beyond the keys, so that nothing is loaded.
      if (line.empty()) line.begin = tiles, line.end = tiles + 1;
      return line;
    } else {
      return range.begin < range.end ? range : TileRange{0, 1};
    }
  }
};

}  // namespace memeff
