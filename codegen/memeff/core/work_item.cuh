// The coordinates of a work tile, and the first element of a tile of scores.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// The tile, head and batch index of a CTA's work.
struct WorkItem {
  int tile;
  int head;
  int batch;

  // Makes tiles innermost.
  CUTE_DEVICE static WorkItem of_block(unsigned block, int tiles, int heads) {
    unsigned const head_batch = block / unsigned(tiles);
    return {int(block % unsigned(tiles)), int(head_batch % unsigned(heads)),
            int(head_batch / unsigned(heads))};
  }

  // Makes batch indices innermost.
  CUTE_DEVICE static WorkItem of_block_by_batch(unsigned block, int tiles, int batch) {
    unsigned const head_tile = block / unsigned(batch);
    return {int(head_tile % unsigned(tiles)), int(head_tile / unsigned(tiles)),
            int(block % unsigned(batch))};
  }
};

// The first element of a tile of scores.
struct ScoreTilePosition {
  int batch;
  int head;
  int row;
  int column;
};

}  // namespace memeff
