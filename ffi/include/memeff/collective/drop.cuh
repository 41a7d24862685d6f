// Dropout of probabilities that wait in registers for their product with the values.
#pragma once

#include <memeff/collective/warp_gemm.cuh>
#include <memeff/score/dropout.cuh>

namespace memeff {

// The 16 columns of a block are one step of a 16-bit operand.
template <int kRowBlocks, int kSteps>
CUTE_DEVICE void drop_block(RegisterOperand<kRowBlocks, kSteps, 2>& operand, int m, int block,
                            KeepBlock const& keep) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) operand.fragments[m][block][i] &= keep.pair_mask(i % 2, i / 2);
}

// And two steps of a 32-bit one.
template <int kRowBlocks, int kSteps>
CUTE_DEVICE void drop_block(RegisterOperand<kRowBlocks, kSteps, 4>& operand, int m, int block,
                            KeepBlock const& keep) {
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    int const element = i % 4;
    operand.fragments[m][2 * block + i / 4][element] &= keep.mask(element % 2, i / 4, element / 2);
  }
}

// Zeros the dropped elements of P, the operand of the tile of scores at (row, column). The row
// sums, and so the logsumexp, have seen them.
template <class Grid, class Probabilities>
CUTE_DEVICE void drop_elements(ForwardParams const& params, int batch, int head, int row,
                               int column, Probabilities& probabilities) {
  Dropout<Grid> const dropout(params.dropout, params.mask, batch);
  dropout.for_each_block(
      dropout_head(params.dropout, batch, head), row, column,
      [&](int m, int block, KeepBlock const& keep) { drop_block(probabilities, m, block, keep); });
}

// The same with bits that are there.
template <class Grid, class Probabilities>
CUTE_DEVICE void drop_elements(KeptTile<true, Grid> const& kept, Probabilities& probabilities) {
  CUTE_UNROLL
  for (int m = 0; m < Grid::kRowBlocks; ++m) {
    CUTE_UNROLL
    for (int n = 0; n < Grid::kColumnBlocks; ++n) drop_block(probabilities, m, n, kept.block(m, n));
  }
}

}  // namespace memeff
