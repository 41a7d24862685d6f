// The softmax of one score and its gradient in a backward, given the row's logsumexp.
#pragma once

#include <memeff/arch/math.cuh>

namespace memeff {

// P of a modified score. `logsumexp` is that of the row in base 2: see ScoreScale.
CUTE_DEVICE float probability(float score, float softmax_scale, float logsumexp) {
  return exp2_approx(fmaf(score, softmax_scale, -logsumexp));
}

// dS = P (dP - delta), the gradient of the modified score. `kept` is dP if the
// element is kept, else 0, before the factor `scale` (collective/probability_modifiers.cuh).
CUTE_DEVICE float softmax_gradient(float probability, float kept, float scale, float delta) {
  return probability * fmaf(kept, scale, -delta);
}

}  // namespace memeff
