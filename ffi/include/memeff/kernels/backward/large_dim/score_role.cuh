// The CTAs of fmha_bwd_large_dim_sm90.cuh that compute S. They send P to the last CTA of the
// cluster and receive dS for their sum: dq = dS K, or dk = dS^T Q.
#pragma once

#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/kernels/backward/large_dim/cluster.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// The role of LargeDimSummingConsumer (summing_consumer.cuh).
template <class Config, Owned kOwned>
struct LargeDimScoreRole : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Base::kConsumers;
  using Base::kOutRank;
  using Base::kOwnsKeys;
  using Base::kProbabilityTiles;
  using Base::kRows;
  using typename Base::Element;
  using typename Base::Links;
  using typename Base::Mask;
  using typename Base::Modifiers;
  using typename Base::Operand;
  using typename Base::ScoreGrid;
  using typename Base::Work;
  using BackwardTiles = typename Base::Tiles;
  using Tiles = typename Base::ScoreTiles;
  using Statistics = RegisterStatistics<ScoreGrid>;
  static constexpr bool kStores = kOwnsKeys ? Config::kKeyGradient : Config::kQueryGradient;

  BackwardParams const& params;
  Work const& work;
  Links& links;
  uint32_t tiles;
  int rank;
  Mask mask;
  Statistics statistics;  // of this CTA's own rows, if they are queries

  CUTE_DEVICE LargeDimScoreRole(BackwardParams const& params, Work const& work, Links& links,
                                uint32_t tiles, int rank)
      : params(params),
        work(work),
        links(links),
        tiles(tiles),
        rank(rank),
        mask(params.mask, params.shape, work.item.batch) {
    if constexpr (!kOwnsKeys) {
      if (work.count > 0) statistics = Base::load_statistics(params, work, own_row());
    }
  }

  CUTE_DEVICE static int link(int rank) { return rank; }
  CUTE_DEVICE static int peer(int) { return kOutRank; }

  // The first of this CTA's own rows, which are consecutive over the CTAs of a cluster.
  CUTE_DEVICE int own_row() const { return work.own_row + rank * kRows; }

  CUTE_DEVICE ScoreTilePosition position(int block) const {
    return work.position(params.shape, block, rank * kRows);
  }
  CUTE_DEVICE int valid_rows(int block) const {
    return Base::valid_rows(params.shape, work, position(block));
  }

  // Computes P from S and sends it.
  template <class Scores>
  CUTE_DEVICE void exchange(int block, Scores& scores) const {
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const at = position(block);
    auto scaled = ScoreGrid::make_accumulators();  // (4, 1, MMA_N), for the soft cap
    modifiers.recompute(scores, scaled, at);
    float const softmax_scale = params.scale.softmax_scale;
    Operand messages[kProbabilityTiles];
    if constexpr (kOwnsKeys) {
      mask.template apply_transposed<kRows, kRows>(scores, params, at);
      exponentiate_transposed(block, softmax_scale, scaled, scores, messages);
    } else {
      mask.template apply<kRows, kRows>(scores, params, at);
      statistics.template exponentiate_and_differentiate<Modifiers>(softmax_scale, scaled, scores);
      messages[0] = as_left_operand<Element>(scores);
    }
    Base::acquire_message(links, rank, block & 1);
    Base::send_message(links, tiles, rank, kOutRank, rank * Base::kProbabilityBytes, messages);
  }

  CUTE_DEVICE float sum_scale() const { return params.scale.gradient_scale; }

  // The number of this CTA's rows of the gradient that exist; for queries, those within the length.
  // Others get 0.
  CUTE_DEVICE int row_bound() const { return work.query_length - own_row(); }

  // Stores the gradient from a tile in shared memory. One warpgroup calls it.
  CUTE_DEVICE void store(BackwardMaps const& maps, uint32_t tile) const {
    ProblemShape const& shape = params.shape;
    int const length = kOwnsKeys ? (Config::kVarlen ? work.key_length : shape.key_length)
                                 : (Config::kVarlen ? work.query_length : shape.query_length);
    Origin const origin = kOwnsKeys ? key_origin<Config>(shape, work.item.batch)
                                    : query_origin<Config>(shape, work.item.batch);
    store_part<Config, typename Tiles::OwnTile>(
        kOwnsKeys ? maps.key_gradient : maps.query_gradient,
        kOwnsKeys ? params.key_gradient : params.query_gradient, tile, 0, origin.row + own_row(),
        length - own_row(), work.item.head, origin.batch, shape.head_dim,
        Base::column_part() * Tiles::kColumns);
    wait_tma_stores();
  }

  // Writes zeros to the gradients of tokens that belong to no sequence.
  CUTE_DEVICE void clear_gap() const {
    if constexpr (Config::kVarlen) {
      ProblemShape const& shape = params.shape;
      if (Base::column_part() > 0) return;
      if constexpr (kOwnsKeys) {
        GridTiles<Config, GridRows::keys, kRows> const grid = {shape};
        clear_key_gap<Config, kConsumers>(params, work.item, work.key_length,
                                          grid.of_batch_index(work.item.batch));
      } else if (rank == 0) {
        GridTiles<Config, GridRows::queries, Config::kTileQuery> const grid = {shape};
        clear_query_gap<Config, kConsumers>(params, work.item, work.query_length,
                                            grid.of_batch_index(work.item.batch));
      }
    }
  }

 private:
  // P^T from S^T, and P^T times the derivative of the modifiers, if it is not constant.
  template <class Scores>
  CUTE_DEVICE void exponentiate_transposed(int block, float softmax_scale, Scores const& scaled,
                                           Scores const& scores,
                                           Operand (&messages)[kProbabilityTiles]) const {
    int const thread = thread_index();
    uint32_t const statistics = Base::statistics(tiles, block);
    CUTE_UNROLL
    for (int pair = 0; pair < kRows / 16; ++pair) {
      auto const logsumexps = QuadStatistics::load_logsumexps<ScoreGrid>(statistics, pair, thread);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const n = 2 * pair + i / 2;
        float p[2];
        float differentiated[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          int const element = i % 2 * 2 + j;
          float const score = scores(element, 0, n);
          p[j] = probability(score, softmax_scale, logsumexps.of[i / 2 * 2 + j]);
          differentiated[j] = Modifiers::backward(
              p[j], Modifiers::input_of_derivative(score, scaled(element, 0, n)));
        }
        messages[0].fragments[0][pair][i] = pack<Element>(p[0], p[1]);
        if constexpr (kProbabilityTiles == 2) {
          messages[1].fragments[0][pair][i] = pack<Element>(differentiated[0], differentiated[1]);
        }
      }
    }
  }
};

}  // namespace memeff
