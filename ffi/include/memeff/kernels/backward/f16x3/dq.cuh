// The gradient of the query of the 3xFP16 backward: see fmha_bwd_f16x3_sm90.cuh.
//
// One CTA owns 128 queries, 64 for each consumer, and iterates over the KV blocks that they attend
// to. P and dS stay in registers, so the consumers exchange nothing: while one computes P and dS,
// the other's products run.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/kernels/backward/dq/kernel.cuh>
#include <memeff/kernels/backward/f16x3/products.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaBackwardF16x3Dq {
  using Tiles = F16x3Tiles<Config>;
  using QueryTile = typename Tiles::Query;
  using OutTile = typename Tiles::OutGradient;
  using KeyTile = typename Tiles::Key;
  using ValueTile = typename Tiles::Value;
  using TwoKernelDq = FmhaBackwardTwoKernelDq<Config>;
  using Work = typename TwoKernelDq::Work;
  using Mask = typename TwoKernelDq::Mask;
  using ScoreGrid = typename TwoKernelDq::ScoreGrid;
  using QueryGrid = typename TwoKernelDq::QueryGrid;
  using Statistics = typename TwoKernelDq::Statistics;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kWarpgroups = kTileQuery / kWarpgroupRows;
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

  // Two products read the keys, and the second one, dQ, comes last in an iteration. So keys need
  // one more buffer than values.
  static constexpr int kKeyStages = Config::kStages;
  static constexpr int kValueStages = kKeyStages - 1;
  using KeyStage = PipelineStage<kKeyStages>;
  using ValueStage = PipelineStage<kValueStages>;

  // Offsets in shared memory: hi and lo parts, then factors.
  static constexpr int kOutOffset = kWarpgroups * kF16x3PartBytes<QueryTile>;
  static constexpr int kKeyOffset = kOutOffset + kWarpgroups * kF16x3PartBytes<OutTile>;
  static constexpr int kValueOffset = kKeyOffset + kKeyStages * kF16x3PartBytes<KeyTile>;
  static constexpr int kQueryFactors = kValueOffset + kValueStages * kF16x3PartBytes<ValueTile>;
  static constexpr int kOutFactors = kQueryFactors + kWarpgroups * kF16x3FactorBytes;
  static constexpr int kKeyFactors = kOutFactors + kWarpgroups * kF16x3FactorBytes;
  static constexpr int kValueFactors = kKeyFactors + kKeyStages * kF16x3FactorBytes;
  static constexpr int kControlOffset = kValueFactors + kValueStages * kF16x3FactorBytes;

  // The barriers in shared memory.
  struct Control {
    Pipeline<1> query;  // also covers dO
    Pipeline<kKeyStages> key;
    Pipeline<kValueStages> value;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      control.query.init(1);
      control.key.init(kConsumerWarps);
      control.value.init(kConsumerWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, work, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      consume(params, work, control, tiles);
    }
  }

  // The producer, one thread: copies queries and dO once, then keys and values of each KV block.
  CUTE_DEVICE static void produce(BackwardParams const& params, Work const& work, Control& control,
                                  uint32_t tiles) {
    WorkItem const& item = work.item;
    if (work.kv_blocks.begin >= work.kv_blocks.end) return;
    uint64_t& arrived =
        control.query.acquire({}, kWarpgroups * (QueryTile::kBytes + OutTile::kBytes));
    // Hazard: rows beyond the length may have no tile. The last tile is copied instead.
    int const length = Mask(params.mask, params.shape, item.batch).query_length;
    int const last = Tiles::template count<QueryTile>(length) - 1;
    CUTE_UNROLL
    for (int i = 0; i < kWarpgroups; ++i) {
      int const tile = min(item.tile * kWarpgroups + i, last);
      load_f16x3<QueryTile>(Tiles::query(params, item.batch, item.head, tile), arrived,
                            tiles + i * kF16x3PartBytes<QueryTile>,
                            tiles + kQueryFactors + i * kF16x3FactorBytes);
      load_f16x3<OutTile>(Tiles::out_gradient(params, item.batch, item.head, tile), arrived,
                          tiles + kOutOffset + i * kF16x3PartBytes<OutTile>,
                          tiles + kOutFactors + i * kF16x3FactorBytes);
    }
    // Computed after the query copies have started, because finding the key head takes a division.
    int const key_head = item.head / params.shape.group;
    char const* const keys = Tiles::key(params, item.batch, key_head, 0);
    char const* const values = Tiles::value(params, item.batch, key_head, 0);
    KeyStage key;
    ValueStage value;
    CUTE_NO_UNROLL
    for (int tile = work.kv_blocks.end - 1; tile >= work.kv_blocks.begin;
         tile = work.kv_blocks.before(tile)) {
      load_f16x3<KeyTile>(keys + (long long)tile * KeyTile::kBytes,
                          control.key.acquire(key, KeyTile::kBytes), key_tile(tiles, key),
                          key_factors(tiles, key));
      load_f16x3<ValueTile>(values + (long long)tile * ValueTile::kBytes,
                            control.value.acquire(value, ValueTile::kBytes),
                            value_tile(tiles, value), value_factors(tiles, value));
      key.advance();
      value.advance();
    }
  }

  // The addresses of the buffers.
  CUTE_DEVICE static uint32_t key_tile(uint32_t tiles, KeyStage const& stage) {
    return tiles + kKeyOffset + stage.index * kF16x3PartBytes<KeyTile>;
  }
  CUTE_DEVICE static uint32_t key_factors(uint32_t tiles, KeyStage const& stage) {
    return tiles + kKeyFactors + stage.index * kF16x3FactorBytes;
  }
  CUTE_DEVICE static uint32_t value_tile(uint32_t tiles, ValueStage const& stage) {
    return tiles + kValueOffset + stage.index * kF16x3PartBytes<ValueTile>;
  }
  CUTE_DEVICE static uint32_t value_factors(uint32_t tiles, ValueStage const& stage) {
    return tiles + kValueFactors + stage.index * kF16x3FactorBytes;
  }

  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid>>;

  // The part of the queries and dO that stays in registers. The other registers hold dQ; S and dP
  // with the input of the derivative or, in the same registers, the operand and accumulators of a
  // product; and statistics, addresses and whatever masks and modifiers need.
  static constexpr int kSumRegisters = Config::kHeadDim / 2;
  static constexpr int kScoreRegisters = (2 + !Modifiers::kConstantDerivative) * kTileKey / 2;
  static constexpr int kProductRegisters = kTileKey / 2 + kSumRegisters;
  static constexpr int kOtherRegisters = 44 + Config::kModifierRegisters;
  static constexpr int kFreeRegisters = kConsumerRegisters - kSumRegisters - kOtherRegisters -
                                        cute::max(kScoreRegisters, kProductRegisters);
  using QueryRows = F16x3Rows<QueryTile, kFreeRegisters>;
  static constexpr int kQueryRegisters = 4 * (QueryRows::kHighSteps + QueryRows::kLowSteps);
  using OutRows = F16x3Rows<OutTile, kFreeRegisters - kQueryRegisters>;
  using KeptBlocks = ProbabilityModifiers<Config, ScoreGrid>;

  using Operand = F16x3LeftOperand<kTileKey / 16>;

  // The main loop: per KV block S and dP, P and dS, then dQ.
  CUTE_DEVICE static void consume(BackwardParams const& params, Work const& work, Control& control,
                                  uint32_t tiles) {
    Mask const mask(params.mask, params.shape, work.item.batch);
    auto query_gradient = QueryGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(query_gradient);
    if (work.kv_blocks.begin < work.kv_blocks.end) {
      // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
      int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
      Statistics const statistics = TwoKernelDq::load_statistics(params, work.item, work.row);
      control.query.wait({});
      QueryRows const queries(tiles + warpgroup * kF16x3PartBytes<QueryTile>);
      OutRows const outs(tiles + kOutOffset + warpgroup * kF16x3PartBytes<OutTile>);
      Steps const steps{
          params,
          work,
          mask,
          control,
          tiles,
          threadIdx.x % kWarpSize == 0,
          statistics,
          RowFactors::load<ScoreGrid>(tiles + kQueryFactors + warpgroup * kF16x3FactorBytes),
          RowFactors::load<ScoreGrid>(tiles + kOutFactors + warpgroup * kF16x3FactorBytes)};
      KeyStage key;
      ValueStage value;
      Operand operand;
      auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      auto part = QueryGrid::make_accumulators();            // (4, 1, MMA_N)
      CUTE_NO_UNROLL
      for (int tile = work.kv_blocks.end - 1; tile >= work.kv_blocks.begin;
           tile = work.kv_blocks.before(tile)) {
        steps.begin_scores(queries, outs, key, value, scores, score_gradient);
        steps.differentiate_block(tile, key, value, scores, score_gradient);
        operand.set(score_gradient);
        begin_f16x3_gradient<KeyTile>(part, operand, key_tile(tiles, key));
        steps.end_gradient(operand, key, part, query_gradient);
        key.advance();
        value.advance();
      }
    }
    store(params, work, mask.query_length - work.row, query_gradient);
  }

  // The steps of the main loop.
  struct Steps {
    BackwardParams const& params;
    Work const& work;
    Mask const& mask;
    Control& control;
    uint32_t tiles;
    bool leader;  // one per warp
    Statistics const& statistics;
    RowFactors query_rows;
    RowFactors out_rows;

    // S = Q K^T and dP = dO V^T
    template <class Scores>
    CUTE_DEVICE void begin_scores(QueryRows const& queries, OutRows const& outs,
                                  KeyStage const& key, ValueStage const& value, Scores& scores,
                                  Scores& score_gradient) const {
      control.key.wait(key);
      begin_f16x3_scores<KeyTile>(scores, queries, key_tile(tiles, key));
      control.value.wait(value);
      begin_f16x3_scores<ValueTile>(score_gradient, outs, value_tile(tiles, value));
    }

    // Replaces dP of KV block `tile` with dS times the factors of its keys.
    template <class Scores>
    CUTE_DEVICE void differentiate_block(int tile, KeyStage const& key, ValueStage const& value,
                                         Scores& scores, Scores& score_gradient) const {
      ScoreTilePosition const at = {work.item.batch, work.item.head, work.row, tile * kTileKey};
      wait_products<1>();  // S
      fence_accumulators(scores);
      unscale(scores, query_rows, key_factors(tiles, key));
      exponentiate(params, mask, at, work.kv_blocks.partial(tile), statistics, scores);
      control.value.wait_again(value);  // redundant: keeps the exponentials above the next wait
      wait_products<0>();               // dP
      fence_accumulators(score_gradient);
      unscale(score_gradient, out_rows, value_factors(tiles, value));
      differentiate(params, at, statistics, scores, score_gradient);
      __syncwarp();
      if (leader) control.value.release(value);
      scale_columns(score_gradient, key_factors(tiles, key));
    }

    // dQ += dS K
    template <class Part>
    CUTE_DEVICE void end_gradient(Operand const& operand, KeyStage const& key, Part& part,
                                  Part& query_gradient) const {
      wait_products<0>();
      add_part(query_gradient, part, operand);
      if (leader) control.key.release(key);
    }
  };

  // Replaces S with P times the derivative of the modifiers.
  template <class Scores>
  CUTE_DEVICE static void exponentiate(BackwardParams const& params, Mask const& mask,
                                       ScoreTilePosition const& at, bool partial,
                                       Statistics const& statistics, Scores& scores) {
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    auto scaled = ScoreGrid::make_accumulators();  // (4, 1, MMA_N), for the derivative
    modifiers.recompute(scores, scaled, at);
    mask.template apply<kTileQuery, kTileKey>(scores, params, at, partial);
    statistics.template exponentiate_and_differentiate<Modifiers>(params.scale.softmax_scale,
                                                                  scaled, scores);
    fence_accumulators(scores);
  }

  // Replaces dP with dS, the gradient of Q K^T, not yet multiplied by the user's scale.
  // `probabilities` are P times the derivative of the modifiers.
  template <class Scores>
  CUTE_DEVICE static void differentiate(BackwardParams const& params, ScoreTilePosition const& at,
                                        Statistics const& statistics, Scores const& probabilities,
                                        Scores& score_gradient) {
    auto block = [&](int, int column_block, auto const& keep) {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        int const chunk = i / 4;
        int const half = i % 4 / 2;
        int const n = 2 * column_block + chunk;
        float& gradient = score_gradient(i % 4, 0, n);
        gradient =
            softmax_gradient(probabilities(i % 4, 0, n), keep.select(gradient, half, chunk, i % 2),
                             probability_scale<Config>(params), statistics.delta(half));
      }
    };
    KeptBlocks::for_each_block(params, at.batch, at.head, at.row, at.column, block);
  }

  // Stores dq. Rows from query_bound on are beyond the query length and get 0.
  template <class Accumulators>
  CUTE_DEVICE static void store(BackwardParams const& params, Work const& work, int query_bound,
                                Accumulators& query_gradient) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(query_gradient); ++i) {
      bool const beyond = QueryGrid::element_row(i % 4, 0) >= query_bound;
      query_gradient(i) = beyond ? 0.0f : query_gradient(i) * params.scale.gradient_scale;
    }
    WorkItem const& item = work.item;
    int const bound = Config::kVarlen ? query_bound : params.shape.query_length - work.row;
    store_gradient<Config, QueryGrid>(params.query_gradient,
                                      query_origin<Config>(params.shape, item.batch), item.head,
                                      work.row, bound, params.shape.head_dim, query_gradient);
    if constexpr (Config::kVarlen) {
      GridTiles<Config, GridRows::queries, kTileQuery> const grid = {params.shape};
      clear_query_gap<Config, kConsumers>(params, item, query_bound + work.row,
                                          grid.of_batch_index(item.batch));
    }
  }
};

}  // namespace memeff
