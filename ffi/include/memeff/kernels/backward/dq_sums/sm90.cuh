// How the CTAs of the Hopper backward add dQ to its f32 sums in global memory.
//
// Config::kOrdersQueries makes the order of the additions deterministic
// (schedule/dq_semaphore.cuh).
#pragma once

#include <memeff/arch/tma.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/kernels/backward/dq_sums/add.cuh>
#include <memeff/kernels/backward/dq_sums/finished.cuh>
#include <memeff/kernels/backward/dq_sums/first_store.cuh>
#include <memeff/schedule/dq_semaphore_sm90.cuh>

namespace memeff {

// Strategy 1: each consumer adds from its registers. It issues one instruction for every 512 bytes
// and waits until the load/store unit has read the registers.
template <class Config, class Tiles>
struct RegisterDqSumsSm90 {
  using Semaphore = DqOrderSm90<Config>;
  using Control = typename Semaphore::Control;
  static_assert(!Config::kStoresFirstDq);
  static constexpr int kSharedBytes = 0;

  // Called by one thread, before the first barrier of the CTA.
  CUTE_DEVICE static void init(BackwardParams const& params, Control& control, int consumer_warps) {
    Semaphore::init(params, control, consumer_warps, 2);
  }

  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const& control) {
    return Semaphore::item(params, control);
  }

  // Called by the producer's warpgroup; `thread` counts from its first thread.
  CUTE_DEVICE static void produce(BackwardParams const& params, Control& control,
                                  WorkItem const& item, TileRange const& tiles, uint32_t,
                                  int thread, PipelineStage<1>&) {
    Semaphore::order(params, control, item, tiles, thread);
  }

  // Called by the consumers. `parity` alternates from one Q block to the next.
  template <class Accumulators>
  CUTE_DEVICE static void add(BackwardParams const& params, Control& control, int batch, int head,
                              int tile, uint32_t, int parity, Accumulators const& query_gradient) {
    Semaphore::begin_additions(control, parity);
    add_to_dq_sums<Tiles>(params, batch, head, tile, query_gradient);
    Semaphore::end_additions(control);
  }
};

// Strategy 2: the consumers write the dQ of a Q block to shared memory and move on. One thread of
// the producer's warpgroup stores it if it is the first, or adds it to the sums with a single TMA
// reduction. If the sums are deterministic, the same thread polls the predecessor's semaphore, so
// consumers never wait for another CTA. A thread of another warp publishes the CTA's progress,
// because a release takes up to half of the time of a Q block.
template <class Config, class Tiles>
struct TmaDqSumsSm90 {
  static constexpr bool kOrdered = Config::kOrdersQueries;
  static_assert(Config::kStoresFirstDq);
  static constexpr int kSharedBytes = Tiles::kQueryTileFloats * int(sizeof(float));
  using Semaphore = DqOrderSm90<Config>;

  // In shared memory.
  struct Control : Semaphore::Control {
    Pipeline<1> tile;  // full: the dQ of a Q block; empty: the reduction has read it
  };

  CUTE_DEVICE static void init(BackwardParams const& params, Control& control, int consumer_warps) {
    Semaphore::init(params, control, 1, 1);
    control.tile.init(1, consumer_warps);
  }

  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const& control) {
    return Semaphore::item(params, control);
  }

  CUTE_DEVICE static void produce(BackwardParams const& params, Control& control,
                                  WorkItem const& item, TileRange const& tiles,
                                  uint32_t shared_tile, int thread, PipelineStage<1>& stage) {
    if (thread == 2 * kWarpSize) Semaphore::publish(params, control, item, tiles);
    if (thread != kWarpSize) return;
    Order order(params, control, item);
    for_each_q_block<Config>(params, item, tiles, [&](int head, int tile, int position) {
      long long const tile_index = Tiles::tile_index(params, item.batch, head, tile);
      float* const sums = params.query_gradient_sum + tile_index * Tiles::kQueryTileFloats;
      FirstDqStore first = order.begin(position, tile_index, stage.parity);
      control.tile.wait(stage);
      if (first.stores()) {
        store_tma(sums, shared_tile, kSharedBytes);
      } else {
        reduce_add_tma(sums, shared_tile, kSharedBytes);
      }
      commit_tma_stores();
      wait_tma_stores();
      control.tile.release(stage);
      first.publish();
      order.end();
      stage.advance();
    });
    order.finish();
  }

  template <class Accumulators>
  CUTE_DEVICE static void add(BackwardParams const&, Control& control, int, int, int,
                              uint32_t shared_tile, int parity,
                              Accumulators const& query_gradient) {
    PipelineStage<1> const stage = {0, parity};
    control.tile.acquire(stage);
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(query_gradient); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(query_gradient); ++n) {
        int const block = m * int(cute::size<2>(query_gradient)) + n;
        // In the order of Tiles::Sums.
        store_shared_vector(shared_tile + threadIdx.x * 16 + block * (Tiles::kThreads * 16),
                            query_gradient(0, m, n), query_gradient(1, m, n),
                            query_gradient(2, m, n), query_gradient(3, m, n));
      }
    }
    fence_tma_store();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) control.tile.commit(stage);
  }

 private:
  // Orders the additions of the one thread; positions are those of for_each_q_block().
  struct Ordered {
    BackwardParams const& params;
    Control& control;
    DqSemaphore<Config> semaphore;

    CUTE_DEVICE Ordered(BackwardParams const& params, Control& control, WorkItem const&)
        : params(params), control(control), semaphore(params, control.ticket) {}
    CUTE_DEVICE FirstDqStore begin(int position, long long tile_index, int parity) {
      FirstDqStore first = FirstDqStore::read(params, tile_index);
      semaphore.wait(position);
      first.update();
      Semaphore::begin_additions(control, parity);
      return first;
    }
    CUTE_DEVICE void end() {
      wait_tma_stores_performed();
      control.additions.release({});
    }
    CUTE_DEVICE void finish() {}
  };
  // The same interface without an order.
  struct Unordered {
    BackwardParams const& params;
    WorkItem const& item;

    CUTE_DEVICE Unordered(BackwardParams const& params, Control const&, WorkItem const& item)
        : params(params), item(item) {}
    CUTE_DEVICE FirstDqStore begin(int, long long tile_index, int) {
      return FirstDqStore::claim(params, tile_index);
    }
    CUTE_DEVICE void end() {}
    CUTE_DEVICE void finish() {
      if constexpr (Config::kCountsKvBlocks) {
        wait_tma_stores_performed();
        FinishedDq<Config>{params}.add_kv_block(item);
      }
    }
  };
  using Order = cute::conditional_t<kOrdered, Ordered, Unordered>;
};

}  // namespace memeff
