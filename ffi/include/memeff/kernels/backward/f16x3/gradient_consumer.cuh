// The consumer of backward/f16x3/dkdv.cuh that computes dS^T = P^T (V dO^T - delta) from the other
// consumer's P^T, and dK += dS^T Q.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/kernels/backward/f16x3/work.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// Called with all threads of the second consumer, if there is a gradient of the key.
template <class Config>
struct F16x3GradientConsumer : F16x3DkdvWork<Config> {
  using Base = F16x3DkdvWork<Config>;
  using typename Base::Control;
  using typename Base::KeyGrid;
  using typename Base::OutTile;
  using typename Base::ProbabilityStage;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::ScoreGrid;
  using typename Base::Stage;
  using typename Base::ValueTile;
  using typename Base::Work;
  using KeptBlocks = typename ProbabilityModifiers<Config, ScoreGrid, true>::Tile;
  using Operand = F16x3LeftOperand<Base::kSteps>;
  using ValueRows = F16x3Rows<ValueTile, Base::free_registers(Config::kHeadDim)>;

  CUTE_DEVICE static void run(BackwardParams const& params, Work const& work, Control& control,
                              uint32_t tiles) {
    F16x3GradientConsumer const consumer{{},      params, work,
                                         control, tiles,  threadIdx.x % kWarpSize == 0};
    auto key_gradient = KeyGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);
    if (int const count = Base::Blocks::q_block_count(params, work); count > 0) {
      control.value.wait({});
      ValueRows const values(tiles + Base::kValueOffset);
      auto const value_rows = RowFactors::load<ScoreGrid>(tiles + Base::kValueFactors);
      QBlockCursor q_block(params, work);
      Stage stage;
      ProbabilityStage received;
      Operand operand;
      auto part = KeyGrid::make_accumulators();              // (4, 1, MMA_N)
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      CUTE_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        consumer.begin_score_gradient(values, stage, score_gradient);
        KeptBlocks const kept(params, work.item.batch, q_block.head, q_block.row(), work.column);
        wait_products<0>();
        consumer.differentiate(value_rows, kept, stage, received, score_gradient);
        operand.set(score_gradient);
        consumer.begin_gradient(operand, stage, part);
        wait_products<0>();
        consumer.end_gradient(operand, stage, part, key_gradient);
        q_block.advance(params, work);
        stage.advance();
      }
    }
    int const key_length =
        typename Base::Mask(params.mask, params.shape, work.item.batch).key_length;
    Base::template store<KeyGrid>(params, work, key_length, params.key_gradient,
                                  params.shape.head_dim, key_gradient, params.scale.gradient_scale);
  }

  BackwardParams const& params;
  Work const& work;
  Control& control;
  uint32_t tiles;
  bool leader;  // one per warp

  // dP^T = V dO^T
  template <class Scores>
  CUTE_DEVICE void begin_score_gradient(ValueRows const& values, Stage const& stage,
                                        Scores& score_gradient) const {
    control.out_gradient.wait(stage);
    begin_f16x3_scores<OutTile>(score_gradient, values, Base::out_tile(tiles, stage));
  }

  // Replaces dP^T with dS^T times the factors of the queries. dS^T is the gradient of Q K^T, not
  // yet multiplied by the user's scale.
  template <class Scores>
  CUTE_DEVICE void differentiate(RowFactors const& value_rows, KeptBlocks const& kept,
                                 Stage const& stage, ProbabilityStage& received,
                                 Scores& score_gradient) const {
    fence_accumulators(score_gradient);
    unscale(score_gradient, value_rows, Base::out_factors(tiles, stage));
    __syncwarp();
    if (leader) control.out_gradient.release(stage);
    control.query.wait(stage);
    control.probability.wait(received);
    int const thread = thread_index();
    uint32_t const statistics = Base::statistics(tiles, stage);
    uint32_t const vectors = Base::probabilities(tiles, received);
    CUTE_UNROLL
    for (int pair = 0; pair < ScoreGrid::kColumnBlocks; ++pair) {
      auto const deltas = QuadStatistics::load_deltas<ScoreGrid>(statistics, pair, thread);
      CUTE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        int const n = 2 * pair + chunk;
        uint4 const words = load_shared_vector(vectors + n * Base::kVectorDistance);
        uint32_t const p[4] = {words.x, words.y, words.z, words.w};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& gradient = score_gradient(i, 0, n);
          float const own = kept.block(0, pair).select(gradient, chunk, i / 2, i % 2);
          gradient = softmax_gradient(__uint_as_float(p[i]), own, probability_scale<Config>(params),
                                      deltas.of[2 * chunk + i % 2]);
        }
      }
    }
    __syncwarp();
    if (leader) control.probability.release(received);
    received.advance();
    scale_columns(score_gradient, Base::query_factors(tiles, stage));
  }

  // dK += dS^T Q
  template <class Part>
  CUTE_DEVICE void begin_gradient(Operand const& operand, Stage const& stage, Part& part) const {
    begin_f16x3_gradient<QueryTile>(part, operand, Base::query_tile(tiles, stage));
  }
  template <class Part>
  CUTE_DEVICE void end_gradient(Operand const& operand, Stage const& stage, Part& part,
                                Part& key_gradient) const {
    add_part(key_gradient, part, operand);
    if (leader) control.query.release(stage);
  }
};

}  // namespace memeff
