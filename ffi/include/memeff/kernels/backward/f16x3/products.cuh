// The products of the 3xFP16 backward (core/f16x3.cuh): S and dP from rows of two tiles, and the
// gradients from P or dS in registers and a tile.
//
// S and dP are multiplied by the factors of their query and their key. P and dS are multiplied by
// the factors of the rows that they are summed over, and only then is each row of them scaled.
//
// Hazard: tensor cores truncate accumulators instead of rounding them. So small products come
// first, and each gradient accumulates the products of one tile separately, then adds the result
// with rounding.
#pragma once

#include <memeff/arch/tma.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/f16x3.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/f16x3_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>

namespace memeff {

// The bytes of a tile's hi and lo parts, and those of its factors. Unlike in the workspaces, the
// two are stored apart in shared memory, because two tiles with their factors would not fit if each
// were padded.
template <class Tile>
constexpr int kF16x3PartBytes = Tile::kFactors;
constexpr int kF16x3FactorBytes = kWarpgroupRows * int(sizeof(float));

// Starts the copy of a tile; all of its bytes arrive at `barrier`.
template <class Tile>
CUTE_DEVICE void load_f16x3(char const* tile, uint64_t& barrier, uint32_t parts, uint32_t factors) {
  static_assert(Tile::kBytes == kF16x3PartBytes<Tile> + kF16x3FactorBytes);
  load_tma(tile, barrier, parts, kF16x3PartBytes<Tile>);
  load_tma(tile + Tile::kFactors, barrier, factors, kF16x3FactorBytes);
}

// The factors of the two rows in which a lane has elements.
struct RowFactors {
  float of[2];

  template <class Grid>
  CUTE_DEVICE static RowFactors load(uint32_t factors) {
    uint32_t const rows =
        factors + Grid::element_row(0, 0, thread_index()) % kWarpgroupRows * int(sizeof(float));
    return {{__uint_as_float(load_shared(rows)), __uint_as_float(load_shared(rows + 8 * 4))}};
  }
};

// A consumer's 64 rows of a tile, the left operand of S or dP in every iteration. As many k-steps
// as fit in kRegisters registers are register operands, starting with those of the hi parts, which
// two of the three products read. A product of 64 columns saturates the bandwidth of shared memory
// if its left operand is there, too.
template <class Tile, int kRegisters>
struct F16x3Rows {
  static constexpr int kHighSteps = register_steps(Tile::kColumns, kRegisters);
  static constexpr int kLowSteps = register_steps(Tile::kColumns, kRegisters - 4 * kHighSteps);
  using Part = typename Tile::Part;
  using Grid = WarpgroupGrid<Tile::kRows, 64>;
  RegisterRows<Part, Grid, kHighSteps> high;
  RegisterRows<Part, Grid, kLowSteps> low;

  CUTE_DEVICE explicit F16x3Rows(uint32_t tile) : high(tile, 0), low(tile + Tile::kLow, 0) {}
};

// Starts scores = left right^T, from the rows of two tiles, as a group of products.
template <class Tile, class Rows, class Scores>
CUTE_DEVICE void begin_f16x3_scores(Scores& scores, Rows const& left, uint32_t right) {
  using Columns = DescriptorOperand<typename Tile::Part, Contiguous::k>;
  constexpr int kSteps = Tile::kColumns / 16;
  using Half = cutlass::half_t;
  fence_accumulators(scores);
  begin_products();
  warpgroup_gemm<Half, kSteps>(scores, left.low, Columns(right), false);
  warpgroup_gemm<Half, kSteps>(scores, left.high, Columns(right + Tile::kLow), true);
  warpgroup_gemm<Half, kSteps>(scores, left.high, Columns(right), true);
  commit_products();
}

// Calls use(n, factors) for each column block of the accumulators, with the factors of a lane's two
// columns.
template <class Scores, class Use>
CUTE_DEVICE void for_each_column_pair(Scores const&, uint32_t factors, Use use) {
  uint32_t const own = factors + thread_index() % 4 * 2 * int(sizeof(float));
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(Scores{}); ++n) {
    use(n, load_shared_pair(own + n * 8 * int(sizeof(float))));
  }
}

// Multiplies scores by the factors of their columns.
template <class Scores>
CUTE_DEVICE void scale_columns(Scores& scores, uint32_t factors) {
  for_each_column_pair(scores, factors, [&](int n, float2 pair) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      scores(2 * half, 0, n) *= pair.x;
      scores(2 * half + 1, 0, n) *= pair.y;
    }
  });
}

// Multiplies scores by the factors of their columns and of their rows, one after the other, because
// the product of two factors may underflow in f32.
template <class Scores>
CUTE_DEVICE void unscale(Scores& scores, RowFactors const& rows, uint32_t column_factors) {
  for_each_column_pair(scores, column_factors, [&](int n, float2 pair) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      scores(2 * half, 0, n) = scores(2 * half, 0, n) * pair.x * rows.of[half];
      scores(2 * half + 1, 0, n) = scores(2 * half + 1, 0, n) * pair.y * rows.of[half];
    }
  });
}

// P or dS as a left operand: its hi and lo parts, and the factors for the product's rows.
template <int kSteps>
struct F16x3LeftOperand {
  RegisterOperand<1, kSteps, 2> high;
  RegisterOperand<1, kSteps, 2> low;
  float factors[2];

  // Scales each row of the scores and splits them.
  template <class Scores>
  CUTE_DEVICE void set(Scores const& scores) {
    static_assert(cute::size<2>(Scores{}) == 2 * kSteps);
    float scales[2];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float greatest[2] = {};  // two chains, for latency
      CUTE_UNROLL
      for (int n = 0; n < 2 * kSteps; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          greatest[i] = fmaxf(greatest[i], fabsf(scores(2 * half + i, 0, n)));
        }
      }
      RowScale const scale =
          RowScale::of(__float_as_int(quad_max(fmaxf(greatest[0], greatest[1]))));
      scales[half] = scale.scale;
      factors[half] = scale.inverse;
    }
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const n = 2 * step + i / 2;
        int const half = i % 2;
        split_to_f16(scores(2 * half, 0, n) * scales[half],
                     scores(2 * half + 1, 0, n) * scales[half], high.fragments[0][step][i],
                     low.fragments[0][step][i]);
      }
    }
  }
};

// Starts part = operand * tile as a group of products.
template <class Tile, int kSteps, class Part>
CUTE_DEVICE void begin_f16x3_gradient(Part& part, F16x3LeftOperand<kSteps> const& operand,
                                      uint32_t tile) {
  static_assert(Tile::kRows == 16 * kSteps);
  using Columns = DescriptorOperand<typename Tile::Part, Contiguous::outer>;
  using Half = cutlass::half_t;
  fence_accumulators(part);
  begin_products();
  warpgroup_gemm<Half, kSteps>(part, operand.low, Columns(tile), false);
  warpgroup_gemm<Half, kSteps>(part, operand.high, Columns(tile + Tile::kLow));
  warpgroup_gemm<Half, kSteps>(part, operand.high, Columns(tile));
  commit_products();
}

// Adds the sums of a finished product to a gradient.
template <int kSteps, class Part, class Gradient>
CUTE_DEVICE void add_part(Gradient& gradient, Part& part, F16x3LeftOperand<kSteps> const& operand) {
  fence_accumulators(part);
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(gradient); ++n) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      gradient(i, 0, n) = fmaf(part(i, 0, n), operand.factors[i / 2], gradient(i, 0, n));
    }
  }
}

// Stores this lane's rows of a gradient. The product's first row is `row` of the tensor's head, and
// rows of the product from `bound` on are not written.
template <class Config, class Grid, class Gradient>
CUTE_DEVICE void store_gradient(TensorView const& tensor, Origin const& origin, int head, int row,
                                int bound, int columns, Gradient const& gradient) {
  using Element = typename Config::Element;
  int const own = Grid::element_row(0, 0);
  char* target = row_pointer<Element>(tensor, origin.batch, origin.row + row + own, head) +
                 lane_column() * int(sizeof(Element));
  hide_value(target);  // otherwise the compiler computes each address from scratch
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    store_row<Element>(target + half * 8 * row_bytes<Element>(tensor), gradient, half, columns,
                       own + half * 8 < bound);
  }
}

}  // namespace memeff
