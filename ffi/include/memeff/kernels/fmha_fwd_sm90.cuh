// Attention forward for Hopper: TMA, wgmma and warp specialization, with one persistent CTA per SM.
//
// The last warpgroup is the producer: one thread hands out work tiles, and three others copy
// queries, keys and values into rings of buffers. Every other warpgroup is a consumer. It owns 64
// query rows of a work tile and iterates over its KV blocks from right to left. Within a consumer
// the scores of the next KV block overlap the product of this block's probabilities with values,
// and the softmax overlaps that product:
//
//   issue S(j+1) = Q K(j+1)^T | issue O += P(j) V(j) | wait S(j+1) | softmax | wait O | P(j+1)
//
// With Config::kOutputFirst the wait for O comes between the maxima and the exponentials. The
// exponentials then overlap only the products of other consumers, which keep the tensor cores busy.
//
// The pipeline does not drain between work tiles. The first scores of a work tile overlap the last
// product of the previous one, whose output is stored from registers while the products of other
// consumers run. The softmax of one consumer overlaps the products of another. Two consumers settle
// into this order by themselves; three take turns (schedule/consumer_turns.cuh). With a mask each
// consumer skips the KV blocks at the end that only rows of other consumers attend to.
//
// An Operands object loads and multiplies the operands of each element type. 3xFP16 products with
// values have accumulators of their own. If these leave too few registers, S(j+1) is issued after
// O, and the products of one consumer overlap only the softmax of the other.
//
// If a score function reads along diagonals, the warp that copies queries also reads the diagonals
// of each KV block (score/captured/shared_diagonals.cuh).
//
// If there are few work tiles, the consumers form groups that share 64 rows (intra-CTA split-KV).
// They take the KV blocks in turn, each with a softmax and an output of its own, and merge these at
// the end of a work tile.
#pragma once

#include <memeff/collective/consumer_groups.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/column_product.cuh>
#include <memeff/collective/softmax/linear_scores.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/kernels/forward/f16x3/operands.cuh>
#include <memeff/kernels/forward/f16x3/split.cuh>
#include <memeff/kernels/forward/main_loop_sm90.cuh>
#include <memeff/kernels/forward/operands_sm90.cuh>
#include <memeff/kernels/forward/output_sm90.cuh>
#include <memeff/kernels/forward/producer_sm90.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/consumer_turns.cuh>
#include <memeff/schedule/kv_blocks.cuh>
#include <memeff/schedule/persistent.cuh>
#include <memeff/schedule/query_tile_rings.cuh>
#include <memeff/score/bias/warp_rows.cuh>
#include <memeff/score/captured/shared_diagonals.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaForwardSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kConsumerGroups = Config::kConsumerGroups;  // consumers of the same rows
  static constexpr int kRowWarpgroups = kTileQuery / kWarpgroupRows;
  static constexpr int kWarpgroups = kRowWarpgroups * kConsumerGroups;  // consumers
  static_assert(kConsumerGroups == 1 || kRowWarpgroups == 1);
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;

  template <int kColumns>
  using Grid =
      cute::conditional_t<kConsumerGroups == 1, WarpGrid<kTileQuery, kColumns, kConsumerWarps, 16>,
                          WarpgroupGrid<kTileQuery, kColumns>>;
  using ScoreGrid = Grid<kTileKey>;
  using OutGrid = Grid<Config::kValueDim>;
  static constexpr bool kCapped = Config::kSoftCap && !Config::kBias && !Config::kRowMaxima &&
                                  cute::is_same_v<Element, cutlass::bfloat16_t>;
  // The bits of negative floats have the wrong order as integers, and with a bias all scores of a
  // row may be negative. Above 128 columns a KV block has too few scores for the branch to pay off.
  static constexpr bool kIntegerMaximum = !Config::kBias && Config::kValueDim <= 128;
  using Softmax =
      OnlineSoftmax<1, kIntegerMaximum, has_large_scores<Config>(), kCapped, Config::kRowMaxima>;
  using Schedule = PersistentSchedule<Config, kTileQuery, sizeof(Element)>;
  using Scheduler = TileScheduler<Schedule>;

  using Operands = cute::conditional_t<cute::is_same_v<Element, F16x3>,
                                       F16x3Operands<Config, ScoreGrid, OutGrid>,
                                       MappedOperands<Config, kThreads>>;
  static constexpr int kProducerRegisters = Operands::kProducerRegisters;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  using Probabilities = ProbabilityModifiers<Config, ScoreGrid, false, Operands::kModifiesEarly>;
  using KeptBlocks = typename Probabilities::Tile;
  using Keys = typename Operands::Keys;
  using Values = typename Operands::Values;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQueryStages = Config::kQueryStages;
  static_assert(kStages % kConsumerGroups == 0);  // so that each group has buffers of its own

  using Mask = ScoreMask<Config, ScoreGrid>;
  using Bias = WarpRowsBias<Config, ScoreGrid, kConsumerWarps, kTileKey, true,
                            WarpBiasPointer<Config, ScoreGrid>, Mask>;
  using Scaling = cute::conditional_t<Config::kSoftCap && !kIs32Bit<Element>,
                                      PolynomialCap<Config, kCapped>, ScoreScaling<Config>>;
  using Linear = LinearScores<Config>;
  using Columns = ColumnProduct<Config>;
  using Diagonals = SharedDiagonals<Config, ScoreGrid, kTileQuery, kTileKey>;
  using Function = typename Diagonals::Function;
  using FunctionReads = typename Function::Reads;
  using Modifiers = ScoreModifiers<Config, Bias, Function, Scaling>;

  using Blocks = KvBlocks<Config, Mask>;

  using ConsumerGroup = WarpConsumerGroups<kConsumerWarps, kConsumerGroups, 1 + kWarpgroups>;
  using Merge = ConsumerGroupMerge<ConsumerGroup, Softmax, kTileQuery * Config::kValueDim>;
  // With three consumers, turns gain 1 to 4 %; with two, nothing. With four they were not measured.
  using Turns =
      ConsumerTurns<Config::kOutputFirst && kWarpgroups == 3, kWarpgroups, 2 + kWarpgroups>;
  using OutputWriter = ForwardOutputSm90<Config, OutGrid, Softmax>;

  using WorkTile = QueryWorkTile;
  using Control = QueryTileRings<kQueryStages, kStages, kRowWarpgroups>;
  static constexpr int kWorkTileStages = Control::kWorkTileStages;
  static constexpr int kKeyOffset = kQueryStages * Operands::kQueryBufferBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * Keys::kBufferBytes;
  static constexpr int kColumnsOffset = kValueOffset + kStages * Values::kBufferBytes;
  static constexpr int kDiagonalsOffset = kColumnsOffset + Columns::kBytes;
  static constexpr int kBiasOffset = kDiagonalsOffset + kStages * Diagonals::kBytes;
  static constexpr int kMergeOffset = kBiasOffset + Bias::kBytes;
  static constexpr int kControlOffset = kMergeOffset + Merge::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer, one for consumer groups, and one for the
  // turn of each consumer.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  // The addresses of the buffers in shared memory.
  CUTE_DEVICE static uint32_t queries(uint32_t tiles, PipelineStage<kQueryStages> const& stage) {
    return tiles + stage.index * Operands::kQueryBufferBytes;
  }
  CUTE_DEVICE static uint32_t keys(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kKeyOffset + stage.index * Keys::kBufferBytes;
  }
  CUTE_DEVICE static uint32_t values(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kValueOffset + stage.index * Values::kBufferBytes;
  }
  CUTE_DEVICE static uint32_t diagonals(uint32_t tiles, PipelineStage<kStages> const& key) {
    return tiles + kDiagonalsOffset + key.index * Diagonals::kBytes;
  }

  // `maps` is empty for operands that need no tensor maps.
  template <class... Maps>
  CUTE_DEVICE static void run(ForwardParams const& params, Maps const&... maps) {
    Operands const operands{params, maps...};
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      operands.prefetch();
      control.init(kConsumerWarps, kConsumerGroups, Diagonals::kIsOn ? 2 : 1);
    }
    Columns::write(tiles + kColumnsOffset, kThreads);
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      ForwardProducerSm90<Config, FmhaForwardSm90>::run(params, operands, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      ForwardMainLoopSm90<Config, FmhaForwardSm90>::run(params, control, tiles);
    }
  }
};

}  // namespace memeff
