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

  // A tensor, and where the rows of a batch index begin in it.
  struct Source {
    TensorMap const& map;
    int batch;
    int row;
  };

  // Copies the CTA's own rows once, then the panels of each block and the statistics of its rows.
  template <class Role>
  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps,
                              Work const& work,
                              typename Base::template Control<Role::kStages>& control,
                              uint32_t tiles, int rank) {
    if (work.count == 0) return;
    WorkItem const& item = work.item;
    ProblemShape const& shape = params.shape;
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const key_head = kOwnsKeys ? item.head : item.head / shape.group;
    KeyValueSource<Config> const source(params, item.batch, key_head);
    Source const queries = {Role::kIsOut ? maps.out_gradient : maps.query, origin.batch,
                            origin.row};
    Source const keys = {Role::kIsOut ? maps.value : maps.key,
                         source.batch(Role::kIsOut ? params.value : params.key), source.origin.row};
    Source const& own = kOwnsKeys ? keys : queries;
    Source const& others = kOwnsKeys ? queries : keys;
    int const first_column = Base::column_part() * Role::kColumns;

    arrive_and_expect(control.own, Role::kOwnBytes);
    CUTE_NO_UNROLL
    for (int i = 0; i < Role::kOwnBytes / Panel::kBytes; ++i) {
      int const row = work.own_row + (Role::kIsOut ? i / Role::kPanels : rank) * kRows;
      load_box(own.map, control.own, tiles + Role::kOwnOffset + i * Panel::kBytes,
               first_column + i % Role::kPanels * Panel::kColumns, own.row + row, item.head,
               own.batch, CacheHint::EVICT_FIRST);
    }
    PipelineStage<Role::kStages> stage;
    int turn = 0;
    CUTE_NO_UNROLL
    for (int block = 0; block < work.count; ++block) {
      ScoreTilePosition const at = work.position(shape, block, 0);
      int const row = others.row + (kOwnsKeys ? at.row : at.column);
      CUTE_NO_UNROLL
      for (int panel = 0; panel < Role::kPanels; ++panel) {
        bool const has_statistics = kOwnsKeys && panel == 0;
        uint64_t& arrived =
            control.panels.acquire(stage, Panel::kBytes + (has_statistics ? kStatisticsBytes : 0));
        if (turn == rank || Role::kSharers == 1) {
          load_panel<Role::kSharers>(others.map, arrived, Role::panel(tiles, stage.index),
                                     first_column + panel * Panel::kColumns, row,
                                     kOwnsKeys ? at.head : key_head, others.batch);
        }
        if (has_statistics) {
          load_tma(Tiles::statistics(params, at.batch, at.head, at.row), arrived,
                   Base::statistics(tiles, block), kStatisticsBytes);
        }
        stage.advance();
        turn ^= 1;
      }
    }
  }

 private:
  // Copies a panel to the first kSharers CTAs of the group, or to this one.
  template <int kSharers>
  CUTE_DEVICE static void load_panel(TensorMap const& map, uint64_t& arrived, uint32_t target,
                                     int column, int row, int head, int batch) {
    if constexpr (kSharers == 1) {
      load_box(map, arrived, target, column, row, head, batch, CacheHint::EVICT_LAST);
    } else {
      static_assert(kSharers == 2);  // they take turns
      load_cluster_box<kSharers>(map, arrived, target, column, row, head, batch,
                                 CacheHint::EVICT_LAST, Base::cluster_rank_of(0));
    }
  }
};

}  // namespace memeff
