// Tangents of attention for Hopper (forward mode): TMA, wgmma and warp specialization, with one
// persistent CTA per SM. The forward has already computed output and logsumexp.
//
//   P = exp(S - lse)      dS = (dQ K^T + Q dK^T) dS/d(Q K^T)      dP = P dS
//   dlse = rowsum(dP)     dO = P dV + dP V - dlse O
//
// The logsumexp is known, so there are no maxima to track and no output to rescale. Work tiles,
// rings and the producer are those of the forward; a buffer also holds the tangents of its rows.
// Each consumer owns 64 query rows of a work tile and iterates over its KV blocks from right to
// left:
//
//   issue P(j) dV(j) + dP(j) V(j) | issue S(j+1) | issue dS(j+1) | wait for all but dS | P(j+1) |
//   wait for dS | dP(j+1)
//
// The exponentials overlap the two products of dS. Only dP is computed while no product of this
// consumer runs, and the products of the other consumer run then.
#pragma once

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/kernels/forward/producer_sm90.cuh>
#include <memeff/kernels/forward/tangent/main_loop.cuh>
#include <memeff/kernels/forward/tangent/operands.cuh>
#include <memeff/kernels/forward/tangent/output.cuh>
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
struct FmhaTangentSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kConsumerGroups = 1;
  static constexpr int kRowWarpgroups = kTileQuery / kWarpgroupRows;  // consumers
  static constexpr int kConsumers = kRowWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;

  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, kConsumerWarps, 16>;
  using OutGrid = WarpGrid<kTileQuery, Config::kValueDim, kConsumerWarps, 16>;
  using Schedule = PersistentSchedule<Config, kTileQuery, sizeof(Element)>;
  using Scheduler = TileScheduler<Schedule>;
  using Operands = TangentOperands<Config, kThreads>;
  static constexpr int kConsumerRegisters =
      consumer_registers<kThreads, Operands::kProducerRegisters>();
  using Probabilities = ProbabilityModifiers<Config, ScoreGrid>;
  using KeptBlocks = typename Probabilities::Tile;
  using Keys = typename Operands::Keys;
  using Values = typename Operands::Values;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQueryStages = Config::kQueryStages;

  using Mask = ScoreMask<Config, ScoreGrid>;
  using Bias = WarpRowsBias<Config, ScoreGrid, kConsumerWarps, kTileKey, true,
                            WarpBiasPointer<Config, ScoreGrid>, Mask>;
  using Modifiers = ScoreModifiers<Config, Bias, ScoreFunction<Config, ScoreGrid>>;
  using Diagonals = NoSharedDiagonals<Config, ScoreGrid>;
  using Blocks = KvBlocks<Config, Mask, kConsumerGroups>;
  using Rows = TangentRows<Config, ScoreGrid>;
  using OutputWriter = TangentOutputSm90<Config, OutGrid>;
  using Turns = ConsumerTurns<false, kRowWarpgroups, 0>;

  using WorkTile = QueryWorkTile;
  using Control = QueryTileRings<kQueryStages, kStages, kRowWarpgroups>;
  static constexpr int kWorkTileStages = Control::kWorkTileStages;
  static constexpr int kKeyOffset = kQueryStages * Operands::kQueryBufferBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * Keys::kBufferBytes;
  static constexpr int kBiasOffset = kValueOffset + kStages * Values::kBufferBytes;
  static constexpr int kControlOffset = kBiasOffset + Bias::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer.
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

  CUTE_DEVICE static void run(TangentParams const& params, TangentMaps const& maps) {
    Operands const operands{params, maps};
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      operands.prefetch();
      control.init(kConsumerWarps, kConsumerGroups);
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      lower_registers<Operands::kProducerRegisters>();
      ForwardProducerSm90<Config, FmhaTangentSm90>::run(params, operands, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      TangentMainLoopSm90<Config, FmhaTangentSm90>::run(params, control, tiles);
    }
  }
};

}  // namespace memeff
