// A consumer of kernels/fmha_fwd_latent_sm90.cuh computes the scores of every second KV block, and
// half of the output's columns over all KV blocks.
#pragma once

#include <memeff/arch/cluster.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/schedule/balanced_keys.cuh>

namespace memeff {

// run() is called by the kernel with all threads of a consumer warpgroup.
template <class Config, class Kernel>
struct LatentConsumerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using Exchange = typename Kernel::Exchange;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using OutGrid = typename Kernel::OutGrid;
  using PanelTile = typename Kernel::PanelTile;
  using ProbabilityTile = typename Kernel::ProbabilityTile;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using Softmax = typename Kernel::Softmax;
  using ValueTile = typename Kernel::ValueTile;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  static constexpr int kPanelSteps = PanelTile::kColumns / 16;
  static constexpr int kOtherColumns = Kernel::kColumnGroups - 1;  // the group without values
  static constexpr int kOthers = Kernel::kPanels - Kernel::group_begin(kOtherColumns);
  static constexpr int kOwnPanels = kOthers + Kernel::kValuePanels;  // without the other's values
  static constexpr bool kKeySegments = Kernel::Schedule::kKeySegments;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;

  // A consumer's position in the rings. The KV blocks whose scores it owns are in the buffer with
  // its number.
  struct Position {
    int warpgroup;
    bool leader;         // one per warp
    int releases;        // the CTA in whose barriers this lane releases keys, or -1
    int next = 0;        // the buffer of the next part's first KV block
    int own_parity = 0;  // of the consumer's own buffer
    int other_parity = 0;
    int sums = 0;  // the buffer of row sums
    PipelineStage<Kernel::kWorkStages> slot;
  };

  CUTE_DEVICE static void run(ForwardParams const& params, Control& control, uint32_t tiles,
                              int sharers) {
    Position at;
    // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
    at.warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    int const lane = int(threadIdx.x) % kWarpSize;
    at.leader = lane == 0;
    at.releases = lane >= sharers ? -1 : sharers == 1 ? cluster_rank() : lane;
    while (true) {
      control.work.wait(at.slot);
      KeyPart const part = control.parts[at.slot.index];
      if (part.batch < 0) break;
      if constexpr (!kKeySegments) release_part(control, at);
      compute(params, control, tiles, part, at);
      if constexpr (kKeySegments) release_part(control, at);
    }
  }

 private:
  // All lanes of a warp call it when they have read the part.
  CUTE_DEVICE static void release_part(Control& control, Position& at) {
    __syncwarp();
    if (at.leader) control.work.release(at.slot);
    at.slot.advance();
  }

  // Computes a part: the KV blocks [begin, end) of a row tile, two at a time, one per consumer.
  CUTE_DEVICE static void compute(ForwardParams const& params, Control& control, uint32_t tiles,
                                  KeyPart const& part, Position& at) {
    Mask const mask(params.mask, params.shape, part.batch);
    auto output = OutGrid::make_accumulators();    // (4, 1, MMA_N)
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(output);
    Softmax softmax;
    if (!has_queries(part)) {
      // Hazard: the other consumer must have read the queries of the previous part. It has, because
      // it has passed the barrier of add_row_sums().
      Kernel::Queries::load(params, part, mask.query_length, tiles);
      commit_copies();
      wait_copies<0>();
      fence_tma_store();
      named_barrier_sync(Kernel::kConsumerBarrier, Kernel::kConsumers);
    }
    bool const starts = at.next == at.warpgroup;
    // The number of KV blocks of a segment is even.
    if constexpr (!kKeySegments) at.next ^= (part.end - part.begin) & 1;
    // The range is uniform over the warp; the shuffles make that visible to the compiler. Without
    // them it computes matrix descriptors in vector registers: 168 R2UR for each KV block.
    int block = __shfl_sync(0xffffffffu, part.begin, 0);
    int const end = __shfl_sync(0xffffffffu, part.end, 0);
    if (starts) {
      add_own_block<false>(params, control, tiles, at, mask, part, block, scores, softmax, output);
      ++block;
    }
    // `block` belongs to the other consumer.
    CUTE_NO_UNROLL
    for (; block + 1 < end; block += Kernel::kWarpgroups) {
      add_own_block<true>(params, control, tiles, at, mask, part, block + 1, scores, softmax,
                          output);
    }
    if (block < end) add_other_values(control, tiles, at, softmax, output);
    Exchange::add_row_sums(control.row_sums[at.sums], at.warpgroup, Kernel::kConsumerBarrier,
                           softmax);
    at.sums ^= 1;  // hazard: the other consumer may still read these
    if constexpr (kKeySegments) {
      // Read anew, because the main loop of a window has no registers for them.
      KeyPart const own = control.parts[at.slot.index];
      int const query_length = Mask(params.mask, params.shape, own.batch).query_length;
      Kernel::Output::write(params, own, query_length, at.warpgroup,
                            at.warpgroup * Kernel::kColumns, softmax, output);
    } else {
      Kernel::Output::write(params, part, mask.query_length, at.warpgroup,
                            at.warpgroup * Kernel::kColumns, softmax, output);
    }
  }

  // Whether the queries of a part are in shared memory, because the part before it had the same.
  CUTE_DEVICE static bool has_queries(KeyPart const& part) {
    if constexpr (kKeySegments) {
      return SegmentResult::of(part).continues;
    } else {
      return false;
    }
  }

  // Adds a KV block whose scores this consumer owns, and with kFollows the other consumer's block
  // before it. That one is added while the scores are half done: the panels for their second half
  // arrive last, because the other consumer released them last. Added before the scores, it would
  // delay them; added after them, it would occupy the other consumer's buffer for longer.
  //
  // Hazard: kFollows must be a compile-time constant, because ptxas serializes products if a branch
  // separates them from the wait for other products.
  template <bool kFollows, class Scores, class Output>
  CUTE_DEVICE static void add_own_block(ForwardParams const& params, Control& control,
                                        uint32_t tiles, Position& at, Mask const& mask,
                                        KeyPart const& part, int block, Scores& scores,
                                        Softmax& softmax, Output& output) {
    add_scores(control, tiles, at, 0, kOwnPanels, scores);
    if constexpr (kFollows) add_other_values(control, tiles, at, softmax, output);
    add_scores(control, tiles, at, kOwnPanels, Kernel::kPanels, scores);
    wait_products<0>();
    fence_accumulators(scores);
    release_keys(control, at, at.warpgroup, kOtherColumns);
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const tile = {part.batch, part.head, part.tile * kTileQuery,
                                    block * kTileKey};
    modifiers.forward(scores, tile);
    mask.template apply<kTileQuery, kTileKey>(scores, params, tile, true, 0,
                                              control.may_miss_pages);
    auto const correction = softmax.exponentiate(scores, params.scale.softmax_scale);
    fence_accumulators(scores);
    auto const probabilities = as_left_operand<Element>(scores);
    publish(params, control, tiles, at, mask, part, block, softmax, correction, probabilities);
    Softmax::rescale(output, correction);
    add_values(control, tiles, at, at.warpgroup, probabilities, output);
    at.own_parity ^= 1;
  }

  // Starts the products [begin, end) of S = Q K^T of the KV block in this consumer's buffer. Each
  // product reads one panel, as soon as it has arrived. The panels that this consumer has released
  // itself come first.
  template <class Scores>
  CUTE_DEVICE static void add_scores(Control& control, uint32_t tiles, Position const& at,
                                     int begin, int end, Scores& scores) {
    auto& barriers = control.keys[at.warpgroup];
    uint32_t const keys = Kernel::keys(tiles, at.warpgroup);
    fence_accumulators(scores);
    CUTE_UNROLL
    for (int i = begin; i < end; ++i) {
      // The columns without values are the last ones.
      int const value_panel =
          (i - kOthers + at.warpgroup * Kernel::kValuePanels) % Kernel::group_begin(kOtherColumns);
      int const panel = i < kOthers ? Kernel::group_begin(kOtherColumns) + i : value_panel;
      wait_barrier(barriers.full[panel], at.own_parity);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      warpgroup_gemm<Element, kPanelSteps>(
          scores, operand<PanelTile, Contiguous::k>(tiles + panel * PanelTile::kBytes),
          operand<PanelTile, Contiguous::k>(keys + panel * PanelTile::kBytes), i > 0);
    }
    commit_products();
  }

  // Passes the probabilities of a KV block to the other consumer, with the softmax references.
  template <class Probabilities>
  CUTE_DEVICE static void publish(ForwardParams const& params, Control& control, uint32_t tiles,
                                  Position const& at, Mask const& mask, KeyPart const& part,
                                  int block, Softmax const& softmax,
                                  typename Softmax::Correction const& correction,
                                  Probabilities const& probabilities) {
    // Hazard: every warp of this consumer must have read the other's probabilities, which these
    // replace.
    named_barrier_sync(Kernel::warpgroup_barrier(at.warpgroup), kWarpgroupSize);
    store_operand<ProbabilityTile, ScoreGrid>(tiles + Kernel::kProbabilityOffset, probabilities);
    Exchange::publish(control.references, softmax, correction);
    int const column = block * kTileKey;
    bool clears = reads_beyond<Config>(mask.key_length, column + kTileKey, params.shape.key_length);
    // Hazard: clear the value columns only. The other columns are already released.
    using Values = SharedTile<kTileKey, Config::kValueDim>;
    if (clears) {
      clear_rows<Values, kWarpgroupSize>(Kernel::keys(tiles, at.warpgroup),
                                         max(mask.key_length - column, 0));
    }
    if constexpr (kMayBeFreed<Config>) {
      int const unneeded = unneeded_rows<Config>(mask, part.tile * kTileQuery, column, kTileKey);
      clears = clears || unneeded > 0;
      clear_rows<Values, kWarpgroupSize>(Kernel::keys(tiles, at.warpgroup), 0, unneeded);
    }
    fence_tma_store();
    if (clears) named_barrier_sync(Kernel::warpgroup_barrier(at.warpgroup), kWarpgroupSize);
    __syncwarp();
    if (at.leader) arrive_barrier(control.probabilities[at.warpgroup]);
    random_sleep();
  }

  // Computes O += P V of a KV block of the other consumer, whose probabilities are in shared
  // memory.
  template <class Output>
  CUTE_DEVICE static void add_other_values(Control& control, uint32_t tiles, Position& at,
                                           Softmax& softmax, Output& output) {
    int const other = 1 - at.warpgroup;
    wait_barrier(control.probabilities[other], at.other_parity);
    random_sleep();
    auto const correction = Exchange::adopt(control.references, softmax);
    Softmax::rescale(output, correction);
    // Redundant wait: the owner of the scores has waited for these keys. It makes their arrival
    // visible to this thread without relying on the other consumer.
    CUTE_UNROLL
    for (int panel = 0; panel < Kernel::kValuePanels; ++panel) {
      wait_barrier(control.keys[other].full[at.warpgroup * Kernel::kValuePanels + panel],
                   at.other_parity);
    }
    add_values(control, tiles, at, other,
               operand<ProbabilityTile, Contiguous::k>(tiles + Kernel::kProbabilityOffset), output);
    at.other_parity ^= 1;
  }

  // Computes O += P V for this consumer's columns of the values in a buffer, and releases them.
  template <class Probabilities, class Output>
  CUTE_DEVICE static void add_values(Control& control, uint32_t tiles, Position const& at,
                                     int buffer, Probabilities const& probabilities,
                                     Output& output) {
    uint32_t const values = Kernel::keys(tiles, buffer) + at.warpgroup * ValueTile::kBytes;
    fence_accumulators(output);
    begin_products();
    warpgroup_gemm<Element, kKeySteps>(output, probabilities,
                                       operand<ValueTile, Contiguous::outer>(values), true);
    commit_products();
    wait_products<0>();
    fence_accumulators(output);
    release_keys(control, at, buffer, at.warpgroup);
  }

  // Releases a column group of a buffer in all CTAs that share its keys. All lanes of a warp call
  // it.
  CUTE_DEVICE static void release_keys(Control& control, Position const& at, int buffer,
                                       int group) {
    if (at.releases >= 0) arrive_cluster_barrier(control.keys[buffer].empty[group], at.releases);
    random_sleep();
  }

  template <class Tile, Contiguous kOrder>
  CUTE_DEVICE static DescriptorOperand<Tile, kOrder> operand(uint32_t tile) {
    return DescriptorOperand<Tile, kOrder>(descriptor_address(tile));
  }
};

}  // namespace memeff
