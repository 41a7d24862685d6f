// The producer threads of kernels/fmha_fwd_large_dim_sm90.cuh: one copies queries and keys, and one
// each copies the values of a consumer.
#pragma once

#include <memeff/arch/cluster.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/interval.cuh>

namespace memeff {

// Each thread of the producer has an object, and the kernel calls one method of it.
//
// The threads of all CTAs of a cluster take the same steps. Each expects the bytes of every panel
// at the barriers of its own CTA, and copies its share of the panels to all CTAs. Hazard: a copy
// may write when the buffer is empty in every CTA, so consumers release it in all of them.
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
  int rank;
  WorkItem item;
  TileRange range;

  CUTE_DEVICE LargeDimProducerSm90(ForwardParams const& params, ForwardMaps const& maps,
                                   Control& control, uint32_t tiles, int rank)
      : params(params),
        maps(maps),
        control(control),
        tiles(tiles),
        rank(rank),
        item(Kernel::item(params.shape, params.bias, rank)),
        range(Kernel::blocks(Mask(params.mask, params.shape, item.batch), item)) {}

  CUTE_DEVICE void produce_keys() const {
    if (range.begin == range.end) return;
    load_queries();
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    int const batch = source.batch(params.key);
    PipelineStage<Kernel::kKeyStages> stage;
    int turn = 0;
    CUTE_NO_UNROLL
    for (int block = range.begin; block < range.end; ++block) {
      CUTE_NO_UNROLL
      for (int panel = 0; panel < Kernel::kKeyPanels; ++panel) {
        uint64_t& arrived = control.key.acquire(stage, KeyPanel::kBytes);
        load_panel(maps.key, arrived, Kernel::keys(tiles, stage), panel * KeyPanel::kColumns,
                   source.origin.row + block * kTileKey, source.head, batch, turn);
        stage.advance();
        turn = next(turn);
      }
    }
  }

  CUTE_DEVICE void produce_values(int warpgroup) const {
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    int const batch = source.batch(params.value);
    PipelineStage<Kernel::kValueStages> stage;
    int turn = warpgroup % Kernel::kCluster;
    CUTE_NO_UNROLL
    for (int block = range.begin; block < range.end; ++block) {
      uint64_t& arrived = control.value[warpgroup].acquire(stage, ValueTile::kBytes);
      uint32_t const target = Kernel::values(tiles, warpgroup, stage);
      CUTE_UNROLL
      for (int panel = 0; panel < ValueTile::kPanels; ++panel) {
        load_panel(maps.value, arrived, target + panel * ValueTile::kPanelBytes,
                   warpgroup * Kernel::kColumns + panel * ValueTile::kPanelColumns,
                   source.origin.row + block * kTileKey, source.head, batch, turn);
        turn = next(turn);
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
                             CacheHint::EVICT_FIRST);
  }

  // The CTAs of a cluster take turns.
  CUTE_DEVICE static int next(int turn) { return turn + 1 == Kernel::kCluster ? 0 : turn + 1; }

  // Copies a panel to all CTAs if it is this one's turn.
  CUTE_DEVICE void load_panel(TensorMap const& map, uint64_t& arrived, uint32_t target, int column,
                              int row, int head, int batch, int turn) const {
    if constexpr (Kernel::kCluster == 1) {
      load_box(map, arrived, target, column, row, head, batch, CacheHint::EVICT_LAST);
    } else if (turn == rank) {
      load_cluster_box<Kernel::kCluster>(map, arrived, target, column, row, head, batch,
                                         CacheHint::EVICT_LAST);
    }
  }
};

}  // namespace memeff
