// The user's function of scores (`score_mod`) in a main loop: ScoreModifiers call it behind the
// scale and before the bias.
//
// Config::Function is generated (codegen/functions/emit.py, which documents its members) and computes
// one element. Rows and columns are global positions, batch and head the user's indices. They may lie
// beyond the captured arrays in masked elements: reads are clipped.
#pragma once

#include <cute/tensor.hpp>

#include <memeff/core/feature_arrays.cuh>
#include <memeff/core/function/arrays.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// The function at the scores of one CTA, in the accumulators of Grid. kTransposed: rows of the
// accumulators are keys, columns are queries. Without a function all of it is empty.
template <class Config, class Grid, bool kTransposed = false, bool kOn = Config::kScoreFunction>
struct ScoreFunction {
  static constexpr bool kConstantDerivative = true;

  template <class Params>
  CUTE_DEVICE ScoreFunction(Params const&) {}

  template <class Scores>
  CUTE_DEVICE void forward(Scores&, ScoreTilePosition const&) const {}
  template <class Scores>
  CUTE_DEVICE void differentiate(Scores const&, Scores&, ScoreTilePosition const&) const {}
};

template <class Config, class Grid, bool kTransposed>
struct ScoreFunction<Config, Grid, kTransposed, true> {
  using Function = typename Config::Function;
  static constexpr bool kConstantDerivative = Function::kConstantDerivative;

  ArrayTable const& table;
  MaskParams const& mask;

  template <class Params>
  CUTE_DEVICE ScoreFunction(Params const& params)
      : table(feature_arrays(params)), mask(params.mask) {}

  // A score below kMaskedBias masks its element, as a bias does.
  template <class Scores>
  CUTE_DEVICE void forward(Scores& scores, ScoreTilePosition const& at) const {
    for_each(at, scores, [](float& score, auto const&... inputs) {
      float const value = Function::value(inputs...);
      score = value < kMaskedBias ? -infinity() : value;
    });
  }

  // The derivatives at scores that forward() has not changed yet.
  template <class Scores>
  CUTE_DEVICE void differentiate(Scores const& scores, Scores& derivatives,
                                 ScoreTilePosition const& at) const {
    derivatives = scores;
    for_each(at, derivatives, [](float& score, auto const&... inputs) {
      score = Function::derivative(inputs...);
    });
  }

 private:
  CUTE_DEVICE int index_at(int array, int i) const {
    return static_cast<int const*>(table.arrays[array].data)[i];
  }

  // use(accumulator, arguments of Function::value...) for each element.
  template <class Scores, class Use>
  CUTE_DEVICE void for_each(ScoreTilePosition const& at, Scores& scores, Use use) const {
    function::FunctionArrays<Config> const arrays = {
        table.arrays + Config::kFirstCapturedArray,
        static_cast<unsigned const*>(table.arrays[Config::kFunctionLiteralsArray].data), at.batch};
    auto const of_head = Function::of_head(arrays, index_at(Config::kBatchIndexArray, at.batch),
                                           index_at(Config::kHeadIndexArray, at.head));
    int const row = at.row + (Config::kPositions ? mask.query_position[at.batch] : 0);
    int const column = at.column + (Config::kPositions ? mask.key_position[at.batch] : 0);
    int const thread = thread_index();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const major = Grid::element_row(2 * half, m, thread);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(scores); ++n) {
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            int const minor = Grid::element_column(i, n, thread);
            int const query = row + (kTransposed ? minor : major);
            int const key = column + (kTransposed ? major : minor);
            float& score = scores(2 * half + i, m, n);
            use(score, arrays, of_head, Function::of_row(arrays, of_head, query),
                Function::of_column(arrays, of_head, key), score, query, key);
          }
        }
      }
    }
  }
};

// Whether the gradient of the modified scores is that of the products' scores.
template <class Config>
CUTE_HOST_DEVICE constexpr bool has_constant_derivative() {
  if constexpr (Config::kScoreFunction) return Config::Function::kConstantDerivative;
  return !Config::kSoftCap;
}

}  // namespace memeff
