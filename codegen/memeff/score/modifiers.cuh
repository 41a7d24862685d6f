// The modifiers of scores between their product and the mask: all modifiers of a kernel as one
// object, in a fixed order.
//
//   x = score * scale           ScoreScaling
//   x = cap * tanh(x / cap)     ScoreScaling
//   x = f(x)                    ScoreFunction
//   x = x + bias                Bias
//
// A forward's main loop calls load() where it starts its other copies, and forward() once per tile
// of scores; a backward calls recompute() and backward(). No main loop tests which modifiers there
// are: without any, the calls compile to nothing. Modifiers of whole rows are in
// score/row_modifiers.cuh.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/arch/tf32.cuh>
#include <memeff/core/math.cuh>
#include <memeff/score/function.cuh>

namespace memeff {

// Scale and soft cap of the scores.

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

// The bias of a kernel that is never compiled with one.
struct NoBias {
  template <class Scores>
  CUTE_DEVICE void add(Scores&, float) const {}
};

// Bias is the implementation that suits this kernel. It defines what `tile` is:
//   load(tile...)                     starts the copy of a tile
//   add(scores, bias_scale, tile...)  adds it
// NoBias does nothing, nor does a bias that leaves the probabilities unchanged
// (score/row_modifiers.cuh).
template <class Config, class Bias, class Function, class Scaling = ScoreScaling<Config>>
struct ScoreModifiers {
  Scaling scaling;
  Function function;
  Bias bias;

  template <class... Tile>
  CUTE_DEVICE void load(Tile&&... tile) const {
    bias.load(tile...);
  }

  // load() if there is a next tile, at where(), which is called only if needed.
  template <class Where>
  CUTE_DEVICE void load_next(bool exists, Where where) const {
    bias.load_next(exists, where);
  }

  // Modifies the scores of the tile at `at`; the mask and the softmax follow.
  template <class Scores, class... Tile>
  CUTE_DEVICE void forward(Scores& scores, ScoreTilePosition const& at, Tile&&... tile) const {
    scaling.forward(scores);
    function.forward(scores, at);
    bias.add(scores, scaling.scale.bias_scale, tile...);
  }

  // forward() in a backward: stores in `scaled` the x that backward() needs, if a bias or a mask
  // will hide it. With a function it stores the derivative itself, or with kKeepsScores the score,
  // from which FunctionGradient computes the derivative.
  template <class Scores, class... Tile>
  CUTE_DEVICE void recompute(Scores& scores, Scores& scaled, ScoreTilePosition const& at,
                             Tile&&... tile) const {
    scaling.recompute(scores);
    scaled = scores;
    if constexpr (!Function::kConstantDerivative && !kKeepsScores) {
      function.differentiate(scores, scaled, at);
    }
    function.forward(scores, at);
    bias.add(scores, scaling.scale.bias_scale, tile...);
  }

  // recompute() that stores the derivatives of backward() instead, if they are not constant.
  template <class Scores, class... Tile>
  CUTE_DEVICE void recompute_with_derivatives(Scores& scores, Scores& derivatives,
                                              ScoreTilePosition const& at, Tile&&... tile) const {
    scaling.recompute(scores);
    scaling.differentiate(scores, derivatives);
    if constexpr (!Function::kConstantDerivative) function.differentiate(scores, derivatives, at);
    function.forward(scores, at);
    bias.add(scores, scaling.scale.bias_scale, tile...);
  }

  static constexpr bool kKeepsScores = Function::kKeepsScores;
  static constexpr bool kConstantDerivative =
      Scaling::kConstantDerivative && Function::kConstantDerivative;
  // A soft cap in front of a function is traced as part of it.
  static_assert(Scaling::kConstantDerivative || !Config::kScoreFunction);

  // The x of backward() from a score after all modifiers and the mask, and from the `scaled` of
  // recompute(). Without a bias the score is enough, and `scaled` takes no registers.
  CUTE_DEVICE static float input_of_derivative(float score, float scaled) {
    constexpr bool kScaled =
        has_bias_tile<Config>() || !Function::kConstantDerivative || kKeepsScores;
    return kScaled ? scaled : Scaling::unmasked(score);
  }

  // The gradient of the unmodified scores from that of the modified ones. `x` is the score after
  // the scaling, or the derivative of a function. The derivative of a bias is 1, and gradient_scale
  // multiplies the sums at the end.
  CUTE_DEVICE static float backward(float gradient, float x) {
    if constexpr (!Function::kConstantDerivative) return product(gradient, x);
    return Scaling::backward(gradient, x);
  }

  // The product of a number that is 0 at masked elements and of a derivative that
  // recompute_with_derivatives() has stored. Hazard: the derivative of a function at a masked
  // element may be inf or NaN.
  CUTE_DEVICE static float product(float x, float derivative) {
    if constexpr (!Function::kConstantDerivative) return x == 0.0f ? 0.0f : x * derivative;
    return x * derivative;
  }
};

}  // namespace memeff
