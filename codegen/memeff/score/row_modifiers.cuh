// The modifiers of whole rows at the end of a forward: all such features of a kernel as one object,
// in a fixed order.
//
//   lse = lse + bias of the row, maximum likewise   RowBias
//   lse = log(exp(lse) + exp(sink))                 RowSink
//   the maximum is written                          RowMaximum
//
// Every forward finishes each row with RowModifiers::finish(), exactly once. With split keys the
// combine kernel calls it instead of the forward. Without a feature the calls compile to nothing.
#pragma once

#include <memeff/score/bias/rows.cuh>
#include <memeff/score/row_maximum.cuh>
#include <memeff/score/sink.cuh>

namespace memeff {

// The modifiers of one row. A new feature is a member with finish(). Its constructor loads its
// data, so all rows of a lane are loaded before any is finished.
template <class Config>
struct RowModifiers {
  RowBias<Config> bias;
  RowSink<Config> sink;
  RowMaximum<Config> maximum;

  RowModifiers() = default;
  CUTE_DEVICE RowModifiers(ForwardParams const& params, RowPosition const& row)
      : bias(params, row), sink(params, row), maximum(params, row) {}

  CUTE_DEVICE RowEnd finish(RowEnd end) const {
    return maximum.finish(sink.finish(bias.finish(end)));
  }
};

// The modifiers of the rows in which a lane has elements.
template <class Config, class Grid>
struct LaneRowModifiers {
  static constexpr int kRows = 2 * Grid::kRowBlocks;

  RowModifiers<Config> rows[kRows];

  template <bool kPackGqa>
  CUTE_DEVICE LaneRowModifiers(ForwardParams const& params, RowsOfTile<kPackGqa> const& tile) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      rows[r] = RowModifiers<Config>(params, tile.at(Grid::element_row(2 * (r % 2), r / 2)));
    }
  }

  CUTE_DEVICE RowEnd finish(int r, RowEnd end) const { return rows[r].finish(end); }
};

}  // namespace memeff
