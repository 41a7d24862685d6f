// What the producer and the two consumers of a dkdv kernel share, in bf16 and f16
// (sm90/two_kernel_backward.cuh) and in f32 (sm90/f16x3_backward.cuh): tiles, pipelines and the Q
// blocks of a CTA.
#pragma once

#include <kernels/sm90/backward_tiles.cuh>
#include <kernels/sm90/bias.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/q_blocks.cuh>

namespace memeff {

// The base of the kernel and both consumers.
template <class Config>
struct DkdvSm90 {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesTwoKernel<Config>;
  static constexpr int kTileQuery = Tiles::kQBlockRows;
  static constexpr int kTileKey = Tiles::kTileKey;
  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;  // dO
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  using ScoreTile = SharedTile<kTileKey, kTileQuery>;  // P^T, dS^T
  static constexpr int kConsumers = Tiles::kThreads;
  static constexpr int kWarpgroupWarps = kWarpgroupSize / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static constexpr int kStages = Config::kQBlockStages;  // for queries and for dO
  static constexpr int kProbabilityStages = Config::kProbabilityStages;
  static constexpr int kGradientStages = 2;  // for dS^T

  using ScoreGrid = typename Tiles::ScoreGrid;
  using BiasTile = SharedTile<kTileQuery, kTileKey>;
  using Bias = QBlockBias<Config, BiasTile, ScoreGrid>;
  // This kernel computes only a bias gradient that is summed over rows. The dq kernel, which owns
  // the rows, writes a gradient with all four dims.
  static constexpr bool kSumsBias = Config::kBiasGradient == BiasGradient::columns;
  using BiasWriter =
      TransposedBiasGradient<Config, Tiles, kSumsBias ? BiasGradient::columns : BiasGradient::none>;
  using BiasSums = typename BiasWriter::Sums;
  using KeyGrid = WarpgroupGrid<kTileKey, Config::kHeadDim>;
  using ValueGrid = WarpgroupGrid<kTileKey, Config::kValueDim>;
  using Mask = ScoreMask<Config, ScoreGrid>;

  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kProbabilityOffset = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kGradientOffset =
      kProbabilityOffset + kProbabilityStages * ScoreTile::kBytes;
  static constexpr int kBiasOffset = kGradientOffset + kGradientStages * ScoreTile::kBytes;
  static constexpr int kQueryStatisticsOffset = kBiasOffset + Bias::kBytes;
  static constexpr int kOutStatisticsOffset = kQueryStatisticsOffset + kStages * kStatisticsBytes;
  static constexpr int kControlOffset = kOutStatisticsOffset + kStages * kStatisticsBytes;

  // The barriers, behind the tiles in shared memory.
  struct Control : Bias::Control {
    Pipeline<1> key;
    Pipeline<1> value;
    Pipeline<kStages> query;         // also covers the statistics of their rows
    Pipeline<kStages> out_gradient;  // also covers the statistics
    Pipeline<kProbabilityStages> probability;
    Pipeline<kGradientStages> score_gradient;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  using RowOfBlocks = BlockMaskRow<Config::kBlockMask>;

  // The work of a CTA: the Q blocks that attend to its keys, for every head of the group.
  struct Work {
    WorkItem item;
    int column;
    TileRange tiles;

    CUTE_DEVICE Work(BackwardParams const& params) {
      ProblemShape const& shape = params.shape;
      item = work_item<Config, Heaviest::first, kTileKey>(shape, params.bias, blockIdx.x);
      column = item.tile * kTileKey;
      tiles = Mask(params.mask, shape, item.batch).query_tiles(column, kTileKey, kTileQuery);
    }

    CUTE_DEVICE RowOfBlocks row_of_blocks(BackwardParams const& params, int head) const {
      return row_of_q_blocks<Config>(params, item, tiles,
                                     ceil_div(params.shape.query_length, kTileQuery), head);
    }
  };

  // One Q block of one head; advance() moves to the next one.
  struct QBlockCursor {
    int head;
    int tile;
    RowOfBlocks blocks;  // of the head, if there is a block mask

    CUTE_DEVICE QBlockCursor(BackwardParams const& params, Work const& work)
        : head(work.item.head * params.shape.group), tile(work.tiles.begin) {
      if constexpr (Config::kBlockMask) begin_head(params, work);
    }

    CUTE_DEVICE int row() const { return tile * kTileQuery; }

    CUTE_DEVICE void advance(BackwardParams const& params, Work const& work) {
      if constexpr (Config::kBlockMask) {
        tile = blocks.after(tile);
        if (tile == blocks.end) {
          ++head;
          begin_head(params, work);
        }
      } else if (++tile == work.tiles.end) {
        tile = work.tiles.begin;
        ++head;
      }
    }

    CUTE_DEVICE bool is_last_of_head(Work const& work) const {
      return tile + 1 == (Config::kBlockMask ? blocks.end : work.tiles.end);
    }

   private:
    // Moves to the first Q block of this head, or of the next head that has one.
    CUTE_DEVICE void begin_head(BackwardParams const& params, Work const& work) {
      for (; head < (work.item.head + 1) * params.shape.group; ++head) {
        blocks = work.row_of_blocks(params, head);
        tile = blocks.begin;
        if (!blocks.empty()) break;
      }
    }
  };

  // The number of Q blocks of this CTA, of all heads of the group.
  CUTE_DEVICE static int q_block_count(BackwardParams const& params, Work const& work) {
    int const group = params.shape.group;
    if constexpr (!Config::kBlockMask) return max(work.tiles.end - work.tiles.begin, 0) * group;
    int count = 0;
    for (int head = work.item.head * group; head < (work.item.head + 1) * group; ++head) {
      RowOfBlocks const blocks = work.row_of_blocks(params, head);
      for (int tile = blocks.begin; tile < blocks.end; tile = blocks.after(tile)) ++count;
    }
    return count;
  }

  using Stage = PipelineStage<kStages>;
  using ProbabilityStage = PipelineStage<kProbabilityStages>;
  using GradientStage = PipelineStage<kGradientStages>;

  // The addresses of the buffers.
  CUTE_DEVICE static uint32_t query_tile(uint32_t tiles, Stage const& stage) {
    return tiles + kQueryOffset + stage.index * QueryTile::kBytes;
  }
  CUTE_DEVICE static uint32_t query_statistics(uint32_t tiles, Stage const& stage) {
    return tiles + kQueryStatisticsOffset + stage.index * kStatisticsBytes;
  }
  CUTE_DEVICE static uint32_t out_tile(uint32_t tiles, Stage const& stage) {
    return tiles + kOutOffset + stage.index * OutTile::kBytes;
  }
  CUTE_DEVICE static uint32_t out_statistics(uint32_t tiles, Stage const& stage) {
    return tiles + kOutStatisticsOffset + stage.index * kStatisticsBytes;
  }
  CUTE_DEVICE static uint32_t probability_tile(uint32_t tiles, ProbabilityStage const& stage) {
    return tiles + kProbabilityOffset + stage.index * ScoreTile::kBytes;
  }
  CUTE_DEVICE static uint32_t gradient_tile(uint32_t tiles, GradientStage const& stage) {
    return tiles + kGradientOffset + stage.index * ScoreTile::kBytes;
  }

  using ScoreOperand = RegisterOperand<1, kTileQuery / 16, sizeof(Element)>;

  // Clears rows beyond a length: they may hold NaN, which would reach dk and dv. Each tile has one
  // reader, which clears it.
  template <class Tile>
  CUTE_DEVICE static void clear_beyond(uint32_t tile, int first, int warpgroup) {
    clear_rows<Tile, kWarpgroupSize>(tile, max(first, 0));
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  // Stores a gradient through the tile that only its warpgroup reads.
  template <class Tile, class Grid, class Accumulators>
  CUTE_DEVICE static void store(TensorMap const& map, TensorView const& tensor,
                                ProblemShape const& shape, Work const& work, int key_length,
                                uint32_t tile, int warpgroup, int columns,
                                Accumulators const& accumulators) {
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    store_accumulators<Element, Tile, Grid>(tile, accumulators);
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
    Origin const origin = key_origin<Config>(shape, work.item.batch);
    int const bound = (Config::kPacked ? key_length : shape.key_length) - work.column;
    store_part<Config, Tile>(map, tensor, tile, 0, origin.row + work.column, bound, work.item.head,
                             origin.batch, columns);
    wait_tma_stores();
  }
};

}  // namespace memeff
