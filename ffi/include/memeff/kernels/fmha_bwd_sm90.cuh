// Attention backward for Hopper: TMA, wgmma and warp specialization, with the keys split over the
// grid.
//
// As in fmha_bwd_sm80.cuh one CTA owns a KV block of one key head, keeps dk and dv in registers and
// adds its part of dq to f32 sums in global memory. The scores are computed transposed:
//
//   S^T = K Q^T    dP^T = V dO^T    P^T = exp2(S^T - lse)    dS^T = P^T (dP^T - delta)
//   dV += P^T dO    dQ = dS K    dK += dS^T Q
//
// Each of the two consumers owns 64 keys, so P^T and dS^T stay in its registers as operands of dV
// and dK. Only dQ, which sums over keys, reads dS from shared memory. dS has two buffers, so one
// barrier between the consumers per Q block is enough.
//
// backward/dq_sums/sm90.cuh adds dQ to its sums, and with Config::kSplitQ several CTAs may divide
// the Q blocks of one KV block (schedule/split_q.cuh).
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/linear_exponents.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/kernels/backward/dbias/postprocess.cuh>
#include <memeff/kernels/backward/dbias/sm90.cuh>
#include <memeff/kernels/backward/dq/delta.cuh>
#include <memeff/kernels/backward/dq_sums/sm90.cuh>
#include <memeff/kernels/backward/one_kernel/consumer.cuh>
#include <memeff/kernels/backward/one_kernel/epilogue.cuh>
#include <memeff/kernels/backward/one_kernel/producer.cuh>
#include <memeff/kernels/backward/one_kernel/strips.cuh>
#include <memeff/kernels/backward/one_kernel/work.cuh>
#include <memeff/kernels/backward/postprocess.cuh>
#include <memeff/kernels/backward/preprocess.cuh>
#include <memeff/layout/backward_tiles_sm90.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/kv_blocks_of_cta.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/schedule/split_q.cuh>
#include <memeff/score/bias/gradient_transposed.cuh>
#include <memeff/score/bias/q_block_ring_sm90.cuh>
#include <memeff/score/captured/shared_diagonals.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// The main kernel; codegen/kernels/fmha_bwd_sm90.py chooses Config.
template <class Config>
struct FmhaBackwardSm90 {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesSm90<Config>;
  using QueryTile = typename Tiles::QueryTile;
  using OutTile = typename Tiles::OutTile;
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  using ScoreTile = typename Tiles::ScoreTile;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using QueryProductGrid = typename Tiles::QueryProductGrid;
  using KeyGrid = typename Tiles::KeyGrid;
  using ValueGrid = typename Tiles::ValueGrid;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kConsumers = Tiles::kThreads;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static constexpr int kStages = Config::kStages;
  using Stage = PipelineStage<kStages>;
  static constexpr int kKeyStages = Config::kKeyStages;
  using KeyStage = PipelineStage<kKeyStages>;
  using Mask = ScoreMask<Config, ScoreGrid>;
  using Exponents = LinearExponents<Config, ScoreGrid>;

  // dq, dk and the gradient of the bias need dS; dv alone needs only P.
  using BiasWriter = TransposedBiasGradient<Config, Tiles>;
  using BiasSums = typename BiasWriter::Sums;
  using CapturedSums = FunctionGradient<Config, ScoreGrid, true>;
  static constexpr bool kScoreGradient = Config::kQueryGradient || Config::kKeyGradient ||
                                         Config::kFunctionGradient || BiasWriter::kNeeded;

  static constexpr bool kTmaDq = Config::kTmaDq && Config::kQueryGradient;
  using DqSums =
      cute::conditional_t<kTmaDq, TmaDqSumsSm90<Config, Tiles>, RegisterDqSumsSm90<Config, Tiles>>;

  using Strips =
      cute::conditional_t<Config::kProducerAddsStrips, ProducerAddsStrips<Config, FmhaBackwardSm90>,
                          ConsumersAddStrips<Config, FmhaBackwardSm90>>;

  static constexpr bool kPersistent = Config::kPersistent;
  static_assert(!kPersistent ||
                (kTmaDq && !Config::kOrdersQueries && !Config::kSplitQ && !Config::kBlockMask));
  using KvBlocks = KvBlocksInRounds<Config>;

  // Offsets in shared memory. TMA tiles begin at multiples of 1024 bytes, so they come first.
  using Bias = QBlockBiasRing<Config, Tiles, kStages>;
  using Diagonals = SharedDiagonals<Config, ScoreGrid, kTileKey, kTileQuery, true>;
  static_assert(!(Diagonals::kIsOn || Config::kProducerAddsStrips) || !kPersistent);
  using Function = typename Diagonals::Function;
  using FunctionReads = typename Function::Reads;
  using Modifiers = ScoreModifiers<Config, Bias, Function>;
  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kValueOffset = KeyTile::kBytes;  // from the keys of the stage
  static constexpr int kKeyStageBytes = kValueOffset + ValueTile::kBytes;
  static constexpr int kQueryOffset = kKeyStages * kKeyStageBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kDqOffset = kScoreOffset + 2 * ScoreTile::kBytes;
  static constexpr int kTmaBiasOffset = kDqOffset + DqSums::kSharedBytes;
  static constexpr int kStatisticsOffset = kTmaBiasOffset + kStages * Bias::kTmaStageBytes;
  static constexpr int kDiagonalsOffset = kStatisticsOffset + kStages * kStatisticsBytes;
  static constexpr int kWarpBiasOffset = kDiagonalsOffset + kStages * Diagonals::kBytes;
  static constexpr int kBiasOffset = Bias::kTmaBias ? kTmaBiasOffset : kWarpBiasOffset;
  static constexpr int kSumsOffset = kWarpBiasOffset + Bias::kWarpBytes;
  static constexpr int kRingsOffset = kSumsOffset + CapturedSums::kSharedBytes;
  static constexpr int kControlOffset = kRingsOffset + Strips::kRingBytes;

  struct Control : DqSums::Control, Strips::Control {
    Pipeline<kStages> query;         // also covers the statistics of their rows, and diagonals
    Pipeline<kStages> out_gradient;  // also covers the bias
    Pipeline<kKeyStages> key;        // also covers the values
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for all consumers, and one for the threads of each.
  static constexpr int kConsumerBarrier = 1;
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 2 + warpgroup; }

  static constexpr int kGradientFloats = kTileKey * (Config::kKeyGradient * Config::kHeadDim +
                                                     Config::kValueGradient * Config::kValueDim);
  using Splits = SplitQ<Config, kGradientFloats, kConsumers, kConsumerBarrier>;
  static_assert(!Config::kSplitQ || !BiasWriter::kNeeded);

  // Keys and values are the left operands of S and dP for every Q block. They stay in the registers
  // that dK, dV, S, dP, their packed forms and addresses leave free. Hazard: without dq or dk they
  // must stay in smem, because ptxas (CUDA 13.0) then packs P or dS into these registers, and the
  // next Q block would read that instead.
  static constexpr int kFreeRegisters =
      Config::kQueryGradient && Config::kKeyGradient
          ? kConsumerRegisters - (Config::kHeadDim + Config::kValueDim) / 2 - 3 * kTileQuery / 2 - 8
          : 0;
  static constexpr int kRegisterKeySteps = register_steps(Config::kHeadDim, kFreeRegisters);
  static constexpr int kRegisterValueSteps =
      register_steps(Config::kValueDim, kFreeRegisters - 4 * kRegisterKeySteps);
  using KeyRows = RegisterRows<KeyTile, ScoreGrid, kRegisterKeySteps>;
  using ValueRows = RegisterRows<ValueTile, ScoreGrid, kRegisterValueSteps>;

  using Work = KvBlockWorkSm90<Config, FmhaBackwardSm90>;

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      prefetch_map(maps.query);
      prefetch_map(maps.key);
      prefetch_map(maps.value);
      prefetch_map(maps.out_gradient);
      Bias(tiles + kBiasOffset).prefetch_map(maps);
      control.query.init(kConsumerWarps, Diagonals::kIsOn ? 2 : 1);
      control.out_gradient.init(kConsumerWarps);
      control.key.init(kConsumerWarps);
      DqSums::init(params, control, kConsumerWarps);
      Strips::init(control);
      fence_barrier_init();
    }
    __syncthreads();
    int const thread = int(threadIdx.x) - kConsumers;  // of the producer's warpgroup
    if constexpr (kPersistent) {
      if (thread >= 0) {
        lower_registers<kProducerRegisters>();
        if (thread == 0) produce_in_rounds(params, maps, control, tiles);
        if (thread == kWarpSize) sum_in_rounds(params, control, tiles, thread);
      } else {
        raise_registers<kConsumerRegisters>();
        consume_in_rounds(params, maps, control, tiles);
      }
    } else {
      Work const work(params, DqSums::item(params, control));
      Stage stage;
      if (thread >= 0) {
        lower_registers<kProducerRegisters>();
        if (thread == 0) Producer::produce(params, maps, work, control, tiles, {}, stage);
        if (Diagonals::kIsOn && thread / kWarpSize == 3) {
          Producer::produce_diagonals(params, work, control, tiles, stage);
        }
        if (thread / kWarpSize == 2) {
          Strips::produce(params, control, work, tiles + kRingsOffset);
        }
        PipelineStage<1> sums;
        DqSums::produce(params, control, work.item, work.tiles, tiles + kDqOffset, thread, sums);
      } else {
        raise_registers<kConsumerRegisters>();
        int score_buffer = 0;
        consume(params, maps, work, control, tiles, {}, stage, score_buffer);
      }
    }
  }

  // The roles of a persistent CTA.
  CUTE_DEVICE static void produce_in_rounds(BackwardParams const& params, BackwardMaps const& maps,
                                            Control& control, uint32_t tiles) {
    Stage stage;
    KvBlocks kv_blocks;
    WorkItem item;
    CUTE_NO_UNROLL
    while (kv_blocks.take(params, item)) {
      Producer::produce(params, maps, Work(params, item), control, tiles,
                        kv_blocks.template key_stage<kKeyStages>(), stage);
    }
  }
  CUTE_DEVICE static void sum_in_rounds(BackwardParams const& params, Control& control,
                                        uint32_t tiles, int thread) {
    PipelineStage<1> stage;
    KvBlocks kv_blocks;
    WorkItem item;
    CUTE_NO_UNROLL
    while (kv_blocks.take(params, item)) {
      Work const work(params, item);
      DqSums::produce(params, control, item, work.tiles, tiles + kDqOffset, thread, stage);
    }
  }
  CUTE_DEVICE static void consume_in_rounds(BackwardParams const& params, BackwardMaps const& maps,
                                            Control& control, uint32_t tiles) {
    Stage stage;
    int score_buffer = 0;
    KvBlocks kv_blocks;
    WorkItem item;
    CUTE_NO_UNROLL
    while (kv_blocks.take(params, item)) {
      Work const work(params, item);
      consume(params, maps, work, control, tiles, kv_blocks.template key_stage<kKeyStages>(), stage,
              score_buffer);
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) {
        control.key.release(kv_blocks.template key_stage<kKeyStages>());
      }
    }
  }

  // The addresses of the buffers of a stage.
  CUTE_DEVICE static uint32_t query_tile_of(uint32_t tiles, int stage) {
    return tiles + kQueryOffset + stage * QueryTile::kBytes;
  }
  CUTE_DEVICE static uint32_t out_tile_of(uint32_t tiles, int stage) {
    return tiles + kOutOffset + stage * OutTile::kBytes;
  }
  CUTE_DEVICE static uint32_t statistics_of(uint32_t tiles, int stage) {
    return tiles + kStatisticsOffset + stage * kStatisticsBytes;
  }

  CUTE_DEVICE static uint32_t diagonals_of(uint32_t tiles, int stage) {
    return tiles + kDiagonalsOffset + stage * Diagonals::kBytes;
  }

  using QueryRows = DescriptorOperand<QueryTile, Contiguous::k>;
  using OutRows = DescriptorOperand<OutTile, Contiguous::k>;
  using QueryColumns = DescriptorOperand<QueryTile, Contiguous::outer>;
  using OutColumns = DescriptorOperand<OutTile, Contiguous::outer>;
  using KeyColumns = DescriptorOperand<KeyTile, Contiguous::outer>;
  using ScoreColumns = DescriptorOperand<ScoreTile, Contiguous::outer>;
  using ScoreRows = DescriptorOperand<ScoreTile, Contiguous::k>;

  using ScoreOperand = RegisterOperand<1, kTileQuery / 16, sizeof(Element)>;
  using KeptBlocks = typename ProbabilityModifiers<Config, ScoreGrid, true>::Tile;

  // ptxas sinks most exponentials below the wait for dP, where no product of this consumer runs.
  // With Config::kExponentiatesUnderDp a redundant wait keeps all of them above it, and some
  // vectors of the statistics are read ahead: logsumexps while S runs, and deltas while dP runs.
  // Products keep shared memory so busy that a read takes hundreds of cycles.
  static constexpr int kVectorsAhead = Config::kExponentiatesUnderDp ? 4 : 0;

  using Producer = BackwardProducerSm90<Config, FmhaBackwardSm90>;
  using Consumer = BackwardConsumerSm90<Config, FmhaBackwardSm90>;
  using Epilogue = BackwardEpilogueSm90<Config, FmhaBackwardSm90>;

  // The reads of a score function, which overlap S and dP. A redundant wait separates them from the
  // wgmmas: in one basic block ptxas delays the last wgmmas until the addresses have been loaded.
  CUTE_DEVICE static FunctionReads read_ahead(BackwardParams const& params, Control& control,
                                              uint32_t tiles, Stage const& stage,
                                              ScoreTilePosition const& at) {
    KeptBlocks::end_basic_block(control.out_gradient, stage);
    if constexpr (FunctionReads::kAny) control.out_gradient.wait_again(stage);
    if constexpr (Diagonals::kIsOn)
      return {diagonals_of(tiles, stage.index)};
    else
      return FunctionReads(params, at);
  }

  // The main loop: per Q block S, dP, P and dS, then dV, dQ and dK. Hazard: functions for more than
  // single steps change how ptxas assigns registers (docs/tuning/compilers.md).
  CUTE_DEVICE static void consume(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles,
                                  KeyStage const& key, Stage& stage, int& score_buffer) {
    WorkItem const& item = work.item;
    // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    bool const leader = threadIdx.x % kWarpSize == 0;  // one per warp
    Mask const mask(params.mask, params.shape, item.batch);
    uint32_t const key_tile = tiles + key.index * kKeyStageBytes;
    Consumer const consumer{params, work, mask, control, tiles, key_tile};

    auto key_gradient = KeyGrid::make_accumulators();      // (4, 1, MMA_N)
    auto value_gradient = ValueGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);
    cute::clear(value_gradient);
    consumer.begin(key);
    KeyRows const keys(key_tile, warpgroup * kWarpgroupRows);
    ValueRows const values(key_tile + kValueOffset, warpgroup * kWarpgroupRows);

    int const group = params.shape.group;
    CUTE_NO_UNROLL
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
      BiasSums bias_sums;
      typename CapturedSums::Sums captured_sums;
      Exponents const exponents(params, item.batch, head);
      CUTE_NO_UNROLL
      for (auto walk = work.walk(params, head); walk.more(); walk.advance()) {
        int const tile = walk.tile();
        uint32_t const query_tile = query_tile_of(tiles, stage.index);
        uint32_t const out_tile = out_tile_of(tiles, stage.index);
        uint32_t const score_tile = tiles + kScoreOffset + score_buffer * ScoreTile::kBytes;
        consumer.wait_for_queries(tile, stage, query_tile, out_tile);
        auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        consumer.begin_scores(keys, query_tile, scores);
        uint32_t const statistics = statistics_of(tiles, stage.index);
        Logsumexps<ScoreGrid, kVectorsAhead> const logsumexps(statistics);
        control.out_gradient.wait(stage);
        consumer.begin_score_gradient(values, out_tile, score_gradient);
        auto const reads = read_ahead(params, control, tiles, stage, work.position(head, tile));
        KeptBlocks const kept(params, item.batch, head, tile * kTileQuery, work.column);
        wait_products<kScoreGradient>();  // S
        fence_accumulators(scores);
        auto scaled = ScoreGrid::make_accumulators();  // (4, 1, MMA_N), for the soft cap
        consumer.exponentiate(head, tile, walk.partial(), stage.index, logsumexps, exponents, reads,
                              scores, scaled);
        if constexpr (Config::kExponentiatesUnderDp) control.out_gradient.wait_again(stage);
        Deltas<ScoreGrid, kVectorsAhead> const deltas(statistics);
        wait_products<0>();  // dP
        fence_accumulators(score_gradient);
        ScoreOperand probabilities;  // P^T
        ScoreOperand left_gradient;  // dS^T
        consumer.differentiate(head, tile, deltas.reader(statistics), kept, scaled, scores,
                               score_gradient, score_tile, probabilities, left_gradient, bias_sums,
                               captured_sums);

        auto query_gradient = QueryProductGrid::make_accumulators();  // (4, 1, MMA_N)
        consumer.begin_value_gradient(probabilities, out_tile, value_gradient);
        consumer.begin_query_gradient(warpgroup, score_tile, query_gradient);
        consumer.add_strips(head, tile, warpgroup, score_buffer);
        wait_products<Config::kQueryGradient>();  // dV
        fence_accumulators(value_gradient);
        if (leader) control.out_gradient.release(stage);
        consumer.begin_key_gradient(left_gradient, query_tile, key_gradient);
        wait_products<Config::kKeyGradient>();  // dQ
        fence_accumulators(query_gradient);
        // The score buffer alternates by Q blocks, as the phases of dQ's barriers do.
        consumer.add_query_gradient(warpgroup, head, tile, score_buffer, query_gradient);
        wait_products<0>();  // dK
        fence_accumulators(key_gradient);
        if (leader) control.query.release(stage);
        stage.advance();
        score_buffer ^= 1;
      }
      BiasWriter::finish(params, item.batch, head, work.column, bias_sums);
      CapturedSums(params, work.position(head, 0), tiles + kSumsOffset).add_sums(captured_sums);
    }
    Epilogue::finish(params, maps, work, mask.key_length, warpgroup, tiles, key_tile, key_gradient,
                     value_gradient);
  }
};

}  // namespace memeff
