// The user's function of scores (`score_mod`) in a main loop. ScoreModifiers calls it after the
// scale and before the bias.
//
// The generated struct Config::ScoreFunction (codegen/functions/emit.py documents its members)
// computes one element. Rows and columns are global positions, batch and head the user's indices.
// In masked elements they may lie beyond the captured arrays, so reads clamp their indices.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/function/of_tile.cuh>
#include <memeff/core/math.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// Whether warps read once for each diagonal of their scores.
template <class Config>
CUTE_HOST_DEVICE constexpr bool has_diagonal_reads() {
  if constexpr (Config::kScoreFunction) return Config::ScoreFunction::kHasDiagonalReads;
  return false;
}

// Applies the function, or its derivative, to the scores in the accumulators of Grid. kTransposed:
// see FunctionOfTile. kPackGqa: see GqaRows. Without a function it does nothing.
template <class Config, class Grid, bool kTransposed = false, bool kPackGqa = false,
          bool kOn = Config::kScoreFunction>
struct ScoreFunction {
  static constexpr bool kConstantDerivative = true;
  static constexpr bool kKeepsScores = false;

  template <class Params>
  CUTE_DEVICE ScoreFunction(Params const&) {}

  template <class Scores>
  CUTE_DEVICE void forward(Scores&, ScoreTilePosition const&) const {}
  template <class Scores>
  CUTE_DEVICE void differentiate(Scores const&, Scores&, ScoreTilePosition const&) const {}
};

template <class Config, class Grid, bool kTransposed, bool kPackGqa>
struct ScoreFunction<Config, Grid, kTransposed, kPackGqa, true> {
  using Function = typename Config::ScoreFunction;
  using Params = typename Config::Params;
  using OfTile = cute::conditional_t<
      kPackGqa,
      FunctionOfRows<Config, Function, Config::kScoreCaptured, Config::kScoreLiterals,
                     GqaRows<true>>,
      FunctionOfTile<Config, Function, Config::kScoreCaptured, Config::kScoreLiterals>>;
  static constexpr bool kConstantDerivative = Function::kConstantDerivative;
  // Gradients of captured arrays need the scores, and FunctionGradient evaluates the derivatives.
  static constexpr bool kKeepsScores =
      Config::kFunctionGradient && Function::kReadDerivativesUseScore;

  Params const& params;

  CUTE_DEVICE ScoreFunction(Params const& params) : params(params) {}

  // A score below kMaskedBias masks its element, as a bias does, because the softmax of such
  // kernels handles large scores (kLargeScores).
  template <class Scores>
  CUTE_DEVICE void forward(Scores& scores, ScoreTilePosition const& at) const {
    OfTile(params, at)
        .template for_each<Grid, kTransposed>(scores, [](float& score, auto const&... inputs) {
          score = Function::value(inputs...);
        });
  }

  // Writes the derivatives at `scores`. Hazard: call it before forward(), which changes the scores.
  template <class Scores>
  CUTE_DEVICE void differentiate(Scores const& scores, Scores& derivatives,
                                 ScoreTilePosition const& at) const {
    derivatives = scores;
    OfTile(params, at)
        .template for_each<Grid, kTransposed>(derivatives, [](float& score, auto const&... inputs) {
          score = Function::derivative(inputs...);
        });
  }
};

// ScoreFunction for kernels that start its reads along diagonals while a product runs, because they
// take hundreds of cycles. If there are any, forward() needs `reads`.
template <class Config, class Grid, bool kTransposed = false,
          bool kOn = has_diagonal_reads<Config>()>
struct ScoreFunctionWithReads : ScoreFunction<Config, Grid, kTransposed> {
  struct Reads {
    static constexpr bool kAny = false;

    template <class Params>
    CUTE_DEVICE Reads(Params const&, ScoreTilePosition const&) {}
  };

  template <class Params>
  CUTE_DEVICE ScoreFunctionWithReads(Params const& params, Reads const* = nullptr)
      : ScoreFunction<Config, Grid, kTransposed>(params) {}
};

template <class Config, class Grid, bool kTransposed>
struct ScoreFunctionWithReads<Config, Grid, kTransposed, true>
    : ScoreFunction<Config, Grid, kTransposed> {
  using Base = ScoreFunction<Config, Grid, kTransposed>;
  using Params = typename Config::Params;
  using OfTile = typename Base::OfTile;
  using Function = typename Config::ScoreFunction;
  static_assert(Grid::kRowBlocks == 1);

  struct Reads {
    static constexpr bool kAny = true;

    function::DiagonalReads<Function, Grid::kWarpColumns> values;

    CUTE_DEVICE Reads(Params const& params, ScoreTilePosition const& at)
        : values(OfTile(params, at).template read_diagonals<Grid, kTransposed>(0)) {}
  };

  Reads const* reads;

  CUTE_DEVICE ScoreFunctionWithReads(Params const& params, Reads const* reads = nullptr)
      : Base(params), reads(reads) {}

  template <class Scores>
  CUTE_DEVICE void forward(Scores& scores, ScoreTilePosition const& at) const {
    OfTile const of_tile(Base::params, at);
    of_tile.template for_each_in_rows<Grid, kTransposed>(
        0, reads->values, scores,
        [](float& score, auto const&... inputs) { score = Function::value(inputs...); });
  }
};

// Whether no modifier has a derivative other than 1, so that the gradient of the modified scores is
// that of the products' scores.
template <class Config>
CUTE_HOST_DEVICE constexpr bool has_constant_derivative() {
  if constexpr (Config::kScoreFunction) return Config::ScoreFunction::kConstantDerivative;
  return !Config::kSoftCap;
}

}  // namespace memeff
