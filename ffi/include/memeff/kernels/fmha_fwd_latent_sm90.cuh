// Latent attention (MLA with absorbed projections) forward for Hopper: the values are the first
// columns of the keys, so a KV block is read from memory once.
//
// A work tile is 64 rows of one sequence: the query heads of a key head, of one or several tokens.
// Its output has 512 columns, too many for the registers of one warpgroup, while 64 x 64 scores are
// too few to divide over two. So two consumer warpgroups own 256 columns of the output each and
// take the scores in turn: one owns those of even KV blocks, the other those of odd ones. The owner
// turns scores into probabilities, multiplies its own columns, and passes the probabilities through
// shared memory to the other warpgroup, which multiplies the other columns:
//
//   warpgroup 0 | S(0) softmax P(0) V(0)        P(1) V(1)  S(2) softmax P(2) V(2) ...
//   warpgroup 1 |        S(1)       P(0) V(0)  softmax  P(1) V(1)        P(2) V(2)  S(3) ...
//
// While one computes its softmax, the tensor cores multiply for the other. S(b) begins before
// P(b - 1) V(b - 1) of the other warpgroup's block and ends after it, because some of its keys
// arrive later. Both accumulate the KV blocks in the same order and with the same softmax
// reference, which is passed along with the probabilities. FlashMLA (DeepSeek, 2025) introduced
// this schedule and rescales a block's probabilities in shared memory. Here the reference has slack
// (collective/softmax/online.cuh), so each warpgroup rescales its own output instead, and only
// rarely.
//
// 64 rows of queries and two buffers of keys take 216 KB, which leaves no room for a third. Instead
// three column groups of a buffer are released separately: the two halves of the value columns,
// each by the warpgroup that multiplies them, and the other columns, which only scores need. So
// columns of the next KV block arrive while others of this one are still read.
//
// The bandwidth of L2 is too small for one copy of the keys per SM. So two CTAs form a cluster, and
// if both compute row tiles of the same sequence, each copies half of the keys to both.
#pragma once

#include <memeff/arch/cluster.cuh>
#include <memeff/collective/softmax/exchange.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/kernels/forward/latent/combine.cuh>
#include <memeff/kernels/forward/latent/consumer.cuh>
#include <memeff/kernels/forward/latent/float8_producer.cuh>
#include <memeff/kernels/forward/latent/output.cuh>
#include <memeff/kernels/forward/latent/producer.cuh>
#include <memeff/kernels/forward/latent/queries.cuh>
#include <memeff/kernels/forward/latent/segment_output.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/balanced_keys.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaForwardLatentSm90 {
  static_assert(!Config::kBias && !Config::kRowMaxima);
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  // With fewer, the warp that plans the work spills before the first copy. Consumers need 208.
  static constexpr int kProducerRegisters = 88;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

  static constexpr int kColumns = Config::kValueDim / kWarpgroups;  // of a consumer's output
  using ScoreGrid = WarpgroupGrid<kTileQuery, kTileKey>;
  using OutGrid = WarpgroupGrid<kTileQuery, kColumns>;
  using Mask = ScoreMask<Config, ScoreGrid, true>;
  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid, false, true>>;
  using Softmax = OnlineSoftmax<1, false, has_large_scores<Config>()>;
  using Exchange = SoftmaxExchange<ScoreGrid, Softmax>;
  using Schedule = BalancedKeys<Config, Mask>;
  using Output =
      cute::conditional_t<Schedule::kKeySegments, LatentSegmentOutputSm90<Config, OutGrid, Softmax>,
                          LatentOutputSm90<Config, OutGrid, Softmax>>;
  using Queries = LatentQueriesSm90<Config, FmhaForwardLatentSm90>;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;
  using ValueTile = SharedTile<kTileKey, kColumns>;  // the columns of a consumer, in a KeyTile
  using PanelTile = SharedTile<kTileKey, KeyTile::kPanelColumns>;
  using ProbabilityTile = SharedTile<kTileQuery, kTileKey>;
  static_assert(kTileQuery == kTileKey && KeyTile::kPanelBytes == PanelTile::kBytes);

  // A buffer of keys is released by column groups. Groups 0 and 1 are the consumers' value columns.
  static constexpr int kColumnGroups = 3;
  static constexpr int kPanels = KeyTile::kPanels;
  static constexpr int kValuePanels = ValueTile::kPanels;  // per consumer
  CUTE_HOST_DEVICE static constexpr int group_begin(int group) { return group * kValuePanels; }
  CUTE_HOST_DEVICE static constexpr int group_end(int group) {
    return group < kWarpgroups ? (group + 1) * kValuePanels : kPanels;
  }
  static_assert(kPanels > group_begin(kWarpgroups));

  // A KV block occupies the buffer of the consumer that owns its scores, so buffers alternate.
  static constexpr int kStages = kWarpgroups;
  // The barriers of a buffer of keys: one per panel that arrives, and one per column group that is
  // released.
  struct KeyBarriers {
    uint64_t full[kPanels];
    uint64_t empty[kColumnGroups];
  };

  static constexpr int kCluster = Config::kCluster;  // CTAs
  static constexpr int kWorkStages = 4;
  // Everything in shared memory except the tiles.
  struct Control {
    RowReference references[kTileQuery];
    float row_sums[2][kWarpgroups][kTileQuery];  // alternating between parts
    KeyBarriers keys[kStages];
    uint64_t probabilities[kWarpgroups];  // of KV blocks of each consumer
    Pipeline<kWorkStages> work;
    KeyPart parts[kWorkStages];
    // Set by the producer before a KV block with an invalid page is complete, and never cleared.
    bool may_miss_pages;
  };

  static constexpr int kKeyOffset = QueryTile::kBytes;
  static constexpr int kProbabilityOffset = kKeyOffset + kStages * KeyTile::kBytes;
  static constexpr int kControlOffset = kProbabilityOffset + ProbabilityTile::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer, and one for both.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }
  static constexpr int kConsumerBarrier = 1 + kWarpgroups;

  CUTE_DEVICE static uint32_t keys(uint32_t tiles, int stage) {
    return tiles + kKeyOffset + stage * KeyTile::kBytes;
  }

  CUTE_DEVICE static void init(Control& control, int sharers) {
    constexpr int kWarps = kWarpgroupSize / kWarpSize;  // per consumer
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      CUTE_UNROLL
      for (uint64_t& barrier : control.keys[stage].full) init_barrier(barrier, 1);
      CUTE_UNROLL
      for (uint64_t& barrier : control.keys[stage].empty) init_barrier(barrier, kWarps * sharers);
      init_barrier(control.probabilities[stage], kWarps);
    }
    control.work.init(kWarpgroups * kWarps + kColumnGroups);
    control.may_miss_pages = false;
    fence_barrier_init();
  }

  // `maps` is a KeyMap. It is empty if warps load the keys, to convert them from float8.
  template <class... Maps>
  CUTE_DEVICE static void run(ForwardParams const& params, Maps const&... maps) {
    using Producer = LatentProducerSm90<Config, FmhaForwardLatentSm90>;
    using Consumer = LatentConsumerSm90<Config, FmhaForwardLatentSm90>;
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    int const sharers =
        Config::kFloat8Pages ? 1 : Schedule(params, int(gridDim.x)).template sharers<kCluster>();
    if (threadIdx.x == kConsumers) {
      (prefetch_map(maps.key), ...);
      init(control, sharers);
    }
    // Makes the barriers of each CTA visible to the threads of all of them.
    arrive_cluster();
    wait_cluster();

    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      int const warp = (int(threadIdx.x) - kConsumers) / kWarpSize;
      if (warp == kColumnGroups) {
        Producer::produce_parts(params, control);
      } else if constexpr (Config::kFloat8Pages) {
        LatentFloat8ProducerSm90<Config, FmhaForwardLatentSm90>::produce_keys(params, control,
                                                                              tiles, warp);
      } else if (threadIdx.x % kWarpSize == 0) {
        Producer::produce_keys(params, maps.key..., control, tiles, warp, sharers);
      }
    } else {
      raise_registers<kConsumerRegisters>();
      Consumer::run(params, control, tiles, sharers);
    }
    // Hazard: this CTA must not end while the other one may still arrive at its barriers.
    __syncwarp();
    arrive_cluster();
    wait_cluster();
  }
};

}  // namespace memeff
