// A bias that is broadcast over columns: one number for each row of scores.
//
// It shifts a whole row, which changes the logsumexp by as much and the probabilities not at all.
#pragma once

#include <memeff/layout/score_view.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

template <class Config>
CUTE_DEVICE float row_bias(ScoreView const& bias, int batch, int head, int row) {
  ScorePlane<typename Config::BiasElement> const plane(bias, element_of<Config>(bias, batch), head,
                                                       row, 0);
  return float(*plane.at(0, 0));
}

// The elements of the rows that a lane owns, for the statistics of an OnlineSoftmax.
template <class Config, class Grid>
struct RowBias {
  float values[2 * Grid::kRowBlocks];

  // Rows from `row_bound` on, which counts from `row`, have a bias of 0.
  CUTE_DEVICE RowBias(ScoreView const& bias, int batch, int head, int row, int row_bound) {
    CUTE_UNROLL
    for (int r = 0; r < 2 * Grid::kRowBlocks; ++r) {
      int const tile_row = Grid::element_row(2 * (r % 2), r / 2);
      values[r] = tile_row < row_bound ? row_bias<Config>(bias, batch, head, row + tile_row) : 0.0f;
    }
  }

  // Before the end of the softmax: makes rows empty whose every element is masked.
  template <class Softmax>
  CUTE_DEVICE void mask(Softmax& softmax) const {
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      if (values[r] < kMaskedBias) softmax.row_sum[r] = 0.0f;
    }
  }

  // After it: shifts the logsumexp.
  template <class Softmax>
  CUTE_DEVICE void add(Softmax& softmax) const {
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) softmax.softmax_reference[r] += values[r];
  }
};

}  // namespace memeff
