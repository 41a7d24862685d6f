// What the scores of a row are taken relative to before they become probabilities.
#pragma once

#include <memeff/core/math.cuh>

namespace memeff {

// exponent = (x - score) * softmax_scale - product, where score or product is 0.
//
// The product is rounded, which the fused multiply-add of the exponents finds. All exponents of a
// row have this error of half a last digit, and it divides out. But a bias of -1e9 in all keys of a
// row makes it many powers of two, which overflow or leave nothing. So kLargeScores subtracts such
// scores from each other before it multiplies.
template <bool kLargeScores>
struct ScoreReference {
  float score;
  float product;

  // Relative to the greatest score. A row in which all keys so far are masked has neither: -inf -
  // -inf would be NaN, and the probability of what a bias masked 1.
  CUTE_DEVICE static ScoreReference of(float greatest, float softmax_scale) {
    float const product = greatest * softmax_scale;
    bool const masked = product < kMaskedBias * kLog2e;
    bool const large = kLargeScores & !masked & fabsf(product) >= kWholeFloats;
    return {large ? greatest : 0.0f, masked | large ? 0.0f : product};
  }

  // What probabilities relative to the score x are multiplied by, in powers of two.
  CUTE_DEVICE float correction(float x, float softmax_scale) const {
    if constexpr (kLargeScores) x -= score;
    return x * softmax_scale - product;
  }
};

}  // namespace memeff
