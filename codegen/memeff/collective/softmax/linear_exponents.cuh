// Score functions `score + slope * (key - query)` whose slope is one number per head (ALiBi), in a
// backward that has the logsumexps.
//
// Evaluated element by element, such a function and the scale cost three instructions for each
// score. Here the scale becomes a factor of softmax_scale, and the rest is subtracted from the
// logsumexp: two instructions for each column, and one for each score of a lane's second row.
#pragma once

#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/core/function/of_tile.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff {

// The exponents of transposed scores (rows are keys, columns are queries) in the accumulators of
// Grid, for one head. Without Config::kLinearScores the scores are complete.
template <class Config, class Grid, bool kOn = Config::kLinearScores>
struct LinearExponents {
  CUTE_DEVICE LinearExponents(BackwardParams const&, int, int) {}

  // Calls the modifiers of scores, unless the exponents contain them.
  template <class Modify>
  CUTE_DEVICE static void modify(Modify const& modify) {
    modify();
  }

  CUTE_DEVICE static float softmax_scale(ScoreScale const& scale) { return scale.softmax_scale; }

  CUTE_DEVICE static CompleteScores of_tile(BackwardParams const&, ScoreTilePosition const&) {
    return {};
  }
};

template <class Config, class Grid>
struct LinearExponents<Config, Grid, true> {
  using OfTile = FunctionOfTile<Config, typename Config::ScoreFunction, Config::kScoreCaptured,
                                Config::kScoreLiterals>;
  static_assert(!Config::kBias && !Config::kSoftCap && Grid::kRowBlocks == 1);

  // Within these bounds all terms are finite, and the scale keeps the sign of the scores. Beyond
  // them, and if the slope is NaN, scores are evaluated one by one.
  static constexpr float kMostSlope = 0x1p60f;
  static constexpr float kLeastScale = 0x1p-60f;
  static constexpr float kMostScale = 0x1p60f;

  // The scores of a tile without slope * (key - query).
  struct LinearColumns {
    float slope;
    float first;  // slope times the difference of key and query at the lane's first element

    // See CompleteScores. The term of the column is added first, so that a lane's two rows share
    // the result.
    CUTE_DEVICE float logsumexp(float of_column, int element, int n) const {
      // Distances from the lane's first element, which are constants for lane 0.
      int const query = Grid::element_column(element, n, 0u) - Grid::element_column(0, 0, 0u);
      int const key = Grid::element_row(element, 0, 0u) - Grid::element_row(0, 0, 0u);
      return fmaf(float(query), slope, of_column) - fmaf(slope, float(key), first);
    }
  };

  float slope;  // times softmax_scale; NaN if scores are evaluated one by one

  CUTE_DEVICE LinearExponents(BackwardParams const& params, int batch, int head) {
    float const own = OfTile(params, {batch, head, 0, 0}).slope();
    float const prescale = params.scale.prescale;
    bool const is_usual =
        fabsf(own) <= kMostSlope && prescale >= kLeastScale && prescale <= kMostScale;
    slope = is_usual ? own * params.scale.softmax_scale : __uint_as_float(0x7fc00000u);
  }

  CUTE_DEVICE bool is_linear() const { return slope == slope; }

  template <class Modify>
  CUTE_DEVICE void modify(Modify const& modify) const {
    if (!is_linear()) modify();
  }

  CUTE_DEVICE float softmax_scale(ScoreScale const& scale) const {
    return is_linear() ? scale.softmax_scale * scale.prescale : scale.softmax_scale;
  }

  CUTE_DEVICE LinearColumns of_tile(BackwardParams const& params,
                                    ScoreTilePosition const& at) const {
    OfTile const function(params, at);
    float const difference = function.template first_element<Grid, true>(thread_index()).first;
    return is_linear() ? LinearColumns{slope, slope * difference} : LinearColumns{0.0f, 0.0f};
  }
};

}  // namespace memeff
