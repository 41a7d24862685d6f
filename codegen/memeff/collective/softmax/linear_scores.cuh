// Score functions `score + slope * (key - query)` whose slope is one number per head (ALiBi).
//
// Evaluated element by element, such a function costs two instructions for each score. So the
// tensor cores add it, in three parts:
//
//   slope * column in the KV block                an additional product (ColumnProduct)
//   slope * (first column - first row of a tile)  ColumnShift, once for each row and KV block
//   slope * (first row of a tile - row)           LinearRows, once for each row
//
// Scores stay in the units of the products, so the scale of a call becomes a factor of
// softmax_scale.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/softmax/reference.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/function/of_tile.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// The slope of a work tile's head. Without Config::kLinearScores it does nothing.
template <class Config, bool kOn = Config::kLinearScores>
struct LinearScores {
  template <class Params>
  CUTE_DEVICE LinearScores(Params const&, WorkItem const&) {}

  CUTE_DEVICE static float softmax_scale(ScoreScale const& scale) { return scale.softmax_scale; }

  CUTE_DEVICE static NoShift shift(int, int) { return {}; }

  // Calls the modifiers of scores, unless the products have added the function.
  template <class Modify>
  CUTE_DEVICE static void modify(Modify const& modify) {
    modify();
  }

  template <class Grid, class Modifiers>
  CUTE_DEVICE static Modifiers const& rows(Modifiers const& modifiers, ScoreScale const&) {
    return modifiers;
  }
};

// Row modifiers after the part of a function that is the same for a whole row.
template <class Grid, class Modifiers>
struct LinearRows {
  Modifiers const& modifiers;
  float slope;  // in units of modified scores

  CUTE_DEVICE RowEnd finish(int r, RowEnd end) const {
    float const shift = -slope * float(Grid::element_row(2 * (r % 2), r / 2));
    return modifiers.finish(r, {end.factor, end.logsumexp + shift, end.maximum + shift});
  }
};

template <class Config>
struct LinearScores<Config, true> {
  using Element = typename Config::Element;
  using OfTile = FunctionOfTile<Config, typename Config::ScoreFunction, Config::kScoreCaptured,
                                Config::kScoreLiterals>;
  static_assert(!Config::kBias && !Config::kSoftCap && sizeof(Element) == 2);

  // Bounds on slopes, scales and distances. Within them the slope of a product is finite in
  // float16, scores without the shift have an error below 2e-4, and the rounded reference of a row
  // is close to its maximum. Scores beyond the bounds, or with a slope of NaN, are evaluated one by
  // one. docs/guide/precision.md states the bounds.
  static constexpr float kMostSlope = 8.0f;
  static constexpr float kLeastScale = 0x1p-12f;
  static constexpr float kMostScale = 16.0f;
  static constexpr float kMostShift = 0x1p24f;

  bool is_linear;        // else scores are evaluated one by one, and the slopes are 0
  float slope;           // of a product, for one column
  float scale;           // softmax_scale
  float exponent_slope;  // slope * scale
  uint32_t parts;        // of the slope: this lane's two numbers of the left operand
  int offset;            // the position of column 0 minus that of row 0

  template <class Params>
  CUTE_DEVICE LinearScores(Params const& params, WorkItem const& item) {
    OfTile const function(params, {item.batch, item.head, 0, 0});
    float const own = function.slope();
    float const prescale = params.scale.prescale;
    offset = function.difference_of_positions();
    float const distance =
        fabsf(float(offset)) + float(params.shape.query_length) + float(params.shape.key_length);
    is_linear = fabsf(own) <= kMostSlope && fabsf(own) * distance <= kMostShift &&
                prescale >= kLeastScale && prescale <= kMostScale;
    slope = is_linear ? own * reciprocal_approx(prescale) : 0.0f;
    scale = params.scale.softmax_scale * (is_linear ? prescale : 1.0f);
    exponent_slope = slope * scale;
    parts = lane_parts(slope);
  }

  CUTE_DEVICE float softmax_scale(ScoreScale const&) const { return scale; }

  // The shift of the tile of scores whose first row and column these are.
  CUTE_DEVICE ColumnShift shift(int row, int column) const {
    return {slope, exponent_slope, float(column - row + offset), !is_linear};
  }

  template <class Modify>
  CUTE_DEVICE void modify(Modify const& modify) const {
    if (!is_linear) modify();
  }

  template <class Grid, class Modifiers>
  CUTE_DEVICE LinearRows<Grid, Modifiers> rows(Modifiers const& modifiers,
                                               ScoreScale const& scale) const {
    return {modifiers, slope * scale.prescale};
  }

 private:
  // A row of the left operand is [high, middle, low, 0, 0, ...]. Three parts of 8 or 11 bits hold
  // all bits of a float.
  CUTE_DEVICE static uint32_t lane_parts(float x) {
    float const high = rounded(x);
    float const middle = rounded(x - high);
    float const low = x - high - middle;
    unsigned const lane = threadIdx.x % 4;
    return lane == 0 ? pack<Element>(high, middle) : lane == 1 ? pack<Element>(low, 0.0f) : 0u;
  }
  CUTE_DEVICE static float rounded(float x) { return unpack<Element>(pack<Element>(x, 0.0f), 0); }
};

// The product that adds `slope * column` to the scores of a KV block.
//
// The right operand is a constant. Its row for a column c of the KV block is [c, c, c, 0, 0, ...],
// 16 numbers, which 16 bits represent exactly. The left operand has the parts of the slope in each
// row. The product takes as long as 16 more columns of queries and keys would.
template <class Config, bool kOn = Config::kLinearScores>
struct ColumnProduct {
  static constexpr int kBytes = 0;

  CUTE_DEVICE static void write(uint32_t, int) {}
  template <class Scores>
  CUTE_DEVICE static void add(Scores&, LinearScores<Config> const&, uint32_t) {}
};

template <class Config>
struct ColumnProduct<Config, true> {
  using Element = typename Config::Element;
  // The narrowest tile that descriptors support has rows of 32 numbers. Nothing reads the last 16.
  using Tile = SharedTile<Config::kTileKey, 32>;
  static constexpr int kBytes = Tile::kBytes;
  static_assert(Config::kTileKey <= 256);  // bfloat16 has 8 bits

  // Writes the right operand with `threads` threads. Hazard: a barrier must follow.
  CUTE_DEVICE static void write(uint32_t tile, int threads) {
    CUTE_NO_UNROLL
    for (int i = threadIdx.x; i < 2 * Config::kTileKey; i += threads) {
      int const column = i / 2;
      float const number = i % 2 == 0 ? float(column) : 0.0f;
      store_shared_vector(tile + Tile::byte_offset(column, i % 2),
                          __uint_as_float(pack<Element>(number, number)),
                          __uint_as_float(pack<Element>(number, 0.0f)), 0.0f, 0.0f);
    }
    fence_tma_store();
  }

  // Starts the product, after that of queries and keys. Hazard: tensor cores truncate sums, so the
  // term that may be the largest comes last.
  template <class Scores>
  CUTE_DEVICE static void add(Scores& scores, LinearScores<Config> const& linear, uint32_t tile) {
    uint32_t const left[4] = {linear.parts, linear.parts, 0, 0};
    wgmma<Element, Major::K>(scores, left, DescriptorOperand<Tile, Contiguous::k>(tile).at(0),
                             true);
  }
};

}  // namespace memeff
