// Tracks which heads have complete dq sums. A postprocess kernel rounds the sums of these heads
// while the last CTAs of the main kernel still run: in its last round many SMs have no CTA.
//
// BackwardParams::semaphores counts, for each (batch, key head) slice, the KV blocks whose last
// addition has been performed. The preprocess kernel clears it.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff {

template <class Config>
struct FinishedDq {
  static_assert(!Config::kVarlen);

  BackwardParams const& params;

  // The number of words in BackwardParams::semaphores.
  CUTE_DEVICE unsigned words() const { return params.shape.batch * params.shape.key_heads; }

  // Called by one thread of a KV block, after the additions of its CTA have been performed.
  CUTE_DEVICE void add_kv_block(WorkItem const& item) const {
    __threadfence();
    atomicAdd(count(item.batch, item.head), 1);
  }

  // Called by all threads of a CTA. Afterwards they see the sums of a query head.
  CUTE_DEVICE void wait(int batch, int query_head) const {
    if (threadIdx.x == 0) {
      int const kv_blocks = ceil_div(params.shape.key_length, Config::kTileKey);
      int* const finished = count(batch, query_head / params.shape.group);
      while (load_acquire(finished) < kv_blocks) sleep_briefly();
    }
    __syncthreads();
  }

 private:
  CUTE_DEVICE int* count(int batch, int key_head) const {
    return params.semaphores + batch * params.shape.key_heads + key_head;
  }
};

}  // namespace memeff
