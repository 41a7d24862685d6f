// The producer threads of kernels/fmha_fwd_large_dim_sm90.cuh: one copies queries and keys, and two
// others copy values, one for each consumer.
#pragma once

#include <memeff/core/pipeline.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/interval.cuh>

namespace memeff {

// Each thread of the producer has an object, and the kernel calls one method of it.
template <class Config, class Kernel>
struct LargeDimProducerSm90 {
  using Control = typename Kernel::Control;
  using KeyPanel = typename Kernel::KeyPanel;
  using Mask = typename Kernel::Mask;
  using QueryTile = typename Kernel::QueryTile;
  using ValueTile = typename Kernel::ValueTile;
  static constexpr int kTileKey = Kernel::kTileKey;

  ForwardParams const& params;
  ForwardMaps const& maps;
  Control& control;
  uint32_t tiles;
  WorkItem item;
  TileRange range;

  CUTE_DEVICE LargeDimProducerSm90(ForwardParams const& params, ForwardMaps const& maps,
                                   Control& control, uint32_t tiles)
      : params(params),
        maps(maps),
        control(control),
        tiles(tiles),
        item(Kernel::item(params.shape, params.bias)),
        range(Kernel::blocks(Mask(params.mask, params.shape, item.batch), item)) {}

  CUTE_DEVICE void produce_keys() const {
    if (range.begin == range.end) return;
    load_queries();
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    int const batch = source.batch(params.key);
    int const first_column = Kernel::column_part() * Kernel::kHeadColumns;
    PipelineStage<Kernel::kKeyStages> stage;
    CUTE_NO_UNROLL
    for (int block = range.begin; block < range.end; ++block) {
      CUTE_NO_UNROLL
      for (int panel = 0; panel < Kernel::kKeyPanels; ++panel) {
        uint64_t& arrived = control.key.acquire(stage, KeyPanel::kBytes);
        load_box(maps.key, arrived, Kernel::keys(tiles, stage),
                 first_column + panel * KeyPanel::kColumns, source.origin.row + block * kTileKey,
                 source.head, batch, CacheHint::EVICT_LAST);
        stage.advance();
      }
    }
  }

  CUTE_DEVICE void produce_values(int warpgroup) const {
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    int const batch = source.batch(params.value);
    int const first_column = Kernel::first_column(warpgroup);
    PipelineStage<Kernel::kValueStages> stage;
    CUTE_NO_UNROLL
    for (int block = range.begin; block < range.end; ++block) {
      uint64_t& arrived = control.value[warpgroup].acquire(stage, ValueTile::kBytes);
      uint32_t const target = Kernel::values(tiles, warpgroup, stage);
      CUTE_UNROLL
      for (int panel = 0; panel < ValueTile::kPanels; ++panel) {
        load_box(maps.value, arrived, target + panel * ValueTile::kPanelBytes,
                 first_column + panel * ValueTile::kPanelColumns,
                 source.origin.row + block * kTileKey, source.head, batch, CacheHint::EVICT_LAST);
      }
      stage.advance();
    }
  }

 private:
  CUTE_DEVICE void load_queries() const {
    Origin const origin = query_origin<Config>(params.shape, item.batch);
    arrive_and_expect(control.query, QueryTile::kBytes);
    load_tma_tile<QueryTile>(maps.query, control.query, tiles, 0,
                             origin.row + item.tile * Config::kTileQuery, item.head, origin.batch,
                             CacheHint::EVICT_FIRST, Kernel::column_part() * Kernel::kHeadColumns);
  }
};

}  // namespace memeff
