// A consumer of kernels/fmha_fwd_large_dim_sm90.cuh computes the scores of every second KV block,
// and half of the output's columns over all KV blocks.
#pragma once

#include <memeff/collective/softmax/linear_scores.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// run() is called by the kernel with all threads of a consumer warpgroup.
template <class Config, class Kernel>
struct LargeDimConsumerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using Exchange = typename Kernel::Exchange;
  using KeyPanel = typename Kernel::KeyPanel;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using OutGrid = typename Kernel::OutGrid;
  using ProbabilityTile = typename Kernel::ProbabilityTile;
  using QueryPanel = typename Kernel::QueryPanel;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using Softmax = typename Kernel::Softmax;
  using Turns = typename Kernel::Turns;
  using ValueTile = typename Kernel::ValueTile;
  static constexpr int kKeyPanels = Kernel::kKeyPanels;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  static constexpr int kPanelSteps = KeyPanel::kColumns / 16;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;

  // A consumer's position in the rings.
  struct Position {
    int warpgroup;
    int own_parity = 0;  // of the KV blocks whose scores it computes
    int other_parity = 0;
    PipelineStage<Kernel::kKeyStages> key;
    PipelineStage<Kernel::kValueStages> value;
  };

  CUTE_DEVICE static void run(ForwardParams const& params, Control& control, uint32_t tiles) {
    Position at;
    // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
    at.warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    WorkItem const item = Kernel::item(params.shape, params.bias);
    Mask const mask(params.mask, params.shape, item.batch);
    TileRange const range = Kernel::blocks(mask, item);
    auto output = OutGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(output);
    Softmax softmax;
    if (range.begin < range.end) {
      compute(params, control, tiles, item, mask, range, at, softmax, output);
    }
    // Both CTAs of a cluster must stay alive until the last scores have been read.
    if constexpr (Kernel::kDividesColumns) arrive_cluster();
    Exchange::add_row_sums(control.row_sums, at.warpgroup, Kernel::kConsumerBarrier, softmax);
    write(params, item, mask.query_length, at.warpgroup, softmax, output);
    if constexpr (Kernel::kDividesColumns) wait_cluster();
  }

 private:
  // Computes the KV blocks of the range two at a time, one per consumer.
  template <class Output>
  CUTE_DEVICE static void compute(ForwardParams const& params, Control& control, uint32_t tiles,
                                  WorkItem const& item, Mask const& mask, TileRange const& range,
                                  Position& at, Softmax& softmax, Output& output) {
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    Turns::begin(at.warpgroup);
    wait_barrier(control.query, 0);
    random_sleep();
    int block = range.begin;
    if (at.warpgroup == 0) {
      add_own_block<false>(params, control, tiles, at, mask, item, block, scores, softmax, output);
      ++block;
    } else {
      pass_keys(at);
    }
    // `block` belongs to the other consumer.
    CUTE_NO_UNROLL
    for (; block + 1 < range.end; block += Kernel::kWarpgroups) {
      add_own_block<true>(params, control, tiles, at, mask, item, block + 1, scores, softmax,
                          output);
    }
    if (block < range.end) {
      begin_other_values(params, control, tiles, at, mask, block, softmax, output);
      end_other_values(control, at, output);
    }
  }

  // Adds a KV block whose scores this consumer computes, and with kFollows the previous one, whose
  // scores the other consumer computes and whose product overlaps the softmax.
  //
  // Hazard: kFollows must be a compile-time constant, because ptxas serializes products if a branch
  // separates them from the wait for other products.
  template <bool kFollows, class Scores, class Output>
  CUTE_DEVICE static void add_own_block(ForwardParams const& params, Control& control,
                                        uint32_t tiles, Position& at, Mask const& mask,
                                        WorkItem const& item, int block, Scores& scores,
                                        Softmax& softmax, Output& output) {
    begin_scores(control, tiles, at, scores);
    if constexpr (kFollows) {
      begin_other_values(params, control, tiles, at, mask, block - 1, softmax, output);
    }
    wait_products<kFollows>();
    fence_accumulators(scores);
    release_keys(control, at);
    if constexpr (Kernel::kDividesColumns) {
      // Every second tile is this consumer's. The other one has published the probabilities of the
      // tile before, so that tile's sum is complete.
      Kernel::ScoreSum::add(control, tiles + Kernel::kScoreSumOffset, 1 - Kernel::column_part(),
                            at.warpgroup, scores);
    }
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const tile = {item.batch, item.head, item.tile * kTileQuery,
                                    block * kTileKey};
    modifiers.forward(scores, tile);
    mask.template apply<kTileQuery, kTileKey>(scores, params, tile);
    auto const correction = softmax.exponentiate(scores, params.scale.softmax_scale);
    fence_accumulators(scores);
    // Redundant wait: it ends the basic block. Without it ptxas sinks the exponentials below the
    // wait for the product that they should overlap.
    wait_barrier(control.query, 0);
    auto const probabilities = as_left_operand<Element>(scores);
    if constexpr (kFollows) end_other_values(control, at, output);
    publish(control, tiles, at, softmax, correction, probabilities);
    Softmax::rescale(output, correction);
    multiply_own_values(params, control, tiles, at, mask, block, probabilities, output);
  }

  // Starts S = Q K^T, panel by panel as they arrive.
  //
  // Hazard: consumers wait for keys in turn. This one skipped those of the previous KV block, and a
  // wait for the phase after next of a barrier would return at once.
  template <class Scores>
  CUTE_DEVICE static void begin_scores(Control& control, uint32_t tiles, Position const& at,
                                       Scores& scores) {
    auto stage = at.key;
    Turns::take(at.warpgroup);
    fence_accumulators(scores);
    CUTE_UNROLL
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      control.key.wait(stage);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      warpgroup_gemm<Element, kPanelSteps>(
          scores, operand<QueryPanel, Contiguous::k>(tiles + panel * QueryPanel::kBytes),
          operand<KeyPanel, Contiguous::k>(Kernel::keys(tiles, stage)), panel > 0);
      stage.advance();
    }
    commit_products();
    Turns::pass(at.warpgroup);
  }

  // Releases the keys of a KV block, each panel by a different lane, and skips those of the next KV
  // block, which the other consumer reads.
  CUTE_DEVICE static void release_keys(Control& control, Position& at) {
    static_assert(kKeyPanels <= kWarpSize);
    int const panel = int(threadIdx.x) % kWarpSize;
    if (panel < kKeyPanels) {
      auto stage = at.key;
      stage.advance(panel);
      arrive_barrier(control.key.empty[stage.index]);
    }
    random_sleep();
    at.key.advance(kKeyPanels);
    pass_keys(at);
  }
  CUTE_DEVICE static void pass_keys(Position& at) { at.key.advance(kKeyPanels); }

  CUTE_DEVICE static void release_values(Control& control, Position& at) {
    if (threadIdx.x % kWarpSize == 0) {
      arrive_barrier(control.value[at.warpgroup].empty[at.value.index]);
    }
    random_sleep();
    at.value.advance();
  }

  // Passes the probabilities of a KV block to the other consumer, with the softmax references.
  template <class Probabilities>
  CUTE_DEVICE static void publish(Control& control, uint32_t tiles, Position& at,
                                  Softmax const& softmax,
                                  typename Softmax::Correction const& correction,
                                  Probabilities const& probabilities) {
    // Hazard: every warp of this consumer must have read the other's probabilities, which these
    // replace.
    named_barrier_sync(Kernel::warpgroup_barrier(at.warpgroup), kWarpgroupSize);
    store_operand<ProbabilityTile, ScoreGrid>(tiles + Kernel::kProbabilityOffset, probabilities);
    Exchange::publish(control.references, softmax, correction);
    fence_tma_store();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive_barrier(control.probabilities[at.warpgroup]);
    random_sleep();
  }

  // Adds P V of a KV block whose probabilities this consumer has in registers.
  template <class Probabilities, class Output>
  CUTE_DEVICE static void multiply_own_values(ForwardParams const& params, Control& control,
                                              uint32_t tiles, Position& at, Mask const& mask,
                                              int block, Probabilities const& probabilities,
                                              Output& output) {
    take_values(params, control, tiles, at, mask, block);
    fence_accumulators(output);
    begin_products();
    warpgroup_gemm<Element, kKeySteps>(output, probabilities, values(tiles, at));
    commit_products();
    wait_products<0>();
    fence_accumulators(output);
    release_values(control, at);
    at.own_parity ^= 1;
  }

  // Starts O += P V of a KV block of the other consumer, whose probabilities are in shared memory.
  template <class Output>
  CUTE_DEVICE static void begin_other_values(ForwardParams const& params, Control& control,
                                             uint32_t tiles, Position const& at, Mask const& mask,
                                             int block, Softmax& softmax, Output& output) {
    take_values(params, control, tiles, at, mask, block);
    wait_barrier(control.probabilities[1 - at.warpgroup], at.other_parity);
    random_sleep();
    Softmax::rescale(output, Exchange::adopt(control.references, softmax));
    fence_accumulators(output);
    begin_products();
    warpgroup_gemm<Element, kKeySteps>(
        output, operand<ProbabilityTile, Contiguous::k>(tiles + Kernel::kProbabilityOffset),
        values(tiles, at), true);
    commit_products();
  }

  template <class Output>
  CUTE_DEVICE static void end_other_values(Control& control, Position& at, Output& output) {
    wait_products<0>();
    fence_accumulators(output);
    release_values(control, at);
    at.other_parity ^= 1;
  }

  // Waits for this consumer's columns of the values of a KV block, and zeros those beyond the key
  // length, where 0 * NaN would be NaN.
  CUTE_DEVICE static void take_values(ForwardParams const& params, Control& control, uint32_t tiles,
                                      Position const& at, Mask const& mask, int block) {
    control.value[at.warpgroup].wait(at.value);
    int const column = block * kTileKey;
    if (!reads_beyond<Config>(mask.key_length, column + kTileKey, params.shape.key_length)) return;
    clear_rows<ValueTile, kWarpgroupSize>(Kernel::values(tiles, at.warpgroup, at.value),
                                          max(mask.key_length - column, 0));
    fence_tma_store();
    named_barrier_sync(Kernel::warpgroup_barrier(at.warpgroup), kWarpgroupSize);
  }

  CUTE_DEVICE static DescriptorOperand<ValueTile, Contiguous::outer> values(uint32_t tiles,
                                                                            Position const& at) {
    return operand<ValueTile, Contiguous::outer>(Kernel::values(tiles, at.warpgroup, at.value));
  }

  template <class Tile, Contiguous kOrder>
  CUTE_DEVICE static DescriptorOperand<Tile, kOrder> operand(uint32_t tile) {
    return DescriptorOperand<Tile, kOrder>(Kernel::kDividesColumns ? descriptor_address(tile)
                                                                   : tile);
  }

  // Writes this consumer's columns of the output. Consumer 0 of the first columns also clears rows
  // that are not valid.
  template <class Output>
  CUTE_DEVICE static void write(ForwardParams const& params, WorkItem const& item, int query_length,
                                int warpgroup, Softmax& softmax, Output& output) {
    LinearScores<Config, false> const linear(params, item);
    Kernel::Output::write(params, item, query_length, linear, softmax, output,
                          Kernel::first_column(warpgroup));
    if (Kernel::column_part() > 0) return;
    if (warpgroup == 0) {
      int const row = item.tile * kTileQuery;
      Kernel::Output::write_empty(params, item, query_length, max(row, query_length),
                                  row + kTileQuery);
    }
    if constexpr (Config::kVarlen) {
      GridTiles<Config, GridRows::queries, kTileQuery> const grid = {params.shape};
      clear_query_gap<Config, Kernel::kConsumers>(params, item, query_length,
                                                  grid.of_batch_index(item.batch));
    }
  }
};

}  // namespace memeff
