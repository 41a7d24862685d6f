// Split-KV: the part of the keys that a CTA processes.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/mask/interval.cuh>

namespace memeff {

// The work of a CTA of the split forward. Heads are innermost: CTAs that run together read
// neighbouring heads of the same keys, which are contiguous in memory.
struct SplitWorkItem {
  int head;  // of the tile: see GqaRows
  int tile;
  int split;
  int batch;

  CUTE_DEVICE static SplitWorkItem of_block(unsigned block, int heads, int tiles, int splits) {
    SplitWorkItem item;
    item.head = int(block % unsigned(heads));
    block /= unsigned(heads);
    item.tile = int(block % unsigned(tiles));
    block /= unsigned(tiles);
    item.split = int(block % unsigned(splits));
    item.batch = int(block / unsigned(splits));
    return item;
  }
};

// The KV blocks of a split among `tiles`, those that its rows attend to. Splits differ by at most
// one block.
CUTE_DEVICE TileRange share_of_split(TileRange const& tiles, int split, int splits) {
  long long const count = tiles.end - tiles.begin;
  return {tiles.begin + int(count * split / splits),
          tiles.begin + int(count * (split + 1) / splits)};
}

// The segments of a split, counted from key 0, so that they do not depend on the mask.
template <int kSegmentKeys>
CUTE_DEVICE TileRange segments_of_split(int key_length, int split, int splits) {
  return share_of_split({0, ceil_div(key_length, kSegmentKeys)}, split, splits);
}

// share_of_split, but with segments (kSegmentKeys > 0) the blocks of a whole number of these.
template <int kTileKey, int kSegmentKeys>
CUTE_DEVICE TileRange blocks_of_split(TileRange const& tiles, int key_length, int split,
                                      int splits) {
  if constexpr (kSegmentKeys == 0) {
    return share_of_split(tiles, split, splits);
  } else {
    constexpr int kBlocks = kSegmentKeys / kTileKey;
    TileRange const own = segments_of_split<kSegmentKeys>(key_length, split, splits);
    return {max(tiles.begin, own.begin * kBlocks), min(tiles.end, own.end * kBlocks)};
  }
}

// The KV blocks of a consumer group, if the groups take the segments of a split in turn. See
// BlockMaskRow.
template <int kSegmentBlocks, int kGroups>
struct SegmentsOfGroup : TileRange {
  template <int kAhead>
  using Walk = RowWalk<SegmentsOfGroup, false, kAhead>;

  CUTE_DEVICE SegmentsOfGroup(TileRange const& of_split, int group) : TileRange(of_split) {
    if (group > 0) begin = (begin / kSegmentBlocks + group) * kSegmentBlocks;
  }

  CUTE_DEVICE int after(int tile) const {
    int const next = tile + 1;
    return next % kSegmentBlocks == 0 ? next + (kGroups - 1) * kSegmentBlocks : next;
  }
  CUTE_DEVICE bool partial(int) const { return true; }
};

}  // namespace memeff
