// The user's mask function (`Mask.function`), evaluated at the elements of a tile.
#pragma once

#include <memeff/core/function/of_tile.cuh>
#include <memeff/layout/gqa_rows.cuh>

namespace memeff {

// Sets the accumulators to -inf if the function is false for their element. Does nothing if the
// call has no mask function. ScoreMask calls it for partial tiles. kPackGqa: see GqaRows.
template <class Config, class Grid, bool kTransposed = false, bool kPackGqa = false>
struct MaskFunction {
  template <class Scores, class Params>
  CUTE_DEVICE static void apply(Scores& scores, Params const& params, ScoreTilePosition const& at) {
    if constexpr (Config::kMaskFunction) {
      using Function = typename Config::MaskFunction;
      using OfTile = cute::conditional_t<
          kPackGqa,
          FunctionOfRows<Config, Function, Config::kMaskCaptured, Config::kMaskLiterals,
                         GqaRows<true>>,
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
