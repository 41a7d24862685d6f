// The tiles of the Hopper backward kernels, as in layout/backward_tiles.cuh, and the statistics of
// a thread's rows.
#pragma once

#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/backward_workspaces.cuh>
#include <memeff/layout/query_tiles.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// For the one-kernel backward (sm90/backward.cuh).
template <class Config>
struct BackwardTilesSm90 {
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kWarpgroups = kTileKey / 64;  // consumers: 64 keys each
  static_assert(kWarpgroups == 2);
  static constexpr int kWarps = 4 * kWarpgroups;
  static constexpr int kThreads = kWarps * kWarpSize;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;  // also dq
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;   // dO
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;      // also dk
  using ValueTile = SharedTile<kTileKey, Config::kValueDim>;   // also dv

  // How the consumers divide dQ. They divide its rows if there are 64 for each, and its columns if
  // there are 64 rows in all. A wgmma has 64 rows, so with any other number they compute the
  // transpose, K^T dS^T, and divide the rows of that. wgmma reads its left operand in either order;
  // a right operand must have k contiguous if panels do not divide its number of columns.
  static constexpr bool kDivideRows = kTileQuery == 64 * kWarpgroups;
  static constexpr bool kTransposedDq = kTileQuery % 64 != 0;
  static_assert(kDivideRows || kTileQuery == 64 ||
                (kTransposedDq && Config::kHeadDim == 64 * kWarpgroups));
  using ScoreTile = cute::conditional_t<kTransposedDq, SharedTile<kTileQuery, kTileKey>,
                                        SharedTile<kTileKey, kTileQuery>>;  // dS, or dS^T

  using ScoreGrid = WarpGrid<kTileKey, kTileQuery, kWarps, 16>;  // transposed
  using KeyGrid = WarpGrid<kTileKey, Config::kHeadDim, kWarps, 16>;
  using ValueGrid = WarpGrid<kTileKey, Config::kValueDim, kWarps, 16>;
  using Statistics = QuadStatistics;

  // If consumers divide the columns of dQ, its sums have the columns of whole panels.
  static constexpr bool kDivideColumns = !kDivideRows && !kTransposedDq;
  static constexpr int kQueryColumns =
      kDivideColumns ? KeyTile::kPanels * KeyTile::kPanelColumns : Config::kHeadDim;
  using QueryGrid =
      cute::conditional_t<kTransposedDq, WarpGrid<Config::kHeadDim, kTileQuery, kWarps, 16>,
                          WarpGrid<kTileQuery, kQueryColumns, kWarps, 16>>;

  // The columns of dQ that a consumer computes if it owns half of them. They must begin with a
  // panel of the keys, or lie inside one. With three panels both consumers compute the columns of
  // the middle one, and each adds its half.
  static constexpr int kOwnColumns = kQueryColumns / kWarpgroups;
  static constexpr int kComputedColumns =
      kOwnColumns < KeyTile::kPanelColumns
          ? kOwnColumns
          : ceil_div(kOwnColumns, KeyTile::kPanelColumns) * KeyTile::kPanelColumns;
  static constexpr int kForeignColumns = kDivideColumns ? kComputedColumns - kOwnColumns : 0;
  using QueryProductGrid =
      cute::conditional_t<kForeignColumns == 0, QueryGrid,
                          WarpGrid<kTileQuery, kComputedColumns * kWarpgroups, kWarps, 16>>;

  // Bytes from the start of dS^T, and of the keys, to the operands of a consumer's part of dQ.
  CUTE_DEVICE static int query_rows_offset(int warpgroup) {
    static_assert(ScoreTile::kPanelColumns == 64);
    return kDivideRows ? warpgroup * ScoreTile::kPanelBytes : 0;
  }
  CUTE_DEVICE static int query_columns_offset(int warpgroup) {
    int const column = kDivideRows     ? 0
                       : kTransposedDq ? warpgroup * (Config::kHeadDim / kWarpgroups)
                                       : warpgroup * (kQueryColumns - kComputedColumns);
    int const panel = column / KeyTile::kPanelColumns;
    return panel * KeyTile::kPanelBytes + column % KeyTile::kPanelColumns * 2;
  }

  using Sums = AccumulatorSums<kThreads, true>;  // of dq
  static constexpr int kQueryTileFloats = kTileQuery * kQueryColumns;

  // The sums of a bias gradient that is broadcast over rows, as in BackwardTiles. A CTA adds to
  // each once per head.
  static constexpr int kBiasSumRows = 1;
  CUTE_DEVICE static long long padded_keys(ProblemShape const& shape) {
    return (long long)ceil_div(shape.key_length, kTileKey) * kTileKey;
  }

  CUTE_DEVICE static long long tile_index(BackwardParams const& params, int batch, int head,
                                          int tile) {
    return query_tile_index<Config>(params, batch, head, tile);
  }
};

// For backwards in two kernels (sm90/two_kernel_backward.cuh).

template <class Config>
struct BackwardTilesTwoKernel {
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kQBlockRows = 64;  // of the dkdv kernel
  static_assert(kTileQuery == 128 && kTileKey == 64);
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kThreads = kWarpgroups * kWarpgroupSize;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;  // also dq
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;   // dO
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;      // also dk
  using ValueTile = SharedTile<kTileKey, Config::kValueDim>;   // also dv

  using ScoreGrid = WarpgroupGrid<kTileKey, kQBlockRows>;  // of the dkdv kernel, transposed

  using Statistics = QuadStatistics;

  // The sums of a bias gradient that is broadcast over rows, as in BackwardTilesSm90.
  static constexpr int kBiasSumRows = 1;
  CUTE_DEVICE static long long padded_keys(ProblemShape const& shape) {
    return (long long)ceil_div(shape.key_length, kTileKey) * kTileKey;
  }

  CUTE_DEVICE static long long tile_index(BackwardParams const& params, int batch, int head,
                                          int tile) {
    return query_tile_index<Config>(params, batch, head, tile);
  }

  // The logsumexp and delta of the rows from `row` on, a multiple of sixteen.
  CUTE_DEVICE static float const* statistics(BackwardParams const& params, int batch, int head,
                                             int row) {
    return params.row_statistics + (tile_index(params, batch, head, 0) * kTileQuery + row) * 2;
  }
};

// The logsumexp and delta of the two rows in which a thread owns elements, in registers.

// For scores whose rows are queries, in the accumulators of a warpgroup.
template <class Grid>
struct RegisterStatistics {
  float2 rows[2];

  // The logsumexp for accumulator i, and the delta for this half of a 16x16 block.
  CUTE_DEVICE float logsumexp(int i) const { return rows[i % 4 / 2].x; }
  CUTE_DEVICE float delta(int half) const { return rows[half].y; }

  // Computes P from S in place.
  template <class Scores>
  CUTE_DEVICE void exponentiate(float softmax_scale, Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) = probability(scores(i), softmax_scale, logsumexp(i));
    }
  }

  // As above, times the derivative of the score modifiers; `scaled` comes from
  // ScoreModifiers::recompute().
  template <class Modifiers, class Scores>
  CUTE_DEVICE void exponentiate_and_differentiate(float softmax_scale, Scores const& scaled,
                                                  Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      float const score = scores(i);
      scores(i) = Modifiers::backward(probability(score, softmax_scale, logsumexp(i)),
                                      Modifiers::input_of_derivative(score, scaled(i)));
    }
  }
};

}  // namespace memeff
