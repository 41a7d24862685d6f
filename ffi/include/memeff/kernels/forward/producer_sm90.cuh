// The producer warpgroup of kernels/fmha_fwd_sm90.cuh: one thread copies queries and hands out work
// tiles, one copies keys, and one copies values.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/layout/sequences.cuh>

namespace memeff {

// The kernel calls produce_queries() and produce_tiles() with one thread each.
template <class Config, class Kernel>
struct ForwardProducerSm90 {
  using Blocks = typename Kernel::Blocks;
  using Control = typename Kernel::Control;
  using Mask = typename Kernel::Mask;
  using Operands = typename Kernel::Operands;
  using Schedule = typename Kernel::Schedule;
  using Scheduler = typename Kernel::Scheduler;
  using WorkTile = typename Kernel::WorkTile;
  static constexpr int kQueryStages = Kernel::kQueryStages;
  static constexpr int kRowWarpgroups = Kernel::kRowWarpgroups;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kTileQuery = Kernel::kTileQuery;
  static constexpr int kWorkTileStages = Kernel::kWorkTileStages;

  // Run by the thread that hands out work tiles and copies their queries.
  CUTE_DEVICE static void produce_queries(ForwardParams const& params, Operands const& operands,
                                          Control& control, uint32_t tiles) {
    PipelineStage<kQueryStages> query;
    PipelineStage<kWorkTileStages> slot;
    Scheduler::begin(params);
    int number = int(blockIdx.x);
    while (true) {
      WorkTile work_tile = numbered_work_tile(params, number);
      while (is_idle(params, work_tile)) {
        skip_empty_sequences(params, work_tile, number);
        number = Scheduler::next(params);
        work_tile = numbered_work_tile(params, number);
      }
      WorkItem const& item = work_tile.item;
      control.work_tile.acquire(slot);
      control.work_tiles[slot.index] = work_tile;
      control.work_tile.commit(slot);
      slot.advance();
      if (item.batch < 0) break;
      CUTE_UNROLL
      for (int warpgroup = 0; warpgroup < kRowWarpgroups; ++warpgroup) {
        operands.load_queries(item, work_tile.query_length, warpgroup,
                              control.query[warpgroup].acquire(query, Operands::kQueryBytes),
                              tiles + query.index * Operands::kQueryBufferBytes);
      }
      query.advance();
      number = Scheduler::next(params);
    }
    Scheduler::finish(params);
  }

  // Run by the thread that copies keys and by the one that copies values; rows_of(work tile, key
  // length) returns the source.
  template <class RowsOf>
  CUTE_DEVICE static void produce_tiles(ForwardParams const& params, Control& control,
                                        Pipeline<kStages>& ring, uint32_t buffers, RowsOf rows_of) {
    PipelineStage<kStages> stage;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkItem const item = Kernel::take_work_tile(control, slot).item;
      control.work_tile.release(slot);
      slot.advance();
      if (item.batch < 0) break;
      Mask const mask(params.mask, params.shape, item.batch);
      Blocks const range(params, mask, item);
      auto const rows = rows_of(item, mask.key_length);
      CUTE_NO_UNROLL
      for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile, 1)) {
        rows.load(tile, ring.acquire(stage, rows.kBytes),
                  buffers + stage.index * rows.kBufferBytes);
        stage.advance();
      }
    }
  }

 private:
  CUTE_DEVICE static bool broadcasts_bias(ForwardParams const& params) {
    return has_bias_tile<Config>() && params.bias.batch_stride == 0;
  }

  CUTE_DEVICE static WorkTile numbered_work_tile(ForwardParams const& params, int number) {
    WorkItem const item = Schedule::item(params.shape, number, broadcasts_bias(params));
    bool const exists = item.batch >= 0;
    return {item, exists ? Mask(params.mask, params.shape, item.batch).query_length : 0};
  }

  // Whether the tile is beyond the end of a packed sequence, and there is no gap after the sequence
  // to clear.
  CUTE_DEVICE static bool is_idle(ForwardParams const& params, WorkTile const& work_tile) {
    if constexpr (!Config::kVarlen) return false;
    if (work_tile.item.batch < 0) return false;
    if (work_tile.item.tile * kTileQuery < work_tile.query_length) return false;
    Gap const gap = Gap::of_queries(params.shape, work_tile.item.batch, work_tile.query_length);
    return params.keeps_gaps || gap.begin >= gap.end;
  }

  // Skips the work tiles of sequences without queries at once. Each idle work tile costs a round
  // trip to the counter, about 1 us, and a call for the prompts among many decode steps has
  // hundreds of them for each CTA.
  CUTE_DEVICE static void skip_empty_sequences(ForwardParams const& params,
                                               WorkTile const& work_tile, int number) {
    if constexpr (Config::kPageSize > 0) {
      int const* const lengths = params.mask.query_lengths;
      bool const is_empty = lengths != nullptr && work_tile.query_length == 0;
      if (!params.keeps_gaps || !is_empty || broadcasts_bias(params)) return;
      Scheduler::skip_to(params, Schedule::skip_empty(params.shape, lengths, number));
    }
  }
};

}  // namespace memeff
