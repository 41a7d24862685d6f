// The user's function of a mask (`Mask.function`): tests of elements.
#pragma once

#include <memeff/core/function/of_rows.cuh>
#include <memeff/core/function/of_tile.cuh>
#include <memeff/layout/packed_rows.cuh>

namespace memeff {

// Sets the accumulators of elements for which the function is false to -inf. Without a function it
// is empty. kPackHeads: see PackedRows.
template <class Config, class Grid, bool kTransposed = false, bool kPackHeads = false>
struct MaskFunction {
  template <class Scores, class Params>
  CUTE_DEVICE static void apply(Scores& scores, Params const& params, ScoreTilePosition const& at) {
    if constexpr (Config::kMaskFunction) {
      using Function = typename Config::MaskFunction;
      using OfTile = cute::conditional_t<
          kPackHeads,
          FunctionOfRows<Config, Function, Config::kMaskCaptured, Config::kMaskLiterals,
                         PackedRows<true>>,
          FunctionOfTile<Config, Function, Config::kMaskCaptured, Config::kMaskLiterals>>;
      OfTile const of_tile(params, at);
      of_tile.template for_each<Grid, kTransposed>(scores, [](float& score, auto const&... inputs) {
        if (!Function::value(inputs...)) {
          score = -infinity();
        }
      });
    }
  }
};

}  // namespace memeff
