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

#include <memeff/core/common.cuh>
#include <memeff/core/math.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/layout/score_view.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// A row at the end of a forward: its position, and the factor of its output, its logsumexp and its
// maximum.

// The indices of a row, and whether it is valid.
struct RowPosition {
  int batch;
  int head;
  int query;
  bool valid;  // below the query length, and not a partial row that the combine kernel finishes
};

// The rows of a tile of one (batch index, head): it begins at `row`, and rows from `bound` on are
// not valid. With kPackGqa both count the rows of all heads of a tile.
template <bool kPackGqa = false>
struct RowsOfTile {
  GqaRows<kPackGqa> rows;
  int batch;
  int head;
  int row;
  int bound;

  CUTE_DEVICE RowsOfTile(ProblemShape const& shape, int batch, int head, int row, int bound)
      : rows(shape), batch(batch), head(head), row(row), bound(bound) {}

  CUTE_DEVICE RowPosition at(int tile_row) const {
    int const r = row + tile_row;
    return {batch, rows.query_head(head, r), rows.query(r), r < bound};
  }
};

// The result of a row. A row without keys, or one that is not valid, has the factor 0, and its
// logsumexp and maximum are -inf.
struct RowEnd {
  float factor;     // normalizes the output
  float logsumexp;  // natural logarithm
  float maximum;    // of the scores; only a softmax of Config::kRowMaxima has it

  CUTE_DEVICE static RowEnd empty() { return {0.0f, -infinity(), -infinity()}; }
};

// A bias that is broadcast over columns: one number for each row of scores.
//
// It shifts all scores of a row equally, which shifts the logsumexp and leaves the probabilities
// unchanged. So no main loop reads it.

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

// Attention sinks: a logit per head that takes part in the softmax of a row but has no value.
//
//   out = sum of exp(s) v / (sum of exp(s) + exp(sink)),   lse = log(sum of exp(s) + exp(sink))

// The sink of one row, for RowModifiers. Without sinks it does nothing.
template <class Config, bool kSinks = Config::kSinks>
struct RowSink {
  float value;  // -inf: no sink, and no bit changes

  RowSink() = default;
  CUTE_DEVICE RowSink(ForwardParams const& params, RowPosition const& row)
      : value(row.valid ? load(feature_array(params, Config::kSinksArray), row) : -infinity()) {}

  // Uses the larger of logsumexp and sink as reference, so neither a sink far above the scores nor
  // one far below them overflows. A row without keys keeps the factor 0; its logsumexp becomes the
  // sink.
  CUTE_DEVICE RowEnd finish(RowEnd end) const {
    if (value == -infinity()) return end;
    float const distance = value - end.logsumexp;
    float const exponential = exp2_approx(-fabsf(distance) * kLog2e);
    float const share = distance > 0.0f ? exponential : 1.0f;  // of the keys, not yet normalized
    float const largest = fmaxf(value, end.logsumexp);
    return {end.factor * share / (1.0f + exponential),
            fmaf(log2_approx(1.0f + exponential), kLn2, largest), end.maximum};
  }

 private:
  CUTE_DEVICE static float load(ArrayView const& sinks, RowPosition const& row) {
    float const* const values = static_cast<float const*>(sinks.data);
    return values[element_of<Config>(sinks, row.batch) * sinks.strides[0] + row.head];
  }
};

template <class Config>
struct RowSink<Config, false> {
  RowSink() = default;
  CUTE_DEVICE RowSink(ForwardParams const&, RowPosition const&) {}
  CUTE_DEVICE RowEnd finish(RowEnd end) const { return end; }
};

// The largest score of each row, which users ask for to keep logits from growing.

// Writes the maximum of one row for RowModifiers. Without the feature it does nothing.
//
// Only valid rows are written; XLA ignores the others, whose logsumexp is -inf. The lanes of a quad
// write the same number to one address, in a single transaction.
template <class Config, bool kRowMaxima = Config::kRowMaxima>
struct RowMaximum {
  float* target;  // null if the row is not valid

  RowMaximum() = default;
  CUTE_DEVICE RowMaximum(ForwardParams const& params, RowPosition const& row)
      : target(row.valid ? address(params, row) : nullptr) {}

  CUTE_DEVICE RowEnd finish(RowEnd end) const {
    if (target != nullptr) *target = end.maximum;
    return end;
  }

 private:
  // The array has the layout of the logsumexp.
  CUTE_DEVICE static float* address(ForwardParams const& params, RowPosition const& row) {
    float* const maxima = static_cast<float*>(feature_array(params, Config::kRowMaximaArray).data);
    Origin const origin = query_origin<Config>(params.shape, row.batch);
    return maxima + logsumexp_offset<Config>(params.shape, origin, row.head) + row.query;
  }
};

template <class Config>
struct RowMaximum<Config, false> {
  RowMaximum() = default;
  CUTE_DEVICE RowMaximum(ForwardParams const&, RowPosition const&) {}
  CUTE_DEVICE RowEnd finish(RowEnd end) const { return end; }
};

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
