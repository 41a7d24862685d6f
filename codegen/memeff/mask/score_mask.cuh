// All masks of a kernel: which tiles are computed, and which of their elements are valid.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/mask/boolean.cuh>
#include <memeff/mask/function.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/mask/pages.cuh>
#include <memeff/mask/segments.cuh>

namespace memeff {

// The mask object of a kernel: main loops ask it for KV or Q blocks (IntervalMask) and call apply()
// on each tile of scores.
template <class Config, class Grid, bool kPackGqa = false>
struct ScoreMask : IntervalMask<Config::kMask, kPackGqa, Config::kPositions> {
  using Interval = IntervalMask<Config::kMask, kPackGqa, Config::kPositions>;
  using Interval::Interval;

  // What a lane reads from memory for a tile. A kernel may do so before the scores are there.
  struct NoReads {};
  template <bool kTransposed>
  using ReadsOf = cute::conditional_t<Config::kBoolean, BooleanMask<Grid, kTransposed>, NoReads>;
  using Reads = ReadsOf<false>;
  using TransposedReads = ReadsOf<true>;

  template <bool kTransposed = false, class Params>
  CUTE_DEVICE ReadsOf<kTransposed> read(Params const& params, ScoreTilePosition const& at) const {
    if constexpr (Config::kBoolean) {
      BitView const& view = params.mask.boolean;
      int row = at.row;
      if constexpr (Config::kPacked) {
        if (view.rows_are_tokens) row += params.shape.query_starts[at.batch];
      }
      int const batch = element_of<Config>(view, at.batch);
      return {{view, batch, at.head, row, at.column},
              this->query_length - at.row,
              this->key_length - at.column};
    } else {
      return {};
    }
  }

  // Sets the accumulators of invalid elements to -inf in the tile of kColumns columns at `at`. The
  // caller owns kRows rows of the tile, from `own_row` on. If the tile is not `partial`, the block
  // mask has shown that arrays and functions leave all its elements valid, so only intervals and
  // pages are tested. `may_miss_pages`: false if the caller has found all its pages valid. `reads`:
  // the result of read(), which is called here by default.
  template <int kRows, int kColumns, class Accumulators, class Params>
  CUTE_DEVICE void apply(Accumulators& scores, Params const& params, ScoreTilePosition const& at,
                         bool partial = true, int own_row = 0, bool may_miss_pages = true,
                         Reads const* reads = nullptr) const {
    int const row_bound = this->query_length - at.row;
    int const column_bound = this->key_length - at.column;
    if (this->needs_test(at.row + own_row, kRows, at.column, kColumns)) {
      Interval::template apply<Grid>(scores, at.row, at.column);
    }
    if (may_miss_pages) {
      PageMask<Config, Grid>::template apply<kColumns>(scores, params, at, column_bound);
    }
    if constexpr (kMasksRows) {
      if (row_bound < own_row + kRows) mask_rows_from<false>(scores, row_bound);
    }
    if (!partial) return;
    if constexpr (Config::kSegments) {
      SegmentMask<Grid, Config::kPacked>::apply(scores, params.mask, params.shape, at.batch, at.row,
                                                at.column, row_bound, column_bound);
    }
    if constexpr (Config::kBoolean) {
      (reads != nullptr ? *reads : read(params, at)).apply(scores);
    }
    MaskFunction<Config, Grid, false, kPackGqa>::apply(scores, params, at);
  }

  // As above for transposed scores: rows of the accumulators are keys, columns are queries.
  template <int kRows, int kColumns, class Accumulators, class Params>
  CUTE_DEVICE void apply_transposed(Accumulators& scores, Params const& params,
                                    ScoreTilePosition const& at, bool partial = true,
                                    TransposedReads const* reads = nullptr) const {
    int const row_bound = this->query_length - at.row;
    int const column_bound = this->key_length - at.column;
    if (this->needs_test(at.row, kRows, at.column, kColumns)) {
      Interval::template apply_transposed<Grid>(scores, at.row, at.column);
    }
    if constexpr (kMasksRows) {
      if (row_bound < kRows) mask_rows_from<true>(scores, row_bound);
    }
    if (!partial) return;
    if constexpr (Config::kSegments) {
      SegmentMask<Grid, Config::kPacked>::template apply<true>(
          scores, params.mask, params.shape, at.batch, at.row, at.column, row_bound, column_bound);
    }
    if constexpr (Config::kBoolean) {
      (reads != nullptr ? *reads : read<true>(params, at)).apply(scores);
    }
    MaskFunction<Config, Grid, true>::apply(scores, params, at);
  }

  // Sets the rows of a tile from `bound` on to -inf. A score function may return NaN for them.
  template <bool kTransposed, class Accumulators>
  CUTE_DEVICE static void mask_rows_from(Accumulators& scores, int bound) {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        CUTE_UNROLL
        for (int element = 0; element < 4; ++element) {
          int const row = kTransposed ? Grid::element_column(element, n, thread)
                                      : Grid::element_row(element, m, thread);
          if (row >= bound) scores(element, m, n) = -infinity();
        }
      }
    }
  }

 private:
  // A backward sums over rows, so a NaN of a score function in a row beyond the length would reach
  // dK and dV. A forward discards such rows.
  static constexpr bool kMasksRows =
      Config::kScoreFunction && cute::is_same_v<typename Config::Params, BackwardParams>;
};

}  // namespace memeff
