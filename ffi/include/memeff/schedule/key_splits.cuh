// Which part of the keys a CTA works on, and where its result waits to be combined with the others.
#pragma once

#include <memeff/mask/interval.cuh>

namespace memeff {

// Heads are innermost: CTAs that run together read neighbouring heads of the same keys, which is
// one stretch of memory.
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

// The share of a split in the tiles that its rows visit: shares differ by one tile at most.
CUTE_DEVICE TileRange share_of_split(TileRange const& tiles, int split, int splits) {
  long long const count = tiles.end - tiles.begin;
  return {tiles.begin + int(count * split / splits),
          tiles.begin + int(count * (split + 1) / splits)};
}

}  // namespace memeff
