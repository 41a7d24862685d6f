// The dq kernel of the two-kernel backward (sm90/two_kernel_backward.cuh).
//
// Each of the two consumers owns 64 queries. dS never leaves the registers: its accumulators become
// the left operand of dQ. dQ of one KV block overlaps S and dP of the next.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/sm90/backward_tiles.cuh>
#include <kernels/sm90/query_owner.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/bias/registers.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// The entry point that the generated source instantiates. One CTA owns 128 queries of a head.
//
// Two products read the keys, and the second one, dQ, comes last in an iteration. So keys need one
// more buffer than values.
template <class Config>
struct FmhaBackwardTwoKernelDq
    : QueryOwnerSm90<Config, 128, kWarpgroupRows, Config::kStages, Config::kStages - 1> {
  using Owner = QueryOwnerSm90<Config, 128, kWarpgroupRows, Config::kStages, Config::kStages - 1>;
  using Tiles = BackwardTilesTwoKernel<Config>;
  using Owner::kConsumers;
  using Owner::kConsumerWarps;
  using Owner::kKeyOffset;
  using Owner::kKeyStages;
  using Owner::kOutOffset;
  using Owner::kTileKey;
  using Owner::kTileQuery;
  using Owner::kValueOffset;
  using Owner::kValueStages;
  using typename Owner::Control;
  using typename Owner::Element;
  using typename Owner::KeyTile;
  using typename Owner::Mask;
  using typename Owner::OutTile;
  using typename Owner::QueryTile;
  using typename Owner::ScoreGrid;
  using typename Owner::ValueTile;
  using typename Owner::Work;
  using QueryGrid = WarpGrid<kTileQuery, Config::kHeadDim, kConsumerWarps, 16>;

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    Owner::template run<FmhaBackwardTwoKernelDq>(params, maps);
  }

  using QueryRows = DescriptorOperand<QueryTile, Contiguous::k>;
  using OutRows = DescriptorOperand<OutTile, Contiguous::k>;
  using KeyColumns = DescriptorOperand<KeyTile, Contiguous::outer>;
  using ScoreOperand = RegisterOperand<1, kTileKey / 16, sizeof(Element)>;

  using Bias = RegisterBias<Config, ScoreGrid, kTileQuery, kTileKey>;
  using Modifiers = ScoreModifiers<Config, Bias const&, ScoreFunction<Config, ScoreGrid>>;
  using Statistics = RegisterStatistics<ScoreGrid>;

  // The main loop: per KV block S, dP, P and dS, then dQ, which overlaps the next block.
  CUTE_DEVICE static void consume(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles) {
    ProblemShape const& shape = params.shape;
    WorkItem const& item = work.item;
    int const warpgroup = warpgroup_index();
    bool const leader = threadIdx.x % kWarpSize == 0;  // one per warp
    Mask const mask(params.mask, shape, item.batch);
    QueryRows const queries(tiles, warpgroup * kWarpgroupRows);
    OutRows const out_gradients(tiles + kOutOffset, warpgroup * kWarpgroupRows);

    auto query_gradient = QueryGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(query_gradient);
    if (work.kv_blocks.begin < work.kv_blocks.end) {
      Statistics const statistics = load_statistics(params, item, work.row);
      PipelineStage<kKeyStages> key;
      PipelineStage<kValueStages> value;
      ScoreOperand left_gradient;
      control.query.wait({});
      Owner::clear_beyond(control, mask, shape, work, warpgroup, tiles);
      CUTE_NO_UNROLL
      for (int tile = work.kv_blocks.end - 1; tile >= work.kv_blocks.begin;
           tile = work.kv_blocks.before(tile)) {
        int const column = tile * kTileKey;
        uint32_t const key_tile = tiles + kKeyOffset + key.index * KeyTile::kBytes;
        auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        Bias const bias(params.bias, item.batch, item.head, work.row, column,
                        mask.query_length - work.row, mask.key_length - column);
        control.key.wait(key);
        Owner::template begin_scores<KeyTile>(queries, key_tile, scores);
        control.value.wait(value);
        Owner::template begin_scores<ValueTile>(
            out_gradients, tiles + kValueOffset + value.index * ValueTile::kBytes, score_gradient);
        wait_products<1>();  // S, and dQ of the previous block
        fence_accumulators(scores);
        fence_accumulators(query_gradient);
        if (leader && tile < work.kv_blocks.end - 1) control.key.release(previous(key));

        Modifiers const modifiers = {{params.scale}, {params}, bias};
        ScoreTilePosition const at = {item.batch, item.head, work.row, column};
        auto scaled = ScoreGrid::make_accumulators();  // (4, 1, MMA_N), for the soft cap
        modifiers.recompute(scores, scaled, at);
        mask.template apply<kTileQuery, kTileKey>(scores, params, at, work.kv_blocks.partial(tile));
        statistics.template exponentiate_and_differentiate<Modifiers>(params.scale.softmax_scale,
                                                                      scaled, scores);
        fence_accumulators(scores);
        control.query.wait_again({});  // redundant: keeps the exponentials above the next wait
        wait_products<0>();            // dP
        fence_accumulators(score_gradient);
        if (leader) control.value.release(value);
        value.advance();
        differentiate(params, item, statistics, work.row, column, mask.query_length - work.row,
                      scores, score_gradient, left_gradient);

        fence_accumulators(query_gradient);
        begin_products();
        warpgroup_gemm<Element, kTileKey / 16>(query_gradient, left_gradient, KeyColumns(key_tile));
        commit_products();
        key.advance();
      }
      wait_products<0>();
      fence_accumulators(query_gradient);
    }
    clear_skipped_keys(params, work);
    store(params, maps, work, mask.query_length - work.row, warpgroup, tiles, query_gradient);
  }

  CUTE_DEVICE static PipelineStage<kKeyStages> previous(PipelineStage<kKeyStages> stage) {
    stage.index = (stage.index + kKeyStages - 1) % kKeyStages;
    return stage;
  }

  // Loads the logsumexp and delta of this thread's two rows.
  CUTE_DEVICE static Statistics load_statistics(BackwardParams const& params, WorkItem const& item,
                                                int row) {
    float const* const source = Tiles::statistics(params, item.batch, item.head, row);
    Statistics statistics;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      statistics.rows[half] = QuadStatistics::load(source, ScoreGrid::element_row(2 * half, 0));
    }
    return statistics;
  }

  // Computes dS from dP and from P, which is already multiplied by the derivative of the modifiers:
  // the gradient of Q K^T, not yet multiplied by the user's scale, packed block by block.
  template <class Scores>
  CUTE_DEVICE static void differentiate(BackwardParams const& params, WorkItem const& item,
                                        Statistics const& statistics, int row, int column,
                                        int query_bound, Scores const& scores,
                                        Scores const& score_gradient, ScoreOperand& left_gradient) {
    auto block = [&](int, int column_block, auto const& keep) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const half = i % 2;
        int const chunk = i / 2;
        int const n = 2 * column_block + chunk;
        float gradient[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          int const element = 2 * half + j;
          float const kept = keep.select(score_gradient(element, 0, n), half, chunk, j);
          gradient[j] = softmax_gradient(scores(element, 0, n), kept,
                                         probability_scale<Config>(params), statistics.delta(half));
        }
        store_bias_gradient(params, item, row, column, query_bound, half, n, gradient);
        left_gradient.fragments[0][column_block][i] = pack<Element>(gradient[0], gradient[1]);
      }
    };
    ProbabilityModifiers<Config, ScoreGrid>::for_each_block(params, item.batch, item.head, row,
                                                            column, block);
  }

  // Stores two adjacent elements of a bias gradient with all four dims, but skips rows beyond the
  // query length, which may be NaN.
  CUTE_DEVICE static void store_bias_gradient(BackwardParams const& params, WorkItem const& item,
                                              int row, int column, int query_bound, int half, int n,
                                              float const (&gradient)[2]) {
    if constexpr (Config::kBiasGradient == BiasGradient::full) {
      ScoreViewSlice<typename Config::BiasElement> const slice(params.bias_gradient, item.batch,
                                                               item.head, row, column);
      int const tile_row = ScoreGrid::element_row(2 * half, 0);
      int const columns = params.shape.key_length - column;
      bool const beyond = tile_row >= query_bound;
      slice.store(tile_row, ScoreGrid::element_column(0, n),
                  tile_row < params.shape.query_length - row ? columns : 0,
                  beyond ? 0.0f : gradient[0], beyond ? 0.0f : gradient[1]);
    }
  }

  // Stores zeros to such a gradient in the KV blocks that the CTA skips.
  CUTE_DEVICE static void clear_skipped_keys(BackwardParams const& params, Work const& work) {
    if constexpr (Config::kBiasGradient == BiasGradient::full) {
      using BiasElement = typename Config::BiasElement;
      ScoreViewSlice<BiasElement> const slice(params.bias_gradient, work.item.batch, work.item.head,
                                              work.row, 0);
      int const rows = min(kTileQuery, params.shape.query_length - work.row);
      auto clear = [&](int begin, int end) {
        for (int row = threadIdx.x / kWarpSize; row < rows; row += kConsumerWarps) {
          for (int column = begin + threadIdx.x % kWarpSize; column < end; column += kWarpSize) {
            *slice.at(row, column) = BiasElement(0.0f);
          }
        }
      };
      if constexpr (Config::kBlockMask) {
        for (int tile = work.kv_blocks.begin; tile < work.kv_blocks.end;
             tile = work.kv_blocks.after(tile)) {
          clear((tile + 1) * kTileKey, work.kv_blocks.after(tile) * kTileKey);
        }
      }
      clear(0, min(work.kv_blocks.begin * kTileKey, params.shape.key_length));
      clear(work.kv_blocks.end * kTileKey, params.shape.key_length);
    }
  }

  // Stores dq through the query tile in shared memory; each consumer stores its own rows. Rows from
  // query_bound on are beyond the query length and get 0.
  template <class Accumulators>
  CUTE_DEVICE static void store(BackwardParams const& params, BackwardMaps const& maps,
                                Work const& work, int query_bound, int warpgroup, uint32_t tiles,
                                Accumulators& query_gradient) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(query_gradient); ++i) {
      bool const beyond = QueryGrid::element_row(i % 4, 0) >= query_bound;
      query_gradient(i) = beyond ? 0.0f : query_gradient(i) * params.scale.gradient_scale;
    }
    store_accumulators<Element, QueryTile, QueryGrid>(tiles, query_gradient);
    fence_tma_store();
    named_barrier_sync(Owner::warpgroup_barrier(warpgroup), kWarpgroupSize);
    Origin const origin = query_origin<Config>(params.shape, work.item.batch);
    int const row_bound = Config::kPacked ? query_bound : params.shape.query_length - work.row;
    store_part<Config, QueryTile>(maps.query_gradient, params.query_gradient, tiles,
                                  warpgroup * kWarpgroupRows, origin.row + work.row, row_bound,
                                  work.item.head, origin.batch, params.shape.head_dim);
    wait_tma_stores();
    if constexpr (Config::kPacked) {
      GridTiles<Config, GridRows::queries, kTileQuery> const grid = {params.shape};
      clear_query_gap<Config, kConsumers>(params, work.item, query_bound + work.row,
                                          grid.of_batch_index(work.item.batch));
    }
  }
};

}  // namespace memeff
