// The softmax reference of a row, which is subtracted from its scores before exponentiation.
#pragma once

#include <memeff/core/math.cuh>

namespace memeff {

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

}  // namespace memeff
