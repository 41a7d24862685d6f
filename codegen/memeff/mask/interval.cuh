// Causal masks, windows and lengths: the valid columns of a row are one interval.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/math.cuh>
#include <memeff/layout/gqa_rows.cuh>

namespace memeff {

// A half-open range of tile indices.
struct TileRange {
  int begin;
  int end;
};

// Column s of row t is valid if t < query_length, s < key_length and t + first <= s <= t + last.
// Both window alignments and the global positions of a shard fold into the two offsets, because all
// are constant within a batch index. With kPackGqa the rows below are those of GqaRows.
// kPositions: the call has global positions; without it they are 0. ScoreMask derives from it, and
// the schedules ask it for the tiles of a row or column of blocks.
template <MaskKind kKind, bool kPackGqa = false, bool kPositions = false>
struct IntervalMask {
  GqaRows<kPackGqa> rows;
  int query_length;  // in rows
  int key_length;
  int first;  // used by MaskKind::window
  int last;   // used by MaskKind::causal and MaskKind::window

  CUTE_DEVICE IntervalMask(MaskParams const& mask, ProblemShape const& shape, int batch)
      : rows(shape) {
    int const queries = clamp_length(mask.query_lengths, batch, shape.query_length);
    query_length = rows.count(queries);
    key_length = clamp_length(mask.key_lengths, batch, shape.key_length);
    if constexpr (kKind != MaskKind::none) {
      int const shift =
          kPositions ? clamp(mask.query_position[batch] - mask.key_position[batch]) : 0;
      int const bottom_right = key_length - queries + shift;
      last = min(bound(mask.top_left_right, shift), bound(mask.bottom_right_right, bottom_right));
      first = -min(bound(mask.top_left_left, -shift), bound(mask.bottom_right_left, -bottom_right));
    }
  }

  // Sizes are below kMaxLength, so the sum of a row, a column and a clamped bound fits 32 bits.
  CUTE_DEVICE static int clamp(int x) { return min(max(x, -kUnbounded), kUnbounded); }
  CUTE_DEVICE static int bound(int limit, int shift) {
    return limit == kUnbounded ? kUnbounded : clamp(limit + shift);
  }

  CUTE_DEVICE static int clamp_length(int const* lengths, int batch, int size) {
    return lengths != nullptr ? min(max(lengths[batch], 0), size) : size;
  }

  // Whether the mask is the same for all batch indices.
  CUTE_DEVICE static bool is_common(MaskParams const& mask) {
    if constexpr (kPositions && kKind != MaskKind::none) return false;
    return mask.query_lengths == nullptr && mask.key_lengths == nullptr;
  }

  // The valid columns of a row: [row_begin(row), row_end(row)).
  CUTE_DEVICE int row_begin(int row) const {
    return kKind == MaskKind::window ? max(rows.query(row) + first, 0) : 0;
  }
  CUTE_DEVICE int row_end(int row) const {
    return kKind == MaskKind::none ? key_length : min(rows.query(row) + last + 1, key_length);
  }

  // The KV blocks, of `tile` columns each, with a valid element in some row of [row, row + count).
  CUTE_DEVICE TileRange key_tiles(int row, int count, int tile) const {
    int const last_row = min(row + count, query_length) - 1;
    if (last_row < row) return {0, 0};
    int const end = max(row_end(last_row), 0);
    return {min(row_begin(row), end) / tile, ceil_div(end, tile)};
  }

  // The Q blocks, of `tile` rows each, with a valid element in some column of [column, column +
  // columns).
  CUTE_DEVICE TileRange query_tiles(int column, int columns, int tile) const {
    if (column >= key_length) return {0, 0};
    int begin = 0;
    int end = query_length;
    if constexpr (kKind != MaskKind::none) begin = max(column - last, 0);
    if constexpr (kKind == MaskKind::window) {
      end = min(end, min(column + columns, key_length) - first);
    }
    return {begin / tile, ceil_div(max(end, begin / tile * tile), tile)};
  }

  // Whether the tile may have an invalid element. Rows beyond query_length are not tested, because
  // their results are never written.
  CUTE_DEVICE bool needs_test(int row, int count, int column, int columns) const {
    return column + columns > row_end(row) ||
           (kKind == MaskKind::window && column < row_begin(row + count - 1));
  }

  // Sets the accumulators of invalid elements to -inf.
  template <class Grid, class Accumulators>
  CUTE_DEVICE void apply(Accumulators& scores, int row, int column) const {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const t = row + Grid::element_row(2 * half, m, thread);
        int const begin = row_begin(t) - column;
        int const end = row_end(t) - column;
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(scores); ++n) {
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            int const s = Grid::element_column(i, n, thread);
            bool const valid = s < end && (kKind != MaskKind::window || s >= begin);
            if (!valid) scores(2 * half + i, m, n) = -infinity();
          }
        }
      }
    }
  }

  // As above for transposed scores: rows of the accumulators are keys, columns are queries.
  template <class Grid, class Accumulators>
  CUTE_DEVICE void apply_transposed(Accumulators& scores, int row, int column) const {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const s = column + Grid::element_row(2 * half, m, thread);
        bool const inside = s < key_length;
        int const begin = kKind == MaskKind::none ? 0 : s - last - row;
        int const end = s - first - row;
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(scores); ++n) {
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            int const t = Grid::element_column(i, n, thread);
            bool const valid = inside && t >= begin && (kKind != MaskKind::window || t <= end);
            if (!valid) scores(2 * half + i, m, n) = -infinity();
          }
        }
      }
    }
  }
};

}  // namespace memeff
