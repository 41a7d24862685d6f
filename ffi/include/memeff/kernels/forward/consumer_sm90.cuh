// The steps that a consumer of kernels/fmha_fwd_sm90.cuh takes between work tiles, and its accesses
// to the rings.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>

namespace memeff {

// A consumer is a warpgroup that owns 64 rows of a work tile, or shares them with other groups. Its
// main loop calls these functions, in a forward (main_loop_sm90.cuh) and in a tangent kernel
// (tangent/main_loop.cuh).
template <class Config, class Kernel>
struct WorkTileConsumerSm90 {
  using Params = typename Config::Params;
  using Blocks = typename Kernel::Blocks;
  using Control = typename Kernel::Control;
  using Mask = typename Kernel::Mask;
  using Operands = typename Kernel::Operands;
  using OutputWriter = typename Kernel::OutputWriter;
  using Turns = typename Kernel::Turns;
  using WorkTile = typename Kernel::WorkTile;
  static constexpr int kConsumerGroups = Kernel::kConsumerGroups;
  static constexpr int kQueryStages = Kernel::kQueryStages;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;
  static constexpr int kWorkTileStages = Kernel::kWorkTileStages;

  // Advances to the buffer of this consumer's next KV block.
  CUTE_DEVICE static void advance(PipelineStage<kStages>& stage) {
    CUTE_UNROLL
    for (int group = 0; group < kConsumerGroups; ++group) stage.advance();
  }

  // Releases the buffers of `count` KV blocks without reading them.
  template <int kBuffers>
  CUTE_DEVICE static void skip(Pipeline<kBuffers>& ring, PipelineStage<kBuffers>& stage, int count,
                               bool leader) {
    CUTE_NO_UNROLL
    for (; count > 0; --count) {
      ring.wait(stage);  // hazard: else the arrival would count for the previous tile
      __syncwarp();      // hazard: else a lane may miss the phase that it waits for
      if (leader) ring.release(stage);
      stage.advance();
    }
  }

  // A consumer's position in each ring.
  struct Position {
    int warpgroup;
    int group;
    int row_warpgroup;
    bool leader;  // one per warp
    PipelineStage<kQueryStages> query;
    PipelineStage<kStages> key;
    PipelineStage<kStages> value;
    PipelineStage<kWorkTileStages> slot;
  };

  // Skips the keys of `count` KV blocks, and the turns in which their products would be issued.
  CUTE_DEVICE static void skip_keys(Control& control, Position& at, int count) {
    CUTE_NO_UNROLL
    for (int i = 0; Turns::kIsEnabled && i < count; ++i) {
      Turns::take(at.warpgroup);
      Turns::pass(at.warpgroup);
    }
    skip(control.key, at.key, count, at.leader);
  }

  CUTE_DEVICE static void release_work_tile(Control& control, Position& at) {
    __syncwarp();
    if (at.leader) control.work_tile.release(at.slot);
    at.slot.advance();
  }

  // Whether a consumer owns rows of the work tile that are below the query length.
  CUTE_DEVICE static bool has_rows(WorkTile const& work_tile, int warpgroup) {
    if constexpr (kConsumerGroups > 1) return true;
    return work_tile.item.tile * kTileQuery + warpgroup * kWarpgroupRows < work_tile.query_length;
  }

  // The next work tile, with a batch of -1 if this consumer has no rows in it.
  CUTE_DEVICE static WorkItem next_work_tile(Control& control, Position const& at) {
    PipelineStage<kWorkTileStages> next = at.slot;
    next.advance();
    WorkTile const work_tile = control.take_work_tile(next);
    bool const has = work_tile.item.batch >= 0 && has_rows(work_tile, at.row_warpgroup);
    return {work_tile.item.tile, work_tile.item.head, has ? work_tile.item.batch : -1};
  }

  // Skips a work tile in which only other consumers own rows. Hazard: release keys and values
  // alternately, because a consumer that needs both would otherwise wait for the ring that lags
  // behind.
  CUTE_DEVICE static void skip_work_tile(Params const& params, Control& control,
                                         WorkItem const& item, Position& at) {
    Mask const mask(params.mask, params.shape, item.batch);
    Blocks const range(params, mask, item);
    PipelineStage<kQueryStages> query = at.query;
    skip(control.query[at.row_warpgroup], query, 1, at.leader);
    CUTE_NO_UNROLL
    for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile)) {
      skip_keys(control, at, 1);
      skip(control.value, at.value, 1, at.leader);
    }
    int const row = item.tile * kTileQuery + at.row_warpgroup * kWarpgroupRows;
    OutputWriter::write_empty(params, item, mask.query_length, row, row + kWarpgroupRows);
    clear_gap(params, item, mask.query_length);
    release_work_tile(control, at);
  }

  // Zeros the values of a work tile's first KV block that lie beyond the key length, where 0 * NaN
  // would be NaN. Each consumer zeros all of them, without a barrier between consumers: they write
  // the same zeros.
  CUTE_DEVICE static void clear_values(Control& control, Mask const& mask,
                                       ProblemShape const& shape, int tile,
                                       PipelineStage<kStages> const& stage, uint32_t tiles,
                                       int warpgroup) {
    if constexpr (Operands::kClearsValues) {
      clear_beyond(control.value, stage, mask, shape, tile, warpgroup,
                   [&](int first) { Operands::clear_values(Kernel::values(tiles, stage), first); });
    }
  }

  // Likewise for values of a KV block that come before the windows of all rows of the work tile.
  CUTE_DEVICE static void clear_unneeded_values(Control& control, Mask const& mask,
                                                WorkItem const& item, int tile,
                                                PipelineStage<kStages> const& stage, uint32_t tiles,
                                                int warpgroup) {
    if constexpr (kMayBeFreed<Config>) {
      int const end =
          unneeded_rows<Config>(mask, item.tile * kTileQuery, tile * kTileKey, kTileKey);
      if (end == 0) return;
      control.value.wait(stage);
      Operands::clear_values(Kernel::values(tiles, stage), 0, end);
      fence_tma_store();
      named_barrier_sync(Kernel::warpgroup_barrier(warpgroup), kWarpgroupSize);
    }
  }

  // If the buffer of a KV block has rows beyond the key length, calls clear(row) with the first of
  // them.
  template <class Clear>
  CUTE_DEVICE static void clear_beyond(Pipeline<kStages>& ring, PipelineStage<kStages> const& stage,
                                       Mask const& mask, ProblemShape const& shape, int tile,
                                       int warpgroup, Clear const& clear) {
    int const column = tile * kTileKey;
    if (!reads_beyond<Config>(mask.key_length, column + kTileKey, shape.key_length)) return;
    ring.wait(stage);
    clear(max(mask.key_length - column, 0));
    fence_tma_store();
    named_barrier_sync(Kernel::warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  // Clears this work tile's part of the queries that belong to no sequence.
  CUTE_DEVICE static void clear_gap(Params const& params, WorkItem const& item, int length) {
    if constexpr (Config::kVarlen) {
      OutputWriter::template clear_gap<Kernel::kConsumers>(
          params, item, length,
          typename Kernel::Schedule::Grid{params.shape}.of_batch_index(item.batch));
    }
  }
};

// The consumer of a forward.
template <class Config, class Kernel>
struct ForwardConsumerSm90 : WorkTileConsumerSm90<Config, Kernel> {
  using Shared = WorkTileConsumerSm90<Config, Kernel>;
  using ConsumerGroup = typename Kernel::ConsumerGroup;
  using Control = typename Kernel::Control;
  using Linear = typename Kernel::Linear;
  using Merge = typename Kernel::Merge;
  using OutputWriter = typename Kernel::OutputWriter;
  using Position = typename Shared::Position;
  using Softmax = typename Kernel::Softmax;
  static constexpr int kConsumerGroups = Kernel::kConsumerGroups;

  // Stores output and logsumexp of this warpgroup's rows of the work tile in its slot, after
  // merging those of all consumer groups.
  template <class Output>
  CUTE_DEVICE static void finish_work_tile(ForwardParams const& params, Control& control,
                                           uint32_t tiles, Position& at, Linear const& linear,
                                           Softmax softmax, Output& output) {
    auto const [item, query_length] = control.work_tiles[at.slot.index];
    Merge::run(tiles + Kernel::kMergeOffset, softmax, output, linear.softmax_scale(params.scale));
    if constexpr (kConsumerGroups > 1)
      ConsumerGroup::sync_all();  // every group has read the staged outputs
    if (kConsumerGroups == 1 || ConsumerGroup::index() == 0) {
      int const row = item.tile * Kernel::kTileQuery + at.row_warpgroup * kWarpgroupRows;
      OutputWriter::write(params, item, query_length, linear, softmax, output);
      OutputWriter::write_empty(params, item, query_length, max(row, query_length),
                                row + kWarpgroupRows);
    }
    Shared::clear_gap(params, item, query_length);
    Shared::release_work_tile(control, at);
  }
};

}  // namespace memeff
