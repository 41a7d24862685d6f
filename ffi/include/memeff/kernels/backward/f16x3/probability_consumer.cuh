// The consumer of backward/f16x3/dkdv.cuh that computes P^T = exp2(K Q^T - lse) for the other one,
// and dV += P^T dO.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/kernels/backward/f16x3/work.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// Called with all threads of the first consumer.
template <class Config>
struct F16x3ProbabilityConsumer : F16x3DkdvWork<Config> {
  using Base = F16x3DkdvWork<Config>;
  using Base::kTileKey;
  using Base::kTileQuery;
  using typename Base::Control;
  using typename Base::KeyTile;
  using typename Base::Mask;
  using typename Base::OutTile;
  using typename Base::ProbabilityStage;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::ScoreGrid;
  using typename Base::Stage;
  using typename Base::ValueGrid;
  using typename Base::Work;

  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid, true>>;
  using KeptBlocks = typename ProbabilityModifiers<Config, ScoreGrid, true>::Tile;
  using Operand = F16x3LeftOperand<Base::kSteps>;
  using KeyRows = F16x3Rows<KeyTile, Base::free_registers(Config::kValueDim)>;

  CUTE_DEVICE static void run(BackwardParams const& params, Work const& work, Control& control,
                              uint32_t tiles) {
    Mask const mask(params.mask, params.shape, work.item.batch);
    F16x3ProbabilityConsumer const consumer{
        {}, params, work, mask, control, tiles, threadIdx.x % kWarpSize == 0};
    auto value_gradient = ValueGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(value_gradient);
    if (int const count = Base::Blocks::q_block_count(params, work); count > 0) {
      control.key.wait({});
      KeyRows const keys(tiles);
      auto const key_rows = RowFactors::load<ScoreGrid>(tiles + Base::kKeyFactors);
      QBlockCursor q_block(params, work);
      Stage stage;
      ProbabilityStage sent;
      Operand operand;
      auto part = ValueGrid::make_accumulators();    // (4, 1, MMA_N)
      auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      CUTE_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        consumer.begin_scores(keys, stage, scores);
        KeptBlocks const kept(params, work.item.batch, q_block.head, q_block.row(), work.column);
        wait_products<0>();
        consumer.exponentiate(key_rows, q_block, stage, sent, scores);
        consumer.make_operand(kept, stage, scores, operand);
        consumer.begin_gradient(operand, stage, part);
        wait_products<0>();
        consumer.end_gradient(operand, stage, part, value_gradient);
        q_block.advance(params, work);
        stage.advance();
      }
    }
    if constexpr (Config::kValueGradient) {
      Base::template store<ValueGrid>(params, work, mask.key_length, params.value_gradient,
                                      params.shape.value_dim, value_gradient,
                                      probability_scale<Config>(params));
    }
  }

  BackwardParams const& params;
  Work const& work;
  Mask const& mask;
  Control& control;
  uint32_t tiles;
  bool leader;  // one per warp

  // S^T = K Q^T
  template <class Scores>
  CUTE_DEVICE void begin_scores(KeyRows const& keys, Stage const& stage, Scores& scores) const {
    control.query.wait(stage);
    begin_f16x3_scores<QueryTile>(scores, keys, Base::query_tile(tiles, stage));
  }

  // Replaces S^T with P^T, and sends P^T times the derivative of the modifiers to the other
  // consumer.
  template <class Scores>
  CUTE_DEVICE void exponentiate(RowFactors const& key_rows, QBlockCursor const& q_block,
                                Stage const& stage, ProbabilityStage& sent, Scores& scores) const {
    fence_accumulators(scores);
    unscale(scores, key_rows, Base::query_factors(tiles, stage));
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const at = {work.item.batch, q_block.head, q_block.row(), work.column};
    auto derivative = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    modifiers.recompute_with_derivatives(scores, derivative, at);
    mask.template apply_transposed<kTileQuery, kTileKey>(scores, params, at,
                                                         q_block.blocks.partial(q_block.tile));
    uint32_t const statistics = Base::statistics(tiles, stage);
    exponentiate_transposed(Logsumexps<ScoreGrid, 0>(statistics).reader(statistics),
                            params.scale.softmax_scale, scores);
    if constexpr (Config::kKeyGradient) {
      control.probability.acquire(sent);
      uint32_t const vectors = Base::probabilities(tiles, sent);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        auto factor = [&](int i) {
          float const p = scores(i, 0, n);
          return Modifiers::kConstantDerivative ? p : Modifiers::product(p, derivative(i, 0, n));
        };
        store_shared_vector(vectors + n * Base::kVectorDistance, factor(0), factor(1), factor(2),
                            factor(3));
      }
    }
    __syncwarp();
    if (leader) control.query.release(stage);
    if constexpr (Config::kKeyGradient) {
      if (leader) control.probability.commit(sent);
      sent.advance();
    }
  }

  // Makes the operand of dV from P^T.
  template <class Scores>
  CUTE_DEVICE void make_operand(KeptBlocks const& kept, Stage const& stage, Scores& probabilities,
                                Operand& operand) const {
    if constexpr (Config::kValueGradient) {
      control.out_gradient.wait(stage);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(probabilities); ++i) {
        int const n = i / 4;
        float& p = probabilities(i % 4, 0, n);
        p = kept.block(0, n / 2).select(p, n % 2, i % 4 / 2, i % 2);
      }
      scale_columns(probabilities, Base::out_factors(tiles, stage));
      operand.set(probabilities);
    }
  }

  // dV += P^T dO
  template <class Part>
  CUTE_DEVICE void begin_gradient(Operand const& operand, Stage const& stage, Part& part) const {
    if constexpr (Config::kValueGradient) {
      begin_f16x3_gradient<OutTile>(part, operand, Base::out_tile(tiles, stage));
    }
  }
  template <class Part>
  CUTE_DEVICE void end_gradient(Operand const& operand, Stage const& stage, Part& part,
                                Part& value_gradient) const {
    if constexpr (Config::kValueGradient) {
      add_part(value_gradient, part, operand);
      if (leader) control.out_gradient.release(stage);
    }
  }
};

}  // namespace memeff
