// A bias that is broadcast over columns: one number for each row of scores.
//
// It shifts all scores of a row equally, which shifts the logsumexp and leaves the probabilities
// unchanged. So no main loop reads it.
#pragma once

#include <memeff/layout/score_view.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/row_end.cuh>

namespace memeff {

template <class Config>
CUTE_DEVICE float row_bias(ScoreView const& bias, int batch, int head, int row) {
  ScoreViewSlice<typename Config::BiasElement> const slice(bias, element_of<Config>(bias, batch),
                                                           head, row, 0);
  return float(*slice.at(0, 0));
}

// The bias of one row, for RowModifiers. Does nothing without such a bias.
template <class Config, bool kBias = shifts_rows<Config>()>
struct RowBias {
  float value;

  RowBias() = default;
  CUTE_DEVICE RowBias(ForwardParams const& params, RowPosition const& row)
      : value(row.valid ? row_bias<Config>(params.bias, row.batch, row.head, row.query) : 0.0f) {}

  // A bias below kMaskedBias masks every element of the row; any other bias shifts the logsumexp
  // and the maximum.
  CUTE_DEVICE RowEnd finish(RowEnd end) const {
    if (value < kMaskedBias) return RowEnd::empty();
    return {end.factor, end.logsumexp + value, end.maximum + value};
  }
};

template <class Config>
struct RowBias<Config, false> {
  RowBias() = default;
  CUTE_DEVICE RowBias(ForwardParams const&, RowPosition const&) {}
  CUTE_DEVICE RowEnd finish(RowEnd end) const { return end; }
};

}  // namespace memeff
