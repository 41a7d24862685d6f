// Split-Q backward: if there are too few KV blocks to fill the GPU, several CTAs divide the Q
// blocks of each.
//
// Each writes its partial dk and dv to global memory. The CTA that finishes last adds up all parts
// in a fixed order: no CTA waits, and the bits are the same in every run.
#pragma once

#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/schedule/key_splits.cuh>

namespace memeff {

// The KV block of this CTA, among those of all heads and batch indices.
template <class Config>
CUTE_DEVICE unsigned split_kv_block_index(BackwardParams const& params) {
  return Config::kSplitQ ? blockIdx.x / params.q_splits : blockIdx.x;
}

// Divides the Q blocks and adds up the parts. kFloats is the size of a part; kThreads threads own
// it and synchronize by the named barrier kBarrier.
template <class Config, int kFloats, int kThreads, int kBarrier>
struct SplitQ {
  CUTE_DEVICE static TileRange query_tiles(BackwardParams const& params, TileRange const& tiles) {
    if constexpr (!Config::kSplitQ) return tiles;
    return share_of_split(tiles, blockIdx.x % params.q_splits, params.q_splits);
  }

  // Stores the part of this CTA. Returns true in the last CTA of a KV block, with the sums of all
  // parts in its accumulators. `scratch` is a word of shared memory that no thread reads once all
  // have arrived.
  template <class KeyGradient, class ValueGradient>
  CUTE_DEVICE static bool add_up(BackwardParams const& params, uint32_t scratch,
                                 KeyGradient& key_gradient, ValueGradient& value_gradient) {
    if (!Config::kSplitQ || params.q_splits == 1) return true;
    unsigned const tile = split_kv_block_index<Config>(params);
    auto for_each = [&](unsigned split, auto use) {
      float4* block =
          reinterpret_cast<float4*>(params.key_gradient_sum +
                                    (long long)(tile * params.q_splits + split) * kFloats) +
          threadIdx.x;
      if constexpr (Config::kKeyGradient) block = for_each_block(block, key_gradient, use);
      if constexpr (Config::kValueGradient) for_each_block(block, value_gradient, use);
    };
    for_each(blockIdx.x % params.q_splits, [](float4& part, auto& gradient, int n) {
      part =
          make_float4(gradient(0, 0, n), gradient(1, 0, n), gradient(2, 0, n), gradient(3, 0, n));
    });
    __threadfence();
    named_barrier_sync(kBarrier, kThreads);
    if (threadIdx.x == 0) {
      store_shared(scratch, atomicAdd(params.semaphores + tile, 1));
      __threadfence();
    }
    named_barrier_sync(kBarrier, kThreads);
    if (int(load_shared(scratch)) < params.q_splits - 1) return false;
    __threadfence();
    cute::clear(key_gradient);
    cute::clear(value_gradient);
    CUTE_NO_UNROLL
    for (int split = 0; split < params.q_splits; ++split) {
      for_each(split, [](float4 const& part, auto& gradient, int n) {
        gradient(0, 0, n) += part.x;
        gradient(1, 0, n) += part.y;
        gradient(2, 0, n) += part.z;
        gradient(3, 0, n) += part.w;
      });
    }
    return true;
  }

 private:
  // Calls use for a lane's accumulators, 16 bytes at a time; the lanes of a warp are contiguous.
  // Returns the address after the last block.
  template <class Accumulators, class Use>
  CUTE_DEVICE static float4* for_each_block(float4* block, Accumulators& accumulators, Use use) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(accumulators); ++n) {
      use(*block, accumulators, n);
      block += kThreads;
    }
    return block;
  }
};

}  // namespace memeff
