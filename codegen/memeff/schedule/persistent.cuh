// The dynamic tile scheduler of a persistent grid with one CTA per SM: a CTA takes the next work
// tile when it has finished its own. Work tiles with more work come first. The barriers through
// which a CTA hands them out are here, too.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// The barriers between the producer and the consumers of a persistent kernel whose work tiles are
// rows of queries, and the work tiles themselves, in shared memory.

// A work tile as the producer hands it out.
struct QueryWorkTile {
  WorkItem item;  // batch is -1 after the last
  int query_length;
};

template <int kQueryStages, int kStages, int kRowWarpgroups>
struct QueryTileRings {
  static constexpr int kWorkTileStages = 4;

  Pipeline<kQueryStages> query[kRowWarpgroups];  // each consumer's own rows
  Pipeline<kStages> key;
  Pipeline<kStages> value;
  Pipeline<kWorkTileStages> work_tile;
  Pipeline<kWorkTileStages> next_tile;  // full once the work tile after this one may be taken
  QueryWorkTile work_tiles[kWorkTileStages];

  // Called by one thread of a CTA with this many warps in all consumers, before a barrier of the
  // CTA. Each group of consumers takes its own keys and values. `key_producers` is 2 if a
  // warp writes to the buffers of keys in addition to the thread that copies keys.
  CUTE_DEVICE void init(int consumer_warps, int consumer_groups, int key_producers = 1) {
    CUTE_UNROLL
    for (auto& own : query) own.init(consumer_warps / kRowWarpgroups);
    key.init(consumer_warps / consumer_groups, key_producers);
    value.init(consumer_warps / consumer_groups);
    work_tile.init(consumer_warps + 3);
    next_tile.init(1);
    fence_barrier_init();
  }

  // Waits for the next work tile. It stays in its slot until every reader, a warp or a producer
  // thread, has released it.
  CUTE_DEVICE QueryWorkTile take_work_tile(PipelineStage<kWorkTileStages> const& slot) {
    work_tile.wait(slot);
    return work_tiles[slot.index];
  }
};

// Numbers the work tiles of a call; the producer of sm90/forward.cuh asks it for the tile
// with a given number.
template <class Config, int kTileQuery, int kElementBytes>
struct PersistentSchedule {
  using Grid = GridTiles<Config, GridRows::queries, kTileQuery>;
  static constexpr bool kCausal = Config::kMask == MaskKind::causal;
  // Keys and values of the heads that run at the same time should stay in L2 (50 MB or more, of
  // which each half serves its own SMs) beside queries and outputs, which pass through it. The more
  // row tiles a head has, the fewer of these pass between two reads of its keys.
  static constexpr int kLeastSectionMegabytes = 8;
  static constexpr int kMostSectionMegabytes = 32;

  // Recomputed for each work tile, because the producer has few registers.
  CUTE_DEVICE static int work_tiles(ProblemShape const& shape) {
    return Grid{shape}.of_slice() * Grid{shape}.slices();
  }

  // The number of slices whose tiles are taken together.
  CUTE_DEVICE static int section_heads(ProblemShape const& shape) {
    long long const head_bytes =
        (long long)shape.key_length * (shape.head_dim + shape.value_dim) * kElementBytes;
    int const megabytes =
        min(max(Grid{shape}.of_slice(), kLeastSectionMegabytes), kMostSectionMegabytes);
    int const fitting = int(((long long)megabytes << 20) / max(head_bytes, 1ll));
    return min(max(fitting, 1) * shape.group, Grid{shape}.slices());
  }

  // The first work tile after the sequence of `item` that belongs to a sequence with queries or a
  // gap, or one of the next slice or section if there is none. `number` is the number of the item,
  // and `query_lengths` have marks.
  CUTE_DEVICE static int after_empty(ProblemShape const& shape, int const* query_lengths,
                                     WorkItem const& item, int number) {
    static_assert(Config::kTokenGrid);
    auto const sequences = Grid{shape}.sequences();
    int const tiles = Grid{shape}.of_slice();
    int const step = kCausal ? -1 : 1;
    int sequence = item.batch + step;
    while (sequence >= 0 && sequence < shape.batch && query_lengths[sequence] == kNoGap) {
      sequence += step;
    }
    if constexpr (!kCausal) {
      int const slice = number / tiles;
      return sequence < shape.batch ? slice * tiles + sequences.first_cta(sequence)
                                    : (slice + 1) * tiles;
    }
    Section const section(shape, number / tiles);
    int const passed = sequence < 0 ? tiles : tiles - sequences.end_cta(sequence);
    return section.first * tiles + passed * section.slices;
  }

  // The work tile with a given number; a batch of -1 means one past the last. If batch indices
  // share a broadcast bias, they take the same tile of a head one after the other, so that L2
  // serves it to all of them.
  CUTE_DEVICE static WorkItem item(ProblemShape const& shape, int number, bool broadcasts_bias) {
    Grid const grid = {shape};
    int const tiles = grid.of_slice();
    int tile = number % tiles;
    int slice = number / tiles;
    if (slice >= grid.slices()) return {0, 0, -1};
    if (kCausal || broadcasts_bias) {
      // The last rows have the most keys: they come first.
      Section const section(shape, slice);
      int const rank = number - section.first * tiles;
      tile = tiles - 1 - rank / section.slices;
      slice = section.first + rank % section.slices;
    }
    if (broadcasts_bias) return {tile, slice / shape.batch, slice % shape.batch};
    return grid.item_alone(tile, slice);
  }

 private:
  // The slices whose tiles are taken together with those of a slice.
  struct Section {
    int first;
    int slices;

    CUTE_DEVICE Section(ProblemShape const& shape, int slice) {
      int const section = section_heads(shape);
      first = slice / section * section;
      slices = min(section, Grid{shape}.slices() - first);
    }
  };
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

  // The work tile after this CTA's current one, or one past the last.
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
