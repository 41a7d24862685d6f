// The producer warpgroup of kernels/fmha_fwd_sm90.cuh: one thread hands out work tiles, and three
// others copy queries, keys and values. With shared diagonals, the warp of the thread that copies
// queries also reads diagonals.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

template <class Config, class Kernel>
struct ForwardProducerSm90 {
  using Blocks = typename Kernel::Blocks;
  using Control = typename Kernel::Control;
  using Diagonals = typename Kernel::Diagonals;
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

  // Run by all threads of the warpgroup. One thread of each warp does the work, except in the warp
  // that reads diagonals.
  CUTE_DEVICE static void run(ForwardParams const& params, Operands const& operands,
                              Control& control, uint32_t tiles) {
    int const thread = threadIdx.x - Kernel::kConsumers;
    if constexpr (Diagonals::kIsOn) {
      if (thread / kWarpSize == 1) {
        produce_queries_and_diagonals(params, operands, control, tiles);
        return;
      }
    }
    switch (thread) {
      case 0:
        produce_work_tiles(params, control);
        break;
      case kWarpSize:
        produce_queries(operands, control, tiles);
        break;
      case 2 * kWarpSize:
        produce_keys(params, operands, control, tiles + Kernel::kKeyOffset);
        break;
      case 3 * kWarpSize:
        produce_values(params, operands, control, tiles + Kernel::kValueOffset);
        break;
    }
  }

 private:
  // Run by the thread that hands out work tiles.
  CUTE_DEVICE static void produce_work_tiles(ForwardParams const& params, Control& control) {
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
      control.work_tile.acquire(slot);
      control.work_tiles[slot.index] = work_tile;
      control.work_tile.commit(slot);
      if (work_tile.item.batch < 0) break;
      control.next_tile.wait(slot);
      slot.advance();
      number = Scheduler::next(params);
    }
    Scheduler::finish(params);
  }

  // Run by the thread that copies queries.
  CUTE_DEVICE static void produce_queries(Operands const& operands, Control& control,
                                          uint32_t buffers) {
    PipelineStage<kQueryStages> query;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkTile const work_tile = control.take_work_tile(slot);
      control.work_tile.release(slot);
      slot.advance();
      if (work_tile.item.batch < 0) break;
      load_queries(operands, control, work_tile, query, buffers);
      query.advance();
    }
  }

  CUTE_DEVICE static void load_queries(Operands const& operands, Control& control,
                                       WorkTile const& work_tile,
                                       PipelineStage<kQueryStages> const& query, uint32_t buffers) {
    CUTE_UNROLL
    for (int warpgroup = 0; warpgroup < kRowWarpgroups; ++warpgroup) {
      operands.load_queries(work_tile.item, work_tile.query_length, warpgroup,
                            control.query[warpgroup].acquire(query, Operands::kQueryBytes),
                            buffers + query.index * Operands::kQueryBufferBytes);
    }
  }

  // Run by the warp that copies queries, if it also fills the buffers of diagonals. It copies the
  // queries of a work tile when it has filled the last buffer of the previous work tile. The
  // consumers then still have as many KV blocks to compute as there are buffers.
  CUTE_DEVICE static void produce_queries_and_diagonals(ForwardParams const& params,
                                                        Operands const& operands, Control& control,
                                                        uint32_t tiles) {
    bool const leader = threadIdx.x % kWarpSize == 0;
    PipelineStage<kQueryStages> query;
    PipelineStage<kStages> key;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkTile const work_tile = control.take_work_tile(slot);
      __syncwarp();  // all lanes have read the work tile
      if (leader) control.work_tile.release(slot);
      slot.advance();
      if (work_tile.item.batch < 0) break;
      if (leader) load_queries(operands, control, work_tile, query, tiles);
      query.advance();
      produce_diagonals(params, control, work_tile.item, key, tiles);
    }
  }

  // Fills the buffers of diagonals of a work tile, in the order in which produce_tiles() copies
  // keys.
  CUTE_DEVICE static void produce_diagonals(ForwardParams const& params, Control& control,
                                            WorkItem const& item, PipelineStage<kStages>& key,
                                            uint32_t tiles) {
    Mask const mask(params.mask, params.shape, item.batch);
    Blocks const range(params, mask, item);
    CUTE_NO_UNROLL
    for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile, 1)) {
      control.key.acquire(key);
      Diagonals::fill(params,
                      {item.batch, item.head, item.tile * kTileQuery, tile * Kernel::kTileKey},
                      Kernel::diagonals(tiles, key));
      __syncwarp();  // all lanes have stored
      if (threadIdx.x % kWarpSize == 0) control.key.commit(key);
      key.advance();
    }
  }

  // Run by the thread that copies keys. It also signals when the next work tile may be taken.
  CUTE_DEVICE static void produce_keys(ForwardParams const& params, Operands const& operands,
                                       Control& control, uint32_t buffers) {
    produce_tiles(
        params, control, control.key, buffers,
        [&](auto... work_tile) { return operands.keys(work_tile...); },
        [&](auto const& slot) { control.next_tile.commit(slot); });
  }

  // Run by the thread that copies values.
  CUTE_DEVICE static void produce_values(ForwardParams const& params, Operands const& operands,
                                         Control& control, uint32_t buffers) {
    produce_tiles(
        params, control, control.value, buffers,
        [&](auto... work_tile) { return operands.values(work_tile...); }, [](auto const&) {});
  }

  // Whether the next work tile is taken before this KV block is copied. It is taken as late as the
  // counter (1 us) and the queries of that tile allow: the consumers still have the last two blocks
  // and those in the ring to compute. If a CTA takes its next work tile earlier, others run out of
  // work while this one has a tile to spare: with a causal mask SMs were idle for 3 to 7 % of a
  // call. Packed sequences take it at the first block, because the scheduler may have to skip idle
  // work tiles, and each of them costs a round trip to the counter.
  CUTE_DEVICE static bool takes_next_before(Blocks const& range, int tile) {
    if constexpr (Config::kVarlen) return tile == range.end - 1;
    if constexpr (Config::kBlockMask) return tile == range.begin;  // the one above may be empty
    return tile == min(range.begin + 1, range.end - 1);
  }

  // Copies the rows of all work tiles; rows_of(work tile, key length) returns the source.
  // `take_next` is called once for each work tile, with its slot.
  template <class RowsOf, class TakeNext>
  CUTE_DEVICE static void produce_tiles(ForwardParams const& params, Control& control,
                                        Pipeline<kStages>& ring, uint32_t buffers, RowsOf rows_of,
                                        TakeNext take_next) {
    PipelineStage<kStages> stage;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkItem const item = control.take_work_tile(slot).item;
      control.work_tile.release(slot);
      if (item.batch < 0) break;
      Mask const mask(params.mask, params.shape, item.batch);
      Blocks const range(params, mask, item);
      auto const rows = rows_of(item, mask.key_length);
      CUTE_NO_UNROLL
      for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile, 1)) {
        if (takes_next_before(range, tile)) take_next(slot);
        rows.load(tile, ring.acquire(stage, rows.kBytes),
                  buffers + stage.index * rows.kBufferBytes);
        stage.advance();
      }
      slot.advance();
    }
  }

  CUTE_DEVICE static bool broadcasts_bias(ForwardParams const& params) {
    return shares_bias<Config>(params.bias);
  }

  CUTE_DEVICE static WorkTile numbered_work_tile(ForwardParams const& params, int number) {
    WorkItem const item = Schedule::item(params.shape, number, broadcasts_bias(params));
    bool const exists = item.batch >= 0;
    return {item, exists ? Mask(params.mask, params.shape, item.batch).query_length : 0};
  }

  // Whether the tile is beyond the end of a packed sequence, and there is no gap after it to clear.
  CUTE_DEVICE static bool is_idle(ForwardParams const& params, WorkTile const& work_tile) {
    if constexpr (!Config::kVarlen) return false;
    if (work_tile.item.batch < 0) return false;
    if (work_tile.item.tile * kTileQuery < work_tile.query_length) return false;
    return params.keeps_gaps ||
           Gap::of_queries<Config>(params, work_tile.item.batch, work_tile.query_length).empty();
  }

  // Each idle work tile costs a round trip to the counter, about 1 us. A call for the prompts among
  // many decode steps has hundreds of them per CTA.
  CUTE_DEVICE static void skip_empty_sequences(ForwardParams const& params,
                                               WorkTile const& work_tile, int number) {
    if constexpr (Config::kPageSize > 0) {
      if (!params.marks_empty || work_tile.query_length > 0) return;
      Scheduler::skip_to(params, Schedule::after_empty(params.shape, params.mask.query_lengths,
                                                       work_tile.item, number));
    }
  }
};

}  // namespace memeff
