// Runs between the preprocess kernel and the main kernel of the Hopper backward if a gradient adds
// up dS over whole rows: computes
//
//   delta = rowsum(P * dP) - dlse
//
// instead of rowsum(dO * O) - dlse, because a 16-bit O has too few digits for such sums
// (jax_memeff/_call/functions.py). One CTA owns 128 queries, whatever the tile of the main kernel;
// its two consumers hide each other's exponentials.
#pragma once

#include <kernels/common/preprocess.cuh>
#include <kernels/sm90/backward_tiles.cuh>
#include <kernels/sm90/query_owner.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/core/math.cuh>
#include <memeff/score/bias/registers.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// The entry point for calls whose main kernel is sm90/backward.cuh.
template <class Config>
struct FmhaBackwardSm90Delta : QueryOwnerSm90<Config, 128, Config::kTileQuery, 2, 2> {
  using Owner = QueryOwnerSm90<Config, 128, Config::kTileQuery, 2, 2>;
  using Tiles = BackwardTilesSm90<Config>;
  using Owner::kKeyOffset;
  using Owner::kOutOffset;
  using Owner::kTileKey;
  using Owner::kTileQuery;
  using Owner::kValueOffset;
  using typename Owner::Control;
  using typename Owner::KeyTile;
  using typename Owner::Mask;
  using typename Owner::OutTile;
  using typename Owner::QueryTile;
  using typename Owner::ScoreGrid;
  using typename Owner::ValueTile;
  using typename Owner::Work;
  static_assert(kTileQuery % Config::kTileQuery == 0);  // TMA boxes of the main kernel

  using Bias = RegisterBias<Config, ScoreGrid, kTileQuery, kTileKey>;
  using Modifiers = ScoreModifiers<Config, Bias const&, ScoreFunction<Config, ScoreGrid>>;
  using Statistics = RegisterStatistics<ScoreGrid>;

  // The sums of a thread's two rows.
  struct Sums {
    float of_products[2] = {};       // P * dP
    float of_probabilities[2] = {};  // P
  };

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    Owner::template run<FmhaBackwardSm90Delta>(params, maps);
  }

  // The main loop: per KV block S, dP and P, and the sums over its columns.
  CUTE_DEVICE static void consume(BackwardParams const& params, BackwardMaps const&,
                                  Work const& work, Control& control, uint32_t tiles) {
    if (work.kv_blocks.begin >= work.kv_blocks.end) return;
    ProblemShape const& shape = params.shape;
    WorkItem const& item = work.item;
    int const warpgroup = warpgroup_index();
    bool const leader = threadIdx.x % kWarpSize == 0;  // one per warp
    Mask const mask(params.mask, shape, item.batch);
    DescriptorOperand<QueryTile, Contiguous::k> const queries(tiles, warpgroup * kWarpgroupRows);
    DescriptorOperand<OutTile, Contiguous::k> const out_gradients(tiles + kOutOffset,
                                                                  warpgroup * kWarpgroupRows);
    Statistics const statistics = load_statistics(params, item, work.row, mask.query_length);
    Sums sums;
    PipelineStage<Owner::kKeyStages> stage;  // of keys and of values
    control.query.wait({});
    Owner::clear_beyond(control, mask, shape, work, warpgroup, tiles);
    CUTE_NO_UNROLL
    for (int tile = work.kv_blocks.end - 1; tile >= work.kv_blocks.begin;
         tile = work.kv_blocks.before(tile)) {
      int const column = tile * kTileKey;
      auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
      auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
      Bias const bias(params.bias, item.batch, item.head, work.row, column,
                      mask.query_length - work.row, mask.key_length - column);
      control.key.wait(stage);
      Owner::template begin_scores<KeyTile>(
          queries, tiles + kKeyOffset + stage.index * KeyTile::kBytes, scores);
      control.value.wait(stage);
      Owner::template begin_scores<ValueTile>(
          out_gradients, tiles + kValueOffset + stage.index * ValueTile::kBytes, score_gradient);
      wait_products<1>();  // S
      fence_accumulators(scores);
      if (leader) control.key.release(stage);

      Modifiers const modifiers = {{params.scale}, {params}, bias};
      ScoreTilePosition const at = {item.batch, item.head, work.row, column};
      modifiers.forward(scores, at);
      mask.template apply<kTileQuery, kTileKey>(scores, params, at, work.kv_blocks.partial(tile));
      statistics.exponentiate(params.scale.softmax_scale, scores);
      fence_accumulators(scores);
      control.query.wait_again({});  // redundant: keeps the exponentials above the next wait
      wait_products<0>();            // dP
      fence_accumulators(score_gradient);
      if (leader) control.value.release(stage);
      stage.advance();
      add(params, item, work.row, column, scores, score_gradient, sums);
    }
    store(params, item, work.row, mask.query_length, statistics, sums);
  }

  // Loads the logsumexp of this thread's two rows. Rows beyond the length get +inf, as rows without
  // keys do, so that all their P are 0. Hazard: they may be beyond the workspace.
  CUTE_DEVICE static Statistics load_statistics(BackwardParams const& params, WorkItem const& item,
                                                int row, int query_length) {
    float const* const source = row_statistics<Tiles>(params, item.batch, item.head);
    Statistics statistics;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const own = row + ScoreGrid::element_row(2 * half, 0);
      statistics.rows[half] =
          own < query_length ? QuadStatistics::load(source, own) : make_float2(infinity(), 0.0f);
    }
    return statistics;
  }

  template <class Scores>
  CUTE_DEVICE static void add(BackwardParams const& params, WorkItem const& item, int row,
                              int column, Scores const& probabilities, Scores const& gradient,
                              Sums& sums) {
    auto block = [&](int, int column_block, auto const& keep) {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        int const element = i % 4;
        int const half = element / 2;
        int const n = 2 * column_block + i / 4;
        float const p = probabilities(element, 0, n);
        float const kept = keep.select(gradient(element, 0, n), half, i / 4, element % 2);
        sums.of_products[half] +=
            softmax_gradient(p, kept, probability_scale<Config>(params), 0.0f);
        sums.of_probabilities[half] += p;
      }
    };
    ProbabilityModifiers<Config, ScoreGrid>::for_each_block(params, item.batch, item.head, row,
                                                            column, block);
  }

  // Adds up the sums of the four threads of a row, and stores delta.
  CUTE_DEVICE static void store(BackwardParams const& params, WorkItem const& item, int row,
                                int query_length, Statistics const& statistics, Sums const& sums) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float const products = quad_sum(sums.of_products[half]);
      float const probabilities = quad_sum(sums.of_probabilities[half]);
      int const own = row + ScoreGrid::element_row(2 * half, 0);
      if (threadIdx.x % 4 != 0 || own >= query_length) continue;
      // The scores of the forward may differ from these (collective/softmax/linear_scores.cuh), and
      // then the probabilities do not sum to 1.
      float const dot = Config::kNormalizesDelta ? products / probabilities : products;
      replace_delta<Config, Tiles>(params, item.batch, item.head, own,
                                   statistics.logsumexp(2 * half), dot);
    }
  }
};

}  // namespace memeff
