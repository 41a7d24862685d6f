// Segment ids: equal ids attend to each other, negative ids attend to nothing.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// Sets scores to -inf if the ids of row and column differ in any pair of id arrays, or beyond the
// bounds, which are relative to the tile's first element. Packed sequences (kPacked) have ids per
// token. ScoreMask calls it for partial tiles.
template <class Grid, bool kPacked>
struct SegmentMask {
  // kTransposed: rows of the accumulators are columns of the scores.
  template <bool kTransposed = false, class Accumulators>
  CUTE_DEVICE static void apply(Accumulators& scores, MaskParams const& mask,
                                ProblemShape const& shape, int batch, int row, int column,
                                int row_bound, int column_bound) {
    int const thread = thread_index();
    for (int pair = 0; pair < mask.segment_pairs; ++pair) {
      int const* rows = mask.query_segments + row;
      int const* columns = mask.key_segments + column;
      if constexpr (kPacked) {
        rows += (long long)pair * shape.query_tokens + shape.query_starts[batch];
        columns += (long long)pair * shape.key_tokens + shape.key_starts[batch];
      } else {
        long long const sequence = (long long)batch * mask.segment_pairs + pair;
        rows += sequence * shape.query_length;
        columns += sequence * shape.key_length;
      }
      if constexpr (kTransposed) {
        compare(scores, thread, columns, column_bound, rows, row_bound);
      } else {
        compare(scores, thread, rows, row_bound, columns, column_bound);
      }
    }
  }

 private:
  // Compares the ids of the accumulators' rows and columns, which are swapped for transposed
  // scores.
  template <class Accumulators>
  CUTE_DEVICE static void compare(Accumulators& scores, int thread, int const* rows, int row_bound,
                                  int const* columns, int column_bound) {
    int row_ids[2 * Grid::kRowBlocks];
    CUTE_UNROLL
    for (int r = 0; r < 2 * Grid::kRowBlocks; ++r) {
      int const row = Grid::element_row(2 * (r % 2), r / 2, thread);
      row_ids[r] = row < row_bound ? rows[row] : -1;
    }
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(scores); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const column = Grid::element_column(i, n, thread);
        int const id = column < column_bound ? columns[column] : -1;
        CUTE_UNROLL
        for (int r = 0; r < 2 * Grid::kRowBlocks; ++r) {
          if (row_ids[r] != id || id < 0) scores(2 * (r % 2) + i, r / 2, n) = -infinity();
        }
      }
    }
  }
};

}  // namespace memeff
