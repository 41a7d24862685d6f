// Runs between the preprocess kernel and the main kernel if a gradient adds up dS over whole rows:
// computes
//
//   delta = rowsum(P * dP) - dlse
//
// instead of rowsum(dO * O) - dlse, because a 16-bit O has too few digits for such sums
// (jax_memeff/_call/functions.py). It serves every backward with mma.sync, with operands that
// stream through two buffers as for large head dims. One CTA owns a Q block and iterates over its
// KV blocks.
#pragma once

#include <kernels/common/preprocess.cuh>
#include <kernels/sm80/large_dim_scores.cuh>
#include <memeff/arch/barrier.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaBackwardDelta {
  using Scores = StreamedScores<WithoutFunctionGradient<WithoutBiasGradient<Config>>>;
  using Whole = BackwardScoresSm80<WithoutFunctionGradient<WithoutBiasGradient<Config>>>;
  using Tiles = typename Scores::Tiles;
  using Grid = typename Scores::ScoreGrid;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kBlocksPerSm = Config::kBlocksPerSm;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  // Delta is divided by the sum of P, which rounding leaves near 1. Modifiers replace P.
  static constexpr bool kNormalizes = Config::kNormalizesDelta && !modifies_probabilities<Config>();

  // Offsets in shared memory.
  static constexpr int kStatisticsOffset = 2 * Scores::kStepBytes;
  static constexpr int kSumsOffset = kStatisticsOffset + kTileQuery * int(sizeof(float2));
  static constexpr int kSharedBytes =
      kSumsOffset + Grid::kColumnWarps * kTileQuery * int(sizeof(float2));

  // The sums of P * dP and of P over the columns of a thread.
  struct Sums {
    float of_products[Grid::kRowBlocks][2] = {};
    float of_probabilities[Grid::kRowBlocks][2] = {};

    template <class Probabilities>
    CUTE_DEVICE void add_probabilities(Probabilities const& probabilities) {
      CUTE_UNROLL
      for (int m = 0; m < Grid::kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 8 * Grid::kColumnBlocks; ++i) {
          of_probabilities[m][i % 4 / 2] += probabilities(i % 4, m, i / 4);
        }
      }
    }
  };

  // Adds dS to the sums, as a bias gradient would.
  struct ProductAdder {
    Sums& sums;

    CUTE_DEVICE void block(int m, int, float const (&gradient)[2][4]) {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) sums.of_products[m][i % 4 / 2] += gradient[i / 4][i % 4];
    }
    CUTE_DEVICE void finish() {}
  };

  CUTE_DEVICE static void run(BackwardParams const& params) {
    uint32_t const shared = shared_address(dynamic_shared());
    ProblemShape const& shape = params.shape;
    WorkItem const item =
        GridTiles<Config, GridRows::queries, kTileQuery>{shape}.of_block(blockIdx.x);
    int const row = item.tile * kTileQuery;
    typename Scores::Mask const mask(params.mask, shape, item.batch);
    if (row >= mask.query_length) return;  // hazard: packed sequences have no such statistics
    BlockMaskRow<Config::kBlockMask> const tiles(mask.key_tiles(row, kTileQuery, kTileKey),
                                                 params.block_mask, item.batch, item.head,
                                                 item.tile, ceil_div(shape.key_length, kTileKey));
    if (tiles.begin >= tiles.end) return;

    load_statistics(params, item, row, shared);
    Sums sums;
    add_tiles(params, Scores(params, mask, item.batch, item.head / shape.group), tiles, item, row,
              shared, sums);
    store(params, item, row, mask.query_length - row, shared, sums);
  }

  // Writes the statistics of the Q block to shared memory, with 0 as delta: dS is then P * dP.
  CUTE_DEVICE static void load_statistics(BackwardParams const& params, WorkItem const& item,
                                          int row, uint32_t shared) {
    float const* const source = row_statistics<Tiles>(params, item.batch, item.head);
    for (int i = thread_index(); i < kTileQuery; i += kThreads) {
      float const logsumexp = Tiles::Statistics::load(source, row + i).x;
      store_shared_pair(shared + kStatisticsOffset + i * 8, logsumexp, 0.0f);
    }
  }

  // The main loop. Its first barrier is that of the ring, before anything reads the statistics.
  CUTE_DEVICE static void add_tiles(BackwardParams const& params, Scores const& scores,
                                    BlockMaskRow<Config::kBlockMask> const& tiles,
                                    WorkItem const& item, int row, uint32_t shared, Sums& sums) {
    auto tile_at = [&](int tile) {
      return LargeDimTile{item.batch, item.head, row, tile * kTileKey, tiles.partial(tile)};
    };
    auto const modifiers = scores.modifiers(item.batch);
    StepRing ring(shared, Scores::kStepBytes);
    ring.start([&](uint32_t buffer) { scores.load_step(tile_at(tiles.begin), 0, buffer); });
    for (int tile = tiles.begin; tile < tiles.end; tile = tiles.after(tile)) {
      LargeDimTile const at = tile_at(tile);
      auto products = Grid::make_accumulators();        // (4, MMA_M, MMA_N)
      auto score_gradient = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
      scores.template multiply<true>(
          ring, products, score_gradient,
          [&](int step, uint32_t buffer) { scores.load_step(at, step, buffer); },
          [&](uint32_t buffer) {
            int const next = tiles.after(tile);
            if (next < tiles.end) scores.load_step(tile_at(next), 0, buffer);
          });
      Whole::template compute<typename Whole::NoCapturedSums>(
          params, modifiers, shared + kStatisticsOffset, item.batch,
          {item.head, row, item.tile, at.partial}, scores.mask, at.column, 0, products,
          score_gradient, [&] { return ProductAdder{sums}; });
      if constexpr (kNormalizes) sums.add_probabilities(products);
    }
  }

  // Adds up the sums of the threads and of the warps that share a row, and stores delta.
  CUTE_DEVICE static void store(BackwardParams const& params, WorkItem const& item, int row,
                                int row_bound, uint32_t shared, Sums const& sums) {
    int const thread = thread_index();
    int const column_warp = Grid::column(thread) / Grid::kWarpColumns;
    CUTE_UNROLL
    for (int m = 0; m < Grid::kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float const products = quad_sum(sums.of_products[m][half]);
        float const probabilities = quad_sum(sums.of_probabilities[m][half]);
        int const place = column_warp * kTileQuery + Grid::element_row(2 * half, m, thread);
        if (thread % 4 == 0) {
          store_shared_pair(shared + kSumsOffset + place * 8, products, probabilities);
        }
      }
    }
    sync_threads();
    for (int i = thread; i < min(kTileQuery, row_bound); i += kThreads) {
      float2 sum = make_float2(0.0f, 0.0f);
      CUTE_UNROLL
      for (int warp = 0; warp < Grid::kColumnWarps; ++warp) {
        float2 const part = load_shared_pair(shared + kSumsOffset + (warp * kTileQuery + i) * 8);
        sum.x += part.x;
        sum.y += part.y;
      }
      float const logsumexp = load_shared_pair(shared + kStatisticsOffset + i * 8).x;
      replace_delta<Config, Tiles>(params, item.batch, item.head, row + i, logsumexp,
                                   kNormalizes ? sum.x / sum.y : sum.x);
    }
  }
};

}  // namespace memeff
