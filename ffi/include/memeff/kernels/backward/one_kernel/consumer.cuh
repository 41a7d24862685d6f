// The steps of a consumer of kernels/fmha_bwd_sm90.cuh. Its main loop calls them in order.
#pragma once

#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/kernels/backward/transposed_score_gradient.cuh>
#include <memeff/layout/tma_tile.cuh>

namespace memeff {

// A consumer is a warpgroup that owns 64 of the keys. Each begin_...() starts an asynchronous
// product as a group of its own; the main loop waits for it.
template <class Config, class Kernel>
struct BackwardConsumerSm90 {
  using Bias = typename Kernel::Bias;
  using BiasSums = typename Kernel::BiasSums;
  using BiasWriter = typename Kernel::BiasWriter;
  using CapturedSums = typename Kernel::CapturedSums;
  using Control = typename Kernel::Control;
  using DqSums = typename Kernel::DqSums;
  using Element = typename Kernel::Element;
  using Exponents = typename Kernel::Exponents;
  using FunctionReads = typename Kernel::FunctionReads;
  using KeptBlocks = typename Kernel::KeptBlocks;
  using KeyColumns = typename Kernel::KeyColumns;
  using KeyRows = typename Kernel::KeyRows;
  using KeyStage = typename Kernel::KeyStage;
  using KeyTile = typename Kernel::KeyTile;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using OutColumns = typename Kernel::OutColumns;
  using OutRows = typename Kernel::OutRows;
  using OutTile = typename Kernel::OutTile;
  using QueryColumns = typename Kernel::QueryColumns;
  using QueryRows = typename Kernel::QueryRows;
  using QueryTile = typename Kernel::QueryTile;
  using ScoreColumns = typename Kernel::ScoreColumns;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using ScoreOperand = typename Kernel::ScoreOperand;
  using ScoreRows = typename Kernel::ScoreRows;
  using ScoreTile = typename Kernel::ScoreTile;
  using Stage = typename Kernel::Stage;
  using Tiles = typename Kernel::Tiles;
  using ValueRows = typename Kernel::ValueRows;
  using ValueTile = typename Kernel::ValueTile;
  using Work = typename Kernel::Work;
  static constexpr auto kBiasOffset = Kernel::kBiasOffset;
  static constexpr auto kConsumerBarrier = Kernel::kConsumerBarrier;
  static constexpr auto kConsumers = Kernel::kConsumers;
  static constexpr auto kDqOffset = Kernel::kDqOffset;
  static constexpr auto kScoreGradient = Kernel::kScoreGradient;
  static constexpr auto kSumsOffset = Kernel::kSumsOffset;
  static constexpr auto kTileKey = Kernel::kTileKey;
  static constexpr auto kTileQuery = Kernel::kTileQuery;
  static constexpr auto kValueOffset = Kernel::kValueOffset;

  BackwardParams const& params;
  Work const& work;
  Mask const& mask;
  Control& control;
  uint32_t tiles;
  uint32_t key_tile;

  // Waits for keys and values, and clears what no Q block will write or must not read.
  CUTE_DEVICE void begin(KeyStage const& key) const {
    CapturedSums::begin(tiles + kSumsOffset);
    clear_skipped<Config, kConsumers>(params, work.item, work.tiles);
    control.key.wait(key);
    if (work.tiles.begin >= work.tiles.end) return;
    int const first_head = work.head_with_blocks(params, work.item.head * params.shape.group);
    Bias(tiles + kBiasOffset)
        .load_first(params, work, mask, first_head, work.row_of_blocks(params, first_head).begin);
    if (reads_beyond<Config>(mask.key_length, work.column + kTileKey, params.shape.key_length)) {
      clear_rows<KeyTile, kConsumers>(key_tile, mask.key_length - work.column);
      clear_rows<ValueTile, kConsumers>(key_tile + kValueOffset, mask.key_length - work.column);
      fence_tma_store();
      named_barrier_sync(kConsumerBarrier, kConsumers);
    }
  }

  // Waits for the operands of a Q block and clears rows beyond the query length. Hazard: memory
  // there may hold NaN, and 0 * NaN, or a P of NaN, would reach dk and dv.
  CUTE_DEVICE void wait_for_queries(int tile, Stage const& stage, uint32_t query_tile,
                                    uint32_t out_tile) const {
    int const row = tile * kTileQuery;
    control.query.wait(stage);
    if (reads_beyond<Config>(mask.query_length, row + kTileQuery, params.shape.query_length)) {
      control.out_gradient.wait(stage);
      clear_rows<QueryTile, kConsumers>(query_tile, mask.query_length - row);
      clear_rows<OutTile, kConsumers>(out_tile, mask.query_length - row);
      Bias(tiles + kBiasOffset).clear_rows_beyond(stage.index, mask.query_length - row);
      fence_tma_store();
      named_barrier_sync(kConsumerBarrier, kConsumers);
    }
  }

  // S^T = K Q^T
  template <class Scores>
  CUTE_DEVICE void begin_scores(KeyRows const& keys, uint32_t query_tile, Scores& scores) const {
    fence_accumulators(scores);
    begin_products();
    warpgroup_gemm<Element, Config::kHeadDim / 16>(scores, keys, QueryRows(query_tile), false);
    commit_products();
  }

  // dP^T = V dO^T
  template <class Scores>
  CUTE_DEVICE void begin_score_gradient(ValueRows const& values, uint32_t out_tile,
                                        Scores& score_gradient) const {
    if constexpr (kScoreGradient) {
      fence_accumulators(score_gradient);
      begin_products();
      warpgroup_gemm<Element, Config::kValueDim / 16>(score_gradient, values, OutRows(out_tile),
                                                      false);
      commit_products();
    }
  }

  // Computes P^T from S^T, while the product dP runs.
  template <class Logsumexps, class Scores>
  CUTE_DEVICE void exponentiate(int head, int tile, bool partial, int stage,
                                Logsumexps const& logsumexps, Exponents const& exponents,
                                FunctionReads const& reads, Scores& scores, Scores& scaled) const {
    Modifiers const modifiers = {{params.scale}, {params, &reads}, Bias(tiles + kBiasOffset)};
    int const row = tile * kTileQuery;
    ScoreTilePosition const at = work.position(head, tile);
    exponents.modify(
        [&] { modifiers.recompute(scores, scaled, at, params, work, head, row, stage); });
    mask.template apply_transposed<kTileQuery, kTileKey>(scores, params, at, partial);
    exponentiate_transposed(logsumexps.reader(Kernel::statistics_of(tiles, stage)),
                            exponents.softmax_scale(params.scale), scores,
                            exponents.of_tile(params, at));
    fence_accumulators(scores);
    modifiers.bias.load_next(params, work, mask, head, tile);
  }

  // Computes dS^T from P^T and dP^T, packs P^T and dS^T, and stores dS for dQ.
  template <class DeltaReader, class Scores>
  CUTE_DEVICE void differentiate(int head, int tile, DeltaReader const& deltas,
                                 KeptBlocks const& kept, Scores const& scaled, Scores const& scores,
                                 Scores const& score_gradient, uint32_t score_tile,
                                 ScoreOperand& probabilities, ScoreOperand& left_gradient,
                                 BiasSums& bias_sums,
                                 typename CapturedSums::Sums& captured_sums) const {
    differentiate_transposed<Config, Modifiers, BiasWriter, ScoreGrid>(
        params, deltas, work.position(head, tile), kept, scaled, scores, score_gradient,
        probabilities, left_gradient, bias_sums,
        CapturedSums(params, work.position(head, tile), tiles + kSumsOffset), captured_sums);
    if constexpr (Config::kQueryGradient) store_score_gradient(score_tile, left_gradient);
    if constexpr (BiasWriter::kFromTile) {
      BiasWriter::store(params, work.position(head, tile), score_tile);
    }
  }

  // Adds the sums of a Q block to the gradients of captured arrays. Call it after differentiate().
  CUTE_DEVICE void add_strips(int head, int tile, int warpgroup, int parity) const {
    CapturedSums const sums(params, work.position(head, tile), tiles + kSumsOffset);
    Kernel::Strips::add(sums, control, tiles + Kernel::kRingsOffset, warpgroup, parity);
  }

  // dV += P^T dO
  template <class Accumulators>
  CUTE_DEVICE void begin_value_gradient(ScoreOperand const& probabilities, uint32_t out_tile,
                                        Accumulators& value_gradient) const {
    if constexpr (Config::kValueGradient) {
      fence_accumulators(value_gradient);
      begin_products();
      warpgroup_gemm<Element, kTileQuery / 16>(value_gradient, probabilities, OutColumns(out_tile));
      commit_products();
    }
  }

  CUTE_DEVICE void store_score_gradient(uint32_t score_tile,
                                        ScoreOperand const& left_gradient) const {
    if constexpr (Tiles::kTransposedDq) {
      store_operand_transposed<ScoreTile, ScoreGrid>(score_tile, left_gradient);
    } else {
      store_operand<ScoreTile, ScoreGrid>(score_tile, left_gradient);
    }
  }

  // dQ = dS K, or its transpose
  template <class Accumulators>
  CUTE_DEVICE void begin_query_gradient(int warpgroup, uint32_t score_tile,
                                        Accumulators& query_gradient) const {
    if constexpr (Config::kQueryGradient) {
      fence_tma_store();
      named_barrier_sync(kConsumerBarrier, kConsumers);  // dS is complete
      fence_accumulators(query_gradient);
      begin_products();
      KeyColumns const keys(key_tile + Tiles::query_columns_offset(warpgroup));
      if constexpr (Tiles::kTransposedDq) {
        warpgroup_gemm<Element, kTileKey / 16>(query_gradient, keys, ScoreRows(score_tile), false);
      } else {
        ScoreColumns const scores(score_tile + Tiles::query_rows_offset(warpgroup));
        warpgroup_gemm<Element, kTileKey / 16>(query_gradient, scores, keys, false);
      }
      commit_products();
    }
  }

  // dK += dS^T Q
  template <class Accumulators>
  CUTE_DEVICE void begin_key_gradient(ScoreOperand const& left_gradient, uint32_t query_tile,
                                      Accumulators& key_gradient) const {
    if constexpr (Config::kKeyGradient) {
      fence_accumulators(key_gradient);
      begin_products();
      warpgroup_gemm<Element, kTileQuery / 16>(key_gradient, left_gradient,
                                               QueryColumns(query_tile));
      commit_products();
    }
  }

  template <class Accumulators>
  CUTE_DEVICE void add_query_gradient(int warpgroup, int head, int tile, int parity,
                                      Accumulators const& query_gradient) const {
    if constexpr (Config::kQueryGradient) {
      DqSums::add(params, control, work.item.batch, head, tile, tiles + kDqOffset, parity,
                  own_columns(warpgroup, query_gradient));
    }
  }

  // The columns of dQ that this consumer adds, among those that it computes: the first columns for
  // the first consumer, and the last ones for the second.
  template <class Accumulators>
  CUTE_DEVICE static auto own_columns(int warpgroup, Accumulators const& computed) {
    if constexpr (Tiles::kForeignColumns == 0) {
      return computed;
    } else {
      constexpr int kSkipped = Tiles::kForeignColumns / 8;
      auto own = Tiles::QueryGrid::make_accumulators();  // (4, 1, MMA_N)
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(own); ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          own(i, 0, n) = warpgroup == 0 ? computed(i, 0, n) : computed(i, 0, n + kSkipped);
        }
      }
      return own;
    }
  }
};

}  // namespace memeff
