// All masks of a kernel: which tiles are computed, and which of their elements are valid.
#pragma once

#include <memeff/mask/block_mask.cuh>
#include <memeff/mask/boolean.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/mask/segments.cuh>

namespace memeff {

template <class Config, class Grid, bool kPackHeads = false>
struct ScoreMask : IntervalMask<Config::kMask, kPackHeads, Config::kPositions> {
  using Interval = IntervalMask<Config::kMask, kPackHeads, Config::kPositions>;
  using Interval::Interval;

  // Sets the accumulators of invalid elements to -inf, in the tile of kColumns columns at (row,
  // column). The caller owns kRows rows of the tile, from `own_row` on. If the tile is not
  // `partial`, segment ids and boolean masks make none of its elements invalid.
  template <int kRows, int kColumns, class Accumulators>
  CUTE_DEVICE void apply(Accumulators& scores, MaskParams const& mask, ProblemShape const& shape,
                         int batch, int head, int row, int column, bool partial = true,
                         int own_row = 0) const {
    int const row_bound = this->query_length - row;
    int const column_bound = this->key_length - column;
    if (this->needs_test(row + own_row, kRows, column, kColumns)) {
      Interval::template apply<Grid>(scores, row, column);
    }
    if (!partial) return;
    if constexpr (Config::kSegments) {
      SegmentMask<Grid, Config::kVarlen>::apply(scores, mask, shape, batch, row, column, row_bound,
                                                column_bound);
    }
    if constexpr (Config::kBoolean) {
      using Boolean = BooleanMask<Grid>;
      Boolean::apply(scores, slice<Boolean>(mask.boolean, batch, head, row, column), row_bound,
                     column_bound);
    }
  }

  // The same for transposed scores: rows of the accumulators are keys, columns are queries.
  template <int kRows, int kColumns, class Accumulators>
  CUTE_DEVICE void apply_transposed(Accumulators& scores, MaskParams const& mask,
                                    ProblemShape const& shape, int batch, int head, int row,
                                    int column, bool partial = true) const {
    int const row_bound = this->query_length - row;
    int const column_bound = this->key_length - column;
    if (this->needs_test(row, kRows, column, kColumns)) {
      Interval::template apply_transposed<Grid>(scores, row, column);
    }
    if (!partial) return;
    if constexpr (Config::kSegments) {
      SegmentMask<Grid, Config::kVarlen>::template apply<true>(scores, mask, shape, batch, row,
                                                               column, row_bound, column_bound);
    }
    if constexpr (Config::kBoolean) {
      using Boolean = BooleanMask<Grid>;
      Boolean::apply_transposed(scores, slice<Boolean>(mask.boolean, batch, head, row, column),
                                row_bound, column_bound);
    }
  }

 private:
  template <class Boolean>
  CUTE_DEVICE static typename Boolean::Slice slice(ScoreView const& boolean, int batch, int head,
                                                   int row, int column) {
    return {boolean, element_of<Config>(boolean, batch), head, row, column};
  }
};

}  // namespace memeff
