// The dynamic tile scheduler of a persistent grid with one CTA per SM: a CTA takes the next work
// tile when it has finished its own. Work tiles with more work come first.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// Numbers the work tiles of a call; the producer of kernels/fmha_fwd_sm90.cuh asks it for the tile
// of a number.
template <MaskKind kMask, int kTileQuery, int kElementBytes>
struct PersistentSchedule {
  // Keys and values of the heads that run at the same time should stay in L2 (50 MB or more).
  static constexpr long long kSectionBytes = 32 << 20;

  // Recomputed for each work tile, because the producer has few registers.
  CUTE_DEVICE static int query_tiles(ProblemShape const& shape) {
    return ceil_div(shape.query_length, kTileQuery);
  }
  CUTE_DEVICE static int work_tiles(ProblemShape const& shape) {
    return query_tiles(shape) * shape.query_heads * shape.batch;
  }

  // The number of (head, batch) pairs whose tiles are taken together.
  CUTE_DEVICE static int section_heads(ProblemShape const& shape) {
    long long const head_bytes =
        (long long)shape.key_length * (shape.head_dim + shape.value_dim) * kElementBytes;
    int const fitting = int(kSectionBytes / max(head_bytes, 1ll));
    return min(max(fitting, 1) * shape.group, shape.query_heads * shape.batch);
  }

  // The first pair of the section of a (head, batch) pair; without sections, the pair itself.
  CUTE_DEVICE static int section_begin(ProblemShape const& shape, int head_batch) {
    if (kMask != MaskKind::causal) return head_batch;
    int const section = section_heads(shape);
    return head_batch / section * section;
  }

  // The first work tile of the first section that has a batch index with queries, beginning with
  // the section of `number`. Hazard: batch indices must not share a broadcast bias, which changes
  // the numbering.
  CUTE_DEVICE static int skip_empty(ProblemShape const& shape, int const* query_lengths,
                                    int number) {
    int batch = section_begin(shape, number / query_tiles(shape)) / shape.query_heads;
    while (batch < shape.batch && query_lengths[batch] <= 0) ++batch;
    if (batch == shape.batch) return work_tiles(shape);
    return section_begin(shape, batch * shape.query_heads) * query_tiles(shape);
  }

  // The work tile of a number; a batch of -1 means one past the last. If batch indices share a
  // broadcast bias, they take the same tile of a head one after the other, so that L2 serves it to
  // all of them.
  CUTE_DEVICE static WorkItem item(ProblemShape const& shape, int number, bool broadcasts_bias) {
    int const tiles = query_tiles(shape);
    int tile = number % tiles;
    int head_batch = number / tiles;
    if (head_batch >= shape.query_heads * shape.batch) return {0, 0, -1};
    if (kMask == MaskKind::causal || broadcasts_bias) {
      // The last rows have the most keys: they come first.
      int const section = section_heads(shape);
      int const first = head_batch / section * section;
      int const rank = number - first * tiles;
      int const here = min(section, shape.query_heads * shape.batch - first);
      tile = tiles - 1 - rank / here;
      head_batch = first + rank % here;
    }
    if (broadcasts_bias) return {tile, head_batch / shape.batch, head_batch % shape.batch};
    return {tile, head_batch % shape.query_heads, head_batch / shape.query_heads};
  }
};

// Hands out work tiles. A CTA's first work tile has the number of the CTA; one thread asks for the
// others. If the grid covers all work tiles, the counter is not used. The scheduler has no state,
// because the producer has few registers.
template <class Schedule>
struct TileScheduler {
  // The workspace is uninitialized, because zeroing it would cost a launch. CTA 0 initializes the
  // counter and publishes a magic value, which the other CTAs wait for before their second work
  // tile. Every call clears it at its end; stale memory matches with probability 2^-64.
  CUTE_DEVICE static void begin(ForwardParams const& params) {
    TileCounter* const counter = params.tile_counter;
    if (blockIdx.x != 0 || !has_more(params)) return;
    counter->next = int(gridDim.x);
    counter->finished = 0;
    store_release(&counter->ready, kReady);
  }

  // The work tile after this CTA's present one, or one past the last.
  CUTE_DEVICE static int next(ForwardParams const& params) {
    if (!has_more(params)) return int(gridDim.x);
    while (load_acquire(&params.tile_counter->ready) != kReady) continue;
    return atomicAdd(&params.tile_counter->next, 1);
  }

  // Skips all work tiles before `number` that no CTA has taken yet.
  CUTE_DEVICE static void skip_to(ForwardParams const& params, int number) {
    if (!has_more(params)) return;
    while (load_acquire(&params.tile_counter->ready) != kReady) continue;
    atomicMax(&params.tile_counter->next, number);
  }

  // Each CTA calls it after its last next(), of which there is at least one: the last CTA clears
  // the counter.
  CUTE_DEVICE static void finish(ForwardParams const& params) {
    if (!has_more(params)) return;
    int const finished = atomicAdd(&params.tile_counter->finished, 1);
    if (finished == int(gridDim.x) - 1) params.tile_counter->ready = 0;
  }

 private:
  static constexpr unsigned long long kReady = 0x9c8f1e6ba7d2305dull;

  CUTE_DEVICE static bool has_more(ForwardParams const& params) {
    return Schedule::work_tiles(params.shape) > int(gridDim.x);
  }
};

}  // namespace memeff
