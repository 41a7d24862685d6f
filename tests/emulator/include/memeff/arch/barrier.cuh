// Barriers of a CTA, named barriers, and barriers in shared memory (mbarriers).
#pragma once

#include <cute/config.hpp>

namespace memeff {

CUTE_DEVICE void sync_threads() { emulator::sync_threads(); }

CUTE_DEVICE void named_barrier_sync(int barrier, int threads) {
  emulator::named_barrier(barrier, threads);
}

CUTE_DEVICE void named_barrier_arrive(int barrier, int threads) {
  emulator::arrive_named_barrier(barrier, threads);
}

CUTE_DEVICE void init_barrier(uint64_t& barrier, int arrivals) {
  emulator::init_barrier(barrier, arrivals);
}
CUTE_DEVICE void fence_barrier_init() {}
CUTE_DEVICE void arrive_barrier(uint64_t& barrier) { emulator::arrive_barrier(barrier, 0); }
CUTE_DEVICE void arrive_and_expect(uint64_t& barrier, int bytes) {
  emulator::arrive_barrier(barrier, bytes);
}
CUTE_DEVICE void arrive_when_copied(uint64_t& barrier) { emulator::arrive_when_copied(barrier); }
CUTE_DEVICE void wait_barrier(uint64_t& barrier, int parity) {
  emulator::wait_barrier(barrier, parity);
}

}  // namespace memeff
