// Barriers: named ones, and those of Hopper in shared memory (mbarriers), on CuTe's operations.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <memeff/arch/thread.cuh>

namespace memeff {

// Named barrier 0 is __syncthreads().
CUTE_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  random_sleep();
}

// A phase of the barrier ends with so many arrivals, and all the bytes expected until then.
CUTE_DEVICE void init_barrier(uint64_t& barrier, int arrivals) {
  cute::initialize_barrier(barrier, arrivals);
}

// Makes initialised mbarriers visible to the copy engine; __syncthreads() makes them visible to the
// other threads.
CUTE_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

CUTE_DEVICE void arrive_barrier(uint64_t& barrier) { cute::arrive_barrier(barrier); }

// Arrives, and lets the phase wait for `bytes` that a copy brings.
CUTE_DEVICE void arrive_and_expect(uint64_t& barrier, int bytes) {
  cute::set_barrier_transaction_bytes(barrier, bytes);
}

// Waits for the end of the last phase of this parity; phases begin with 0. Before the first phase
// ends, that of parity 1 has ended.
CUTE_DEVICE void wait_barrier(uint64_t& barrier, int parity) {
  cute::wait_barrier(barrier, parity);
}

}  // namespace memeff
