// Split-Q backward: several CTAs share a KV block.
//
// With grouped heads, `head_splits` CTAs divide the query heads of the group. Under a causal mask a
// CTA that processes all of them takes too long for an even balance. Besides, the CTAs of a key
// head drift apart: they are at different query heads, whose Q, dO and dq sums do not fit L2
// together. The launcher describes `head_splits` times as many key heads, each with a part of the
// group, and key_head_of() maps them back.
//
// If there are too few KV blocks to fill the GPU, `row_splits` CTAs divide the Q blocks of each,
// unless the sums of dq are deterministic.
//
// Each CTA writes its partial dk and dv to global memory. The CTA that finishes last adds up all
// parts in a fixed order: no CTA waits, and the bits are the same in every run.
#pragma once

#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/key_splits.cuh>

namespace memeff {

// The KV block of this CTA, among those of all key heads that the launcher describes.
template <class Config>
CUTE_DEVICE unsigned split_kv_block_index(BackwardParams const& params) {
  return Config::kSplitQ ? blockIdx.x / params.row_splits : blockIdx.x;
}

// The key head of the arrays, if `described` is one that the launcher describes. The value is
// hidden, because the compiler would divide before producer and consumers part, and spill the
// quotient.
template <class Config>
CUTE_DEVICE int key_head_of(BackwardParams const& params, unsigned described) {
  if constexpr (!Config::kSplitQ) return described;
  hide_value(described);
  return described / unsigned(params.head_splits);
}

// The part of BackwardParams::semaphores that counts, for each KV block, the CTAs that have stored
// their parts. It follows the semaphores of deterministic sums.
template <class Config>
struct SplitCounters {
  CUTE_DEVICE static unsigned offset(BackwardParams const& params) {
    if constexpr (!Config::kDeterministicDq) return 0;
    return DqSemaphore<Config>::words(params.shape);
  }
  CUTE_DEVICE static unsigned words(BackwardParams const& params) {
    if constexpr (!Config::kSplitQ) return 0;
    GridTiles<Config, GridRows::keys, Config::kTileKey> const grid = {params.shape};
    return grid.of_slice() * (grid.slices() / params.head_splits);
  }
};

// Divides the Q blocks and adds up the parts. kFloats is the size of a part; kThreads threads own
// it and synchronize by the named barrier kBarrier.
template <class Config, int kFloats, int kThreads, int kBarrier>
struct SplitQ {
  using Grid = GridTiles<Config, GridRows::keys, Config::kTileKey>;

  CUTE_DEVICE static TileRange query_tiles(BackwardParams const& params, TileRange const& tiles) {
    if constexpr (!Config::kSplitQ) return tiles;
    return share_of_split(tiles, blockIdx.x % params.row_splits, params.row_splits);
  }

  // Stores the part of this CTA. Returns true in the last CTA of a KV block, with the sums of all
  // parts in its accumulators. `scratch` is a word of shared memory that no thread reads once all
  // have arrived.
  template <class KeyGradient, class ValueGradient>
  CUTE_DEVICE static bool add_up(BackwardParams const& params, WorkItem const& item,
                                 uint32_t scratch, KeyGradient& key_gradient,
                                 ValueGradient& value_gradient) {
    unsigned const heads = params.head_splits;
    unsigned const rows = params.row_splits;
    unsigned const splits = heads * rows;
    if (!Config::kSplitQ || splits == 1) return true;
    Grid const grid = {params.shape};
    unsigned const slice = grid.slice(item);
    unsigned const own = slice % heads * rows + blockIdx.x % rows;
    unsigned const tile = slice / heads * grid.of_slice() + grid.tile_of_slice(item);
    auto for_each = [&](unsigned split, auto use) {
      float4* block = reinterpret_cast<float4*>(params.key_gradient_sum +
                                                (long long)(tile * splits + split) * kFloats) +
                      threadIdx.x;
      if constexpr (Config::kKeyGradient) block = for_each_block(block, key_gradient, use);
      if constexpr (Config::kValueGradient) for_each_block(block, value_gradient, use);
    };
    for_each(own, [](float4& part, auto& gradient, int n) {
      part =
          make_float4(gradient(0, 0, n), gradient(1, 0, n), gradient(2, 0, n), gradient(3, 0, n));
    });
    __threadfence();
    named_barrier_sync(kBarrier, kThreads);
    if (threadIdx.x == 0) {
      int* const counters = params.semaphores + SplitCounters<Config>::offset(params);
      store_shared(scratch, atomicAdd(counters + tile, 1));
      __threadfence();
    }
    named_barrier_sync(kBarrier, kThreads);
    if (load_shared(scratch) < splits - 1) return false;
    __threadfence();
    cute::clear(key_gradient);
    cute::clear(value_gradient);
    CUTE_NO_UNROLL
    for (unsigned split = 0; split < splits; ++split) {
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
