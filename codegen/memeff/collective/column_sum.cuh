// The sum of a score tile over two CTAs of a cluster that divide the columns of its operands.
#pragma once

#include <memeff/arch/cluster.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/warp_grid.cuh>

namespace memeff {

// Each CTA multiplies its own columns. A thread sends its accumulators to the same thread of the
// other CTA and adds those that it receives. Both CTAs get the same bits, because the order of two
// summands does not matter. Grid is the tile of a warpgroup.
//
// Hazard: the consumers of a CTA share one buffer and its barriers. They must call add() one after
// the other, in the order of the tiles, because a wait for the phase after next of a barrier would
// return at once.
template <class Grid, bool kDividesColumns>
struct ColumnSum {
  static constexpr int kWarps = kWarpgroupSize / kWarpSize;
  static constexpr int kVectorBytes = 16;
  static constexpr int kVectors = decltype(cute::size(Grid::make_accumulators()))::value / 4;
  static constexpr int kBytes = kWarpgroupSize * kVectors * kVectorBytes;

  struct Barriers {
    uint64_t sum_received;   // accumulators have arrived here
    uint64_t sum_delivered;  // the other CTA has read those from here
  };

  CUTE_DEVICE static void init(Barriers& barriers) {
    init_barrier(barriers.sum_received, kWarps);
    init_barrier(barriers.sum_delivered, kWarps);
  }

  // Adds the accumulators of CTA `other`. `buffer` is the address of kBytes of shared memory, the
  // same in both CTAs, and `parity` that of the number of tiles before this one. All threads of a
  // warpgroup call it.
  template <class Scores>
  CUTE_DEVICE static void add(Barriers& barriers, uint32_t buffer, int other, int parity,
                              Scores& scores) {
    int const thread = thread_index() % kWarpgroupSize;
    uint32_t const own = buffer + thread * kVectorBytes;
    wait_barrier(barriers.sum_delivered, parity ^ 1);
    random_sleep();
    if (thread % kWarpSize == 0) {
      arrive_cluster_and_expect(barriers.sum_received, other, kBytes / kWarps);
    }
    uint32_t const target = cluster_address(own, other);
    uint32_t const barrier = cluster_address(shared_address(&barriers.sum_received), other);
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      uint32_t const vector[4] = {
          __float_as_uint(scores(4 * i)), __float_as_uint(scores(4 * i + 1)),
          __float_as_uint(scores(4 * i + 2)), __float_as_uint(scores(4 * i + 3))};
      store_cluster_vector(target + i * kWarpgroupSize * kVectorBytes, barrier, vector);
    }
    wait_barrier(barriers.sum_received, parity);
    random_sleep();
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      uint4 const words = load_shared_vector(own + i * kWarpgroupSize * kVectorBytes);
      scores(4 * i) += __uint_as_float(words.x);
      scores(4 * i + 1) += __uint_as_float(words.y);
      scores(4 * i + 2) += __uint_as_float(words.z);
      scores(4 * i + 3) += __uint_as_float(words.w);
    }
    // Hazard: the sums must exist before the arrival, which overtakes pending loads.
    fence_accumulators(scores);
    __syncwarp();
    if (thread % kWarpSize == 0) arrive_cluster_barrier(barriers.sum_delivered, other);
    random_sleep();
  }
};

// One CTA has all columns: there is nothing to add, and no shared memory.
template <class Grid>
struct ColumnSum<Grid, false> {
  static constexpr int kBytes = 0;
  struct Barriers {};
  CUTE_DEVICE static void init(Barriers&) {}
};

}  // namespace memeff
