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

}  // namespace memeff
