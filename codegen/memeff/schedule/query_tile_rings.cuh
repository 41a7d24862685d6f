// The barriers between the producer and the consumers of a persistent kernel whose work tiles are
// rows of queries, and the work tiles themselves, in shared memory.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff {

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

}  // namespace memeff
