// The modifiers of probabilities between the softmax and their product with the values, and of the
// gradient of the probabilities: all modifiers of a kernel as one object.
//
//   P' = keep * P * scale       Dropout
//   dP = keep * dP' * scale
//
// The row sums of the softmax, and so the logsumexp, are those of the unmodified P. The scale is
// the same for all elements, so it multiplies the sums O and dV at the end, and dP inside
// softmax_gradient() (score/probability.cuh).
//
// A main loop does not depend on which modifiers there are. Without any, its calls compile to
// nothing.
#pragma once

#include <memeff/collective/warp_gemm.cuh>
#include <memeff/score/dropout.cuh>

namespace memeff {

// Whether a kernel has such a modifier. Its bits take registers, so tiles and schedules depend on
// it.
template <class Config>
CUTE_HOST_DEVICE constexpr bool modifies_probabilities() {
  return Config::kDropout;
}

// The factor of the kept probabilities, 1 without dropout.
template <class Config, class Params>
CUTE_DEVICE float probability_scale(Params const& params) {
  return Config::kDropout ? params.dropout.scale : 1.0f;
}

// Drops the elements of a 16x16 block of an operand. Its 16 columns are one step of a 16-bit
// operand.
template <int kRowBlocks, int kSteps>
CUTE_DEVICE void drop_block(RegisterOperand<kRowBlocks, kSteps, 2>& operand, int m, int block,
                            KeepBlock const& keep) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) operand.fragments[m][block][i] &= keep.pair_mask(i % 2, i / 2);
}

// As above for a 32-bit operand, in which the 16 columns are two steps.
template <int kRowBlocks, int kSteps>
CUTE_DEVICE void drop_block(RegisterOperand<kRowBlocks, kSteps, 4>& operand, int m, int block,
                            KeepBlock const& keep) {
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    int const element = i % 4;
    operand.fragments[m][2 * block + i / 4][element] &= keep.mask(element % 2, i / 4, element / 2);
  }
}

// As above for accumulators of P that are not yet an operand.
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

// The probability modifiers of a kernel. kTransposed: rows of the accumulators are columns of the
// scores.
//
// kEarly: constructing a Tile computes the bits, while a product runs; this takes registers.
// Otherwise forward() computes them.
template <class Config, class Grid, bool kTransposed = false,
          bool kEarly = modifies_probabilities<Config>()>
struct ProbabilityModifiers {
  static constexpr bool kIsEarly = modifies_probabilities<Config>() && kEarly;

  // The modifiers of a tile of scores, computed ahead of their use. block(m, n) is that of a 16x16
  // block; its select(x, half, chunk, i) modifies one element (KeepBlock).
  using Tile = KeptTile<Config, Grid, kTransposed, kIsEarly>;

  // Modifies P of the tile of scores at (row, column).
  template <class Probabilities>
  CUTE_DEVICE static void forward(ForwardParams const& params, Tile const& tile, int batch,
                                  int head, int row, int column, Probabilities& probabilities) {
    if constexpr (kIsEarly) {
      CUTE_UNROLL
      for (int m = 0; m < Grid::kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < Grid::kColumnBlocks; ++n) {
          drop_block(probabilities, m, n, tile.block(m, n));
        }
      }
    } else {
      forward(params, batch, head, row, column, probabilities);
    }
  }

  // As above without a Tile.
  template <class Probabilities>
  CUTE_DEVICE static void forward(ForwardParams const& params, int batch, int head, int row,
                                  int column, Probabilities& probabilities) {
    if constexpr (Config::kDropout) {
      Dropout<Config, Grid> const dropout(params, batch);
      dropout.for_each_block(dropout_head(params, batch, head), row, column,
                             [&](int m, int block, KeepBlock const& keep) {
                               drop_block(probabilities, m, block, keep);
                             });
    }
  }

  // Calls use(row block, column block, block) for every 16x16 block that this warp owns of the tile
  // at (row, column), for a backward. `block` is as in Tile.
  template <class Use>
  CUTE_DEVICE static void for_each_block(BackwardParams const& params, int batch, int head, int row,
                                         int column, Use use) {
    if constexpr (Config::kDropout) {
      Dropout<Config, Grid> const dropout(params, batch);
      dropout.for_each_block(dropout_head(params, batch, head), row, column, use);
    } else {
      CUTE_UNROLL
      for (int m = 0; m < Grid::kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < Grid::kColumnBlocks; ++n) use(m, n, KeepAll{});
      }
    }
  }

  // For a backward in which one consumer computes P^T and another one uses it.
  using Signs = DropoutSigns<Config, Grid>;
};

}  // namespace memeff
