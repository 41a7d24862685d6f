// Sums along the diagonals of a CTA's KV block, over the Q blocks of one head. One warp adds up the
// sums of all warps. It adds a diagonal to global memory once no adjacent Q block follows that has
// the same diagonal.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/core/common.cuh>
#include <memeff/score/captured/strip_sums.cuh>

namespace memeff {

// Rows of Grid's accumulators are keys, columns are queries. Shared memory holds, for each warp of
// Grid, the sums of its own diagonals for one Q block, and a ring of sums for the warp that adds
// them up.
template <class Grid>
struct DiagonalRing {
  using Strip = StripSums<Grid>;
  static constexpr int kWarps = Grid::kRowWarps;
  static constexpr int kRows = 16 * kWarps;  // keys of the CTA
  static constexpr int kColumns = Strip::kColumns;
  static constexpr int kDiagonals = kRows + kColumns - 1;
  static constexpr int kFirstDiagonal = 1 - kRows;                 // column - row
  static constexpr int kOfWarp = (Strip::kDiagonals + 3) / 4 * 4;  // sums, padded
  static constexpr int kPlaces = 256;                              // of the ring
  static constexpr int kWarpBytes = kOfWarp * int(sizeof(float));
  static constexpr int kPlaceBytes = kPlaces * int(sizeof(float));
  static constexpr int kBytes = kWarps * kWarpBytes + kPlaceBytes;
  static constexpr int kGroupWarps = kWarpgroupSize / kWarpSize;
  static_assert(Grid::kRowBlocks == 1 && Grid::kColumnWarps == 1);
  static_assert(kDiagonals <= kPlaces && kPlaces % kColumns == 0);

  uint32_t memory;
  int begin = 0;  // the place of the first diagonal of the current Q block

  // Stores the sums of the calling warp, which is one of Grid's.
  CUTE_DEVICE static void store(uint32_t memory, Strip const& strip) {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int first = 0; first < kOfWarp; first += kWarpSize) {
      int const index = first + thread % kWarpSize;
      float const sum = index < Strip::kDiagonals ? strip.diagonal(index) : 0.0f;
      uint32_t const own = memory + thread / kWarpSize % kWarps * kWarpBytes;
      if (index < kOfWarp) store_shared(own + index * 4, __float_as_uint(sum));
    }
  }

  // Zeros the ring. Called first, by the warp that adds up.
  CUTE_DEVICE void clear() const {
    for (int i = lane(); i < kPlaces; i += kWarpSize) store_shared(ring() + i * 4, 0);
    __syncwarp();
  }

  // Adds the sums of a warpgroup to the ring.
  CUTE_DEVICE void add(int warpgroup) const {
    // Rows of the next warp come 16 later, so its diagonals begin 16 earlier.
    constexpr int kOfGroup = kOfWarp + 16 * (kGroupWarps - 1);
    int const warps_after = kWarps - (warpgroup + 1) * kGroupWarps;
    uint32_t const sums = memory + warpgroup * kGroupWarps * kWarpBytes;
    CUTE_NO_UNROLL
    for (int first = lane() * 4; first < kOfGroup; first += kWarpSize * 4) {
      uint32_t const own = ring() + (begin + 16 * warps_after + first) % kPlaces * 4;
      uint4 total = load_shared_vector(own);
      CUTE_UNROLL
      for (int warp = 0; warp < kGroupWarps; ++warp) {
        int const index = first - 16 * (kGroupWarps - 1 - warp);
        if (index < 0 || index >= kOfWarp) continue;
        uint4 const x = load_shared_vector(sums + warp * kWarpBytes + index * 4);
        total = {sum(total.x, x.x), sum(total.y, x.y), sum(total.z, x.z), sum(total.w, x.w)};
      }
      store_shared_vector(own, __uint_as_float(total.x), __uint_as_float(total.y),
                          __uint_as_float(total.z), __uint_as_float(total.w));
    }
    __syncwarp();
  }

  // Calls use(diagonal, sum) for the first `count` diagonals, counted from kFirstDiagonal, and
  // zeros their sums. All lanes call it; those beyond `count` pass a sum of 0.
  template <class Use>
  CUTE_DEVICE void take(int count, Use const& use) const {
    CUTE_NO_UNROLL
    for (int first = 0; first < count; first += kWarpSize) {
      int const diagonal = first + lane();
      float found = 0.0f;
      if (diagonal < count) {
        uint32_t const own = ring() + (begin + diagonal) % kPlaces * 4;
        found = __uint_as_float(load_shared(own));
        store_shared(own, 0);
      }
      use(diagonal, found);
    }
    __syncwarp();
  }

  // The next Q block begins kColumns queries later.
  CUTE_DEVICE void advance() { begin = (begin + kColumns) % kPlaces; }

 private:
  CUTE_DEVICE static int lane() { return thread_index() % kWarpSize; }
  CUTE_DEVICE uint32_t ring() const { return memory + kWarps * kWarpBytes; }
  CUTE_DEVICE static uint32_t sum(uint32_t x, uint32_t y) {
    return __float_as_uint(__uint_as_float(x) + __uint_as_float(y));
  }
};

}  // namespace memeff
