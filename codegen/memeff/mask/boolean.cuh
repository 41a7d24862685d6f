// A dense boolean mask: one byte per element, read from global memory once.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/layout/score_view.cuh>

namespace memeff {

// Sets scores to -inf if the mask is false or the element is beyond the bounds, which are relative
// to the tile's first element. ScoreMask calls it for partial tiles.
template <class Grid>
struct BooleanMask {
  using Slice = ScoreViewSlice<unsigned char>;

  template <class Accumulators>
  CUTE_DEVICE static void apply(Accumulators& scores, Slice const& slice, int row_bound,
                                int column_bound) {
    if (slice.paired) {
      apply<true>(scores, slice, row_bound, column_bound);
    } else {
      apply<false>(scores, slice, row_bound, column_bound);
    }
  }

  // As above for transposed scores: rows of the accumulators are columns of the mask.
  template <class Accumulators>
  CUTE_DEVICE static void apply_transposed(Accumulators& scores, Slice const& slice, int row_bound,
                                           int column_bound) {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(scores); ++n) {
      CUTE_UNROLL
      for (int element = 0; element < 4; ++element) {
        int const row = Grid::element_column(element % 2, n, thread);
        int const column = Grid::element_row(element, 0, thread);
        bool const inside = row < row_bound && column < column_bound;
        if (!inside || !*slice.at(row, column)) scores(element, 0, n) = -infinity();
      }
    }
  }

 private:
  template <bool kPaired, class Accumulators>
  CUTE_DEVICE static void apply(Accumulators& scores, Slice const& slice, int row_bound,
                                int column_bound) {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const row = Grid::element_row(2 * half, m, thread);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(scores); ++n) {
          auto const valid = slice.template load<kPaired>(row, Grid::element_column(0, n, thread),
                                                          row < row_bound ? column_bound : 0);
          if (!valid.first) scores(2 * half, m, n) = -infinity();
          if (!valid.second) scores(2 * half + 1, m, n) = -infinity();
        }
      }
    }
  }
};

}  // namespace memeff
