// Attention sinks: a logit per head that takes part in the softmax of a row but has no value.
//
//   out = sum of exp(s) v / (sum of exp(s) + exp(sink)),   lse = log(sum of exp(s) + exp(sink))
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/score/row_end.cuh>

namespace memeff {

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

}  // namespace memeff
