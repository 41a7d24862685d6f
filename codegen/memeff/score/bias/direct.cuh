// Adds a bias to scores; each lane loads its own elements from global memory. Used by the split-KV
// forward, whose few rows leave no reuse between warps, and for large head dims, whose products
// take much longer than the loads.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/layout/score_view.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// Adds the bias of one tile. Elements beyond the bounds, which are relative to the tile's first
// element, get a bias of 0.
//
// kPerRow is false for a bias that is broadcast over rows, which is loaded once for all rows.
template <class Element, class Grid, bool kPerRow>
struct DirectBiasAdder {
  template <class Accumulators>
  CUTE_DEVICE static void add(Accumulators& scores, ScoreViewSlice<Element> const& bias,
                              int row_bound, int column_bound, float bias_scale) {
    if (bias.paired) {
      add<true>(scores, bias, row_bound, column_bound, bias_scale);
    } else {
      add<false>(scores, bias, row_bound, column_bound, bias_scale);
    }
  }

 private:
  template <bool kPaired, class Accumulators>
  CUTE_DEVICE static void add(Accumulators& scores, ScoreViewSlice<Element> const& bias,
                              int row_bound, int column_bound, float bias_scale) {
    int const thread = thread_index();
    if constexpr (kPerRow) {
      CUTE_UNROLL
      for (int r = 0; r < 2 * Grid::kRowBlocks; ++r) {
        int const row = Grid::element_row(2 * (r % 2), r / 2, thread);
        int const bound = row < row_bound ? column_bound : 0;
        CUTE_UNROLL
        for (int n = 0; n < 2 * Grid::kColumnBlocks; ++n) {
          int const column = Grid::element_column(0, n, thread);
          add_pair(scores, r, n, bias.template load<kPaired>(row, column, bound), bias_scale);
        }
      }
    } else {
      CUTE_UNROLL
      for (int n = 0; n < 2 * Grid::kColumnBlocks; ++n) {
        int const column = Grid::element_column(0, n, thread);
        auto const pair = bias.template load<kPaired>(0, column, column_bound);
        CUTE_UNROLL
        for (int r = 0; r < 2 * Grid::kRowBlocks; ++r) add_pair(scores, r, n, pair, bias_scale);
      }
    }
  }

  template <class Accumulators>
  CUTE_DEVICE static void add_pair(Accumulators& scores, int r, int n, Pair<Element> const& bias,
                                   float bias_scale) {
    float& first = scores(2 * (r % 2), r / 2, n);
    float& second = scores(2 * (r % 2) + 1, r / 2, n);
    first = biased_score(first, float(bias.first), bias_scale);
    second = biased_score(second, float(bias.second), bias_scale);
  }
};

// The bias of one batch index, with the interface that ScoreModifiers expects; the tile begins at
// (rows.row, column) of the scores of rows.head. Nothing is copied in advance. Without a bias it
// does nothing.
template <class Config, class Grid, class Mask, bool kBias = has_bias_tile<Config>()>
struct DirectBias {
  ScoreView const& bias;
  Mask const& mask;
  int batch;

  template <class Scores, class Rows>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, Rows const& rows, int column) const {
    using Element = typename Config::BiasElement;
    constexpr bool kPerRow = Config::kBiasAccess != BiasAccess::columns;
    ScoreViewSlice<Element> const slice(bias, element_of<Config>(bias, batch), rows.head, rows.row,
                                        column);
    DirectBiasAdder<Element, Grid, kPerRow>::add(scores, slice, mask.query_length - rows.row,
                                                 mask.key_length - column, bias_scale);
  }
};

template <class Config, class Grid, class Mask>
struct DirectBias<Config, Grid, Mask, false> {
  CUTE_DEVICE DirectBias(ScoreView const&, Mask const&, int) {}
  template <class Scores, class Rows>
  CUTE_DEVICE void add(Scores&, float, Rows const&, int) const {}
};

}  // namespace memeff
