// The producer thread of each CTA of fmha_bwd_large_dim_sm90.cuh.
#pragma once

#include <memeff/kernels/backward/large_dim/cluster.cuh>

namespace memeff {

template <class Config, Owned kOwned>
struct LargeDimBackwardProducer : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Base::kOwnsKeys;
  using Base::kRows;
  using Base::kStatisticsBytes;
  using typename Base::Panel;
  using typename Base::Tiles;
  using typename Base::Work;

  // Copies the CTA's own rows once, then the panels of each block and the statistics of its rows.
  template <class Role>
  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps,
                              Work const& work, typename Base::template Control<Role::kStages>& control,
                              uint32_t tiles, int rank) {
    constexpr bool kIsOut = Role::kIsOut;
    if (work.count == 0) return;
    WorkItem const& item = work.item;
    ProblemShape const& shape = params.shape;
    Origin const queries = query_origin<Config>(shape, item.batch);
    KeyValueSource<Config> const keys(params, item.batch,
                                      kOwnsKeys ? item.head : item.head / shape.group);
    TensorMap const& query_map = kIsOut ? maps.out_gradient : maps.query;
    TensorMap const& key_map = kIsOut ? maps.value : maps.key;
    int const key_batch = keys.batch(kIsOut ? params.value : params.key);
    auto load = [&](bool is_key, uint64_t& arrived, uint32_t target, int column, int row, int head,
                    CacheHint hint) {
      load_box(is_key ? key_map : query_map, arrived, target, column,
               (is_key ? keys.origin.row : queries.row) + row, head,
               is_key ? key_batch : queries.batch, hint);
    };

    arrive_and_expect(control.own, Role::kOwnBytes);
    CUTE_NO_UNROLL
    for (int i = 0; i < Role::kOwnBytes / Panel::kBytes; ++i) {
      int const own = (kIsOut ? i / Role::kPanels : rank) * kRows;
      load(kOwnsKeys, control.own, tiles + Role::kOwnOffset + i * Panel::kBytes,
           i % Role::kPanels * Panel::kColumns, work.own_row + own, item.head,
           CacheHint::EVICT_FIRST);
    }
    PipelineStage<Role::kStages> stage;
    CUTE_NO_UNROLL
    for (int block = 0; block < work.count; ++block) {
      ScoreTilePosition const at = work.position(shape, block, 0);
      CUTE_NO_UNROLL
      for (int panel = 0; panel < Role::kPanels; ++panel) {
        bool const has_statistics = kOwnsKeys && panel == 0;
        uint64_t& arrived = control.panels.acquire(
            stage, Panel::kBytes + (has_statistics ? kStatisticsBytes : 0));
        load(!kOwnsKeys, arrived, Role::panel(tiles, stage.index), panel * Panel::kColumns,
             kOwnsKeys ? at.row : at.column, kOwnsKeys ? at.head : keys.head,
             CacheHint::EVICT_LAST);
        if (has_statistics) {
          load_tma(Tiles::statistics(params, at.batch, at.head, at.row), arrived,
                   Base::statistics(tiles, block), kStatisticsBytes);
        }
        stage.advance();
      }
    }
  }
};

}  // namespace memeff
