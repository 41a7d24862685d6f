// Maxima and sums of rows whose columns several warps divide.
#pragma once

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// Combines what the warps of Grid that have the same rows know of them. Each group of such warps
// has a named barrier and a number in shared memory for each warp and row, and calls all functions
// together. Alone, a warp has nothing to combine.
template <class Grid, int kTileRows, int kWarps = Grid::kColumnWarps>
class SharedRowStatistics {
 public:
  static constexpr int kBytes = kWarps * kTileRows * int(sizeof(float));
  static constexpr int kRows = 2 * Grid::kRowBlocks;  // in which a lane has elements

  CUTE_DEVICE explicit SharedRowStatistics(uint32_t shared) : shared_(shared) {}

  // Replaces the maxima that a lane knows of its rows with those of all warps.
  CUTE_DEVICE void combine_maxima(float (&maxima)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) maxima[r] = quad_max(maxima[r]);
    share(maxima);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int i = 1; i < kWarps; ++i) maxima[r] = fmaxf(maxima[r], other(i, r));
    }
  }

  // Replaces the sums of a lane, such that those of a quad add up to the sum of all warps. Hazard:
  // the warps must have read the maxima of the last KV block.
  CUTE_DEVICE void add_up(float (&sums)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] = quad_sum(sums[r]);
    share(sums);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int i = 1; i < kWarps; ++i) sums[r] += other(i, r);
      if (threadIdx.x % 4 != 0) sums[r] = 0.0f;
    }
  }

  // Waits for the other warps of these rows.
  CUTE_DEVICE void wait() const {
    int const barrier = 1 + int(threadIdx.x) / kWarpSize % Grid::kRowWarps;
    named_barrier_sync(barrier, kWarps * kWarpSize);
  }

 private:
  // Stores a number for each row, which the lanes of a quad have in common, and waits for those of
  // the other warps.
  CUTE_DEVICE void share(float const (&numbers)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (threadIdx.x % 4 == 0) store_shared(slot(own(), r), __float_as_uint(numbers[r]));
    }
    wait();
  }
  CUTE_DEVICE static int own() { return int(threadIdx.x) / kWarpSize / Grid::kRowWarps; }
  CUTE_DEVICE uint32_t slot(int warp, int r) const {
    return shared_ + (warp * kTileRows + Grid::element_row(2 * (r % 2), r / 2)) * 4;
  }
  CUTE_DEVICE float other(int distance, int r) const {
    return __uint_as_float(load_shared(slot((own() + distance) % kWarps, r)));
  }

  uint32_t shared_;
};

template <class Grid, int kTileRows>
class SharedRowStatistics<Grid, kTileRows, 1> {
 public:
  static constexpr int kBytes = 0;
  CUTE_DEVICE explicit SharedRowStatistics(uint32_t) {}
  template <class Maxima>
  CUTE_DEVICE void combine_maxima(Maxima&) const {}
  template <class Sums>
  CUTE_DEVICE void add_up(Sums&) const {}
  CUTE_DEVICE void wait() const {}
};

}  // namespace memeff
