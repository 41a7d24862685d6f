// Clusters of CTAs, whose shared memory TMA and barriers reach from each of them.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/arch/tma.cuh>

namespace memeff {

// The index of this CTA in its cluster.
CUTE_DEVICE int cluster_rank() { return int(cute::block_rank_in_cluster()); }

// Counts this thread as arrived at the barrier of all threads of the cluster, with release
// semantics. All lanes of a warp call it.
CUTE_DEVICE void arrive_cluster() {
  cute::cluster_arrive();
  random_sleep();
}

// Waits until all threads of the cluster have arrived or exited.
CUTE_DEVICE void wait_cluster() {
  cute::cluster_wait();
  random_sleep();
}

// Arrives at the barrier of the same address in the CTA with this rank, which may be this one.
CUTE_DEVICE void arrive_cluster_barrier(uint64_t& barrier, int rank) {
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n\t"
      "}" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// As load_box() into every CTA of a cluster of kCtas: the box and its bytes arrive at the same
// addresses in each of them.
template <int kCtas>
CUTE_DEVICE void load_cluster_box(TensorMap const& map, uint64_t& barrier, uint32_t shared,
                                  int column, int row, int head, int batch, CacheHint hint) {
  constexpr uint16_t kAll = (1 << kCtas) - 1;
  cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, &barrier, kAll, static_cast<uint64_t>(hint),
                                         shared_pointer(shared), column, row, head, batch);
}

}  // namespace memeff
