// The layout of the workspace row_statistics, and of its tiles in shared memory: logsumexp and
// delta of each row, two floats.
#pragma once

#include <memeff/arch/copy.cuh>

namespace memeff {

// Interleaved pairs: (logsumexp, delta) of each row.
struct PairedStatistics {
  CUTE_DEVICE static void store(float* statistics, int row, float logsumexp, float delta) {
    reinterpret_cast<float2*>(statistics)[row] = make_float2(logsumexp, delta);
  }

  // The logsumexp and delta of one row.
  CUTE_DEVICE static float2 load(float const* statistics, int row) {
    return reinterpret_cast<float2 const*>(statistics)[row];
  }
};

// Sixteen logsumexps, then sixteen deltas, for products whose columns are these rows. Lane q of a
// quad has columns 2q and 2q + 1 of each eight, and reads its four of sixteen rows as one vector.
struct QuadStatistics {
  static constexpr int kRows = 16;

  CUTE_HOST_DEVICE static constexpr int offset(unsigned row) {
    return row / kRows * (2 * kRows) + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
  }

  CUTE_DEVICE static void store(float* statistics, int row, float logsumexp, float delta) {
    float* const target = statistics + offset(row);
    target[0] = logsumexp;
    target[kRows] = delta;
  }

  // The logsumexp and delta of one row.
  CUTE_DEVICE static float2 load(float const* statistics, int row) {
    float const* const source = statistics + offset(row);
    return make_float2(source[0], source[kRows]);
  }

  // One of the two statistics for the rows that are this lane's columns: element i of column block
  // n is value 2 * (n % 2) + i of `pair` n / 2.
  struct Values {
    float of[4];
  };
  template <class Grid>
  CUTE_DEVICE static Values load_logsumexps(uint32_t tile, int pair, int thread) {
    return load_vector<Grid>(tile, pair, thread);
  }
  template <class Grid>
  CUTE_DEVICE static Values load_deltas(uint32_t tile, int pair, int thread) {
    return load_vector<Grid>(tile + kRows * int(sizeof(float)), pair, thread);
  }

 private:
  template <class Grid>
  CUTE_DEVICE static Values load_vector(uint32_t tile, int pair, int thread) {
    int const column = Grid::element_column(0, 2 * pair, thread);
    uint4 const words = load_shared_vector(tile + offset(column) * int(sizeof(float)));
    return {{__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
             __uint_as_float(words.w)}};
  }
};

}  // namespace memeff
