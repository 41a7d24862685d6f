// A bias in registers, for kernels without shared memory for it. Each lane loads its own elements
// while the tensor cores compute the scores, and adds them afterwards.
#pragma once

#include <memeff/score/bias/direct.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// Whether the elements are held in registers: 16-bit ones are, two in each register.
template <class Config>
CUTE_HOST_DEVICE constexpr bool holds_bias() {
  if constexpr (has_bias_tile<Config>()) return sizeof(typename Config::BiasElement) == 2;
  return false;
}

// The bias of a tile of kRows x kColumns scores that warps divide as in Grid. Does nothing without
// a bias.
template <class Config, class Grid, int kRows, int kColumns, bool kBias = has_bias_tile<Config>(),
          bool kHolds = holds_bias<Config>()>
struct RegisterBias {
  CUTE_DEVICE RegisterBias(ScoreView const&, int, int, int, int, int, int) {}
  template <class Accumulators>
  CUTE_DEVICE void add(Accumulators&, float) const {}
};

template <class Config, class Grid, int kRows, int kColumns>
struct RegisterBias<Config, Grid, kRows, kColumns, true, true> {
  using Element = typename Config::BiasElement;
  // If the bias is broadcast over rows, one row of elements serves all rows.
  static constexpr bool kPerRow = Config::kBiasAccess != BiasAccess::columns;
  static constexpr int kLaneRows = kPerRow ? 2 * Grid::kRowBlocks : 1;
  static constexpr int kPairs = 2 * Grid::kColumnBlocks;
  uint32_t pairs[kLaneRows][kPairs];

  // Loads the bias of the tile at (row, column) of the scores. Elements beyond the bounds, which
  // are relative to the tile, are 0.
  CUTE_DEVICE RegisterBias(ScoreView const& bias, int batch, int head, int row, int column,
                           int row_bound, int column_bound) {
    ScoreViewSlice<Element> const slice(bias, element_of<Config>(bias, batch), head, row, column);
    if (slice.paired && row_bound >= kRows && column_bound >= kColumns) {
      load_whole(slice);
    } else {
      load_within(slice, row_bound, column_bound);
    }
  }

  template <class Accumulators>
  CUTE_DEVICE void add(Accumulators& scores, float bias_scale) const {
    CUTE_UNROLL
    for (int r = 0; r < 2 * Grid::kRowBlocks; ++r) {
      CUTE_UNROLL
      for (int n = 0; n < kPairs; ++n) {
        float2 const pair = unpack_pair<Element>(pairs[kPerRow ? r : 0][n]);
        float& first = scores(2 * (r % 2), r / 2, n);
        float& second = scores(2 * (r % 2) + 1, r / 2, n);
        first = biased_score(first, pair.x, bias_scale);
        second = biased_score(second, pair.y, bias_scale);
      }
    }
  }

 private:
  CUTE_DEVICE static int lane_row(int r) {
    return kPerRow ? Grid::element_row(2 * (r % 2), r / 2, thread_index()) : 0;
  }

  // Loads a tile inside the bounds without branches, so that all loads are issued together.
  CUTE_DEVICE void load_whole(ScoreViewSlice<Element> const& slice) {
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      Element const* const row =
          slice.origin + lane_row(r) * slice.row_stride + Grid::element_column(0, 0);
      CUTE_UNROLL
      for (int n = 0; n < kPairs; ++n) {
        pairs[r][n] = *reinterpret_cast<uint32_t const*>(row + 8 * n);
      }
    }
  }

  CUTE_DEVICE void load_within(ScoreViewSlice<Element> const& slice, int row_bound,
                               int column_bound) {
    CUTE_UNROLL
    for (int r = 0; r < kLaneRows; ++r) {
      int const row = lane_row(r);
      CUTE_UNROLL
      for (int n = 0; n < kPairs; ++n) {
        auto const pair = slice.template load<false>(row, Grid::element_column(0, n),
                                                     row < row_bound ? column_bound : 0);
        pairs[r][n] = reinterpret_cast<uint32_t const&>(pair);
      }
    }
  }
};

// 32-bit elements would take too many registers; they are loaded when they are added.
template <class Config, class Grid, int kRows, int kColumns>
struct RegisterBias<Config, Grid, kRows, kColumns, true, false> {
  using Element = typename Config::BiasElement;
  static constexpr bool kPerRow = Config::kBiasAccess != BiasAccess::columns;
  ScoreViewSlice<Element> slice;
  int row_bound;
  int column_bound;

  CUTE_DEVICE RegisterBias(ScoreView const& bias, int batch, int head, int row, int column,
                           int row_bound, int column_bound)
      : slice(bias, element_of<Config>(bias, batch), head, row, column),
        row_bound(row_bound),
        column_bound(column_bound) {}

  template <class Accumulators>
  CUTE_DEVICE void add(Accumulators& scores, float bias_scale) const {
    DirectBiasAdder<Element, Grid, kPerRow>::add(scores, slice, row_bound, column_bound,
                                                 bias_scale);
  }
};

}  // namespace memeff
