// The epilogue of kernels/fmha_bwd_sm90.cuh.
#pragma once

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/split_q.cuh>

namespace memeff {

template <class Config, class Kernel>
struct BackwardEpilogueSm90 {
  using Element = typename Kernel::Element;
  using KeyGrid = typename Kernel::KeyGrid;
  using KeyTile = typename Kernel::KeyTile;
  using Splits = typename Kernel::Splits;
  using ValueGrid = typename Kernel::ValueGrid;
  using ValueTile = typename Kernel::ValueTile;
  using Work = typename Kernel::Work;
  static constexpr auto kConsumerBarrier = Kernel::kConsumerBarrier;
  static constexpr auto kConsumers = Kernel::kConsumers;
  static constexpr auto kStatisticsOffset = Kernel::kStatisticsOffset;
  static constexpr auto kTileKey = Kernel::kTileKey;
  static constexpr auto kValueOffset = Kernel::kValueOffset;

  // Scales and stores dk and dv. With split-Q it first adds up the parts of all CTAs.
  template <class KeyGradient, class ValueGradient>
  CUTE_DEVICE static void finish(BackwardParams const& params, BackwardMaps const& maps,
                                 Work const& work, int key_length, int warpgroup, uint32_t tiles,
                                 uint32_t key_tile, KeyGradient& key_gradient,
                                 ValueGradient& value_gradient) {
    if (!Splits::add_up(params, work.item, tiles + kStatisticsOffset, key_gradient,
                        value_gradient)) {
      return;
    }
    if constexpr (Config::kKeyGradient) {
      scale_accumulators(key_gradient, params.scale.gradient_scale);
    }
    if constexpr (Config::kValueGradient) {
      scale_accumulators(value_gradient, probability_scale<Config>(params));
    }
    store(params, maps, work, key_length, warpgroup, key_tile, key_gradient, value_gradient);
  }

  // Stores each consumer's rows of dk and dv through the tiles of keys and values.
  template <class KeyGradient, class ValueGradient>
  CUTE_DEVICE static void store(BackwardParams const& params, BackwardMaps const& maps,
                                Work const& work, int key_length, int warpgroup, uint32_t key_tile,
                                KeyGradient const& key_gradient,
                                ValueGradient const& value_gradient) {
    ProblemShape const& shape = params.shape;
    named_barrier_sync(kConsumerBarrier, kConsumers);  // both consumers have read the keys
    if constexpr (Config::kKeyGradient) {
      store_accumulators<Element, KeyTile, KeyGrid>(key_tile, key_gradient);
    }
    if constexpr (Config::kValueGradient) {
      store_accumulators<Element, ValueTile, ValueGrid>(key_tile + kValueOffset, value_gradient);
    }
    fence_tma_store();
    named_barrier_sync(Kernel::warpgroup_barrier(warpgroup), kWarpgroupSize);
    Origin const keys = key_origin<Config>(shape, work.item.batch);
    int const head = key_head_of<Config>(params, work.item.head);
    int const row = keys.row + work.column;
    int const tile_row = warpgroup * kWarpgroupRows;
    int const bound = (Config::kVarlen ? key_length : shape.key_length) - work.column;
    if constexpr (Config::kKeyGradient) {
      store_part<Config, KeyTile>(maps.key_gradient, params.key_gradient, key_tile, tile_row, row,
                                  bound, head, keys.batch, shape.head_dim);
    }
    if constexpr (Config::kValueGradient) {
      store_part<Config, ValueTile>(maps.value_gradient, params.value_gradient,
                                    key_tile + kValueOffset, tile_row, row, bound, head, keys.batch,
                                    shape.value_dim);
    }
    wait_tma_stores();
    if constexpr (Config::kVarlen) {
      GridTiles<Config, GridRows::keys, kTileKey> const grid = {shape};
      clear_key_gap<Config, kConsumers>(params, {work.item.tile, head, work.item.batch}, key_length,
                                        grid.of_batch_index(work.item.batch));
    }
  }
};

}  // namespace memeff
