// Which piece of the problem a CTA works on. The grid is one-dimensional: its y and z dimensions
// end at 65535, which batch sizes pass.
#pragma once

#include <memeff/bias/tile.cuh>

namespace memeff {

struct WorkItem {
  int tile;
  int head;
  int batch;

  // Tiles are innermost, so that CTAs which run together read the same keys and values from L2.
  CUTE_DEVICE static WorkItem of_block(unsigned block, int tiles, int heads) {
    unsigned const head_batch = block / unsigned(tiles);
    return {int(block % unsigned(tiles)), int(head_batch % unsigned(heads)),
            int(head_batch / unsigned(heads))};
  }

  // Batch elements are innermost: where they share a bias, it is read once for all of them.
  CUTE_DEVICE static WorkItem of_block_by_batch(unsigned block, int tiles, int batch) {
    unsigned const head_tile = block / unsigned(batch);
    return {int(head_tile % unsigned(tiles)), int(head_tile / unsigned(tiles)),
            int(block % unsigned(batch))};
  }
};

// The piece of a CTA: `tiles` pieces for each of `heads` heads of each batch element.
template <class Config>
CUTE_DEVICE WorkItem work_item(ProblemShape const& shape, ScoreView const& bias, unsigned block,
                               int tiles, int heads) {
  if constexpr (has_bias_tile<Config>()) {
    if (bias.batch_stride == 0) return WorkItem::of_block_by_batch(block, tiles, shape.batch);
  }
  return WorkItem::of_block(block, tiles, heads);
}

// First element of row `row` of one head of a tensor.
template <class Element>
CUTE_DEVICE char* row_pointer(TensorView const& tensor, int batch, int row, int head) {
  return reinterpret_cast<char*>(static_cast<Element*>(tensor.data) + batch * tensor.batch_stride +
                                 row * tensor.row_stride + head * tensor.head_stride);
}

// The same of key or value, which a vmap may share.
template <class Config>
CUTE_DEVICE char* key_row_pointer(TensorView const& tensor, int batch, int row, int head) {
  return row_pointer<typename Config::Element>(tensor, element_of<Config>(tensor, batch), row,
                                               head);
}

}  // namespace memeff
