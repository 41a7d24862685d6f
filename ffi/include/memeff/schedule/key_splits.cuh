// Split-KV: the part of the keys that a CTA processes.
#pragma once

#include <memeff/mask/interval.cuh>

namespace memeff {

// The work of a CTA of the split forward. Heads are innermost: CTAs that run together read
// neighbouring heads of the same keys, which are contiguous in memory.
struct SplitWorkItem {
  int head;  // of the tile: see PackedRows
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

}  // namespace memeff
