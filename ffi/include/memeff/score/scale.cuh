// Scale and soft cap of the scores.
#pragma once

#include <cute/tensor.hpp>

#include <memeff/arch/tf32.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// unit * tanh(prescale * score). The special function unit has the exponentials to compute. So
// where none of a warp's arguments is beyond 5/8, hyperbolic tangents are x q(x^2), with the
// polynomial of degree 2 that is nearest to tanh(x) / x there: its relative error is below 8.2e-5,
// a sixth of that unit's.
template <class Accumulators>
CUTE_DEVICE void cap_scores(Accumulators& scores, float prescale, float unit) {
  float greatest = 0.0f;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(scores); ++i) greatest = fmaxf(greatest, fabsf(scores(i)));
  if (warp_any(!(greatest * fabsf(prescale) <= 0.625f))) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) = unit * tanh_approx(scores(i) * prescale);
    }
  } else {
    float const square = prescale * prescale;
    float const c0 = 0.99992075f * prescale * unit;
    float const c1 = -0.3296211f * prescale * unit * square;
    float const c2 = 0.10660988f * prescale * unit * square * square;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      float const x = scores(i);
      float const u = x * x;
      scores(i) = x * fmaf(fmaf(c2, u, c1), u, c0);
    }
  }
}

// x = prescale * score, or tanh of it: see ScoreScale. Leaves the accumulators alone when there is
// nothing to do.
template <class Element, bool kSoftCap, class Accumulators>
CUTE_DEVICE void prescale_scores(Accumulators& scores, ScoreScale const& scale) {
  if constexpr (kSoftCap) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      float const x = scores(i) * scale.prescale;
      scores(i) = kIs32Bit<Element> ? tanhf(x) : tanh_approx(x);
    }
  } else if (scale.prescale != 1.0f) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) scores(i) *= scale.prescale;
  }
}

// The first modifier of a score: x = prescale * score, or its hyperbolic tangent.
template <class Config>
struct ScoreScaling {
  ScoreScale const& scale;

  template <class Scores>
  CUTE_DEVICE void forward(Scores& scores) const {
    prescale_scores<typename Config::Element, Config::kSoftCap>(scores, scale);
  }

  // The derivative of tanh is 1 - x^2. It is not constant: a backward keeps x until it has the
  // gradient. The factor prescale is part of gradient_scale, which multiplies sums at the end.
  static constexpr bool kConstantDerivative = !Config::kSoftCap;

  CUTE_DEVICE static float derivative(float x) {
    return Config::kSoftCap ? fmaf(-x, x, 1.0f) : 1.0f;
  }

  CUTE_DEVICE static float backward(float gradient, float x) {
    if constexpr (kConstantDerivative) return gradient;
    return gradient * derivative(x);
  }

  template <class Scores>
  CUTE_DEVICE static void differentiate(Scores const& scores, Scores& derivatives) {
    if constexpr (!kConstantDerivative) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) derivatives(i) = derivative(scores(i));
    }
  }

  // The x of a score that a mask may have made -inf. tanh is at least -1, where the derivative of
  // a masked score is 0 as it should be.
  CUTE_DEVICE static float unmasked(float x) { return fmaxf(x, -1.0f); }
};

}  // namespace memeff
