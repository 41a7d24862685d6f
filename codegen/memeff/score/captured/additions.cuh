// Additions to the gradients of captured arrays in global memory.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/core/function/sums.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// Adds to the gradient of one array, for one batch index. The order of the additions, and so the
// last bits, differ between runs.
template <class Config, bool kFixedPoint = Config::kFixedPointSums>
struct CapturedAdder {
  float* first;

  CUTE_DEVICE CapturedAdder(BackwardParams const&, ArrayView const& view, int batch)
      : first(static_cast<float*>(view.data) + element_of<Config>(view, batch) * view.strides[0]) {}

  CUTE_DEVICE void add(long long offset, float x) const { atomicAdd(first + offset, x); }
};

// Sums in fixed point, which do not depend on the order: two 64-bit integers per element, in units
// of 1 and of 2^kFixedPointBits. jax_memeff/_cuda/fixed_point_sums.py chooses the scale and rounds
// the sums. A term adds at most half of the larger unit to the first integer, so with 35 bits an
// overflow takes 2^29 terms.
template <class Config>
struct CapturedAdder<Config, true> {
  long long* first;
  float scale;

  CUTE_DEVICE CapturedAdder(BackwardParams const& params, ArrayView const& view, int batch)
      : first(static_cast<long long*>(view.data) +
              element_of<Config>(view, batch) * (view.strides[0] / 2)),
        scale(*static_cast<float const*>(feature_array(params, Config::kCapturedScaleArray).data)) {
  }

  CUTE_DEVICE void add(long long offset, float x) const {
    long long* const sums = first + 2 * offset;
    float const scaled = x * scale;
    if (!(fabsf(scaled) < 0x1p79f)) {
      // Out of range, inf or NaN: the result becomes NaN, whatever else is added.
      atomicExch(reinterpret_cast<unsigned long long*>(sums + 1), kNotANumber);
      return;
    }
    float const high = rintf(scaled * (1.0f / kUnit));
    add(sums, static_cast<long long>(rintf(scaled - high * kUnit)));
    if (high != 0.0f) add(sums + 1, static_cast<long long>(high));
  }

 private:
  static constexpr float kUnit = float(1ll << Config::kFixedPointBits);

  // Sums of terms in range stay far below this.
  static constexpr unsigned long long kNotANumber = 0x6000000000000000;

  CUTE_DEVICE static void add(long long* address, long long x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(x));
  }
};

// The gradient of the array of read kRead, for one batch index of the call.
template <class Config, int kRead>
struct CapturedGradient {
  using Function = typename Config::ScoreFunction;
  using Arrays = typename Config::CapturedGradients;

  CapturedAdder<Config> adder;

  CUTE_DEVICE CapturedGradient(BackwardParams const& params, int batch)
      : adder(params, feature_array(params, Arrays::kArrays[Function::kReadArrays[kRead]]), batch) {
  }

  // Hazard: all lanes of a warp must call it; offset -1 means no element. Neighbouring lanes with
  // the same element add up their sums first: atomics on one address are serialized, and every tile
  // adds to the same slope or bucket of distances.
  CUTE_DEVICE void add(long long offset, float sum) const {
    int const lane = thread_index() % kWarpSize;
    int const before = lane > 0 ? lane - 1 : 0;
    int const low = __shfl_sync(0xffffffffu, int(offset), before);
    int const high = __shfl_sync(0xffffffffu, int(offset >> 32), before);
    bool const repeats = lane > 0 && offset >= 0 && low == int(offset) && high == int(offset >> 32);
    unsigned const begins = __ballot_sync(0xffffffffu, !repeats);
    bool ends = true;
    if (begins != 0xffffffffu) {
      // 2u << 31 is 0.
      int const begin = 31 - __clz(int(begins & ((2u << lane) - 1)));
      CUTE_UNROLL
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        int const other = lane - distance;
        float const theirs = __shfl_sync(0xffffffffu, sum, other > 0 ? other : 0);
        if (other >= begin) sum += theirs;
      }
      ends = lane == kWarpSize - 1 || (begins >> (lane + 1) & 1) != 0;
    }
    if (ends && offset >= 0 && sum != 0.0f) adder.add(offset, sum);
  }
};

}  // namespace memeff
