// The consumer of backward/f16x3/dkdv.cuh that computes dS^T = P^T (V dO^T - delta) from the other
// one's P^T, and dK += dS^T Q.
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
  using ValueRows = F16x3Rows<ValueTile, Base::free_registers(Config::kHeadDim)>;

  CUTE_DEVICE static void run(BackwardParams const& params, Work const& work, Control& control,
                              uint32_t tiles) {
    bool const leader = threadIdx.x % kWarpSize == 0;  // of its warp
    auto key_gradient = KeyGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);
    if (int const count = Base::Blocks::q_block_count(params, work); count > 0) {
      control.value.wait({});
      ValueRows const values(tiles + Base::kValueOffset);
      auto const value_rows = RowFactors::load<ScoreGrid>(tiles + Base::kValueFactors);
      QBlockCursor q_block(params, work);
      Stage stage;
      ProbabilityStage received;
      CUTE_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        control.out_gradient.wait(stage);
        begin_f16x3_scores<OutTile>(score_gradient, values, Base::out_tile(tiles, stage));
        KeptBlocks const kept(params, work.item.batch, q_block.head, q_block.row(), work.column);
        wait_products<0>();
        fence_accumulators(score_gradient);
        unscale(score_gradient, value_rows, Base::out_factors(tiles, stage));
        __syncwarp();
        if (leader) control.out_gradient.release(stage);
        control.query.wait(stage);
        control.probability.wait(received);
        differentiate(params, kept, Base::statistics(tiles, stage),
                      Base::probabilities(tiles, received), score_gradient);
        __syncwarp();
        if (leader) control.probability.release(received);
        received.advance();
        scale_columns(score_gradient, Base::query_factors(tiles, stage));
        F16x3LeftOperand<Base::kSteps> const operand(score_gradient);
        auto part = KeyGrid::make_accumulators();  // (4, 1, MMA_N)
        begin_f16x3_gradient<QueryTile>(part, operand, Base::query_tile(tiles, stage));
        wait_products<0>();
        add_part(key_gradient, part, operand);
        if (leader) control.query.release(stage);
        q_block.advance(params, work);
        stage.advance();
      }
    }
    int const key_length =
        typename Base::Mask(params.mask, params.shape, work.item.batch).key_length;
    Base::template store<KeyGrid>(params, work, key_length, params.key_gradient,
                                  params.shape.head_dim, key_gradient,
                                  params.scale.gradient_scale);
  }

 private:
  // Replaces dP^T by dS^T, the gradient of query.key without the user's scale. `probabilities` is
  // the address of this lane's P^T times the derivative of the modifiers.
  template <class Scores>
  CUTE_DEVICE static void differentiate(BackwardParams const& params, KeptBlocks const& kept,
                                        uint32_t statistics, uint32_t probabilities,
                                        Scores& score_gradient) {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int pair = 0; pair < ScoreGrid::kColumnBlocks; ++pair) {
      auto const deltas = QuadStatistics::load_deltas<ScoreGrid>(statistics, pair, thread);
      CUTE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        int const n = 2 * pair + chunk;
        uint4 const words = load_shared_vector(probabilities + n * Base::kVectorDistance);
        uint32_t const p[4] = {words.x, words.y, words.z, words.w};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& gradient = score_gradient(i, 0, n);
          float const own =
              kept.block(0, pair).select(gradient, chunk, i / 2, i % 2);
          gradient = softmax_gradient(__uint_as_float(p[i]), own, probability_scale<Config>(params),
                                      deltas.of[2 * chunk + i % 2]);
        }
      }
    }
  }
};

}  // namespace memeff
