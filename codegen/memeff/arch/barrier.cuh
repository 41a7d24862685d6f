// Barriers of a CTA, named barriers, and Hopper's barriers in shared memory (mbarriers), on CuTe's
// operations.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <memeff/arch/thread.cuh>

namespace memeff {

CUTE_DEVICE void sync_threads() {
  __syncthreads();
  random_sleep();
}

// Named barrier 0 is __syncthreads().
CUTE_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  random_sleep();
}

// Counts the threads of the calling warp as arrived, and does not wait for the others.
CUTE_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  random_sleep();
}

// A phase of the barrier completes after `arrivals` arrivals and all bytes expected until then. One
// thread calls it, and fence_barrier_init() afterwards.
CUTE_DEVICE void init_barrier(uint64_t& barrier, int arrivals) {
  cute::initialize_barrier(barrier, arrivals);
}

// Makes initialized mbarriers visible to TMA. __syncthreads() makes them visible to the other
// threads.
CUTE_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

CUTE_DEVICE void arrive_barrier(uint64_t& barrier) { cute::arrive_barrier(barrier); }

// Arrives, and makes the phase wait for `bytes` bytes of TMA copies.
CUTE_DEVICE void arrive_and_expect(uint64_t& barrier, int bytes) {
  cute::set_barrier_transaction_bytes(barrier, bytes);
}

// Arrives when all copies that this thread has started with copy_async() are complete, and does not
// wait for them. Hazard: what they wrote is visible to TMA and wgmma only after a thread that has
// waited for the barrier has called fence_tma_store().
CUTE_DEVICE void arrive_when_copied(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   cute::cast_smem_ptr_to_uint(&barrier))
               : "memory");
}

// Waits for the end of the latest phase with this parity. The first phase has parity 0; until it
// ends, a wait for parity 1 returns at once, so a producer finds a fresh buffer empty.
CUTE_DEVICE void wait_barrier(uint64_t& barrier, int parity) {
  cute::wait_barrier(barrier, parity);
}

}  // namespace memeff
