// Attention forward for Hopper with head dims above 256: separate keys and values, 64 rows of a
// head in each CTA.
//
// The output of 64 rows has up to 512 columns, too many for the registers of one warpgroup. So two
// consumers own half of the columns each and take turns computing the scores of KV blocks, as in
// latent attention (kernels/fmha_fwd_latent_sm90.cuh):
//
//   consumer 0 | S(0) softmax P(0) V(0)        P(1) V(1)  S(2) softmax P(2) V(2) ...
//   consumer 1 |        S(1)       P(0) V(0)  softmax  P(1) V(1)        P(2) V(2)  S(3) ...
//
// Keys arrive in panels of 64 columns, because scores accumulate panel by panel, and because a ring
// of panels fills shared memory to the last 8 KB. Each consumer has a ring of its own for its
// columns of the values.
//
// Above 576 columns the two CTAs of a cluster divide the columns of all operands. Each computes the
// scores of its columns, and both add them up (collective/sums/column_sum.cuh).
#pragma once

#include <memeff/collective/softmax/exchange.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/sums/column_sum.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/kernels/forward/large_dim/consumer.cuh>
#include <memeff/kernels/forward/large_dim/producer.cuh>
#include <memeff/kernels/forward/output_sm90.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/consumer_turns.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaForwardLargeDimSm90 {
  static_assert(!has_bias_tile<Config>() && Config::kPageSize == 0);
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static_assert(kTileQuery == kWarpgroupRows);

  static constexpr int kColumnCtas = Config::kColumnCtas;  // that divide the columns
  static constexpr bool kDividesColumns = kColumnCtas > 1;
  static_assert(kColumnCtas <= 2);
  static constexpr int kHeadColumns = Config::kHeadDim / kColumnCtas;  // of this CTA
  static constexpr int kValueColumns = Config::kValueDim / kColumnCtas;
  static constexpr int kColumns = kValueColumns / kWarpgroups;  // of a consumer's output
  using ScoreGrid = WarpgroupGrid<kTileQuery, kTileKey>;
  using OutGrid = WarpgroupGrid<kTileQuery, kColumns>;
  using Mask = ScoreMask<Config, ScoreGrid>;
  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid>>;
  using Softmax = OnlineSoftmax<1, false, has_large_scores<Config>(), false, Config::kRowMaxima>;
  using Exchange = SoftmaxExchange<ScoreGrid, Softmax>;
  using Output = ForwardOutputSm90<Config, OutGrid, Softmax>;

  using ScoreSum = ColumnSum<ScoreGrid, kDividesColumns>;
  using QueryTile = SharedTile<kTileQuery, kHeadColumns>;
  using QueryPanel = SharedTile<kTileQuery, QueryTile::kPanelColumns>;
  using KeyPanel = SharedTile<kTileKey, QueryTile::kPanelColumns>;
  using ValueTile = SharedTile<kTileKey, kColumns>;  // the columns of a consumer
  using ProbabilityTile = SharedTile<kTileQuery, kTileKey>;
  static constexpr int kKeyPanels = QueryTile::kPanels;

  static constexpr int kKeyStages = Config::kStages;  // panels
  static constexpr int kValueStages = Config::kValueStages;
  static_assert(kKeyStages >= kKeyPanels);

  // Everything in shared memory except the tiles.
  struct Control : ScoreSum::Barriers {
    RowReference references[kTileQuery];
    float row_sums[kWarpgroups][kTileQuery];
    Pipeline<kKeyStages> key;
    Pipeline<kValueStages> value[kWarpgroups];
    uint64_t probabilities[kWarpgroups];  // of KV blocks of each consumer
    uint64_t query;
  };

  static constexpr int kKeyOffset = QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kKeyStages * KeyPanel::kBytes;
  static constexpr int kProbabilityOffset =
      kValueOffset + kWarpgroups * kValueStages * ValueTile::kBytes;
  static constexpr int kScoreSumOffset = kProbabilityOffset + ProbabilityTile::kBytes;
  static constexpr int kControlOffset = kScoreSumOffset + ScoreSum::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer, one for both, and one for the turn of
  // each consumer.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }
  static constexpr int kConsumerBarrier = 1 + kWarpgroups;
  using Turns = ConsumerTurns<true, kWarpgroups, 2 + kWarpgroups>;

  // The addresses of the buffers in shared memory.
  CUTE_DEVICE static uint32_t keys(uint32_t tiles, PipelineStage<kKeyStages> const& stage) {
    return tiles + kKeyOffset + stage.index * KeyPanel::kBytes;
  }
  CUTE_DEVICE static uint32_t values(uint32_t tiles, int warpgroup,
                                     PipelineStage<kValueStages> const& stage) {
    return tiles + kValueOffset + (warpgroup * kValueStages + stage.index) * ValueTile::kBytes;
  }

  CUTE_DEVICE static WorkItem item(ProblemShape const& shape, ScoreView const& bias) {
    return work_item<Config, Heaviest::last, kTileQuery>(shape, bias, blockIdx.x / kColumnCtas);
  }

  // The index of this CTA's part of the columns.
  CUTE_DEVICE static int column_part() { return kDividesColumns ? cluster_rank() : 0; }

  // The first column of a consumer's output.
  CUTE_DEVICE static int first_column(int warpgroup) {
    return column_part() * kValueColumns + warpgroup * kColumns;
  }

  // The KV blocks that some row of the tile needs.
  CUTE_DEVICE static TileRange blocks(Mask const& mask, WorkItem const& item) {
    TileRange const range = mask.key_tiles(item.tile * kTileQuery, kTileQuery, kTileKey);
    return range.begin < range.end ? range : TileRange{0, 0};
  }

  CUTE_DEVICE static void init(Control& control) {
    constexpr int kWarps = kWarpgroupSize / kWarpSize;  // per consumer
    control.key.init(kWarps);
    CUTE_UNROLL
    for (auto& value : control.value) value.init(kWarps);
    CUTE_UNROLL
    for (uint64_t& barrier : control.probabilities) init_barrier(barrier, kWarps);
    init_barrier(control.query, 1);
    ScoreSum::init(control);
    fence_barrier_init();
  }

  CUTE_DEVICE static void run(ForwardParams const& params, ForwardMaps const& maps) {
    using Producer = LargeDimProducerSm90<Config, FmhaForwardLargeDimSm90>;
    using Consumer = LargeDimConsumerSm90<Config, FmhaForwardLargeDimSm90>;
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      prefetch_map(maps.query);
      prefetch_map(maps.key);
      prefetch_map(maps.value);
      init(control);
    }
    if constexpr (kDividesColumns) {
      // Makes the barriers of each CTA visible to the threads of both.
      arrive_cluster();
      wait_cluster();
    } else {
      __syncthreads();
    }
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      Producer const producer(params, maps, control, tiles);
      switch (threadIdx.x - kConsumers) {
        case 0:
          producer.produce_keys();
          break;
        case kWarpSize:
          producer.produce_values(0);
          break;
        case 2 * kWarpSize:
          producer.produce_values(1);
          break;
      }
    } else {
      raise_registers<kConsumerRegisters>();
      Consumer::run(params, control, tiles);
    }
  }
};

}  // namespace memeff
