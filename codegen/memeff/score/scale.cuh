// Scale and soft cap of the scores.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/arch/tf32.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// Computes unit * tanh(prescale * score) in place. The special function unit is busy with the
// exponentials, so if no argument of a warp exceeds 5/8, tanh is evaluated as x q(x^2), with the
// best polynomial q of degree 2 for tanh(x) / x there. Its relative error is below 8.2e-5, a sixth
// of the special function unit's.
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

template <class Accumulators>
CUTE_DEVICE void scale_scores(Accumulators& scores, float prescale) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(scores); ++i) scores(i) *= prescale;
}

// The first modifier of a score: x = prescale * score, or its hyperbolic tangent, see ScoreScale.
template <class Config>
struct ScoreScaling {
  ScoreScale const& scale;

  // Without a function the accumulators stay untouched if prescale is 1 and there is no cap. With a
  // function it always multiplies, because a branch would prevent a fused multiply-add.
  template <class Scores>
  CUTE_DEVICE void forward(Scores& scores) const {
    if constexpr (Config::kScoreFunction) {
      scale_scores(scores, scale.prescale);
    } else {
      recompute(scores);
    }
  }

  // forward() in a backward. Hazard: keep the branch, which ends the basic block. Without it ptxas
  // moves ALiBi's multiplications at head dim 128 between the wgmmas of dP, serializes the wgmmas,
  // and spills.
  template <class Scores>
  CUTE_DEVICE void recompute(Scores& scores) const {
    if constexpr (Config::kSoftCap) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        float const x = scores(i) * scale.prescale;
        scores(i) = kIs32Bit<typename Config::Element> ? tanhf(x) : tanh_approx(x);
      }
    } else if (scale.prescale != 1.0f) {
      scale_scores(scores, scale.prescale);
    }
  }

  // The derivative of tanh is 1 - x^2. It is not constant, so a backward keeps x until it has the
  // gradient. The factor prescale is part of gradient_scale, which multiplies the sums at the end.
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

  // The x of a score that a mask may have set to -inf. tanh is at least -1, where the derivative is
  // 0, as needed for a masked score.
  CUTE_DEVICE static float unmasked(float x) { return fmaxf(x, -1.0f); }
};

// The scaling of a forward with a soft cap, by cap_scores(). kApplied: scores are also multiplied
// by softmax_scale, as an OnlineSoftmax with kCapped expects.
template <class Config, bool kApplied>
struct PolynomialCap {
  ScoreScale const& scale;

  static constexpr bool kConstantDerivative = false;

  template <class Scores>
  CUTE_DEVICE void forward(Scores& scores) const {
    cap_scores(scores, scale.prescale, kApplied ? scale.softmax_scale : 1.0f);
  }
};

}  // namespace memeff
