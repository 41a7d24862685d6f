// The user's function of a mask (`Mask.function`): tests of elements.
#pragma once

#include <memeff/core/function/of_tile.cuh>

namespace memeff {

// Sets the accumulators of elements for which the function is false to -inf. Without a function it
// is empty.
template <class Config, class Grid, bool kTransposed = false>
struct MaskFunction {
  template <class Scores, class Params>
  CUTE_DEVICE static void apply(Scores& scores, Params const& params, ScoreTilePosition const& at) {
    if constexpr (Config::kMaskFunction) {
      using Function = typename Config::MaskFunction;
      FunctionOfTile<Config, Function, Config::kMaskCaptured, Config::kMaskLiterals> const of_tile(
          params, at);
      of_tile.template for_each<Grid, kTransposed>(scores, [](float& score, auto const&... inputs) {
        if (!Function::value(inputs...)) {
          score = -infinity();
        }
      });
    }
  }
};

}  // namespace memeff
