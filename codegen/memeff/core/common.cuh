// Constants and helpers for all device code.
#pragma once

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/config.hpp>
#include <cute/numeric/integral_constant.hpp>

#include <memeff/params.h>
#include <memeff/arch/thread.cuh>

namespace memeff {

constexpr int kWarpSize = 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The interval tests that a kernel is compiled with. Lengths are not among them: they are run-time
// bounds of loads and loops, and cost nothing if absent.
enum class MaskKind { none, causal, window };

// How a backward sums the bias gradient: see score/bias/gradient.cuh.
enum class BiasGradient { none, full, common, columns, dbias_kernel };

// How a kernel reads a bias: see score/bias/tile.cuh.
//   vectors  tiles, 16 bytes at a time: each row begins at a multiple of 16 bytes
//   words    tiles, 4 bytes at a time: rows begin anywhere
//   columns  broadcast over rows: one row of each tile
//   rows     broadcast over columns: one element per row
//   elements each lane reads its own elements from global memory: see score/bias/direct.cuh
enum class BiasAccess { vectors, words, columns, rows, elements };

CUTE_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
CUTE_HOST_DEVICE constexpr bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }

// Maps a batch index of the call to the batch index of an array that a vmap broadcasts
// (BatchBroadcast). Method: Lemire, Kaser and Kurz, "Faster remainder by direct computation"
// (2019), section 3. Whole periods overflow; the remaining fraction of a period times the elements
// has the index above the binary point. This is exact for periods below 2^33, because rounding adds
// less than 2^-33 of one.
template <class Config, class View>
CUTE_DEVICE int element_of(View const& view, int batch) {
  if constexpr (!Config::kBroadcastBatch) return batch;
  return int(__umul64hi(view.share.fraction * unsigned(batch), view.share.elements));
}

CUTE_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// The table of a kernel's arrays. Hazard: only kernels whose spec has captured arrays are launched
// with a table; in others this reads beyond the parameters.
template <class Params>
CUTE_DEVICE ArrayTable const& feature_arrays(Params const& params) {
  return static_cast<WithArrays<Params> const&>(params).table;
}

// The array at `index`, a Config::k...Array.
template <class Params>
CUTE_DEVICE ArrayView const& feature_array(Params const& params, int index) {
  return feature_arrays(params).arrays[index];
}

}  // namespace memeff
