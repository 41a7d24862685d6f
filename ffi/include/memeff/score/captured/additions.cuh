// Additions to the gradients of captured arrays in global memory.
#pragma once

#include <memeff/core/feature_arrays.cuh>
#include <memeff/core/function/sums.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// The gradient of the array that read kRead reads, for one batch index of the call.
template <class Config, int kRead>
struct CapturedGradient {
  using Function = typename Config::ScoreFunction;
  using Arrays = typename Config::CapturedGradients;

  float* first;

  CUTE_DEVICE CapturedGradient(BackwardParams const& params, int batch) {
    ArrayView const& view = feature_array(params, Arrays::kArrays[Function::kReadArrays[kRead]]);
    first = static_cast<float*>(view.data) + element_of<Config>(view, batch) * view.strides[0];
  }

  // All lanes of a warp call it. An offset of -1 is no element. Neighbouring lanes with one element
  // add up their sums first: all additions to an address wait for each other, and a bucket of
  // distances or a slope has as many as there are tiles.
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
    if (ends && offset >= 0 && sum != 0.0f) atomicAdd(first + offset, sum);
  }
};

}  // namespace memeff
