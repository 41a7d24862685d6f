// The largest score of each row, which users ask for to keep logits from growing.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/score/row_end.cuh>

namespace memeff {

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

}  // namespace memeff
