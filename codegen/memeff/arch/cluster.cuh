// Clusters of CTAs: each CTA can reach the shared memory of all others with TMA copies, stores and
// barrier arrivals.
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

// Arrives at the barrier at the same address in the CTA with this rank, which may be this one. It
// orders earlier accesses of this thread for its own CTA only. Release semantics for the cluster
// would be a GPU-wide fence (MEMBAR.ALL.GPU), which waits for all outstanding accesses. None is
// needed where the other CTA then overwrites what this thread has read, or where stores bring their
// own bytes to the barrier.
CUTE_DEVICE void arrive_cluster_barrier(uint64_t& barrier, int rank) {
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t"
      "}" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// As above, and makes the phase there wait for `bytes` bytes, in addition to those that other
// arrivals expect.
CUTE_DEVICE void arrive_cluster_and_expect(uint64_t& barrier, int rank, int bytes) {
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %2;\n\t"
      "}" ::"r"(shared_address(&barrier)),
      "r"(rank), "r"(bytes)
      : "memory");
}

// The address of the CTA with this rank that corresponds to an address of this one.
CUTE_DEVICE uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Starts the store of 16 bytes to another CTA. They arrive at a barrier there. Both addresses are
// those of cluster_address().
CUTE_DEVICE void store_cluster_vector(uint32_t target, uint32_t barrier, uint32_t const (&x)[4]) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(target),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
      : "memory");
}

// Like load_box(), but into kCtas CTAs of a cluster, from rank `first` on: the box and its bytes
// arrive at the same addresses in each of them.
template <int kCtas>
CUTE_DEVICE void load_cluster_box(TensorMap const& map, uint64_t& barrier, uint32_t shared,
                                  int column, int row, int head, int batch, CacheHint hint,
                                  int first = 0) {
  uint16_t const ranks = ((1 << kCtas) - 1) << first;
  cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, &barrier, ranks, static_cast<uint64_t>(hint),
                                         shared_pointer(shared), column, row, head, batch);
}

}  // namespace memeff
