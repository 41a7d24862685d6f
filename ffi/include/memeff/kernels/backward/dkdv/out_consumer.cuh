// The consumer of dO in dkdv/kernel.cuh: dS^T = P^T (V dO^T - delta) for the other consumer, and
// dV += P^T dO.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/kernels/backward/dkdv/work.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// Called by dkdv/kernel.cuh with all threads of the second consumer.
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

}  // namespace memeff
