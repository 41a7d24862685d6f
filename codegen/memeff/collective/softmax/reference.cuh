// The number that is subtracted from the scores of a row before exponentiation, and the terms that
// the scores of a KV block lack.
#pragma once

#include <memeff/core/math.cuh>

namespace memeff {

// The softmax reference of a row, which is subtracted from its scores before exponentiation.
//
// exponent = (x - score) * softmax_scale - product, where score or product is 0.
//
// Hazard: the product is rounded, and the fused multiply-add of the exponents exposes the rounding
// error. All exponents of a row have the same error, so normally it cancels. But if all keys of a
// row have a bias of -1e9, the error is many powers of two, and the exponentials overflow or
// vanish. kLargeScores therefore subtracts such scores before it multiplies.
template <bool kLargeScores>
struct ScoreReference {
  float score;
  float product;

  // The reference for a given greatest score. Hazard: if all keys of a row so far are masked, score
  // and product must be 0, because -inf - -inf would be NaN, and elements masked by a bias would
  // get probability 1.
  CUTE_DEVICE static ScoreReference of(float greatest, float softmax_scale) {
    float const product = greatest * softmax_scale;
    bool const masked = product < kMaskedBias * kLog2e;
    bool const large = kLargeScores & !masked & fabsf(product) >= kWholeFloats;
    return {large ? greatest : 0.0f, masked | large ? 0.0f : product};
  }

  // The exponent of two that converts probabilities relative to the score x to this reference.
  CUTE_DEVICE float correction(float x, float softmax_scale) const {
    if constexpr (kLargeScores) x -= score;
    return x * softmax_scale - product;
  }
};

// A number that is left out of the scores of a KV block, and is the same for all of them. The
// online softmax compares and exponentiates scores without it, and adds it once for each row.

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
