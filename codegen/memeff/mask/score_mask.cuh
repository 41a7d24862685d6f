// All masks of a kernel: which tiles are computed, and which of their elements are valid.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/arch/thread.cuh>
#include <memeff/core/common.cuh>
#include <memeff/core/function/of_tile.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/mask/interval.cuh>

namespace memeff {

// Segment ids: equal ids attend to each other, negative ids attend to nothing.

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

// A dense boolean mask: one bit per element, in words of 32 columns.

// One (batch, head) slice of a mask's bits, from the first element of a tile on. Bits beyond the
// last column are 0.
struct BitSlice {
  unsigned short const* origin;  // 16 columns each; a tile begins at a multiple of 16
  long long row_stride;

  CUTE_DEVICE BitSlice(BitView const& view, int batch, int head, int row, int column)
      : row_stride(2 * view.row_stride) {
    unsigned const* const slice =
        view.words + batch * view.batch_stride + head * view.head_stride + row * view.row_stride;
    origin = reinterpret_cast<unsigned short const*>(slice) + column / 16;
  }

  // kColumns bits of a row, 16 or 32; a multiple of them begins at `column`.
  template <int kColumns>
  CUTE_DEVICE unsigned at(int row, int column) const {
    unsigned short const* const bits = origin + row * row_stride + column / 16;
    if constexpr (kColumns == 16) return __ldg(bits);
    return __ldg(reinterpret_cast<unsigned const*>(bits));
  }
};

// The bits of a tile for one warp. They are divided over its lanes, so that a lane needs one or two
// registers and a kernel can read them ahead, while a product runs.
template <class Grid, bool kTransposed>
class BooleanMask {
  // The accumulators' columns are columns of the mask or, if transposed, its rows.
  static constexpr int kColumns = kTransposed ? Grid::kWarpRows : Grid::kWarpColumns;
  static constexpr int kPartColumns = kColumns % 32 == 0 ? 32 : 16;
  static constexpr int kParts = kColumns / kPartColumns;           // of a row
  static constexpr int kRowParts = 2 * Grid::kRowBlocks * kParts;  // of the rows of a lane
  static constexpr int kRegisters =
      kTransposed ? (Grid::kWarpColumns + 31) / 32 * kParts : (kRowParts + 3) / 4;
  unsigned parts_[kRegisters];

 public:
  // Bits from the bounds on, which are relative to the tile's first element, are 0.
  CUTE_DEVICE BooleanMask(BitSlice const& slice, int row_bound, int column_bound) {
    unsigned const thread = thread_index();
    unsigned const lane = thread % kWarpSize;
    auto const part = [&](int row, int column) {
      bool const inside = row < row_bound && column < column_bound;
      return inside ? slice.at<kPartColumns>(row, column) : 0;
    };
    CUTE_UNROLL
    for (int i = 0; i < kRegisters; ++i) {
      if constexpr (kTransposed) {
        // A lane has one row of each 32.
        int const row = i / kParts * 32 + int(lane);
        bool const exists = Grid::kWarpColumns % 32 == 0 || row < Grid::kWarpColumns;
        int const column = Grid::row(thread) + i % kParts * kPartColumns;
        parts_[i] = exists ? part(Grid::column(thread) + row, column) : 0;
      } else {
        // The four lanes of a quad share the parts of their rows.
        int const index = 4 * i + int(lane % 4);
        bool const exists = kRowParts % 4 == 0 || index < kRowParts;
        int const row = Grid::row(thread) + index / kParts * 8 + int(lane / 4);
        int const column = Grid::column(thread) + index % kParts * kPartColumns;
        parts_[i] = exists ? part(row, column) : 0;
      }
    }
  }

  // Sets scores to -inf where the mask is false. All lanes of the warp must call it together.
  template <class Accumulators>
  CUTE_DEVICE void apply(Accumulators& scores) const {
    if constexpr (kTransposed) {
      apply_transposed(scores);
    } else {
      apply_rows(scores);
    }
  }

 private:
  CUTE_DEVICE unsigned from_lane(int part, unsigned lane) const {
    return __shfl_sync(0xffffffffu, parts_[part], int(lane));
  }

  template <class Accumulators>
  CUTE_DEVICE void apply_rows(Accumulators& scores) const {
    constexpr int kBlocks = kPartColumns / 8;
    unsigned const lane = threadIdx.x % kWarpSize;
    CUTE_UNROLL
    for (int index = 0; index < kRowParts; ++index) {
      unsigned const bits = from_lane(index / 4, lane / 4 * 4 + index % 4) >> (lane % 4 * 2);
      int const m = index / kParts / 2;
      int const half = index / kParts % 2;
      CUTE_UNROLL
      for (int n = 0; n < kBlocks; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          bool const valid = bits >> (8 * n + i) & 1;
          if (!valid) scores(2 * half + i, m, index % kParts * kBlocks + n) = -infinity();
        }
      }
    }
  }

  template <class Accumulators>
  CUTE_DEVICE void apply_transposed(Accumulators& scores) const {
    constexpr int kBlocks = kPartColumns / 16;
    unsigned const lane = threadIdx.x % kWarpSize;
    CUTE_UNROLL
    for (int n = 0; n < 2 * Grid::kColumnBlocks; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int part = 0; part < kParts; ++part) {
          unsigned const bits =
              from_lane(n / 4 * kParts + part, n % 4 * 8 + lane % 4 * 2 + i) >> (lane / 4);
          CUTE_UNROLL
          for (int half = 0; half < 2 * kBlocks; ++half) {
            bool const valid = bits >> (8 * half) & 1;
            if (!valid) scores(half % 2 * 2 + i, part * kBlocks + half / 2, n) = -infinity();
          }
        }
      }
    }
  }
};

// Masks keys whose page-table entry is invalid: a negative entry refers to no page of the pool.

// Sets the scores of keys on missing pages to -inf. ScoreMask calls it for the tiles of a paged
// call that may have such keys; without pages it does nothing.
template <class Config, class Grid>
struct PageMask {
  // Masks the tile of kColumns columns at `at`; the interval mask has masked columns from
  // column_bound on already.
  template <int kColumns, class Accumulators, class Params>
  CUTE_DEVICE static void apply(Accumulators& scores, Params const& params,
                                ScoreTilePosition const& at, int column_bound) {
    if constexpr (PageTable<Config>::kPaged) {
      PageTable<Config> const table(params, at.batch);
      mask_from<0, kColumns>(scores, table, at, min(kColumns, column_bound));
    }
  }

 private:
  // Masks the columns from kFirst on. Each lane checks one part of a page, so a table without
  // invalid entries costs a vote, or several if pages are small.
  template <int kFirst, int kColumns, class Accumulators>
  CUTE_DEVICE static void mask_from(Accumulators& scores, PageTable<Config> const& table,
                                    ScoreTilePosition const& at, int bound) {
    constexpr int kStep = PageTable<Config>::kStep;
    constexpr int kEnd = kFirst + kWarpSize * kStep;
    if constexpr (kEnd < kColumns) mask_from<kEnd, kColumns>(scores, table, at, bound);
    int const own = thread_index() % kWarpSize * kStep + kFirst;
    bool const missing = own < bound && table.row(at.column + own) < 0;
    unsigned const parts = __ballot_sync(0xffffffffu, missing);
    if (parts == 0) return;
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          int const column = Grid::element_column(i, n, thread_index());
          bool const is_checked =
              kColumns <= kWarpSize * kStep || (column >= kFirst && column < kEnd);
          if (is_checked && (parts >> (column - kFirst) / kStep & 1)) scores(i, m, n) = -infinity();
        }
      }
    }
  }
};

// Whether keys may be on missing pages: a base class of what producer and consumers share. With
// kOn the producer finds out; otherwise they always may.
template <bool kOn>
struct MissingPages {
  CUTE_DEVICE void init_missing() {}
  CUTE_DEVICE bool may_miss() const { return true; }
};

template <>
struct MissingPages<true> {
  bool found;

  CUTE_DEVICE void init_missing() { found = false; }
  // The producer calls it before the KV block is complete.
  CUTE_DEVICE void mark_missing() { found = true; }
  // Hazard: the producer may set it for a later block between the reads of two lanes.
  CUTE_DEVICE bool may_miss() const { return warp_any(found); }
};

// The user's mask function (`Mask.function`), evaluated at the elements of a tile.

// Sets the accumulators to -inf if the function is false for their element. Does nothing if the
// call has no mask function. ScoreMask calls it for partial tiles. kPackGqa: see GqaRows.
template <class Config, class Grid, bool kTransposed = false, bool kPackGqa = false>
struct MaskFunction {
  template <class Scores, class Params>
  CUTE_DEVICE static void apply(Scores& scores, Params const& params, ScoreTilePosition const& at) {
    if constexpr (Config::kMaskFunction) {
      using Function = typename Config::MaskFunction;
      using OfTile = cute::conditional_t<
          kPackGqa,
          FunctionOfRows<Config, Function, Config::kMaskCaptured, Config::kMaskLiterals,
                         GqaRows<true>>,
          FunctionOfTile<Config, Function, Config::kMaskCaptured, Config::kMaskLiterals>>;
      OfTile const of_tile(params, at);
      of_tile.template for_each<Grid, kTransposed>(scores, [](float& score, auto const&... inputs) {
        if (!Function::value(inputs...)) {
          score = -infinity();
        }
      });
    }
  }
};

// The mask object of a kernel: main loops ask it for KV or Q blocks (IntervalMask) and call apply()
// on each tile of scores.
template <class Config, class Grid, bool kPackGqa = false>
struct ScoreMask : IntervalMask<Config::kMask, kPackGqa, Config::kPositions> {
  using Interval = IntervalMask<Config::kMask, kPackGqa, Config::kPositions>;
  using Interval::Interval;

  // The words of a tile that a lane reads. A kernel may read them before the scores are complete.
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
