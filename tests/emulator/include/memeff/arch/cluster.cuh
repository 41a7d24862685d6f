// Clusters of CTAs.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/tma.cuh>

namespace memeff {

CUTE_DEVICE int cluster_rank() { return emulator::cluster_rank(); }
CUTE_DEVICE void arrive_cluster() { emulator::arrive_cluster(); }
CUTE_DEVICE void wait_cluster() { emulator::wait_cluster(); }
CUTE_DEVICE void arrive_cluster_barrier(uint64_t& barrier, int rank) {
  emulator::arrive_cluster_barrier(barrier, rank);
}

CUTE_DEVICE void arrive_cluster_and_expect(uint64_t& barrier, int rank, int bytes) {
  emulator::arrive_cluster_barrier(barrier, rank, bytes);
}
CUTE_DEVICE uint32_t cluster_address(uint32_t shared, int rank) {
  return emulator::cluster_address(shared, rank);
}
CUTE_DEVICE void store_cluster_vector(uint32_t target, uint32_t barrier, uint32_t const (&x)[4]) {
  emulator::store_cluster(target, barrier, x);
}

template <int kCtas>
CUTE_DEVICE void load_cluster_box(TensorMap const& map, uint64_t& barrier, uint32_t shared,
                                  int column, int row, int head, int batch, CacheHint,
                                  int first = 0) {
  emulator::load_cluster_box(&map, barrier, shared, {column, row, head, batch}, first, kCtas);
}

}  // namespace memeff
