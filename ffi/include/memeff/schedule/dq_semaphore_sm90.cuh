// The turns of turn.cuh in the Hopper backward, whose consumers neither poll nor wait for their
// additions: two threads of the producer's warpgroup do.
//
// One polls for the CTA before this one, ahead of the visit. One publishes, which holds it up until
// what the consumers added is performed. Both let the consumers add to a visit's sums, so that
// neither falls behind by a phase of the barriers.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/schedule/split_q.cuh>

namespace memeff {

template <class Config>
struct DqSemaphoreSm90 {
  // In shared memory.
  struct Control {
    Pipeline<1> turn;  // consumers wait until it is theirs, and release it when they have added
    int ticket;
  };

  // By one thread, before the block meets.
  CUTE_DEVICE static void init(BackwardParams const& params, Control& control, int consumer_warps) {
    control.ticket = DqSemaphore<Config>::draw(params);
    control.turn.init(consumer_warps, 2);
  }

  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const& control) {
    // Uniform over the warp, and known to be.
    int const ticket = __shfl_sync(0xffffffffu, control.ticket, 0);
    return DqSemaphore<Config>(params, key_tiles(params), ticket).item(params, key_tiles(params));
  }

  // By the producer's warpgroup; `thread` counts from its first.
  CUTE_DEVICE static void keep(BackwardParams const& params, Control& control, WorkItem const& item,
                               TileRange const& tiles, int thread) {
    if (thread == kWarpSize) wait(params, control, item, tiles);
    if (thread == 2 * kWarpSize) publish(params, control, item, tiles);
  }

  // By the consumers, around the additions of a visit. `parity` is that of the visit.
  CUTE_DEVICE static void begin_additions(Control& control, int parity) {
    control.turn.wait({0, parity});
  }
  CUTE_DEVICE static void end_additions(Control& control) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) control.turn.release({});
  }

 private:
  CUTE_DEVICE static int key_tiles(BackwardParams const& params) {
    return ceil_div(params.shape.key_length, Config::kTileKey);
  }

  CUTE_DEVICE static void wait(BackwardParams const& params, Control& control, WorkItem const& item,
                               TileRange const& tiles) {
    DqSemaphore<Config> turn(params, key_tiles(params), control.ticket);
    PipelineStage<1> stage;
    for_each_block(params, item, tiles, [&](int position) {
      turn.wait(position);
      control.turn.acquire(stage);
      control.turn.commit(stage);
      stage.advance();
    });
  }

  CUTE_DEVICE static void publish(BackwardParams const& params, Control& control,
                                  WorkItem const& item, TileRange const& tiles) {
    DqSemaphore<Config> turn(params, key_tiles(params), control.ticket);
    PipelineStage<1> stage;
    for_each_block(params, item, tiles, [&](int position) {
      control.turn.acquire(stage);  // the visit before has been added
      control.turn.commit(stage);
      turn.publish(position);
      stage.advance();
    });
    control.turn.acquire(stage);
    turn.publish(kFinished);
  }

  // Where each visit stands among all that the CTAs of a key head may have, in the same order.
  template <class Visit>
  CUTE_DEVICE static void for_each_block(BackwardParams const& params, WorkItem const& item,
                                         TileRange const& tiles, Visit const& visit) {
    CUTE_NO_UNROLL
    for (int head = 0; head < params.shape.group; ++head) {
      auto const line = row_of_q_blocks<Config>(params, item, tiles, params.query_tiles,
                                                item.head * params.shape.group + head);
      CUTE_NO_UNROLL
      for (int tile = line.begin; tile < line.end; tile = line.after(tile)) {
        visit(head * params.query_tiles + tile);
      }
    }
  }
};

// The same for kernels whose sums may differ in their last bits.
template <class Config>
struct NoDqSemaphoreSm90 {
  struct Control {};
  CUTE_DEVICE static void init(BackwardParams const&, Control&, int) {}
  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const&) {
    return work_item<Config, Heaviest::first>(
        params.shape, params.bias, shared_tile_index<Config>(params),
        ceil_div(params.shape.key_length, Config::kTileKey), params.shape.key_heads);
  }
  CUTE_DEVICE static void keep(BackwardParams const&, Control&, WorkItem const&, TileRange const&,
                               int) {}
  CUTE_DEVICE static void begin_additions(Control&, int) {}
  CUTE_DEVICE static void end_additions(Control&) {}
};

}  // namespace memeff
