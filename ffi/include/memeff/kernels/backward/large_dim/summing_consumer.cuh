// The consumers of a CTA of fmha_bwd_large_dim_sm90.cuh that sums a gradient.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/kernels/backward/large_dim/cluster.cuh>

namespace memeff {

// Each consumer computes every second score tile, and half of the columns of the gradient: the even
// or the odd panels, plus half of the last panel if their number is odd.
//
//   consumer 0 | S(0) P(0)        sum(0)  S(2) sum(1) P(2)  sum(2) ...
//   consumer 1 |      S(1) sum(0) P(1)  sum(1)  S(3) sum(2) P(3) ...
//
// Role defines the score product and what is computed from the scores. The left operand of sum(b)
// comes from another CTA. It depends on P(b), which leaves this CTA while the other consumer
// computes its scores.
template <class Config, Owned kOwned, template <class, Owned> class Role_>
struct LargeDimSummingConsumer : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Role = Role_<Config, kOwned>;
  using RoleTiles = typename Role::Tiles;
  using Base::kConsumerBarrier;
  using Base::kConsumers;
  using Base::kOwnsKeys;
  using Base::kRows;
  using Base::kWarpgroups;
  using typename Base::Element;
  using typename Base::Operand;
  using typename Base::Panel;
  using typename Base::ScoreGrid;
  using typename Base::Work;
  using Control = typename Base::template Control<RoleTiles::kStages>;
  using Stage = PipelineStage<RoleTiles::kStages>;
  static constexpr int kPanels = RoleTiles::kPanels;
  static constexpr int kSteps = kRows / 16;
  static_assert(RoleTiles::kStages >= 2 * kPanels);  // consumer 1 computes scores ahead of sums

  using PanelGrid = WarpgroupGrid<kRows, Panel::kColumns>;
  using HalfGrid = WarpGrid<kRows, Panel::kColumns, kConsumers / kWarpSize, 16>;
  static constexpr int kWholePanels = kPanels / kWarpgroups;  // per consumer
  static constexpr bool kHasHalf = kPanels % kWarpgroups != 0;
  static constexpr int kParts = kWholePanels + kHasHalf;

  struct Sums {
    decltype(PanelGrid::make_accumulators()) panels[kWholePanels];  // (4, 1, MMA_N)
    decltype(HalfGrid::make_accumulators()) half;                   // (4, 1, MMA_N)

    // Calls use(part, index) for every part. Hazard: the indices must be constants, or ptxas keeps
    // the sums in local memory.
    template <class Use>
    CUTE_DEVICE void for_each(Use use) {
      cute::for_each(cute::make_seq<kWholePanels>{}, [&](auto part) { use(panels[part], part); });
      if constexpr (kHasHalf) use(half, cute::Int<kWholePanels>{});
    }

    CUTE_DEVICE void fence() {
      for_each([](auto& part, auto) { fence_accumulators(part); });
    }
  };

  // Positions in the ring and in the sequence of messages.
  struct Position {
    int warpgroup;
    Stage scores;   // the first panel of the next tile of scores
    Stage sum;      // the first panel of the next sum
    int block = 0;  // of the next sum
  };

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps,
                              Work const& work, Control& control, uint32_t tiles, int rank) {
    Position at;
    // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
    at.warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    Role const role(params, work, control, tiles, rank);
    Sums sums;
    sums.for_each([](auto& part, auto) { cute::clear(part); });
    if (work.count > 0) {
      wait_barrier(control.own, 0);
      random_sleep();
      if constexpr (kOwnsKeys) {
        int const valid = work.key_length - work.own_row;
        if (reads_beyond<Config>(work.key_length, work.own_row + kRows, params.shape.key_length)) {
          Base::template clear_own_beyond<RoleTiles>(tiles, valid);
        }
      }
      compute(role, work, control, tiles, at, sums);
    }
    // This CTA's barriers must stay alive until the last message has been acknowledged.
    arrive_cluster();
    store(role, params, maps, work, tiles, at.warpgroup, sums);
    wait_cluster();
  }

 private:
  CUTE_DEVICE static void compute(Role const& role, Work const& work, Control& control,
                                  uint32_t tiles, Position& at, Sums& sums) {
    Base::begin_score_sums(at.warpgroup);
    int block = at.warpgroup;
    if (block == 0) {
      add_own_block<false>(role, control, tiles, at, block, sums);
      add_sum(role, control, tiles, at, sums);
      block += kWarpgroups;
    } else {
      at.scores.advance(kPanels);
    }
    CUTE_NO_UNROLL
    for (; block < work.count; block += kWarpgroups) {
      add_own_block<true>(role, control, tiles, at, block, sums);
      add_sum(role, control, tiles, at, sums);
    }
    if (at.block < work.count) add_sum(role, control, tiles, at, sums);
  }

  // Computes the scores of a block, and what follows from them. With kFollows the sum of the
  // previous block runs in the meantime.
  //
  // Hazard: kFollows must be a compile-time constant, because ptxas serializes products if a branch
  // separates them from the wait for other products.
  template <bool kFollows>
  CUTE_DEVICE static void add_own_block(Role const& role, Control& control, uint32_t tiles,
                                        Position& at, int block, Sums& sums) {
    Base::template clear_beyond<RoleTiles>(control, tiles, at.warpgroup, at.scores,
                                           role.valid_rows(block));
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    multiply_scores(control, tiles, at.scores, scores);
    at.scores.advance(kPanels);
    at.scores.advance(kPanels);  // skips those of the other consumer
    if constexpr (kFollows) begin_sum(role, control, tiles, at, sums);
    Base::template add_other_columns<RoleTiles>(control, tiles, role.rank, at.warpgroup, scores);
    role.exchange(block, scores);
    if constexpr (kFollows) end_sum(control, at, sums);
  }

  CUTE_DEVICE static void add_sum(Role const& role, Control& control, uint32_t tiles, Position& at,
                                  Sums& sums) {
    begin_sum(role, control, tiles, at, sums);
    end_sum(control, at, sums);
  }

  // Computes the product of this CTA's own rows and a block, panel by panel as they arrive.
  template <class Scores>
  CUTE_DEVICE static void multiply_scores(Control& control, uint32_t tiles, Stage stage,
                                          Scores& scores) {
    fence_accumulators(scores);
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      control.panels.wait(stage);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      warpgroup_gemm<Element, Panel::kColumns / 16>(
          scores,
          Base::template operand<Contiguous::k>(tiles + RoleTiles::kOwnOffset +
                                                panel * Panel::kBytes),
          Base::template operand<Contiguous::k>(RoleTiles::panel(tiles, stage.index)), panel > 0);
      stage.advance();
    }
    commit_products();
    wait_products<0>();
    fence_accumulators(scores);
  }

  // Starts the sum of the next block: each panel is a group of products, so that panels are
  // released one after the other.
  CUTE_DEVICE static void begin_sum(Role const& role, Control& control, uint32_t tiles,
                                    Position& at, Sums& sums) {
    Base::wait_message(control, Role::link(role.rank), at.block & 1);
    Operand const left = Base::load_message(tiles, 0);
    uint32_t rights[kParts];
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      bool const is_half = part == kWholePanels;
      Stage stage = at.sum;
      stage.advance(kWarpgroups * part + (is_half ? 0 : at.warpgroup));
      control.panels.wait(stage);
      rights[part] = RoleTiles::panel(tiles, stage.index) +
                     (is_half ? at.warpgroup * Panel::kRowBytes / kWarpgroups : 0);
    }
    sums.fence();
    begin_products();
    sums.for_each([&](auto& part, auto index) {
      warpgroup_gemm<Element, kSteps>(part, left,
                                      Base::template operand<Contiguous::outer>(rights[index]));
      commit_products();
    });
    Base::release_message(control, Role::link(role.rank), Role::peer(role.rank));
  }

  // Waits for the sum, and releases the panels of the block. Both consumers release every panel,
  // including those of the other one, as their own panels finish.
  CUTE_DEVICE static void end_sum(Control& control, Position& at, Sums& sums) {
    cute::for_each(cute::make_seq<kParts>{}, [&](auto part) {
      wait_products<kParts - 1 - part>();
      Stage stage = at.sum;
      stage.advance(kWarpgroups * part);
      Base::template release_panels < RoleTiles,
          part<kWholePanels ? kWarpgroups : 1>(control, stage);
    });
    sums.fence();
    at.sum.advance(kPanels);
    ++at.block;
  }

  // Stores the gradient through the buffer of the CTA's own rows, which no product reads any more.
  CUTE_DEVICE static void store(Role const& role, BackwardParams const& params,
                                BackwardMaps const& maps, Work const& work, uint32_t tiles,
                                int warpgroup, Sums& sums) {
    if constexpr (Role::kStores) {
      int const bound = role.row_bound();
      float const scale = role.sum_scale();
      sums.for_each([&](auto& part, auto) {
        CUTE_UNROLL
        for (int i = 0; i < cute::size(part); ++i) {
          bool const beyond = !kOwnsKeys && PanelGrid::element_row(i % 4, 0) >= bound;
          part(i) = beyond ? 0.0f : part(i) * scale;
        }
      });
      uint32_t const own = tiles + RoleTiles::kOwnOffset;
      named_barrier_sync(kConsumerBarrier, kConsumers);
      sums.for_each([&](auto const& part, auto index) {
        constexpr bool kIsHalf = index == kWholePanels;
        using Grid = cute::conditional_t<kIsHalf, HalfGrid, PanelGrid>;
        int const panel = kWarpgroups * index + (kIsHalf ? 0 : warpgroup);
        store_accumulators<Element, Panel, Grid>(own + panel * Panel::kBytes, part);
      });
      fence_tma_store();
      named_barrier_sync(kConsumerBarrier, kConsumers);
      if (warpgroup == 0) role.store(maps, own);
    }
    role.clear_gap();
  }
};

}  // namespace memeff
