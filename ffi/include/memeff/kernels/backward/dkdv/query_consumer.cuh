// The consumer of queries in dkdv/kernel.cuh: P^T = exp2(K Q^T - lse) for the other consumer, and
// dK += dS^T Q.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/kernels/backward/dkdv/work.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// Called by dkdv/kernel.cuh with all threads of the first consumer.
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
    if constexpr (Config::kVarlen) {
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

}  // namespace memeff
