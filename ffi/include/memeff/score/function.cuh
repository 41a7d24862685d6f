// The user's function of scores (`score_mod`) in a main loop: ScoreModifiers call it behind the
// scale and before the bias.
//
// Config::Function is generated (codegen/functions/emit.py) and computes one element:
//
//   of_head(arrays, batch, head)         everything that no row and no column changes
//   of_row(arrays, of_head, query), of_column(arrays, of_head, key)
//   value(score, query, key, of_head, of_row, of_column, arrays)
//   derivative(...)                      d value / d score
//
// Rows and columns are global positions, batch and head the user's indices. They may lie beyond the
// arrays in masked elements; reads of captured arrays are clipped to their sizes.
#pragma once

#include <cute/tensor.hpp>

#include <memeff/core/feature_arrays.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/score/function_arrays.cuh>

namespace memeff {

// A score below this masks its element, as a bias below it does.
constexpr float kMaskedScore = -1e37f;

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

  FunctionArrays<Config> arrays;

  template <class Params>
  CUTE_DEVICE ScoreFunction(Params const& params) : arrays(params) {}

  template <class Scores>
  CUTE_DEVICE void forward(Scores& scores, ScoreTilePosition const& at) const {
    for_each(at, scores, [&](float& score, auto const&... inputs) {
      float const value = Function::value(score, inputs..., arrays);
      score = value < kMaskedScore ? -infinity() : value;
    });
  }

  // The derivatives at scores that forward() has not changed yet.
  template <class Scores>
  CUTE_DEVICE void differentiate(Scores const& scores, Scores& derivatives,
                                 ScoreTilePosition const& at) const {
    derivatives = scores;
    for_each(at, derivatives, [&](float& score, auto const&... inputs) {
      score = Function::derivative(score, inputs..., arrays);
    });
  }

 private:
  // use(accumulator, query, key, of_head, of_row, of_column) for each element.
  template <class Scores, class Use>
  CUTE_DEVICE void for_each(ScoreTilePosition const& at, Scores& scores, Use use) const {
    int const thread = thread_index();
    auto const of_head = Function::of_head(arrays, arrays.batch(at.batch), arrays.head(at.head));
    int const row = at.row + arrays.query_position(at.batch);
    int const column = at.column + arrays.key_position(at.batch);
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
            use(scores(2 * half + i, m, n), query, key, of_head,
                Function::of_row(arrays, of_head, query),
                Function::of_column(arrays, of_head, key));
          }
        }
      }
    }
  }
};

}  // namespace memeff
