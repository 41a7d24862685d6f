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

#include <memeff/score/function.cuh>
#include <memeff/score/scale.cuh>

namespace memeff {

// The bias of a kernel that is never compiled with one.
struct NoBias {
  template <class Scores>
  CUTE_DEVICE void add(Scores&, float) const {}
};

// Bias is the implementation that suits this kernel. It defines what `tile` is:
//   load(tile...)                     starts the copy of a tile
//   add(scores, bias_scale, tile...)  adds it
// NoBias does nothing, nor does a bias that leaves the probabilities unchanged
// (score/bias/rows.cuh).
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
