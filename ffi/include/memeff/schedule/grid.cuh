// Which piece of the problem a CTA works on. The grid is one-dimensional: its y and z dimensions
// end at 65535, which batch sizes pass.
#pragma once

#include <memeff/core/common.cuh>

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
};

// First element of row `row` of one head of a tensor.
template <class Element>
CUTE_DEVICE char* row_pointer(TensorView const& tensor, int batch, int row, int head) {
  return reinterpret_cast<char*>(static_cast<Element*>(tensor.data) + batch * tensor.batch_stride +
                                 row * tensor.row_stride + head * tensor.head_stride);
}

}  // namespace memeff
