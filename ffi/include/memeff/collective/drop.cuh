// Dropout of probabilities that wait in registers for their product with the values.
#pragma once

#include <memeff/dropout/keep.cuh>

namespace memeff {

// Zeros the dropped elements of P, the operand of the tile of scores at (row, column). The row
// sums, and so the logsumexp, have seen them.
template <class Grid, class Probabilities>
CUTE_DEVICE void drop_elements(ForwardParams const& params, int batch, int head, int row,
                               int column, Probabilities& probabilities) {
  Dropout<Grid> const dropout(params.dropout, params.mask, batch);
  dropout.for_each_block(dropout_head(params.dropout, batch, head), row, column,
                         [&](int m, int block, KeepBlock const& keep) {
                           CUTE_UNROLL
                           for (int i = 0; i < 4; ++i) {
                             probabilities.fragments[m][block][i] &= keep.pair_mask(i % 2, i / 2);
                           }
                         });
}

}  // namespace memeff
