// dS^T from P^T and dP^T, for kernels whose scores are transposed: rows of the accumulators are
// keys, columns are queries.
#pragma once

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/layout/row_statistics.cuh>
#include <memeff/score/bias/gradient_transposed.cuh>
#include <memeff/score/captured/function_gradient.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// Computes dS^T, the gradient of Q K^T, not yet multiplied by the user's scale, and the modified
// P^T. Both are packed block by block, which frees the accumulators. The consumers of
// fmha_bwd_sm90.cuh call it once per Q block.
template <class Config, class Modifiers, class BiasWriter, class Grid, class Kept, class Scores,
          class Operand, class FunctionGradient, class DeltaReader>
CUTE_DEVICE void differentiate_transposed(
    BackwardParams const& params, DeltaReader const& delta_reader,
    ScoreTilePosition const& position, Kept const& kept_blocks, Scores const& scaled,
    Scores const& scores, Scores const& score_gradient, Operand& probabilities,
    Operand& left_gradient, typename BiasWriter::Sums& bias_sums,
    FunctionGradient function_gradient, typename FunctionGradient::Sums& function_sums) {
  using Element = typename Config::Element;
  BiasWriter const bias_gradient(params, position);
  // Handles sixteen queries and the sixteen keys of this warp.
  auto block = [&](int, int row_block, auto const& keep) {
    auto const deltas = delta_reader.pair(row_block);
    CUTE_UNROLL
    for (int chunk = 0; chunk < 2; ++chunk) {
      int const n = 2 * row_block + chunk;
      float chunk_gradient[4];  // of the modified scores
      float chunk_scaled[4];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float kept[2];
        float gradient[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const element = 2 * half + i;
          float const p = scores(element, 0, n);
          float const kept_gradient = keep.select(score_gradient(element, 0, n), chunk, half, i);
          gradient[i] = softmax_gradient(p, kept_gradient, probability_scale<Config>(params),
                                         deltas.of[2 * chunk + i]);
          kept[i] = keep.select(p, chunk, half, i);
        }
        bias_gradient.pair(bias_sums, n, half, gradient);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const element = 2 * half + i;
          chunk_gradient[element] = gradient[i];
          chunk_scaled[element] = scaled(element, 0, n);
          gradient[i] = Modifiers::backward(gradient[i], chunk_scaled[element]);
        }
        probabilities.fragments[0][row_block][2 * chunk + half] = pack<Element>(kept[0], kept[1]);
        if constexpr (!Modifiers::kKeepsScores) {
          left_gradient.fragments[0][row_block][2 * chunk + half] =
              pack<Element>(gradient[0], gradient[1]);
        }
      }
      function_gradient.chunk(function_sums, 0, n, chunk_gradient, chunk_scaled);
      if constexpr (Modifiers::kKeepsScores) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          float gradient[2];
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            int const element = 2 * half + i;
            gradient[i] = Modifiers::backward(chunk_gradient[element], chunk_scaled[element]);
          }
          left_gradient.fragments[0][row_block][2 * chunk + half] =
              pack<Element>(gradient[0], gradient[1]);
        }
      }
    }
  };
  CUTE_UNROLL
  for (int n = 0; n < Grid::kColumnBlocks; ++n) block(0, n, kept_blocks.block(0, n));
}

}  // namespace memeff
