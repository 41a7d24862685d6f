// The f32 sums of dQ in global memory, to which the CTAs of all KV blocks of the Hopper backward
// add by TMA.
//
// The consumers write the dQ of a Q block to shared memory and go on. One thread of the producer's
// warpgroup adds it to the sums, by one asynchronous bulk reduction. A consumer that added its
// registers itself would wait until the load/store unit had read them, and would issue an
// instruction for every 512 bytes.
//
// Config::kOrdersQueries makes the order of the additions deterministic (schedule/dq_semaphore.cuh).
// The same thread then polls the semaphore of the predecessor, and publishes the CTA's progress when
// an addition has been performed, so consumers never wait for another CTA.
#pragma once

#include <memeff/arch/tma.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/query_tiles.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/schedule/split_q.cuh>

namespace memeff {

template <class Config, class Tiles>
struct DqSumsSm90 {
  static constexpr bool kOrdered = Config::kOrdersQueries;
  static constexpr int kTileBytes = Tiles::kQueryTileFloats * int(sizeof(float));
  static constexpr int kSharedBytes = Config::kQueryGradient ? kTileBytes : 0;

  // In shared memory.
  struct Control {
    Pipeline<1> tile;  // full: the dQ of a Q block; empty: the reduction has read it
    int ticket;        // of the semaphore
  };

  // By one thread, before the first barrier of the CTA.
  CUTE_DEVICE static void init(BackwardParams const& params, Control& control, int consumer_warps) {
    if constexpr (kOrdered) control.ticket = DqSemaphore<Config>::draw(params);
    control.tile.init(1, consumer_warps);
  }

  // The work of the CTA.
  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const& control) {
    int const tiles = key_tiles(params);
    if constexpr (kOrdered) {
      // Uniform over the warp, and the shuffle lets the compiler know it.
      int const ticket = __shfl_sync(0xffffffffu, control.ticket, 0);
      return DqSemaphore<Config>(params, tiles, ticket).item(params, tiles);
    } else {
      return work_item<Config, Heaviest::first>(params.shape, params.bias,
                                                split_kv_block_index<Config>(params), tiles,
                                                params.shape.key_heads);
    }
  }

  // By the consumers: their part of dQ, to the tile in shared memory at `tile`. `parity` alternates
  // from one Q block to the next.
  template <class Accumulators>
  CUTE_DEVICE static void store(Control& control, uint32_t tile, int parity,
                                Accumulators const& query_gradient) {
    PipelineStage<1> const stage = {0, parity};
    control.tile.acquire(stage);
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(query_gradient); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(query_gradient); ++n) {
        int const block = m * int(cute::size<2>(query_gradient)) + n;
        store_shared_vector(
            tile + query_gradient_offset<Tiles::kThreads>(block) * int(sizeof(float)),
            query_gradient(0, m, n), query_gradient(1, m, n), query_gradient(2, m, n),
            query_gradient(3, m, n));
      }
    }
    fence_tma_store();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) control.tile.commit(stage);
  }

  // By one thread that is neither producer nor consumer.
  CUTE_DEVICE static void add(BackwardParams const& params, Control& control, WorkItem const& item,
                              TileRange const& tiles, uint32_t tile) {
    if constexpr (Config::kQueryGradient) {
      Order order(params, control);
      PipelineStage<1> stage;
      CUTE_NO_UNROLL
      for (int head = 0; head < params.shape.group; ++head) {
        int const query_head = item.head * params.shape.group + head;
        auto const blocks =
            row_of_q_blocks<Config>(params, item, tiles, params.query_tiles, query_head);
        CUTE_NO_UNROLL
        for (int block = blocks.begin; block < blocks.end; block = blocks.after(block)) {
          float* const sums = params.query_gradient_sum +
                              Tiles::tile_index(params, item.batch, query_head, block) *
                                  Tiles::kQueryTileFloats;
          order.begin(head * params.query_tiles + block);
          control.tile.wait(stage);
          reduce_add_tma(sums, tile, kTileBytes);
          commit_tma_stores();
          wait_tma_stores();
          control.tile.release(stage);
          order.end();
          stage.advance();
        }
      }
      order.finish();
    }
  }

 private:
  CUTE_DEVICE static int key_tiles(BackwardParams const& params) {
    return ceil_div(params.shape.key_length, Config::kTileKey);
  }

  // Positions count all Q blocks that the CTAs of a key head may have, in the same order.
  struct Semaphore {
    DqSemaphore<Config> semaphore;

    CUTE_DEVICE Semaphore(BackwardParams const& params, Control const& control)
        : semaphore(params, key_tiles(params), control.ticket) {}
    CUTE_DEVICE void begin(int position) {
      semaphore.publish(position);
      semaphore.wait(position);
    }
    CUTE_DEVICE void end() { wait_tma_stores_performed(); }
    CUTE_DEVICE void finish() { semaphore.publish(kFinished); }
  };
  struct NoSemaphore {
    CUTE_DEVICE NoSemaphore(BackwardParams const&, Control const&) {}
    CUTE_DEVICE void begin(int) {}
    CUTE_DEVICE void end() {}
    CUTE_DEVICE void finish() {}
  };
  using Order = cute::conditional_t<kOrdered, Semaphore, NoSemaphore>;
};

}  // namespace memeff
