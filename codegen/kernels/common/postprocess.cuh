// Kernels that run after a backward and round its f32 sums: those of dq, and those of a bias
// gradient.
#pragma once

#include <kernels/common/dq_sums.cuh>
#include <memeff/arch/barrier.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/bias/gradient.cuh>

namespace memeff {

// Rounds the sums of a bias gradient to its dtype. One CTA per tile of the sums. Generations differ
// in Tiles.
template <class Config, class Tiles = BackwardTiles<Config>>
struct FmhaBackwardDbiasPostprocess {
  using Grid = typename Tiles::ScoreGrid;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kBlocksPerSm = 4;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    BiasGradientTile<Config, Tiles> const tile(params, blockIdx.x);

    if constexpr (Config::kBiasGradient == BiasGradient::common) {
      float const* const sums =
          params.bias_gradient_sum + Tiles::bias_tile_offset(params, tile.slice,
                                                             tile.row / Tiles::kTileQuery,
                                                             tile.column / Tiles::kTileKey);
      CUTE_UNROLL
      for (int m = 0; m < Grid::kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < 2 * Grid::kColumnBlocks; ++n) {
          float4 const sum = Tiles::Sums::load(sums, m * 2 * Grid::kColumnBlocks + n);
          tile.store(m, n, sum.x, sum.y, sum.z, sum.w);
        }
      }
    } else {
      for (int j = threadIdx.x; j < min(Tiles::kTileKey, tile.column_bound); j += kThreads) {
        *tile.gradient.at(0, j) = typename Config::BiasElement(
            ColumnSums<Config, Tiles>::total(params, tile.slice, tile.column + j));
      }
    }
  }
};

// dq = scale * (its sums), rounded. One CTA per tile of query rows. With Config::kCountsKvBlocks it
// runs beside the last CTAs of the main kernel (FinishedDq). Tiles defines the order of the sums.
template <class Config, class Tiles = BackwardTiles<Config>>
struct FmhaBackwardPostprocess {
  using Element = typename Config::Element;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kSharedBytes = Tiles::QueryTile::kBytes;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    ProblemShape const& shape = params.shape;
    GridTiles<Config, GridRows::queries, Tiles::kTileQuery> const grid = {shape};
    WorkItem const item = grid.of_block(blockIdx.x);
    int const row = item.tile * Tiles::kTileQuery;
    int row_bound = shape.query_length - row;
    if constexpr (Config::kPacked) {
      int const length = IntervalMask<MaskKind::none>(params.mask, shape, item.batch).query_length;
      clear_query_gap<Config, kThreads>(params, item, length, grid.of_batch_index(item.batch));
      row_bound = length - row;
      if (row_bound <= 0) return;
    }
    if constexpr (Config::kCountsKvBlocks) {
      FinishedDq<Config>{params}.wait(item.batch, item.head);
    }
    Origin const origin = query_origin<Config>(shape, item.batch);
    long long const tile_index = Tiles::tile_index(params, item.batch, item.head, item.tile);
    float const* const sums = params.query_gradient_sum + tile_index * Tiles::kQueryTileFloats;
    bool const present = has_sums(params, tile_index);

    auto query_gradient = Tiles::QueryGrid::make_accumulators();  // (4, MMA_M, MMA_N)
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(query_gradient); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(query_gradient); ++n) {
        float4 sum = Tiles::Sums::load(sums, m * int(cute::size<2>(query_gradient)) + n);
        if (!present) sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        query_gradient(0, m, n) = sum.x * params.scale.gradient_scale;
        query_gradient(1, m, n) = sum.y * params.scale.gradient_scale;
        query_gradient(2, m, n) = sum.z * params.scale.gradient_scale;
        query_gradient(3, m, n) = sum.w * params.scale.gradient_scale;
      }
    }
    using QueryTile = typename Tiles::QueryTile;
    using QueryGrid = typename Tiles::QueryGrid;
    uint32_t const tile = shared_address(shared);
    if constexpr (Tiles::kTransposedDq) {
      store_operand_transposed<QueryTile, QueryGrid>(tile,
                                                     as_left_operand<Element>(query_gradient));
    } else {
      store_accumulators<Element, QueryTile, QueryGrid>(tile, query_gradient);
    }
    sync_threads();
    store_rows<QueryTile, kThreads, Config::kAlignment>(
        tile,
        row_pointer<Element>(params.query_gradient, origin.batch, origin.row + row, item.head),
        params.query_gradient.row_stride * sizeof(Element), row_bound, shape.head_dim);
    // Hazard: this kernel must not end before the main kernel, because the next kernel waits for
    // this one only. If more than one CTA waited, they would occupy SMs.
    if (Config::kCountsKvBlocks && blockIdx.x == gridDim.x - 1) wait_for_kernel_before();
  }

  // Whether the main kernel has written the sums of a Q block.
  CUTE_DEVICE static bool has_sums(BackwardParams const& params, long long tile_index) {
    if constexpr (!Config::kStoresFirstDq) return true;
    return params.query_gradient_states[tile_index] == FirstDqStore::kPresent;
  }
};

}  // namespace memeff
