// Attention backward for Hopper and head dims above 128, in two kernels, each of which owns the
// gradients it writes:
//
//   FmhaBackwardTwoKernelDq    one CTA per 128 queries: dQ += dS K for every KV block
//   FmhaBackwardTwoKernelDkdv  one CTA per 64 keys: dV += P^T dO and dK += dS^T Q for every Q block
//
// dK and dV of 128 keys do not fit in the registers of an SM, and with 64 keys the f32 sums of dQ
// of a single kernel would exceed the L2 bandwidth. Two kernels compute S and dP twice (seven
// products instead of five), but keep no sums in global memory, and every run adds in the same
// order.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/common/postprocess.cuh>
#include <kernels/common/preprocess.cuh>
#include <kernels/sm90/dbias.cuh>
#include <kernels/sm90/dkdv_work.cuh>
#include <kernels/sm90/dq.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// The dkdv kernel: the gradients of key and value.
//
// One consumer computes P^T = exp2(K Q^T - lse) and owns dK, the other computes dS^T = P^T (V dO^T
// - delta) and owns dV. They exchange P^T and dS^T through shared memory. S and dP of one Q block
// overlap dK and dV of the previous one, while the next Q block arrives in a third buffer. The
// first consumer holds the scores, so it multiplies dS^T by the derivative of a soft cap.

// The first consumer: P^T for the other one, and dK += dS^T Q.
template <class Config>
struct DkdvQueryConsumer : DkdvSm90<Config> {
  using Base = DkdvSm90<Config>;
  using Base::kBiasOffset;
  using Base::kTileKey;
  using Base::kTileQuery;
  using typename Base::Bias;
  using typename Base::BiasTile;
  using typename Base::Control;
  using typename Base::Element;
  using typename Base::GradientStage;
  using typename Base::KeyGrid;
  using typename Base::KeyTile;
  using typename Base::Mask;
  using typename Base::ProbabilityStage;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::ScoreGrid;
  using typename Base::ScoreTile;
  using typename Base::Stage;
  using typename Base::Work;

  using Modifiers = ScoreModifiers<Config, Bias&, ScoreFunction<Config, ScoreGrid, true>>;

  // The k-steps of the keys that stay in registers, alongside dK, S with its modifiers, and
  // addresses.
  static constexpr int kScoreRegisters = kTileQuery / 2;
  static constexpr int kKeyRegisters =
      Base::kConsumerRegisters - Config::kHeadDim / 2 -
      (2 + !Modifiers::kConstantDerivative + Bias::kRegisterSteps) * kScoreRegisters - 16;
  static constexpr int kRegisterKeySteps = register_steps(Config::kHeadDim, kKeyRegisters);
  using KeyRows = RegisterRows<KeyTile, ScoreGrid, kRegisterKeySteps>;

  // The main loop: S of one Q block overlaps dK of the previous one.
  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps,
                              Work const& work, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    bool const leader = threadIdx.x % kWarpSize == 0;  // one per warp
    Mask const mask(params.mask, shape, work.item.batch);
    Steps const steps{params, work, mask, control, tiles, leader};
    auto key_gradient = KeyGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);

    if (int const count = Base::q_block_count(params, work); count > 0) {
      control.key.wait({});
      if (reads_beyond<Config>(mask.key_length, work.column + kTileKey, shape.key_length)) {
        Base::template clear_beyond<KeyTile>(tiles, mask.key_length - work.column, 0);
      }
      KeyRows const keys(tiles, 0);
      auto scores = ScoreGrid::make_accumulators();      // (4, 1, MMA_N)
      auto derivative = ScoreGrid::make_accumulators();  // (4, 1, MMA_N), for dS
      QBlockCursor q_block(params, work);
      Stage stage;
      ProbabilityStage sent;
      GradientStage received;
      Bias bias(tiles + kBiasOffset);

      steps.begin_scores(keys, q_block, stage, scores);
      bias.load(params, work, q_block, mask);
      wait_products<0>();
      steps.send_probabilities(q_block, stage, sent, bias, derivative, scores);
      CUTE_NO_UNROLL
      for (int i = 1; i < count; ++i) {
        Stage const before = stage;
        q_block.advance(params, work);
        stage.advance();
        steps.begin_scores(keys, q_block, stage, scores);
        steps.begin_key_gradient(before, received, derivative, key_gradient);
        bias.load(params, work, q_block, mask);
        wait_products<Config::kKeyGradient>();  // S
        steps.send_probabilities(q_block, stage, sent, bias, derivative, scores);
        wait_products<0>();
        steps.release(before, received, key_gradient);
      }
      steps.begin_key_gradient(stage, received, derivative, key_gradient);
      wait_products<0>();
      steps.release(stage, received, key_gradient);
    }
    if constexpr (Config::kKeyGradient) {
      scale_accumulators(key_gradient, params.scale.gradient_scale);
      Base::template store<KeyTile, KeyGrid>(maps.key_gradient, params.key_gradient, shape, work,
                                             mask.key_length, tiles, 0, shape.head_dim,
                                             key_gradient);
    }
    if constexpr (Config::kPacked) {
      GridTiles<Config, GridRows::keys, kTileKey> const grid = {shape};
      clear_key_gap<Config, kWarpgroupSize>(params, work.item, mask.key_length,
                                            grid.of_batch_index(work.item.batch));
    }
  }

  // The steps of the main loop.
  struct Steps {
    BackwardParams const& params;
    Work const& work;
    Mask const& mask;
    Control& control;
    uint32_t tiles;
    bool leader;

    // S^T = K Q^T
    template <class Scores>
    CUTE_DEVICE void begin_scores(KeyRows const& keys, QBlockCursor const& q_block,
                                  Stage const& stage, Scores& scores) const {
      uint32_t const tile = Base::query_tile(tiles, stage);
      control.query.wait(stage);
      if (reads_beyond<Config>(mask.query_length, q_block.row() + kTileQuery,
                               params.shape.query_length)) {
        Base::template clear_beyond<QueryTile>(tile, mask.query_length - q_block.row(), 0);
      }
      fence_accumulators(scores);
      begin_products();
      warpgroup_gemm<Element, Config::kHeadDim / 16>(
          scores, keys, DescriptorOperand<QueryTile, Contiguous::k>(tile), false);
      commit_products();
    }

    // Computes P^T from S^T and sends it to the other consumer.
    template <class Scores>
    CUTE_DEVICE void send_probabilities(QBlockCursor const& q_block, Stage const& stage,
                                        ProbabilityStage& sent, Bias& bias, Scores& derivative,
                                        Scores& scores) const {
      fence_accumulators(scores);
      Modifiers const modifiers = {{params.scale}, {params}, bias};
      ScoreTilePosition const at = {work.item.batch, q_block.head, q_block.row(), work.column};
      auto clear_bias = [](uint32_t tile, int first) {
        Base::template clear_beyond<BiasTile>(tile, first, 0);
      };
      modifiers.recompute_with_derivatives(scores, derivative, at, params, q_block, mask, control,
                                           clear_bias);
      mask.template apply_transposed<kTileQuery, kTileKey>(scores, params, at,
                                                           q_block.blocks.partial(q_block.tile));
      uint32_t const statistics = Base::query_statistics(tiles, stage);
      exponentiate_transposed(Logsumexps<ScoreGrid, 0>(statistics).reader(statistics),
                              params.scale.softmax_scale, scores);
      ProbabilityModifiers<Config, ScoreGrid, true>::Signs::mark(
          params, work.item.batch, q_block.head, q_block.row(), work.column, scores);
      control.probability.acquire(sent);
      store_operand<ScoreTile, ScoreGrid>(Base::probability_tile(tiles, sent),
                                          as_left_operand<Element>(scores));
      __syncwarp();
      if (leader) {
        control.probability.commit(sent);
        bias.release(control);
      }
      sent.advance();
      bias.advance();
    }

    // dK += dS^T Q
    template <class Scores, class Accumulators>
    CUTE_DEVICE void begin_key_gradient(Stage const& stage, GradientStage const& received,
                                        Scores const& derivative,
                                        Accumulators& key_gradient) const {
      if constexpr (Config::kKeyGradient) {
        uint32_t const tile = Base::gradient_tile(tiles, received);
        control.score_gradient.wait(received);
        multiply(tile, derivative);
        fence_accumulators(key_gradient);
        begin_products();
        warpgroup_gemm<Element, kTileQuery / 16>(
            key_gradient, DescriptorOperand<ScoreTile, Contiguous::k>(tile),
            DescriptorOperand<QueryTile, Contiguous::outer>(Base::query_tile(tiles, stage)), true);
        commit_products();
      }
    }

    // Releases the buffers that the finished dK of a Q block has read.
    template <class Accumulators>
    CUTE_DEVICE void release(Stage const& stage, GradientStage& received,
                             Accumulators& key_gradient) const {
      fence_accumulators(key_gradient);
      if (leader) {
        control.query.release(stage);
        if constexpr (Config::kKeyGradient) control.score_gradient.release(received);
      }
      received.advance();
    }

   private:
    // Multiplies dS^T in shared memory by the derivatives of the modifiers, in place. This consumer
    // does it because it holds the derivatives; the other one computed dS^T.
    template <class Factors>
    CUTE_DEVICE static void multiply(uint32_t tile, Factors const& factors) {
      if constexpr (Modifiers::kConstantDerivative) return;
      auto operand = load_operand<ScoreTile, ScoreGrid>(tile);
      CUTE_UNROLL
      for (int i = 0; i < kTileQuery / 4; ++i) {
        uint32_t& pair = operand.fragments[0][i / 4][i % 4];
        int const element = i % 2 * 2;
        pair = pack<Element>(unpack<Element>(pair, 0) * factors(element, 0, i / 2),
                             unpack<Element>(pair, 1) * factors(element + 1, 0, i / 2));
      }
      store_operand<ScoreTile, ScoreGrid>(tile, operand);
      fence_tma_store();
      named_barrier_sync(Base::warpgroup_barrier(0), kWarpgroupSize);
    }
  };
};

// The second consumer: dS^T for the other one, and dV += P^T dO.
template <class Config>
struct DkdvOutConsumer : DkdvSm90<Config> {
  using Base = DkdvSm90<Config>;
  using Base::kTileKey;
  using Base::kTileQuery;
  using typename Base::BiasSums;
  using typename Base::BiasWriter;
  using typename Base::Control;
  using typename Base::Element;
  using typename Base::GradientStage;
  using typename Base::Mask;
  using typename Base::OutTile;
  using typename Base::ProbabilityStage;
  using typename Base::QBlockCursor;
  using typename Base::ScoreGrid;
  using typename Base::ScoreTile;
  using typename Base::Stage;
  using typename Base::ValueGrid;
  using typename Base::ValueTile;
  using typename Base::Work;

  // The k-steps of the values that stay in registers, alongside dV, dP, two packed operands and
  // addresses.
  static constexpr int kScoreRegisters = kTileQuery / 2;
  static constexpr int kValueRegisters =
      Base::kConsumerRegisters - Config::kValueDim / 2 - 2 * kScoreRegisters - 32;
  static constexpr int kRegisterValueSteps = register_steps(Config::kValueDim, kValueRegisters);
  using ValueRows = RegisterRows<ValueTile, ScoreGrid, kRegisterValueSteps>;
  using Signs = typename ProbabilityModifiers<Config, ScoreGrid, true>::Signs;
  using ScoreOperand = RegisterOperand<1, kTileQuery / 16, sizeof(Element)>;

  // The main loop: dP of one Q block overlaps dV of the previous one.
  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps,
                              Work const& work, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    bool const leader = threadIdx.x % kWarpSize == 0;  // one per warp
    Mask const mask(params.mask, shape, work.item.batch);
    Steps const steps{params, work, mask, control, tiles, leader};
    uint32_t const value_tile = tiles + Base::kValueOffset;
    auto value_gradient = ValueGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(value_gradient);

    if (int const count = Base::q_block_count(params, work); count > 0) {
      control.value.wait({});
      if (reads_beyond<Config>(mask.key_length, work.column + kTileKey, shape.key_length)) {
        Base::template clear_beyond<ValueTile>(value_tile, mask.key_length - work.column, 1);
      }
      ValueRows const values(value_tile, 0);
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      QBlockCursor q_block(params, work);
      Stage stage;
      ProbabilityStage received;
      GradientStage sent;
      BiasSums bias_sums;

      steps.begin_score_gradient(values, q_block, stage, score_gradient);
      wait_products<0>();
      steps.send_score_gradient(q_block, stage, received, sent, bias_sums, score_gradient);
      ScoreOperand probabilities = steps.take_probabilities(received);
      CUTE_NO_UNROLL
      for (int i = 1; i < count; ++i) {
        Stage const before = stage;
        q_block.advance(params, work);
        stage.advance();
        steps.begin_score_gradient(values, q_block, stage, score_gradient);
        steps.begin_value_gradient(before, received, probabilities, value_gradient);
        wait_products<Config::kValueGradient>();  // dP
        steps.send_score_gradient(q_block, stage, received, sent, bias_sums, score_gradient);
        wait_products<0>();
        steps.release(before, value_gradient);
        probabilities = steps.take_probabilities(received);
      }
      steps.begin_value_gradient(stage, received, probabilities, value_gradient);
      wait_products<0>();
      steps.release(stage, value_gradient);
    }
    if constexpr (Config::kValueGradient) {
      scale_accumulators(value_gradient, probability_scale<Config>(params));
      Base::template store<ValueTile, ValueGrid>(maps.value_gradient, params.value_gradient, shape,
                                                 work, mask.key_length, value_tile, 1,
                                                 shape.value_dim, value_gradient);
    }
  }

  // The steps of the main loop.
  struct Steps {
    BackwardParams const& params;
    Work const& work;
    Mask const& mask;
    Control& control;
    uint32_t tiles;
    bool leader;

    // dP^T = V dO^T
    template <class Scores>
    CUTE_DEVICE void begin_score_gradient(ValueRows const& values, QBlockCursor const& q_block,
                                          Stage const& stage, Scores& score_gradient) const {
      uint32_t const tile = Base::out_tile(tiles, stage);
      control.out_gradient.wait(stage);
      if (reads_beyond<Config>(mask.query_length, q_block.row() + kTileQuery,
                               params.shape.query_length)) {
        Base::template clear_beyond<OutTile>(tile, mask.query_length - q_block.row(), 1);
      }
      if constexpr (Config::kKeyGradient) {
        fence_accumulators(score_gradient);
        begin_products();
        warpgroup_gemm<Element, Config::kValueDim / 16>(
            score_gradient, values, DescriptorOperand<OutTile, Contiguous::k>(tile), false);
        commit_products();
      }
    }

    // Computes dS^T from P^T and dP^T and sends it to the other consumer.
    template <class Scores>
    CUTE_DEVICE void send_score_gradient(QBlockCursor const& q_block, Stage const& stage,
                                         ProbabilityStage const& received, GradientStage& sent,
                                         BiasSums& bias_sums, Scores& score_gradient) const {
      fence_accumulators(score_gradient);
      control.probability.wait(received);
      if constexpr (Config::kKeyGradient) {
        ScoreOperand const gradient =
            differentiate(Base::out_statistics(tiles, stage), load_probabilities(received),
                          score_gradient, bias_sums);
        if (Base::kSumsBias && q_block.is_last_of_head(work)) {
          BiasWriter::finish(params, work.item.batch, q_block.head, work.column, bias_sums);
          bias_sums = {};
        }
        control.score_gradient.acquire(sent);
        store_operand<ScoreTile, ScoreGrid>(Base::gradient_tile(tiles, sent), gradient);
        fence_tma_store();
        __syncwarp();
        if (leader) control.score_gradient.commit(sent);
        sent.advance();
      }
    }

    // The modified P^T. Hazard: read it again instead of keeping it from above, because ptxas
    // serializes wgmma if an operand register is written while a product runs (C7513).
    CUTE_DEVICE ScoreOperand take_probabilities(ProbabilityStage const& received) const {
      ScoreOperand operand = load_probabilities(received);
      Signs::drop(operand);
      return operand;
    }

    // dV += P^T dO
    template <class Accumulators>
    CUTE_DEVICE void begin_value_gradient(Stage const& stage, ProbabilityStage& received,
                                          ScoreOperand const& probabilities,
                                          Accumulators& value_gradient) const {
      if constexpr (Config::kValueGradient) {
        fence_accumulators(value_gradient);
        begin_products();
        warpgroup_gemm<Element, kTileQuery / 16>(
            value_gradient, probabilities,
            DescriptorOperand<OutTile, Contiguous::outer>(Base::out_tile(tiles, stage)));
        commit_products();
      }
      // Hazard: release only after the product has begun. Before that, pending loads may still read
      // the buffer, which the other consumer overwrites.
      __syncwarp();
      if (leader) control.probability.release(received);
      received.advance();
    }

    template <class Accumulators>
    CUTE_DEVICE void release(Stage const& stage, Accumulators& value_gradient) const {
      fence_accumulators(value_gradient);
      if (leader) control.out_gradient.release(stage);
    }

   private:
    CUTE_DEVICE ScoreOperand load_probabilities(ProbabilityStage const& received) const {
      return load_operand<ScoreTile, ScoreGrid>(Base::probability_tile(tiles, received));
    }

    // Computes dS^T from P^T and dP^T: the gradient of Q K^T, not yet multiplied by the user's
    // scale.
    template <class Scores>
    CUTE_DEVICE ScoreOperand differentiate(uint32_t statistics, ScoreOperand const& probabilities,
                                           Scores const& score_gradient,
                                           BiasSums& bias_sums) const {
      int const thread = thread_index();
      BiasWriter const bias_gradient(params, {});
      ScoreOperand result;
      CUTE_UNROLL
      for (int pair = 0; pair < cute::size<2>(score_gradient) / 2; ++pair) {
        auto const deltas = QuadStatistics::load_deltas<ScoreGrid>(statistics, pair, thread);
        CUTE_UNROLL
        for (int fragment = 0; fragment < 4; ++fragment) {
          int const chunk = fragment / 2;
          int const half = fragment % 2;
          int const n = 2 * pair + chunk;
          float gradient[2];
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            float const p = unpack<Element>(probabilities.fragments[0][pair][fragment], i);
            float const kept = Signs::select(score_gradient(2 * half + i, 0, n), p);
            gradient[i] = softmax_gradient(fabsf(p), kept, probability_scale<Config>(params),
                                           deltas.of[2 * chunk + i]);
          }
          bias_gradient.pair(bias_sums, n, half, gradient);
          result.fragments[0][pair][fragment] = pack<Element>(gradient[0], gradient[1]);
        }
      }
      return result;
    }
  };
};

// The entry point that the generated source instantiates. One CTA owns 64 keys of a key head.
template <class Config>
struct FmhaBackwardTwoKernelDkdv : DkdvSm90<Config> {
  using Base = DkdvSm90<Config>;
  using Base::kBiasOffset;
  using Base::kConsumerRegisters;
  using Base::kConsumers;
  using Base::kControlOffset;
  using Base::kProducerRegisters;
  using Base::kStatisticsBytes;
  using Base::kValueOffset;
  using Base::kWarpgroupWarps;
  using typename Base::Bias;
  using typename Base::Control;
  using typename Base::KeyTile;
  using typename Base::OutTile;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::Stage;
  using typename Base::Tiles;
  using typename Base::ValueTile;
  using typename Base::Work;

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      control.key.init(1);
      control.value.init(1);
      control.query.init(kWarpgroupWarps);
      control.out_gradient.init(kWarpgroupWarps);
      control.probability.init(kWarpgroupWarps, kWarpgroupWarps);
      control.score_gradient.init(kWarpgroupWarps, kWarpgroupWarps);
      Bias::init(control, kWarpgroupWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, maps, work, control, tiles);
      return;
    }
    raise_registers<kConsumerRegisters>();
    if (warpgroup_index() == 0) {
      DkdvQueryConsumer<Config>::run(params, maps, work, control, tiles);
    } else {
      DkdvOutConsumer<Config>::run(params, maps, work, control, tiles);
    }
  }

  // The producer, one thread: copies keys and values once, then queries, dO, statistics and bias of
  // each Q block.
  CUTE_DEVICE static void produce(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles) {
    auto constexpr kOnce = CacheHint::EVICT_FIRST;
    auto constexpr kAgain = CacheHint::EVICT_LAST;
    WorkItem const& item = work.item;
    int const count = Base::q_block_count(params, work);
    if (count == 0) return;
    Origin const queries = query_origin<Config>(params.shape, item.batch);
    KeyValueSource<Config> const source(params, item.batch, item.head);
    int const key_row = source.origin.row + work.column;
    load_tma_tile<KeyTile>(maps.key, control.key.acquire({}, KeyTile::kBytes), tiles, 0, key_row,
                           source.head, source.batch(params.key), kOnce);
    load_tma_tile<ValueTile>(maps.value, control.value.acquire({}, ValueTile::kBytes),
                             tiles + kValueOffset, 0, key_row, source.head,
                             source.batch(params.value), kOnce);
    QBlockCursor q_block(params, work);
    Stage stage;
    Bias bias(tiles + kBiasOffset);
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      float const* const statistics =
          Tiles::statistics(params, item.batch, q_block.head, q_block.row());
      uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + kStatisticsBytes);
      load_tma_tile<QueryTile>(maps.query, query, Base::query_tile(tiles, stage), 0,
                               queries.row + q_block.row(), q_block.head, queries.batch, kAgain);
      load_tma(statistics, query, Base::query_statistics(tiles, stage), kStatisticsBytes);
      bias.produce(params, maps, work, q_block, control);
      uint64_t& out = control.out_gradient.acquire(stage, OutTile::kBytes + kStatisticsBytes);
      load_tma_tile<OutTile>(maps.out_gradient, out, Base::out_tile(tiles, stage), 0,
                             queries.row + q_block.row(), q_block.head, queries.batch, kAgain);
      load_tma(statistics, out, Base::out_statistics(tiles, stage), kStatisticsBytes);
      q_block.advance(params, work);
      stage.advance();
    }
  }
};

// Computes the statistics of the rows; there are no sums to zero.
template <class Config>
struct FmhaBackwardTwoKernelPreprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesTwoKernel<Config>> {};

// Rounds the sums of a bias gradient.
template <class Config>
struct FmhaBackwardTwoKernelDbiasPostprocess
    : FmhaBackwardDbiasPostprocess<Config, BackwardTilesTwoKernel<Config>> {};

// The deterministic gradient of a bias that is broadcast over the batch or heads.
template <class Config>
struct FmhaBackwardTwoKernelDbias : DbiasSm90<Config, BackwardTilesTwoKernel<Config>> {};

}  // namespace memeff
