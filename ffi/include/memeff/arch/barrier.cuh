// Barriers of Hopper: mbarriers in shared memory, on CuTe's operations, and named barriers.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>

#include <memeff/core/common.cuh>

namespace memeff {

// Named barrier 0 is __syncthreads().
CUTE_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

CUTE_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Makes initialised mbarriers visible to the copy engine; __syncthreads() makes them visible to the
// other threads.
CUTE_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Position in a ring of kStages buffers. The parity is that of the pass over the ring.
template <int kStages>
struct PipelineStage {
  int index = 0;
  int parity = 0;

  CUTE_DEVICE void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// A ring of buffers in shared memory between one producer thread, whose copies arrive by bytes, or
// producers that write, which arrive once each, and consumer warps, which arrive once each when
// they have read a buffer.
template <int kStages>
struct Pipeline {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  CUTE_DEVICE void init(int consumer_arrivals, int producer_arrivals = 1) {
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      cute::initialize_barrier(full[stage], producer_arrivals);
      cute::initialize_barrier(empty[stage], consumer_arrivals);
    }
  }

  // The producer: a buffer that was never filled counts as empty, hence the opposite parity.
  CUTE_DEVICE uint64_t& acquire(PipelineStage<kStages> const& stage, int bytes) {
    cute::wait_barrier(empty[stage.index], stage.parity ^ 1);
    cute::set_barrier_transaction_bytes(full[stage.index], bytes);
    return full[stage.index];
  }

  // The producer, where it fills the buffer with ordinary writes.
  CUTE_DEVICE void acquire(PipelineStage<kStages> const& stage) {
    cute::wait_barrier(empty[stage.index], stage.parity ^ 1);
  }
  CUTE_DEVICE void commit(PipelineStage<kStages> const& stage) {
    cute::arrive_barrier(full[stage.index]);
  }

  // A consumer.
  CUTE_DEVICE void wait(PipelineStage<kStages> const& stage) {
    cute::wait_barrier(full[stage.index], stage.parity);
  }
  CUTE_DEVICE void release(PipelineStage<kStages> const& stage) {
    cute::arrive_barrier(empty[stage.index]);
  }
};

}  // namespace memeff
