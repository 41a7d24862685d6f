// Shared by the producer and the two consumers of backward/f16x3/dkdv.cuh.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/kernels/backward/dkdv/work.cuh>
#include <memeff/kernels/backward/f16x3/products.cuh>

namespace memeff {

template <class Config>
struct F16x3DkdvWork {
  using Tiles = F16x3Tiles<Config>;
  using QueryTile = typename Tiles::Query;
  using OutTile = typename Tiles::OutGradient;
  using KeyTile = typename Tiles::Key;
  using ValueTile = typename Tiles::Value;
  using Blocks = DkdvSm90<Config>;
  using Work = typename Blocks::Work;
  using QBlockCursor = typename Blocks::QBlockCursor;
  using Mask = typename Blocks::Mask;
  using ScoreGrid = typename Blocks::ScoreGrid;
  using KeyGrid = typename Blocks::KeyGrid;
  using ValueGrid = typename Blocks::ValueGrid;
  using Statistics = typename Blocks::Tiles;
  static constexpr int kTileQuery = Blocks::kTileQuery;
  static constexpr int kTileKey = Blocks::kTileKey;
  static constexpr int kSteps = kTileQuery / 16;  // k-steps of a gradient's product
  static constexpr int kConsumers = Blocks::kConsumers;
  static constexpr int kStages = Blocks::kStages;  // for queries and for dO
  static constexpr int kProbabilityStages = Blocks::kProbabilityStages;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters =
      consumer_registers<kConsumers + kWarpgroupSize, kProducerRegisters>();

  // The registers for keys or values, alongside a gradient, the operand and accumulators of its
  // product, and addresses.
  static constexpr int kOtherRegisters = 40;
  CUTE_DEVICE static constexpr int free_registers(int columns) {
    return kConsumerRegisters - columns - kTileQuery / 2 - kOtherRegisters;
  }
  using Stage = PipelineStage<kStages>;
  using ProbabilityStage = PipelineStage<kProbabilityStages>;

  // Offsets in shared memory: hi and lo parts, P^T, then factors and statistics.
  static constexpr int kProbabilityBytes = kTileKey * kTileQuery * int(sizeof(float));
  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kValueOffset = kF16x3PartBytes<KeyTile>;
  static constexpr int kQueryOffset = kValueOffset + kF16x3PartBytes<ValueTile>;
  static constexpr int kOutOffset = kQueryOffset + kStages * kF16x3PartBytes<QueryTile>;
  static constexpr int kProbabilityOffset = kOutOffset + kStages * kF16x3PartBytes<OutTile>;
  static constexpr int kKeyFactors = kProbabilityOffset + kProbabilityStages * kProbabilityBytes;
  static constexpr int kValueFactors = kKeyFactors + kF16x3FactorBytes;
  static constexpr int kQueryFactors = kValueFactors + kF16x3FactorBytes;
  static constexpr int kOutFactors = kQueryFactors + kStages * kF16x3FactorBytes;
  static constexpr int kStatisticsOffset = kOutFactors + kStages * kF16x3FactorBytes;
  static constexpr int kControlOffset = kStatisticsOffset + kStages * kStatisticsBytes;

  // The barriers in shared memory.
  struct Control {
    Pipeline<1> key;
    Pipeline<1> value;
    Pipeline<kStages> query;  // also covers the statistics of their rows
    Pipeline<kStages> out_gradient;
    Pipeline<kProbabilityStages> probability;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // The addresses of the buffers.
  CUTE_DEVICE static uint32_t query_tile(uint32_t tiles, Stage const& stage) {
    return tiles + kQueryOffset + stage.index * kF16x3PartBytes<QueryTile>;
  }
  CUTE_DEVICE static uint32_t query_factors(uint32_t tiles, Stage const& stage) {
    return tiles + kQueryFactors + stage.index * kF16x3FactorBytes;
  }
  CUTE_DEVICE static uint32_t out_tile(uint32_t tiles, Stage const& stage) {
    return tiles + kOutOffset + stage.index * kF16x3PartBytes<OutTile>;
  }
  CUTE_DEVICE static uint32_t out_factors(uint32_t tiles, Stage const& stage) {
    return tiles + kOutFactors + stage.index * kF16x3FactorBytes;
  }
  CUTE_DEVICE static uint32_t statistics(uint32_t tiles, Stage const& stage) {
    return tiles + kStatisticsOffset + stage.index * kStatisticsBytes;
  }

  // This lane's part of a buffer of P^T: vector n holds its four elements of eight columns. A lane
  // owns the same elements in both consumers, so no lane reads what a different lane wrote.
  CUTE_DEVICE static uint32_t probabilities(uint32_t tiles, ProbabilityStage const& stage) {
    return tiles + kProbabilityOffset + stage.index * kProbabilityBytes +
           thread_index() % kWarpgroupSize * 16;
  }
  static constexpr int kVectorDistance = kWarpgroupSize * 16;

  // Stores a gradient of this CTA's keys.
  template <class Grid, class Gradient>
  CUTE_DEVICE static void store(BackwardParams const& params, Work const& work, int key_length,
                                TensorView const& tensor, int columns, Gradient& gradient,
                                float scale) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(gradient); ++i) gradient(i) *= scale;
    Origin const origin = key_origin<Config>(params.shape, work.item.batch);
    int const bound = (Config::kVarlen ? key_length : params.shape.key_length) - work.column;
    store_gradient<Config, Grid>(tensor, origin, work.item.head, work.column, bound, columns,
                                 gradient);
  }
};

}  // namespace memeff
