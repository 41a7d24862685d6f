// The producer of kernels/fmha_bwd_sm90.cuh.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/schedule/split_q.cuh>

namespace memeff {

template <class Config, class Kernel>
struct BackwardProducerSm90 {
  using Bias = typename Kernel::Bias;
  using Control = typename Kernel::Control;
  using Diagonals = typename Kernel::Diagonals;
  using KeyStage = typename Kernel::KeyStage;
  using KeyTile = typename Kernel::KeyTile;
  using OutTile = typename Kernel::OutTile;
  using QueryTile = typename Kernel::QueryTile;
  using Stage = typename Kernel::Stage;
  using Tiles = typename Kernel::Tiles;
  using ValueTile = typename Kernel::ValueTile;
  using Work = typename Kernel::Work;
  static constexpr auto kBiasOffset = Kernel::kBiasOffset;
  static constexpr auto kKeyStageBytes = Kernel::kKeyStageBytes;
  static constexpr auto kStatisticsBytes = Kernel::kStatisticsBytes;
  static constexpr auto kTileQuery = Kernel::kTileQuery;
  static constexpr auto kValueOffset = Kernel::kValueOffset;

  // One thread copies keys and values, then queries, statistics, dO and bias of each Q block.
  CUTE_DEVICE static void produce(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles,
                                  KeyStage const& key, Stage& stage) {
    if (work.tiles.begin >= work.tiles.end) {
      control.key.acquire(key);
      control.key.commit(key);
      return;
    }
    uint32_t const keys = tiles + key.index * kKeyStageBytes;
    uint64_t& arrived = control.key.acquire(key, kKeyStageBytes);
    auto constexpr kOnce = CacheHint::EVICT_FIRST;
    auto constexpr kAgain = CacheHint::EVICT_LAST;
    WorkItem const& item = work.item;
    int const group = params.shape.group;
    Bias const bias(tiles + kBiasOffset);
    Origin const queries = query_origin<Config>(params.shape, item.batch);
    KeyValueSource<Config> const source(params, item.batch, key_head_of<Config>(params, item.head));
    int const key_row = source.origin.row + work.column;
    load_tma_tile<KeyTile>(maps.key, arrived, keys, 0, key_row, source.head,
                           source.batch(params.key), kOnce);
    load_tma_tile<ValueTile>(maps.value, arrived, keys + kValueOffset, 0, key_row, source.head,
                             source.batch(params.value), kOnce);
    CUTE_NO_UNROLL
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
      CUTE_NO_UNROLL
      for (auto walk = work.walk(params, head); walk.more(); walk.advance()) {
        int const tile = walk.tile();
        int const row = queries.row + tile * kTileQuery;
        uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + kStatisticsBytes);
        load_tma_tile<QueryTile>(maps.query, query, Kernel::query_tile_of(tiles, stage.index), 0,
                                 row, head, queries.batch, kAgain);
        load_tma(params.row_statistics +
                     Tiles::tile_index(params, item.batch, head, tile) * kTileQuery * 2,
                 query, Kernel::statistics_of(tiles, stage.index), kStatisticsBytes);
        uint64_t& out = control.out_gradient.acquire(stage, OutTile::kBytes + Bias::kTmaStageBytes);
        load_tma_tile<OutTile>(maps.out_gradient, out, Kernel::out_tile_of(tiles, stage.index), 0,
                               row, head, queries.batch, kAgain);
        bias.produce(params, maps, work, head, tile, stage.index, out);
        stage.advance();
      }
    }
  }

  // Fills the buffers of diagonals, in the order in which produce() copies queries. Called by a
  // whole warp.
  CUTE_DEVICE static void produce_diagonals(BackwardParams const& params, Work const& work,
                                            Control& control, uint32_t tiles, Stage& stage) {
    for_each_q_block<Config>(params, work.item, work.tiles, [&](int head, int tile, int) {
      control.query.acquire(stage);
      Diagonals::fill(params, work.position(head, tile), Kernel::diagonals_of(tiles, stage.index));
      __syncwarp();  // all lanes have stored
      if (threadIdx.x % kWarpSize == 0) control.query.commit(stage);
      stage.advance();
    });
  }
};

}  // namespace memeff
