// Attention forward for Hopper with head dims above 256: separate keys and values, 64 rows of a
// head in each CTA.
//
// The output of 64 rows has up to 512 columns, too many for the registers of one warpgroup. So two
// consumers own half of the columns each and take turns computing the scores of KV blocks, as in
// latent attention (sm90/latent.cuh):
//
//   consumer 0 | S(0) softmax P(0) V(0)        P(1) V(1)  S(2) softmax P(2) V(2) ...
//   consumer 1 |        S(1)       P(0) V(0)  softmax  P(1) V(1)        P(2) V(2)  S(3) ...
//
// Keys arrive in panels of 64 columns, because scores accumulate panel by panel, and because a ring
// of panels fills shared memory to the last 8 KB. Each consumer has a ring of its own for its
// columns of the values.
//
// Above 576 columns the two CTAs of a cluster divide the columns of all operands. Each computes the
// scores of its columns, and both add them up (collective/column_sum.cuh).
#pragma once

#include <kernels/sm90/forward_parts.cuh>
#include <memeff/collective/column_sum.cuh>
#include <memeff/collective/softmax/exchange.cuh>
#include <memeff/collective/softmax/linear_scores.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/ping_pong.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// Producer: one thread copies queries and keys, and two others copy values, one for each consumer.

// Each thread of the producer has an object, and the kernel calls one method of it.
template <class Config, class Kernel>
struct LargeDimProducerSm90 {
  using Control = typename Kernel::Control;
  using KeyPanel = typename Kernel::KeyPanel;
  using Mask = typename Kernel::Mask;
  using QueryTile = typename Kernel::QueryTile;
  using ValueTile = typename Kernel::ValueTile;
  static constexpr int kTileKey = Kernel::kTileKey;

  ForwardParams const& params;
  ForwardMaps const& maps;
  Control& control;
  uint32_t tiles;
  WorkItem item;
  TileRange range;

  CUTE_DEVICE LargeDimProducerSm90(ForwardParams const& params, ForwardMaps const& maps,
                                   Control& control, uint32_t tiles)
      : params(params),
        maps(maps),
        control(control),
        tiles(tiles),
        item(Kernel::item(params.shape, params.bias)),
        range(Kernel::blocks(Mask(params.mask, params.shape, item.batch), item)) {}

  CUTE_DEVICE void produce_keys() const {
    if (range.begin == range.end) return;
    load_queries();
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    int const batch = source.batch(params.key);
    int const first_column = Kernel::column_part() * Kernel::kHeadColumns;
    PipelineStage<Kernel::kKeyStages> stage;
    CUTE_NO_UNROLL
    for (int block = range.begin; block < range.end; ++block) {
      CUTE_NO_UNROLL
      for (int panel = 0; panel < Kernel::kKeyPanels; ++panel) {
        uint64_t& arrived = control.key.acquire(stage, KeyPanel::kBytes);
        load_box(maps.key, arrived, Kernel::keys(tiles, stage),
                 first_column + panel * KeyPanel::kColumns, source.origin.row + block * kTileKey,
                 source.head, batch, CacheHint::EVICT_LAST);
        stage.advance();
      }
    }
  }

  CUTE_DEVICE void produce_values(int warpgroup) const {
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    int const batch = source.batch(params.value);
    int const first_column = Kernel::first_column(warpgroup);
    PipelineStage<Kernel::kValueStages> stage;
    CUTE_NO_UNROLL
    for (int block = range.begin; block < range.end; ++block) {
      uint64_t& arrived = control.value[warpgroup].acquire(stage, ValueTile::kBytes);
      uint32_t const target = Kernel::values(tiles, warpgroup, stage);
      CUTE_UNROLL
      for (int panel = 0; panel < ValueTile::kPanels; ++panel) {
        load_box(maps.value, arrived, target + panel * ValueTile::kPanelBytes,
                 first_column + panel * ValueTile::kPanelColumns,
                 source.origin.row + block * kTileKey, source.head, batch, CacheHint::EVICT_LAST);
      }
      stage.advance();
    }
  }

 private:
  CUTE_DEVICE void load_queries() const {
    Origin const origin = query_origin<Config>(params.shape, item.batch);
    arrive_and_expect(control.query, QueryTile::kBytes);
    load_tma_tile<QueryTile>(maps.query, control.query, tiles, 0,
                             origin.row + item.tile * Config::kTileQuery, item.head, origin.batch,
                             CacheHint::EVICT_FIRST, Kernel::column_part() * Kernel::kHeadColumns);
  }
};

// Consumer: the scores of every second KV block, and half of the output's columns over all KV
// blocks.

// run() is called by the kernel with all threads of a consumer warpgroup.
template <class Config, class Kernel>
struct LargeDimConsumerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using Exchange = typename Kernel::Exchange;
  using KeyPanel = typename Kernel::KeyPanel;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using OutGrid = typename Kernel::OutGrid;
  using ProbabilityTile = typename Kernel::ProbabilityTile;
  using QueryPanel = typename Kernel::QueryPanel;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using Softmax = typename Kernel::Softmax;
  using PingPong = typename Kernel::PingPong;
  using ValueTile = typename Kernel::ValueTile;
  static constexpr int kKeyPanels = Kernel::kKeyPanels;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  static constexpr int kPanelSteps = KeyPanel::kColumns / 16;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;

  // A consumer's stages in the rings.
  struct ConsumerState {
    int warpgroup;
    int own_parity = 0;  // of the KV blocks whose scores it computes
    int other_parity = 0;
    PipelineStage<Kernel::kKeyStages> key;
    PipelineStage<Kernel::kValueStages> value;
  };

  CUTE_DEVICE static void run(ForwardParams const& params, Control& control, uint32_t tiles) {
    ConsumerState at;
    at.warpgroup = warpgroup_index();
    WorkItem const item = Kernel::item(params.shape, params.bias);
    Mask const mask(params.mask, params.shape, item.batch);
    TileRange const range = Kernel::blocks(mask, item);
    auto output = OutGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(output);
    Softmax softmax;
    if (range.begin < range.end) {
      compute(params, control, tiles, item, mask, range, at, softmax, output);
    }
    // Both CTAs of a cluster must stay alive until the last scores have been read.
    if constexpr (Kernel::kDividesColumns) arrive_cluster();
    Exchange::add_row_sums(control.row_sums, at.warpgroup, Kernel::kConsumerBarrier, softmax);
    write(params, item, mask.query_length, at.warpgroup, softmax, output);
    if constexpr (Kernel::kDividesColumns) wait_cluster();
  }

 private:
  // Computes the KV blocks of the range two at a time, one per consumer.
  template <class Output>
  CUTE_DEVICE static void compute(ForwardParams const& params, Control& control, uint32_t tiles,
                                  WorkItem const& item, Mask const& mask, TileRange const& range,
                                  ConsumerState& at, Softmax& softmax, Output& output) {
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    PingPong::begin(at.warpgroup);
    wait_barrier(control.query, 0);
    random_sleep();
    int block = range.begin;
    if (at.warpgroup == 0) {
      add_own_block<false>(params, control, tiles, at, mask, item, block, scores, softmax, output);
      ++block;
    } else {
      pass_keys(at);
    }
    // `block` belongs to the other consumer.
    CUTE_NO_UNROLL
    for (; block + 1 < range.end; block += Kernel::kWarpgroups) {
      add_own_block<true>(params, control, tiles, at, mask, item, block + 1, scores, softmax,
                          output);
    }
    if (block < range.end) {
      begin_other_values(params, control, tiles, at, mask, block, softmax, output);
      end_other_values(control, at, output);
    }
  }

  // Adds a KV block whose scores this consumer computes, and with kFollows the previous one, whose
  // scores the other consumer computes and whose product overlaps the softmax.
  //
  // Hazard: kFollows must be a compile-time constant, because ptxas serializes products if a branch
  // separates them from the wait for other products.
  template <bool kFollows, class Scores, class Output>
  CUTE_DEVICE static void add_own_block(ForwardParams const& params, Control& control,
                                        uint32_t tiles, ConsumerState& at, Mask const& mask,
                                        WorkItem const& item, int block, Scores& scores,
                                        Softmax& softmax, Output& output) {
    begin_scores(control, tiles, at, scores);
    if constexpr (kFollows) {
      begin_other_values(params, control, tiles, at, mask, block - 1, softmax, output);
    }
    wait_products<kFollows>();
    fence_accumulators(scores);
    release_keys(control, at);
    if constexpr (Kernel::kDividesColumns) {
      // Every second tile is this consumer's. The other one has published the probabilities of the
      // tile before, so that tile's sum is complete.
      Kernel::ScoreSum::add(control, tiles + Kernel::kScoreSumOffset, 1 - Kernel::column_part(),
                            at.warpgroup, scores);
    }
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const tile = {item.batch, item.head, item.tile * kTileQuery,
                                    block * kTileKey};
    modifiers.forward(scores, tile);
    mask.template apply<kTileQuery, kTileKey>(scores, params, tile);
    auto const correction = softmax.exponentiate(scores, params.scale.softmax_scale);
    fence_accumulators(scores);
    // Redundant wait: it ends the basic block. Without it ptxas sinks the exponentials below the
    // wait for the product that they should overlap.
    wait_barrier(control.query, 0);
    auto const probabilities = as_left_operand<Element>(scores);
    if constexpr (kFollows) end_other_values(control, at, output);
    publish(control, tiles, at, softmax, correction, probabilities);
    Softmax::rescale(output, correction);
    multiply_own_values(params, control, tiles, at, mask, block, probabilities, output);
  }

  // Starts S = Q K^T, panel by panel as they arrive.
  //
  // Hazard: consumers wait for keys in turn. This one skipped those of the previous KV block, and a
  // wait for the phase after next of a barrier would return at once.
  template <class Scores>
  CUTE_DEVICE static void begin_scores(Control& control, uint32_t tiles, ConsumerState const& at,
                                       Scores& scores) {
    auto stage = at.key;
    PingPong::wait(at.warpgroup);
    fence_accumulators(scores);
    CUTE_UNROLL
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      control.key.wait(stage);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      warpgroup_gemm<Element, kPanelSteps>(
          scores, operand<QueryPanel, Contiguous::k>(tiles + panel * QueryPanel::kBytes),
          operand<KeyPanel, Contiguous::k>(Kernel::keys(tiles, stage)), panel > 0);
      stage.advance();
    }
    commit_products();
    PingPong::pass(at.warpgroup);
  }

  // Releases the keys of a KV block, each panel by a different lane, and skips those of the next KV
  // block, which the other consumer reads.
  CUTE_DEVICE static void release_keys(Control& control, ConsumerState& at) {
    static_assert(kKeyPanels <= kWarpSize);
    int const panel = int(threadIdx.x) % kWarpSize;
    if (panel < kKeyPanels) {
      auto stage = at.key;
      stage.advance(panel);
      arrive_barrier(control.key.empty[stage.index]);
    }
    random_sleep();
    at.key.advance(kKeyPanels);
    pass_keys(at);
  }
  CUTE_DEVICE static void pass_keys(ConsumerState& at) { at.key.advance(kKeyPanels); }

  CUTE_DEVICE static void release_values(Control& control, ConsumerState& at) {
    if (threadIdx.x % kWarpSize == 0) {
      arrive_barrier(control.value[at.warpgroup].empty[at.value.index]);
    }
    random_sleep();
    at.value.advance();
  }

  // Passes the probabilities of a KV block to the other consumer, with the softmax references.
  template <class Probabilities>
  CUTE_DEVICE static void publish(Control& control, uint32_t tiles, ConsumerState& at,
                                  Softmax const& softmax,
                                  typename Softmax::Correction const& correction,
                                  Probabilities const& probabilities) {
    // Hazard: every warp of this consumer must have read the other's probabilities, which these
    // replace.
    named_barrier_sync(Kernel::warpgroup_barrier(at.warpgroup), kWarpgroupSize);
    store_operand<ProbabilityTile, ScoreGrid>(tiles + Kernel::kProbabilityOffset, probabilities);
    Exchange::publish(control.references, softmax, correction);
    fence_tma_store();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive_barrier(control.probabilities[at.warpgroup]);
    random_sleep();
  }

  // Adds P V of a KV block whose probabilities this consumer has in registers.
  template <class Probabilities, class Output>
  CUTE_DEVICE static void multiply_own_values(ForwardParams const& params, Control& control,
                                              uint32_t tiles, ConsumerState& at, Mask const& mask,
                                              int block, Probabilities const& probabilities,
                                              Output& output) {
    take_values(params, control, tiles, at, mask, block);
    fence_accumulators(output);
    begin_products();
    warpgroup_gemm<Element, kKeySteps>(output, probabilities, values(tiles, at));
    commit_products();
    wait_products<0>();
    fence_accumulators(output);
    release_values(control, at);
    at.own_parity ^= 1;
  }

  // Starts O += P V of a KV block of the other consumer, whose probabilities are in shared memory.
  template <class Output>
  CUTE_DEVICE static void begin_other_values(ForwardParams const& params, Control& control,
                                             uint32_t tiles, ConsumerState const& at,
                                             Mask const& mask, int block, Softmax& softmax,
                                             Output& output) {
    take_values(params, control, tiles, at, mask, block);
    wait_barrier(control.probabilities[1 - at.warpgroup], at.other_parity);
    random_sleep();
    Softmax::rescale(output, Exchange::adopt(control.references, softmax));
    fence_accumulators(output);
    begin_products();
    warpgroup_gemm<Element, kKeySteps>(
        output, operand<ProbabilityTile, Contiguous::k>(tiles + Kernel::kProbabilityOffset),
        values(tiles, at), true);
    commit_products();
  }

  template <class Output>
  CUTE_DEVICE static void end_other_values(Control& control, ConsumerState& at, Output& output) {
    wait_products<0>();
    fence_accumulators(output);
    release_values(control, at);
    at.other_parity ^= 1;
  }

  // Waits for this consumer's columns of the values of a KV block, and zeros those beyond the key
  // length, where 0 * NaN would be NaN.
  CUTE_DEVICE static void take_values(ForwardParams const& params, Control& control, uint32_t tiles,
                                      ConsumerState const& at, Mask const& mask, int block) {
    control.value[at.warpgroup].wait(at.value);
    int const column = block * kTileKey;
    if (!reads_beyond<Config>(mask.key_length, column + kTileKey, params.shape.key_length)) return;
    clear_rows<ValueTile, kWarpgroupSize>(Kernel::values(tiles, at.warpgroup, at.value),
                                          max(mask.key_length - column, 0));
    fence_tma_store();
    named_barrier_sync(Kernel::warpgroup_barrier(at.warpgroup), kWarpgroupSize);
  }

  CUTE_DEVICE static DescriptorOperand<ValueTile, Contiguous::outer> values(
      uint32_t tiles, ConsumerState const& at) {
    return operand<ValueTile, Contiguous::outer>(Kernel::values(tiles, at.warpgroup, at.value));
  }

  template <class Tile, Contiguous kOrder>
  CUTE_DEVICE static DescriptorOperand<Tile, kOrder> operand(uint32_t tile) {
    return DescriptorOperand<Tile, kOrder>(Kernel::kDividesColumns ? descriptor_address(tile)
                                                                   : tile);
  }

  // Writes this consumer's columns of the output. Consumer 0 of the first columns also clears rows
  // that are not valid.
  template <class Output>
  CUTE_DEVICE static void write(ForwardParams const& params, WorkItem const& item, int query_length,
                                int warpgroup, Softmax& softmax, Output& output) {
    LinearScores<Config, false> const linear(params, item);
    Kernel::Output::write(params, item, query_length, linear, softmax, output,
                          Kernel::first_column(warpgroup));
    if (Kernel::column_part() > 0) return;
    if (warpgroup == 0) {
      int const row = item.tile * kTileQuery;
      Kernel::Output::write_empty(params, item, query_length, max(row, query_length),
                                  row + kTileQuery);
    }
    if constexpr (Config::kPacked) {
      GridTiles<Config, GridRows::queries, kTileQuery> const grid = {params.shape};
      clear_query_gap<Config, Kernel::kConsumers>(params, item, query_length,
                                                  grid.of_batch_index(item.batch));
    }
  }
};

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
  using PingPong = PingPongBarrier<true, kWarpgroups, 2 + kWarpgroups>;

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
