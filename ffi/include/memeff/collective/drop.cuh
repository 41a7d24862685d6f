// Dropout of probabilities in registers, before their product with the values.
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

// They are two steps of a 32-bit operand.
template <int kRowBlocks, int kSteps>
CUTE_DEVICE void drop_block(RegisterOperand<kRowBlocks, kSteps, 4>& operand, int m, int block,
                            KeepBlock const& keep) {
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    int const element = i % 4;
    operand.fragments[m][2 * block + i / 4][element] &= keep.mask(element % 2, i / 4, element / 2);
  }
}

// The same for eight accumulators of P that are not yet an operand.
template <class Engine, class Layout>
CUTE_DEVICE void drop_block(cute::Tensor<Engine, Layout>& probabilities, int m, int block,
                            KeepBlock const& keep) {
  CUTE_UNROLL
  for (int chunk = 0; chunk < 2; ++chunk) {
    CUTE_UNROLL
    for (int element = 0; element < 4; ++element) {
      float& x = probabilities(element, m, 2 * block + chunk);
      x = keep.select(x, element / 2, chunk, element % 2);
    }
  }
}

// Dropout of P, the operand of the tile of scores at (row, column): zeros the dropped elements. The
// row sums, and so the logsumexp, include them. Empty without dropout.
//
// kEarly: bits() computes the bits of a tile while a product runs, which takes registers. Otherwise
// apply() computes them.
template <class Config, class Grid, bool kEarly = false>
struct ProbabilityDropout {
  using Bits = KeptTile<Config, Grid, false, Config::kDropout && kEarly>;

  CUTE_DEVICE static Bits bits(ForwardParams const& params, int batch, int head, int row,
                               int column) {
    return Bits(params.dropout, params.mask, batch, head, row, column);
  }

  template <class Probabilities>
  CUTE_DEVICE static void apply(ForwardParams const& params, Bits const& bits, int batch, int head,
                                int row, int column, Probabilities& probabilities) {
    if constexpr (Config::kDropout && kEarly) {
      CUTE_UNROLL
      for (int m = 0; m < Grid::kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < Grid::kColumnBlocks; ++n) {
          drop_block(probabilities, m, n, bits.block(m, n));
        }
      }
    } else {
      apply(params, batch, head, row, column, probabilities);
    }
  }

  template <class Probabilities>
  CUTE_DEVICE static void apply(ForwardParams const& params, int batch, int head, int row,
                                int column, Probabilities& probabilities) {
    if constexpr (Config::kDropout) {
      Dropout<Config, Grid> const dropout(params.dropout, params.mask, batch);
      dropout.for_each_block(dropout_head(params.dropout, batch, head), row, column,
                             [&](int m, int block, KeepBlock const& keep) {
                               drop_block(probabilities, m, block, keep);
                             });
    }
  }
};

}  // namespace memeff
