// The logsumexp and delta of the two rows in which a thread owns elements, in registers.
#pragma once

#include <memeff/layout/backward_workspaces.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// For scores whose rows are queries, in the accumulators of a warpgroup. The dq and dbias kernels
// of Hopper use it.
template <class Grid>
struct RegisterStatistics {
  float2 rows[2];

  // The logsumexp for accumulator i, and the delta for this half of a 16x16 block.
  CUTE_DEVICE float logsumexp(int i) const { return rows[i % 4 / 2].x; }
  CUTE_DEVICE float delta(int half) const { return rows[half].y; }

  // Computes P from S in place.
  template <class Scores>
  CUTE_DEVICE void exponentiate(float softmax_scale, Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) = probability(scores(i), softmax_scale, logsumexp(i));
    }
  }

  // As above, times the derivative of the score modifiers; `scaled` comes from
  // ScoreModifiers::recompute().
  template <class Modifiers, class Scores>
  CUTE_DEVICE void exponentiate_and_differentiate(float softmax_scale, Scores const& scaled,
                                                  Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      float const score = scores(i);
      scores(i) = Modifiers::backward(probability(score, softmax_scale, logsumexp(i)),
                                      Modifiers::input_of_derivative(score, scaled(i)));
    }
  }
};

}  // namespace memeff
