// Segment ids: equal ones attend, negative ones attend to nothing.
#pragma once

#include <cute/tensor.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// Sets scores to -inf where an id of the row and of the column differ, for every pair of id arrays.
// Elements beyond the bounds, which count from the tile's first element, become -inf too.
// Packed sequences have ids per token.
template <class Grid, bool kVarlen>
struct SegmentMask {
  template <class Accumulators>
  CUTE_DEVICE static void apply(Accumulators& scores, MaskParams const& mask,
                                ProblemShape const& shape, int batch, int row, int column,
                                int row_bound, int column_bound) {
    int const thread = thread_index();
    for (int pair = 0; pair < mask.segment_pairs; ++pair) {
      int const* rows = mask.query_segments + row;
      int const* columns = mask.key_segments + column;
      if constexpr (kVarlen) {
        rows += (long long)pair * shape.query_tokens + shape.query_starts[batch];
        columns += (long long)pair * shape.key_tokens + shape.key_starts[batch];
      } else {
        long long const sequence = (long long)batch * mask.segment_pairs + pair;
        rows += sequence * shape.query_length;
        columns += sequence * shape.key_length;
      }
      int row_ids[2 * Grid::kRowBlocks];
      CUTE_UNROLL
      for (int r = 0; r < 2 * Grid::kRowBlocks; ++r) {
        int const t = Grid::element_row(2 * (r % 2), r / 2, thread);
        row_ids[r] = t < row_bound ? rows[t] : -1;
      }
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const s = Grid::element_column(i, n, thread);
          int const id = s < column_bound ? columns[s] : -1;
          CUTE_UNROLL
          for (int r = 0; r < 2 * Grid::kRowBlocks; ++r) {
            if (row_ids[r] != id || id < 0) scores(2 * (r % 2) + i, r / 2, n) = -infinity();
          }
        }
      }
    }
  }
};

}  // namespace memeff
