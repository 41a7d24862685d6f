// The semaphores of dq_semaphore.cuh in the Hopper backward. Its consumers neither poll nor wait
// for their additions to be performed; threads of the producer's warpgroup do both.
//
// One polls the semaphore of the predecessor ahead of the additions; it is the thread that adds if
// one thread adds. Another one publishes, which stalls it until the additions are performed.
// Additions to a Q block begin only after these threads have arrived, so none of them falls behind
// by a phase of the barriers.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/schedule/split_q.cuh>

namespace memeff {

// Orders the additions to dq; the strategies of kernels/backward/dq_sums/sm90.cuh call it.
template <class Config>
struct DqSemaphoreSm90 {
  // In shared memory.
  struct Control {
    Pipeline<1> additions;  // full: additions to a Q block may begin; empty: they are done
    int ticket;
  };

  // Called by one thread, before the first barrier of the CTA. `adders` warps or threads add, and
  // `orderers` threads call order() or publish().
  CUTE_DEVICE static void init(BackwardParams const& params, Control& control, int adders,
                               int orderers) {
    control.ticket = DqSemaphore<Config>::draw(params);
    control.additions.init(adders, orderers);
  }

  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const& control) {
    // The ticket is uniform over the warp; the shuffle makes that visible to the compiler.
    int const ticket = __shfl_sync(0xffffffffu, control.ticket, 0);
    return DqSemaphore<Config>(params, ticket).item(params);
  }

  // Called by the producer's warpgroup; `thread` counts from its first thread.
  CUTE_DEVICE static void order(BackwardParams const& params, Control& control,
                                WorkItem const& item, TileRange const& tiles, int thread) {
    if (thread == kWarpSize) wait(params, control, item, tiles);
    if (thread == 2 * kWarpSize) publish(params, control, item, tiles);
  }

  // Called around the additions of a Q block; end_additions() by whole warps. `parity` alternates
  // from one Q block to the next.
  CUTE_DEVICE static void begin_additions(Control& control, int parity) {
    control.additions.wait({0, parity});
  }
  CUTE_DEVICE static void end_additions(Control& control) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) control.additions.release({});
  }

  // Called by one thread.
  CUTE_DEVICE static void publish(BackwardParams const& params, Control& control,
                                  WorkItem const& item, TileRange const& tiles) {
    DqSemaphore<Config> semaphore(params, control.ticket);
    PipelineStage<1> stage;
    for_each_q_block<Config>(params, item, tiles, [&](int, int, int position) {
      control.additions.acquire(stage);  // the previous Q block has been added
      control.additions.commit(stage);
      semaphore.publish(position);
      stage.advance();
    });
    control.additions.acquire(stage);
    semaphore.publish(kFinished);
  }

 private:
  CUTE_DEVICE static void wait(BackwardParams const& params, Control& control, WorkItem const& item,
                               TileRange const& tiles) {
    DqSemaphore<Config> semaphore(params, control.ticket);
    PipelineStage<1> stage;
    for_each_q_block<Config>(params, item, tiles, [&](int, int, int position) {
      semaphore.wait(position);
      control.additions.acquire(stage);
      control.additions.commit(stage);
      stage.advance();
    });
  }
};

// The same interface without an order, for kernels whose sums may differ in their last bits from
// run to run.
template <class Config>
struct NoDqSemaphoreSm90 {
  struct Control {};
  CUTE_DEVICE static void init(BackwardParams const&, Control&, int, int) {}
  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const&) {
    return work_item<Config, Heaviest::first, Config::kTileKey>(
        params.shape, params.bias, split_kv_block_index<Config>(params));
  }
  CUTE_DEVICE static void order(BackwardParams const&, Control&, WorkItem const&, TileRange const&,
                                int) {}
  CUTE_DEVICE static void publish(BackwardParams const&, Control&, WorkItem const&,
                                  TileRange const&) {}
  CUTE_DEVICE static void begin_additions(Control&, int) {}
  CUTE_DEVICE static void end_additions(Control&) {}
};

// The one of the two that a kernel uses.
template <class Config>
using DqOrderSm90 =
    cute::conditional_t<Config::kOrdersQueries, DqSemaphoreSm90<Config>, NoDqSemaphoreSm90<Config>>;

}  // namespace memeff
