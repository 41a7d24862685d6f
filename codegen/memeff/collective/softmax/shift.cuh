// A number that is left out of the scores of a KV block, and is the same for all of them.
//
// The online softmax compares and exponentiates scores without it, and adds it once for each row
// (collective/softmax/online.cuh).
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// The scores are complete.
struct NoShift {
  static constexpr bool kIsOn = false;

  // The missing number, as a score.
  CUTE_DEVICE static float score() { return 0.0f; }
  // The complete score.
  CUTE_DEVICE static float add(float score) { return score; }
  // The addend of an exponent for a softmax reference times softmax_scale.
  CUTE_DEVICE static float exponent(float product) { return -product; }
};

// The scores lack slope * distance. They are small without it: they are the products of a call and
// at most 128 times the slope. With `is_complete` the slope is 0, and scores may be large.
struct ColumnShift {
  static constexpr bool kIsOn = true;

  float slope;
  float exponent_slope;  // slope times softmax_scale
  float distance;
  bool is_complete;

  CUTE_DEVICE float score() const { return slope * distance; }
  CUTE_DEVICE float add(float score) const { return fmaf(slope, distance, score); }
  // Hazard: both terms may be large and their sum small. Rounding the product first would change
  // the weights of KV blocks relative to each other.
  CUTE_DEVICE float exponent(float product) const {
    return fmaf(exponent_slope, distance, -product);
  }
};

}  // namespace memeff
