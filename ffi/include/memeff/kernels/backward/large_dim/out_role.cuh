// The last CTA of a cluster of fmha_bwd_large_dim_sm90.cuh computes dP, receives P, and sends dS.
// If the cluster owns keys it also sums dv = P^T dO.
#pragma once

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/kernels/backward/large_dim/cluster.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// The role of LargeDimSummingConsumer (summing_consumer.cuh) in clusters that own keys.
template <class Config, Owned kOwned>
struct LargeDimOutRole : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Base::kOwnsKeys;
  using Base::kProbabilityTiles;
  using Base::kRows;
  using Base::kTileBytes;
  using typename Base::Element;
  using typename Base::Links;
  using typename Base::Operand;
  using typename Base::ScoreGrid;
  using typename Base::Work;
  using Tiles = typename Base::OutTiles;
  static_assert(kOwnsKeys);
  static constexpr bool kStores = Config::kValueGradient;

  BackwardParams const& params;
  Work const& work;
  Links& links;
  uint32_t tiles;
  int rank;

  CUTE_DEVICE LargeDimOutRole(BackwardParams const& params, Work const& work, Links& links,
                              uint32_t tiles, int rank)
      : params(params), work(work), links(links), tiles(tiles), rank(rank) {}

  CUTE_DEVICE static int link(int) { return 0; }
  CUTE_DEVICE static int peer(int) { return 0; }

  CUTE_DEVICE int valid_rows(int block) const {
    return Base::valid_rows(params.shape, work, work.position(params.shape, block, 0));
  }

  // Computes dS^T from P^T and dP^T and sends it.
  template <class Scores>
  CUTE_DEVICE void exchange(int block, Scores& score_gradient) const {
    Base::wait_message(links, 0, block & 1);
    Operand const probabilities = Base::load_message(tiles, (kProbabilityTiles - 1) * kTileBytes);
    uint32_t const statistics = Base::statistics(tiles, block);
    int const thread = thread_index();
    Operand message[1];
    CUTE_UNROLL
    for (int pair = 0; pair < kRows / 16; ++pair) {
      auto const deltas = QuadStatistics::load_deltas<ScoreGrid>(statistics, pair, thread);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float gradient[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          float const p = unpack<Element>(probabilities.fragments[0][pair][i], j);
          gradient[j] =
              softmax_gradient(p, score_gradient(i % 2 * 2 + j, 0, 2 * pair + i / 2),
                               probability_scale<Config>(params), deltas.of[i / 2 * 2 + j]);
        }
        message[0].fragments[0][pair][i] = pack<Element>(gradient[0], gradient[1]);
      }
    }
    Base::acquire_message(links, 0, block & 1);
    Base::send_message(links, tiles, 0, 0, 0, message);
  }

  CUTE_DEVICE float sum_scale() const { return probability_scale<Config>(params); }
  CUTE_DEVICE int row_bound() const { return kRows; }

  CUTE_DEVICE void store(BackwardMaps const& maps, uint32_t tile) const {
    ProblemShape const& shape = params.shape;
    int const length = Config::kVarlen ? work.key_length : shape.key_length;
    Origin const origin = key_origin<Config>(shape, work.item.batch);
    store_part<Config, typename Tiles::OwnTile>(maps.value_gradient, params.value_gradient, tile, 0,
                                                origin.row + work.own_row, length - work.own_row,
                                                work.item.head, origin.batch, shape.value_dim,
                                                Base::column_part() * Tiles::kColumns);
    wait_tma_stores();
  }

  CUTE_DEVICE void clear_gap() const {}
};

// The consumers of this CTA if the cluster owns queries: each computes dS of the rows of one of the
// other CTAs, and sums nothing. So its rows of dO fit in registers, which halves the reads of
// shared memory. The consumers multiply in turn: one computes dS while the other keeps the tensor
// cores busy.
template <class Config>
struct LargeDimOutConsumer : LargeDimCluster<Config, Owned::queries> {
  using Base = LargeDimCluster<Config, Owned::queries>;
  using Base::kOutRank;
  using Base::kProbabilityBytes;
  using Base::kRows;
  using Base::kTurnBarrier;
  using Base::kWarpgroups;
  using typename Base::Element;
  using typename Base::Operand;
  using typename Base::OutTiles;
  using typename Base::Panel;
  using typename Base::ScoreGrid;
  using typename Base::Work;
  using Control = typename Base::template Control<OutTiles::kStages>;
  using Statistics = RegisterStatistics<ScoreGrid>;
  using Turns = ConsumerTurns<true, kWarpgroups, kTurnBarrier>;
  static constexpr int kPanels = OutTiles::kPanels;
  static constexpr int kPanelSteps = Panel::kColumns / 16;
  using OutRows = RegisterOperand<1, kPanels * kPanelSteps, sizeof(Element)>;

  CUTE_DEVICE static void run(BackwardParams const& params, Work const& work, Control& control,
                              uint32_t tiles) {
    int const warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    if (work.count > 0) {
      Statistics const statistics =
          Base::load_statistics(params, work, work.own_row + warpgroup * kRows);
      wait_barrier(control.own, 0);
      random_sleep();
      OutRows const rows = load_operand<typename OutTiles::OwnTile, ScoreGrid>(
          tiles + OutTiles::kOwnOffset + warpgroup * OutTiles::OwnTile::kBytes);
      Turns::begin(warpgroup);
      Base::begin_score_sums(warpgroup);
      PipelineStage<OutTiles::kStages> stage;
      CUTE_NO_UNROLL
      for (int block = 0; block < work.count; ++block) {
        Base::template clear_beyond<OutTiles>(
            control, tiles, warpgroup, stage,
            Base::valid_rows(params.shape, work, work.position(params.shape, block, 0)));
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        multiply(control, tiles, warpgroup, rows, stage, score_gradient);
        Base::template add_other_columns<OutTiles>(control, tiles, kOutRank, warpgroup,
                                                   score_gradient);
        exchange(params, control, tiles, warpgroup, block, statistics, score_gradient);
      }
    }
    // This CTA's barriers must stay alive until the last message has been acknowledged.
    arrive_cluster();
    wait_cluster();
  }

 private:
  // dP = dO V^T, panel by panel. Each panel is released once its product is done, while that of the
  // next one runs.
  template <class Scores>
  CUTE_DEVICE static void multiply(Control& control, uint32_t tiles, int warpgroup,
                                   OutRows const& rows, PipelineStage<OutTiles::kStages>& stage,
                                   Scores& scores) {
    Turns::take(warpgroup);
    fence_accumulators(scores);
    auto before = stage;
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      control.panels.wait(stage);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      auto const right = Base::template operand<Contiguous::k>(OutTiles::panel(tiles, stage.index));
      CUTE_UNROLL
      for (int step = 0; step < kPanelSteps; ++step) {
        wgmma<Element, decltype(right)::kMajor>(scores,
                                                rows.fragments[0][panel * kPanelSteps + step],
                                                right.at(step), panel > 0 || step > 0);
      }
      commit_products();
      if (panel > 0) {
        wait_products<1>();
        Base::template release_panels<OutTiles, 1>(control, before);
        before.advance();
      }
      stage.advance();
    }
    Turns::pass(warpgroup);
    wait_products<0>();
    fence_accumulators(scores);
    Base::template release_panels<OutTiles, 1>(control, before);
  }

  // Computes dS from P, which contains the derivative of the modifiers, and from dP, and sends it.
  template <class Scores>
  CUTE_DEVICE static void exchange(BackwardParams const& params, Control& control, uint32_t tiles,
                                   int link, int block, Statistics const& statistics,
                                   Scores const& score_gradient) {
    Base::wait_message(control, link, block & 1);
    Operand const probabilities = Base::load_message(tiles, link * kProbabilityBytes);
    Operand message[1];
    CUTE_UNROLL
    for (int pair = 0; pair < kRows / 16; ++pair) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float gradient[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          float const p = unpack<Element>(probabilities.fragments[0][pair][i], j);
          gradient[j] =
              softmax_gradient(p, score_gradient(i % 2 * 2 + j, 0, 2 * pair + i / 2),
                               probability_scale<Config>(params), statistics.delta(i % 2));
        }
        message[0].fragments[0][pair][i] = pack<Element>(gradient[0], gradient[1]);
      }
    }
    Base::acquire_message(control, link, block & 1);
    Base::send_message(control, tiles, link, link, 0, message);
    Base::release_message(control, link, link);
  }
};

}  // namespace memeff
