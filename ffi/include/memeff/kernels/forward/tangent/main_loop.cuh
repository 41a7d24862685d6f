// The main loop of kernels/forward/tangent/fmha_tangent_sm90.cuh, which a consumer runs for the
// work tiles that it has rows of.
#pragma once

#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/kernels/forward/consumer_sm90.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// run() is called by the kernel with all threads of a consumer warpgroup.
template <class Config, class Kernel>
struct TangentMainLoopSm90 {
  using Element = typename Config::Element;
  using Blocks = typename Kernel::Blocks;
  using Consumer = WorkTileConsumerSm90<Config, Kernel>;
  using Control = typename Kernel::Control;
  using KeptBlocks = typename Kernel::KeptBlocks;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using Operands = typename Kernel::Operands;
  using OutGrid = typename Kernel::OutGrid;
  using Output = typename Kernel::OutputWriter;
  using Position = typename Consumer::Position;
  using Probabilities = typename Kernel::Probabilities;
  using Queries = typename Operands::Queries;
  using Rows = typename Kernel::Rows;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using WorkTile = typename Kernel::WorkTile;
  using Accumulators = decltype(ScoreGrid::make_accumulators());
  using LeftOperand = decltype(as_left_operand<Element>(Accumulators{}));
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;

  // Computes all work tiles of one consumer.
  CUTE_DEVICE static void run(TangentParams const& params, Control& control, uint32_t tiles) {
    Position at = {};
    // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
    at.warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    at.row_warpgroup = at.warpgroup;
    at.leader = threadIdx.x % kWarpSize == 0;
    while (true) {
      WorkTile const work_tile = control.take_work_tile(at.slot);
      if (work_tile.item.batch < 0) break;
      if (Consumer::has_rows(work_tile, at.row_warpgroup)) {
        compute(params, control, tiles, work_tile, at);
      } else {
        Consumer::skip_work_tile(params, control, work_tile.item, at);
      }
      at.query.advance();
    }
  }

 private:
  // Computes the rows of this consumer of a work tile.
  CUTE_DEVICE static void compute(TangentParams const& params, Control& control, uint32_t tiles,
                                  WorkTile const& work_tile, Position& at) {
    WorkItem const& item = work_tile.item;
    Mask const mask(params.mask, params.shape, item.batch);
    Blocks const range(params, mask, item, 0);
    int tile = range.first(mask, item, at.row_warpgroup);
    Rows rows(params, item, mask.query_length);
    Queries queries;
    begin_work_tile(params, control, tiles, at, mask, item, range, tile, queries);
    auto sums = OutGrid::make_accumulators();        // P dV + dP V; (4, 1, MMA_N)
    auto scores = ScoreGrid::make_accumulators();    // S, then P times the derivative of S
    auto tangents = ScoreGrid::make_accumulators();  // dS, then dP
    LeftOperand probabilities;
    LeftOperand probability_tangents;
    // Hazard: clear them before the first product. Otherwise ptxas waits for it before it assigns
    // registers.
    cute::clear(sums);
    fence_accumulators(sums);
    bool begins = true;  // the first KV block
    begin_scores(control, tiles, at, queries, scores);
    begin_score_tangents(tiles, at, queries, tangents);
    CUTE_NO_UNROLL
    while (true) {
      KeptBlocks const kept(params, item.batch, item.head, item.tile * kTileQuery, tile * kTileKey);
      wait_products<Operands::kScoreTangent ? 1 : 0>();  // S, and the sums of the previous block
      fence_accumulators(scores);
      fence_accumulators(sums);
      if (!begins) release_values(control, at);
      exponentiate(params, mask, item, tile, range, tiles, at, rows, kept, scores, probabilities);
      fence_accumulators(scores);
      // Hazard: keep this wait here, because it ends the basic block. Without it ptxas sinks the
      // exponentials below the wait for dS, which they should overlap.
      control.value.wait(at.value);
      wait_products<0>();
      fence_accumulators(tangents);
      // Hazard: release only after a product has used the registers that were loaded from the
      // buffer.
      release_keys(control, at, Operands::kReadsQueriesOnce ? begins : tile == range.begin);
      if constexpr (Operands::kScoreTangent) {
        multiply(scores, tangents);
        probability_tangents = as_left_operand<Element>(tangents);
        modify_probabilities(params, item, tile, kept, probability_tangents);
      }
      fence_accumulators(sums);
      begin_products();
      Operands::multiply_values(sums, probabilities, probability_tangents,
                                at_use(Kernel::values(tiles, at.value)));
      commit_products();
      begins = false;
      if (tile == range.begin) break;
      tile = range.next(tile);
      begin_scores(control, tiles, at, queries, scores);
      rows_add(rows, tangents);
      begin_score_tangents(tiles, at, queries, tangents);
    }
    rows_add(rows, tangents);
    auto const forward = Output::load(params, item, work_tile.query_length);
    wait_products<0>();
    fence_accumulators(sums);
    release_values(control, at);
    Output::write(params, item, work_tile.query_length, rows, forward, sums);
    finish_work_tile(params, control, at, work_tile);
  }

  // Takes the queries of a work tile, and skips the KV blocks above `tile`, its first.
  CUTE_DEVICE static void begin_work_tile(TangentParams const& params, Control& control,
                                          uint32_t tiles, Position& at, Mask const& mask,
                                          WorkItem const& item, Blocks const& range, int tile,
                                          Queries& queries) {
    modifiers_of(params, mask, item, tiles).load(tile * kTileKey);
    // Hazard: skip them alternately, because the producer may fill one ring only when the other is
    // empty.
    CUTE_NO_UNROLL
    for (int count = range.passed(tile + 1); count > 0; --count) {
      Consumer::skip(control.key, at.key, 1, at.leader);
      Consumer::skip(control.value, at.value, 1, at.leader);
    }
    Consumer::clear_beyond(
        control.key, at.key, mask, params.shape, tile, at.warpgroup,
        [&](int first) { Operands::clear_keys(Kernel::keys(tiles, at.key), first); });
    Consumer::clear_values(control, mask, params.shape, tile, at.value, tiles, at.warpgroup);
    control.query[at.row_warpgroup].wait(at.query);
    queries.take(Kernel::queries(tiles, at.query), at.row_warpgroup);
  }

  // The address of a buffer. With wide rows the descriptors of all steps of products are computed
  // at each use: ptxas would compute them before the loop, and spill 260 bytes at head dim 256.
  CUTE_DEVICE static uint32_t at_use(uint32_t buffer) {
    if constexpr (Config::kHeadDim + Config::kValueDim > 320) hide_value(buffer);
    return buffer;
  }

  CUTE_DEVICE static void begin_scores(Control& control, uint32_t tiles, Position const& at,
                                       Queries const& queries, Accumulators& scores) {
    control.key.wait(at.key);
    fence_accumulators(scores);
    begin_products();
    Operands::multiply_keys(scores, queries, at_use(Kernel::queries(tiles, at.query)),
                            at_use(Kernel::keys(tiles, at.key)), at.row_warpgroup);
    commit_products();
  }

  CUTE_DEVICE static void begin_score_tangents(uint32_t tiles, Position const& at,
                                               Queries const& queries, Accumulators& tangents) {
    if constexpr (Operands::kScoreTangent) {
      fence_accumulators(tangents);
      begin_products();
      Operands::multiply_key_tangents(tangents, queries, at_use(Kernel::queries(tiles, at.query)),
                                      at_use(Kernel::keys(tiles, at.key)), at.row_warpgroup);
      commit_products();
    }
  }

  CUTE_DEVICE static void release_keys(Control& control, Position& at, bool releases_queries) {
    if (at.leader) {
      control.key.release(at.key);
      if (releases_queries) control.query[at.row_warpgroup].release(at.query);
    }
    at.key.advance();
  }

  CUTE_DEVICE static void release_values(Control& control, Position& at) {
    if (at.leader) control.value.release(at.value);
    at.value.advance();
  }

  // Turns scores into probabilities, an operand, and replaces the scores with P times their
  // derivative with respect to dQ K^T + Q dK^T.
  CUTE_DEVICE static void exponentiate(TangentParams const& params, Mask const& mask,
                                       WorkItem const& item, int tile, Blocks const& range,
                                       uint32_t tiles, Position const& position, Rows const& rows,
                                       KeptBlocks const& kept, Accumulators& scores,
                                       LeftOperand& probabilities) {
    int const column = tile * kTileKey;
    int const own_row = position.row_warpgroup * kWarpgroupRows;
    ScoreTilePosition const at = {item.batch, item.head, item.tile * kTileQuery, column};
    Modifiers const modifiers = modifiers_of(params, mask, item, tiles);
    auto derivatives = ScoreGrid::make_accumulators();  // no registers if they are constant
    modifiers.recompute_with_derivatives(scores, derivatives, at, column);
    modifiers.load_next(tile > range.begin, [&] { return range.next(tile) * kTileKey; });
    mask.template apply<kWarpgroupRows, kTileKey>(
        scores, params, at, range.is_partial(tile, position.row_warpgroup), own_row);
    if (range.is_empty(tile, position.row_warpgroup)) cute::fill(scores, -infinity());
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(scores); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& score = scores(i, 0, n);
        score = probability(score, params.scale.softmax_scale, rows.logsumexp[i / 2]);
      }
    }
    if constexpr (Config::kValueTangent) {
      probabilities = as_left_operand<Element>(scores);
      modify_probabilities(params, item, tile, kept, probabilities);
    }
    if constexpr (Operands::kScoreTangent) {
      float const scale = params.scale.gradient_scale;
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        if constexpr (Modifiers::kConstantDerivative) {
          scores(i) *= scale;
        } else {
          scores(i) = Modifiers::product(scores(i) * scale, derivatives(i));
        }
      }
    }
  }

  // dP = P dS, given P times the derivative of the scores.
  CUTE_DEVICE static void multiply(Accumulators const& scores, Accumulators& tangents) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) tangents(i) *= scores(i);
  }

  // Adds dP to the tangents of the logsumexp of the rows.
  CUTE_DEVICE static void rows_add(Rows& rows, Accumulators const& tangents) {
    if constexpr (Operands::kScoreTangent) {
      CUTE_UNROLL
      for (int r = 0; r < Rows::kRows; ++r) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(tangents); ++n) {
          rows.tangent[r] += tangents(2 * r, 0, n) + tangents(2 * r + 1, 0, n);
        }
      }
    }
  }

  CUTE_DEVICE static void modify_probabilities(TangentParams const& params, WorkItem const& item,
                                               int tile, KeptBlocks const& kept,
                                               LeftOperand& probabilities) {
    Probabilities::forward(params, kept, item.batch, item.head, item.tile * kTileQuery,
                           tile * kTileKey, probabilities);
  }

  CUTE_DEVICE static void finish_work_tile(TangentParams const& params, Control& control,
                                           Position& at, WorkTile const& work_tile) {
    WorkItem const& item = work_tile.item;
    int const row = item.tile * kTileQuery + at.row_warpgroup * kWarpgroupRows;
    Output::write_empty(params, item, work_tile.query_length, max(row, work_tile.query_length),
                        row + kWarpgroupRows);
    Consumer::clear_gap(params, item, work_tile.query_length);
    Consumer::release_work_tile(control, at);
  }

  // The modifiers of a work tile. They are constructed at each use, so that they occupy no
  // registers between two KV blocks.
  CUTE_DEVICE static Modifiers modifiers_of(TangentParams const& params, Mask const& mask,
                                            WorkItem const& item, uint32_t tiles) {
    return {{params.scale},
            {params},
            {params.bias,
             {params.bias, item},
             mask,
             item.tile * kTileQuery,
             tiles + Kernel::kBiasOffset}};
  }
};

}  // namespace memeff
