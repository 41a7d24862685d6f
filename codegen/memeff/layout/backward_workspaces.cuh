// The arrays in global memory by which the kernels of a backward pass results to each other: sums
// of accumulators, and the statistics of rows.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/common.cuh>

namespace memeff {

// The f32 sums of accumulators in global memory, to which several CTAs add.
//
// A tile of sums has the order of the threads that own its accumulators, so additions are aligned
// and contiguous, and a postprocess kernel whose threads own the same accumulators reads them back
// unchanged. Each warp has 128 floats for every m16n8 block.

// kVectors: the four floats of a lane are adjacent, for one vector reduction (from sm_90 on).
// Otherwise float i of all lanes of a warp are adjacent, so each of four scalar reductions covers
// 128 contiguous bytes. With a lane's floats adjacent it would touch 16 sectors for these bytes,
// and the four together 64.
template <int kThreads, bool kVectors>
struct AccumulatorSums {
  static constexpr int kBlockFloats = 4 * kThreads;
  static constexpr int kStride = kVectors ? 1 : kWarpSize;  // between the floats of a lane

  // The first float of this thread in a block of a tile of sums.
  template <class Float>
  CUTE_DEVICE static Float* at(Float* tile, int block) {
    unsigned const lane = threadIdx.x % kWarpSize;
    unsigned const first = kVectors ? threadIdx.x * 4 : (threadIdx.x - lane) * 4 + lane;
    // Keep the constant last: it becomes an immediate, and all blocks use one address register.
    return tile + first + block * kBlockFloats;
  }

  CUTE_DEVICE static void add(float* tile, int block, float x, float y, float z, float w) {
    float* const sums = at(tile, block);
    if constexpr (kVectors) {
      reduce_add(sums, x, y, z, w);
    } else {
      reduce_add(sums, x);
      reduce_add(sums + kStride, y);
      reduce_add(sums + 2 * kStride, z);
      reduce_add(sums + 3 * kStride, w);
    }
  }

  CUTE_DEVICE static float4 load(float const* tile, int block) {
    float const* const sums = at(tile, block);
    if constexpr (kVectors) return *reinterpret_cast<float4 const*>(sums);
    return make_float4(sums[0], sums[kStride], sums[2 * kStride], sums[3 * kStride]);
  }
};

// The layout of the workspace row_statistics, and of its tiles in shared memory: logsumexp and
// delta of each row, two floats.

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
