// The f32 sums of accumulators in global memory, to which several CTAs add.
//
// A tile of sums has the order of the threads that own its accumulators, so additions are aligned
// and contiguous, and a postprocess kernel whose threads own the same accumulators reads them back
// unchanged. Each warp has 128 floats for every m16n8 block.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/common.cuh>

namespace memeff {

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

}  // namespace memeff
