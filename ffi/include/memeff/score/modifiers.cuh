// What changes scores between the product that computes them and the mask: all modifiers of a
// kernel as one object, in their fixed order.
//
//   x = score * scale           ScoreScaling
//   x = cap * tanh(x / cap)     ScoreScaling
//   x = x + bias                Bias
//
// A main loop calls load() where it starts its other copies, forward() once for each tile of
// scores. It does not know which modifiers there are. Without one, its calls compile to nothing.
// What changes whole rows at their end is in score/row_modifiers.cuh.
#pragma once

#include <memeff/score/scale.cuh>

namespace memeff {

// Bias is how this kernel brings a bias to its scores, and says what `tile` is:
//   load(tile...)                     starts the copy of a tile
//   add(scores, bias_scale, tile...)  adds it
// NoBias, and a bias that does not change probabilities, do nothing here.
template <class Config, class Bias, class Scaling = ScoreScaling<Config>>
struct ScoreModifiers {
  Scaling scaling;
  Bias bias;

  template <class... Tile>
  CUTE_DEVICE void load(Tile&&... tile) const {
    bias.load(tile...);
  }

  // The same if there is a next tile; where() says where, and is not called without a need.
  template <class Where>
  CUTE_DEVICE void load_next(bool exists, Where where) const {
    bias.load_next(exists, where);
  }

  // Scores of a tile, as the mask and the softmax expect them.
  template <class Scores, class... Tile>
  CUTE_DEVICE void forward(Scores& scores, Tile&&... tile) const {
    scaling.forward(scores);
    bias.add(scores, scaling.scale.bias_scale, tile...);
  }

  // forward() in a backward: leaves in `scaled` the x that backward() reads, if a bias or a mask
  // will hide it.
  template <class Scores, class... Tile>
  CUTE_DEVICE void recompute(Scores& scores, Scores& scaled, Tile&&... tile) const {
    scaling.forward(scores);
    scaled = scores;
    bias.add(scores, scaling.scale.bias_scale, tile...);
  }

  // The same, but leaves the derivatives of backward(), if they are not constant.
  template <class Scores, class... Tile>
  CUTE_DEVICE void recompute_with_derivatives(Scores& scores, Scores& derivatives,
                                              Tile&&... tile) const {
    scaling.forward(scores);
    scaling.differentiate(scores, derivatives);
    bias.add(scores, scaling.scale.bias_scale, tile...);
  }

  static constexpr bool kConstantDerivative = Scaling::kConstantDerivative;

  // The x of backward() from a score after all modifiers and the mask, and from the `scaled` of
  // recompute(). Without a bias the score is enough, and `scaled` takes no registers.
  CUTE_DEVICE static float input_of_derivative(float score, float scaled) {
    return has_bias_tile<Config>() ? scaled : Scaling::unmasked(score);
  }

  // The gradient of the products' scores from that of the modified ones. `x` is the score after
  // the scaling. A bias has the factor 1, and gradient_scale multiplies the sums at the end.
  CUTE_DEVICE static float backward(float gradient, float x) {
    return Scaling::backward(gradient, x);
  }
};

}  // namespace memeff
