// Tangents of attention for Hopper (forward mode): TMA, wgmma and warp specialization, with one
// persistent CTA per SM. The forward has already computed output and logsumexp.
//
//   P = exp(S - lse)      dS = (dQ K^T + Q dK^T) dS/d(Q K^T)      dP = P dS
//   dlse = rowsum(dP)     dO = P dV + dP V - dlse O
//
// The logsumexp is known, so there are no maxima to track and no output to rescale. Work tiles,
// rings and the producer are those of the forward; a buffer also holds the tangents of its rows.
// Each consumer owns 64 query rows of a work tile and iterates over its KV blocks from right to
// left:
//
//   issue P(j) dV(j) + dP(j) V(j) | issue S(j+1) | issue dS(j+1) | wait for all but dS | P(j+1) |
//   wait for dS | dP(j+1)
//
// The exponentials overlap the two products of dS. Only dP is computed while no product of this
// consumer runs, and the products of the other consumer run then.
#pragma once

#include <kernels/sm90/forward_parts.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/kv_blocks.cuh>
#include <memeff/schedule/persistent.cuh>
#include <memeff/schedule/ping_pong.cuh>
#include <memeff/score/bias/warp_rows.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/probability.cuh>
#include <memeff/score/row_modifiers.cuh>
#include <memeff/score/shared_diagonals.cuh>

namespace memeff {

// Operands: each buffer holds rows of an operand, and after them the same rows of its tangent. The
// producer of the forward copies them through this interface.

// For a CTA of kThreads. A tangent that is zero has neither buffers nor products.
template <class Config, int kThreads>
struct TangentOperands {
  using Element = typename Config::Element;
  using QueryTile = SharedTile<Config::kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<Config::kTileKey, Config::kHeadDim>;
  using ValueTile = SharedTile<Config::kTileKey, Config::kValueDim>;
  // Whether scores have a tangent. Otherwise only the values do, and they are not read.
  static constexpr bool kScoreTangent = Config::kQueryTangent || Config::kKeyTangent;
  static constexpr int kRowWarpgroups = Config::kTileQuery / kWarpgroupRows;
  static constexpr int kQueryBufferBytes = (1 + Config::kQueryTangent) * QueryTile::kBytes;
  static constexpr int kQueryBytes = kQueryBufferBytes / kRowWarpgroups;  // per consumer
  static constexpr int kHeadSteps = Config::kHeadDim / 16;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  static constexpr bool kClearsValues = true;
  static constexpr int kProducerRegisters = 32;

  // The registers of a consumer besides accumulators and probabilities.
  static constexpr int kLeftRegisters = consumer_registers<kThreads, kProducerRegisters>() -
                                        Config::kValueDim / 2 - 3 * Config::kTileKey / 2;
  static constexpr int kQueryRegisters = Config::kHeadDim / 4;
  static constexpr bool kRegisterQueries =
      kLeftRegisters - kQueryRegisters >= main_loop_registers<Config>();
  static constexpr bool kRegisterTangents =
      kLeftRegisters - 2 * kQueryRegisters >= main_loop_registers<Config>();
  // Whether a consumer reads the buffer of its queries for the first KV block only.
  static constexpr bool kReadsQueriesOnce =
      kRegisterQueries && (kRegisterTangents || !Config::kQueryTangent);
  template <bool kInRegisters>
  using Rows =
      cute::conditional_t<kInRegisters, RegisterQueries<QueryTile>, SharedQueries<QueryTile>>;

  // A consumer's queries and their tangents.
  struct Queries {
    Rows<kRegisterQueries> queries;
    Rows<kRegisterTangents> tangents;

    CUTE_DEVICE void take(uint32_t buffer, int warpgroup) {
      queries.take(buffer, warpgroup);
      if constexpr (Config::kQueryTangent) tangents.take(buffer + QueryTile::kBytes, warpgroup);
    }
  };

  TangentParams const& params;
  TangentMaps const& maps;

  CUTE_DEVICE void prefetch() const {
    prefetch_map(maps.query);
    prefetch_map(maps.key);
    if constexpr (kScoreTangent) prefetch_map(maps.value);
    if constexpr (Config::kQueryTangent) prefetch_map(maps.query_tangent);
    if constexpr (Config::kKeyTangent) prefetch_map(maps.key_tangent);
    if constexpr (Config::kValueTangent) prefetch_map(maps.value_tangent);
  }

  // Starts the copies of a consumer's queries of a work tile and of their tangents.
  CUTE_DEVICE void load_queries(WorkItem const& item, int, int warpgroup, uint64_t& arrived,
                                uint32_t buffer) const {
    Origin const origin = query_origin<Config>(params.shape, item.batch);
    int const tile_row = warpgroup * kWarpgroupRows;
    int const row = origin.row + item.tile * Config::kTileQuery + tile_row;
    load_tma_tile<QueryTile>(maps.query, arrived, buffer, tile_row, row, item.head, origin.batch,
                             CacheHint::EVICT_FIRST);
    if constexpr (Config::kQueryTangent) {
      load_tma_tile<QueryTile>(maps.query_tangent, arrived, buffer + QueryTile::kBytes, tile_row,
                               row, item.head, origin.batch, CacheHint::EVICT_FIRST);
    }
  }

  // The tiles of keys, or of values, of a work tile, and of their tangents. A vmap may broadcast an
  // operand, but not its tangent.
  template <class Tile, bool kOperand, bool kTangent>
  struct Pair {
    static constexpr int kTangentOffset = kOperand * Tile::kBytes;
    static constexpr int kBytes = kTangentOffset + kTangent * Tile::kBytes;
    static constexpr int kBufferBytes = kBytes;
    TensorMap const& map;
    TensorMap const& tangent_map;
    int row;
    int head;
    int batch;
    int tangent_batch;

    CUTE_DEVICE void load(int tile, uint64_t& arrived, uint32_t buffer) const {
      int const first = row + tile * Config::kTileKey;
      if constexpr (kOperand) {
        load_tma_tile<Tile>(map, arrived, buffer, 0, first, head, batch, CacheHint::EVICT_LAST);
      }
      if constexpr (kTangent) {
        load_tma_tile<Tile>(tangent_map, arrived, buffer + kTangentOffset, 0, first, head,
                            tangent_batch, CacheHint::EVICT_LAST);
      }
    }

    // Zeros the rows of a buffer from `first` on, with the threads of a consumer.
    CUTE_DEVICE static void clear(uint32_t buffer, int first) {
      if constexpr (kOperand) clear_rows<Tile, kWarpgroupSize>(buffer, first);
      if constexpr (kTangent) clear_rows<Tile, kWarpgroupSize>(buffer + kTangentOffset, first);
    }
  };
  using Keys = Pair<KeyTile, true, Config::kKeyTangent>;
  using Values = Pair<ValueTile, kScoreTangent, Config::kValueTangent>;

  CUTE_DEVICE Keys keys(WorkItem const& item, int) const {
    return pair<Keys>(params.key, maps.key, maps.key_tangent, item);
  }
  CUTE_DEVICE Values values(WorkItem const& item, int) const {
    return pair<Values>(params.value, maps.value, maps.value_tangent, item);
  }

  // A NaN beyond the key length would reach the tangents of sums over valid scores as 0 * NaN.
  CUTE_DEVICE static void clear_keys(uint32_t keys, int first) { Keys::clear(keys, first); }
  CUTE_DEVICE static void clear_values(uint32_t values, int first) { Values::clear(values, first); }

  // Starts the product of the scores, Q K^T.
  template <class Scores>
  CUTE_DEVICE static void multiply_keys(Scores& scores, Queries const& rows, uint32_t queries,
                                        uint32_t keys, int warpgroup) {
    warpgroup_gemm<Element, kHeadSteps>(scores, rows.queries.operand(queries, warpgroup),
                                        DescriptorOperand<KeyTile, Contiguous::k>(keys), false);
  }

  // Starts the products of their tangent, dQ K^T + Q dK^T.
  template <class Scores>
  CUTE_DEVICE static void multiply_key_tangents(Scores& tangents, Queries const& rows,
                                                uint32_t queries, uint32_t keys, int warpgroup) {
    using Right = DescriptorOperand<KeyTile, Contiguous::k>;
    if constexpr (Config::kQueryTangent) {
      warpgroup_gemm<Element, kHeadSteps>(
          tangents, rows.tangents.operand(queries + QueryTile::kBytes, warpgroup), Right(keys),
          false);
    }
    if constexpr (Config::kKeyTangent) {
      warpgroup_gemm<Element, kHeadSteps>(tangents, rows.queries.operand(queries, warpgroup),
                                          Right(keys + Keys::kTangentOffset),
                                          Config::kQueryTangent);
    }
  }

  // Starts the products of a KV block that are added to the output, P dV + dP V.
  template <class Output, class Left>
  CUTE_DEVICE static void multiply_values(Output& output, Left const& probabilities,
                                          Left const& tangents, uint32_t values) {
    using Right = DescriptorOperand<ValueTile, Contiguous::outer>;
    if constexpr (Config::kValueTangent) {
      warpgroup_gemm<Element, kKeySteps>(output, probabilities,
                                         Right(values + Values::kTangentOffset));
    }
    if constexpr (kScoreTangent) {
      warpgroup_gemm<Element, kKeySteps>(output, tangents, Right(values));
    }
  }

 private:
  template <class Rows>
  CUTE_DEVICE Rows pair(TensorView const& tensor, TensorMap const& map, TensorMap const& tangent,
                        WorkItem const& item) const {
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    return {
        map, tangent, source.origin.row, source.head, source.batch(tensor), source.origin.batch};
  }
};

// The rows of a consumer: what it reads of the forward's results, and what it writes.

// The two rows of a work tile in which a lane has elements. Grid is that of the scores.
template <class Config, class Grid>
struct TangentRows {
  static constexpr int kRows = 2;

  float logsumexp[kRows];  // in base 2; +inf makes every probability exactly 0
  float tangent[kRows];    // of the logsumexp: this lane's part of the sums of a row

  CUTE_DEVICE TangentRows(TangentParams const& params, WorkItem const& item, int query_length) {
    Origin const origin = query_origin<Config>(params.shape, item.batch);
    float const* const of_head =
        params.logsumexp + logsumexp_offset<Config>(params.shape, origin, item.head);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      int const row = item.tile * Config::kTileQuery + Grid::element_row(2 * r, 0);
      float own = row < query_length ? of_head[row] : -infinity();
      // As in a backward: such a row has no keys, or a bias so large that its exponents lose all
      // precision.
      bool const empty = fabsf(own) >= kWholeFloats;
      if constexpr (shifts_rows<Config>()) {
        // The logsumexp contains this bias, but the scores of the main loop do not.
        if (!empty) own -= row_bias<Config>(params.bias, item.batch, item.head, row);
      }
      logsumexp[r] = empty ? infinity() : own * kLog2e;
      tangent[r] = 0.0f;
    }
  }

  // The tangents of the logsumexp, summed over the lanes of a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      tangent[r] += __shfl_xor_sync(0xffffffffu, tangent[r], 1);
      tangent[r] += __shfl_xor_sync(0xffffffffu, tangent[r], 2);
    }
  }
};

template <class Config, class Grid>
struct TangentOutputSm90 {
  using Element = typename Config::Element;
  static constexpr int kBlocks = Config::kValueDim / 8;

  using ForwardRow = RowVectors<kBlocks>;
  // Both rows of the forward's output, loaded while the last product runs. Above 192 columns they
  // would spill.
  static constexpr bool kLoadsEarly = Config::kValueDim <= 192;
  struct ForwardRows {
    ForwardRow rows[kLoadsEarly ? 2 : 1];
  };

  CUTE_DEVICE static ForwardRows load(TangentParams const& params, WorkItem const& item,
                                      int query_length) {
    ForwardRows found;
    if constexpr (kLoadsEarly) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) found.rows[r] = load_row(params, item, query_length, r);
    }
    return found;
  }

  // Writes the tangents of output and logsumexp of this warp's valid rows of a work tile, those
  // below `query_length`. `sums` are those of P dV + dP V.
  template <class Rows, class Sums>
  CUTE_DEVICE static void write(TangentParams const& params, WorkItem const& item, int query_length,
                                Rows& rows, ForwardRows const& forward, Sums& sums) {
    ProblemShape const& shape = params.shape;
    rows.finish();
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const query = item.tile * Config::kTileQuery + Grid::element_row(0, 0);
    char* const out =
        row_pointer<Element>(params.out_tangent, origin.batch, origin.row + query, item.head) +
        lane_column() * int(sizeof(Element));
    float* const logsumexp =
        params.logsumexp_tangent + logsumexp_offset<Config>(shape, origin, item.head) + query;
    float const scale = probability_scale<Config>(params);
    CUTE_UNROLL
    for (int r = 0; r < Rows::kRows; ++r) {
      ForwardRow row = kLoadsEarly ? forward.rows[r % (kLoadsEarly ? 2 : 1)]
                                   : load_row(params, item, query_length, r);
      row.transpose();
      CUTE_UNROLL
      for (int n = 0; n < kBlocks; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& sum = sums(2 * r + i, 0, n);
          float const shift = rows.tangent[r] * unpack<Element>(row.pair(n), i);
          sum = fmaf(sum, scale, -shift);
        }
      }
      int const below = Grid::element_row(2 * r, 0) - Grid::element_row(0, 0);
      bool const valid = query + below < query_length;
      store_global_if(valid && threadIdx.x % 4 == 0, logsumexp + below, rows.tangent[r]);
      store_row<Element>(out + below * params.out_tangent.row_stride * int(sizeof(Element)), sums,
                         r, shape.value_dim, valid);
    }
  }

  // Writes zeros to the rows [row, row_end) of a work tile that are not valid.
  CUTE_DEVICE static void write_empty(TangentParams const& params, WorkItem const& item,
                                      int query_length, int row, int row_end) {
    write_empty_rows<Config>(params.shape, params.out_tangent, params.logsumexp_tangent, 0.0f, item,
                             query_length, row, row_end);
  }

  // Writes zeros to a CTA's part of the queries that belong to no sequence.
  template <int kThreads>
  CUTE_DEVICE static void clear_gap(TangentParams const& params, WorkItem const& item, int length,
                                    int tiles) {
    clear_query_gap<Config, kThreads>(Gap::of_queries(params.shape, item.batch, length),
                                      params.shape, params.out_tangent, params.logsumexp_tangent,
                                      0.0f, item, tiles);
  }

 private:
  CUTE_DEVICE static ForwardRow load_row(TangentParams const& params, WorkItem const& item,
                                         int query_length, int r) {
    ProblemShape const& shape = params.shape;
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const query = item.tile * Config::kTileQuery + Grid::element_row(2 * r, 0);
    ForwardRow found;
    found.load(row_pointer<Element>(params.out, origin.batch, origin.row + query, item.head) +
                   lane_column() * int(sizeof(Element)),
               shape.value_dim, query < query_length);
    return found;
  }
};

// Main loop: a consumer runs it for the work tiles that it has rows of.

// run() is called by the kernel with all threads of a consumer warpgroup.
template <class Config, class Kernel>
struct TangentMainLoopSm90 {
  using Element = typename Config::Element;
  using Blocks = typename Kernel::Blocks;
  using Consumer = WorkTileConsumerSm90<Config, Kernel>;
  using Control = typename Kernel::Control;
  using KeptBlocks = typename Kernel::KeptBlocks;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using Operands = typename Kernel::Operands;
  using OutGrid = typename Kernel::OutGrid;
  using Output = typename Kernel::OutputWriter;
  using ConsumerState = typename Consumer::ConsumerState;
  using Probabilities = typename Kernel::Probabilities;
  using Queries = typename Operands::Queries;
  using Rows = typename Kernel::Rows;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using WorkTile = typename Kernel::WorkTile;
  using Accumulators = decltype(ScoreGrid::make_accumulators());
  using LeftOperand = decltype(as_left_operand<Element>(Accumulators{}));
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;

  // Computes all work tiles of one consumer.
  CUTE_DEVICE static void run(TangentParams const& params, Control& control, uint32_t tiles) {
    ConsumerState at = {};
    at.warpgroup = warpgroup_index();
    at.row_warpgroup = at.warpgroup;
    at.leader = threadIdx.x % kWarpSize == 0;
    while (true) {
      WorkTile const work_tile = control.take_work_tile(at.slot);
      if (work_tile.item.batch < 0) break;
      if (Consumer::has_rows(work_tile, at.row_warpgroup)) {
        compute(params, control, tiles, work_tile, at);
      } else {
        Consumer::skip_work_tile(params, control, work_tile.item, at);
      }
      at.query.advance();
    }
  }

 private:
  // Computes the rows of this consumer of a work tile.
  CUTE_DEVICE static void compute(TangentParams const& params, Control& control, uint32_t tiles,
                                  WorkTile const& work_tile, ConsumerState& at) {
    WorkItem const& item = work_tile.item;
    Mask const mask(params.mask, params.shape, item.batch);
    Blocks const range(params, mask, item, 0);
    int tile = range.first(mask, item, at.row_warpgroup);
    Rows rows(params, item, mask.query_length);
    Queries queries;
    begin_work_tile(params, control, tiles, at, mask, item, range, tile, queries);
    auto sums = OutGrid::make_accumulators();        // P dV + dP V; (4, 1, MMA_N)
    auto scores = ScoreGrid::make_accumulators();    // S, then P times the derivative of S
    auto tangents = ScoreGrid::make_accumulators();  // dS, then dP
    LeftOperand probabilities;
    LeftOperand probability_tangents;
    // Hazard: clear them before the first product. Otherwise ptxas waits for it before it assigns
    // registers.
    cute::clear(sums);
    fence_accumulators(sums);
    bool begins = true;  // the first KV block
    begin_scores(control, tiles, at, queries, scores);
    begin_score_tangents(tiles, at, queries, tangents);
    CUTE_NO_UNROLL
    while (true) {
      KeptBlocks const kept(params, item.batch, item.head, item.tile * kTileQuery, tile * kTileKey);
      wait_products<Operands::kScoreTangent ? 1 : 0>();  // S, and the sums of the previous block
      fence_accumulators(scores);
      fence_accumulators(sums);
      if (!begins) release_values(control, at);
      exponentiate(params, mask, item, tile, range, tiles, at, rows, kept, scores, probabilities);
      fence_accumulators(scores);
      // Hazard: keep this wait here, because it ends the basic block. Without it ptxas sinks the
      // exponentials below the wait for dS, which they should overlap.
      control.value.wait(at.value);
      wait_products<0>();
      fence_accumulators(tangents);
      // Hazard: release only after a product has used the registers that were loaded from the
      // buffer.
      release_keys(control, at, Operands::kReadsQueriesOnce ? begins : tile == range.begin);
      if constexpr (Operands::kScoreTangent) {
        multiply(scores, tangents);
        probability_tangents = as_left_operand<Element>(tangents);
        modify_probabilities(params, item, tile, kept, probability_tangents);
      }
      fence_accumulators(sums);
      begin_products();
      Operands::multiply_values(sums, probabilities, probability_tangents,
                                at_use(Kernel::values(tiles, at.value)));
      commit_products();
      begins = false;
      if (tile == range.begin) break;
      tile = range.next(tile);
      begin_scores(control, tiles, at, queries, scores);
      rows_add(rows, tangents);
      begin_score_tangents(tiles, at, queries, tangents);
    }
    rows_add(rows, tangents);
    auto const forward = Output::load(params, item, work_tile.query_length);
    wait_products<0>();
    fence_accumulators(sums);
    release_values(control, at);
    Output::write(params, item, work_tile.query_length, rows, forward, sums);
    finish_work_tile(params, control, at, work_tile);
  }

  // Takes the queries of a work tile, and skips the KV blocks above `tile`, its first.
  CUTE_DEVICE static void begin_work_tile(TangentParams const& params, Control& control,
                                          uint32_t tiles, ConsumerState& at, Mask const& mask,
                                          WorkItem const& item, Blocks const& range, int tile,
                                          Queries& queries) {
    modifiers_of(params, mask, item, tiles).load(tile * kTileKey);
    // Hazard: skip them alternately, because the producer may fill one ring only when the other is
    // empty.
    CUTE_NO_UNROLL
    for (int count = range.passed(tile + 1); count > 0; --count) {
      Consumer::skip(control.key, at.key, 1, at.leader);
      Consumer::skip(control.value, at.value, 1, at.leader);
    }
    Consumer::clear_beyond(
        control.key, at.key, mask, params.shape, tile, at.warpgroup,
        [&](int first) { Operands::clear_keys(Kernel::keys(tiles, at.key), first); });
    Consumer::clear_values(control, mask, params.shape, tile, at.value, tiles, at.warpgroup);
    control.query[at.row_warpgroup].wait(at.query);
    queries.take(Kernel::queries(tiles, at.query), at.row_warpgroup);
  }

  // The address of a buffer. With wide rows the descriptors of all steps of products are computed
  // at each use: ptxas would compute them before the loop, and spill 260 bytes at head dim 256.
  CUTE_DEVICE static uint32_t at_use(uint32_t buffer) {
    if constexpr (Config::kHeadDim + Config::kValueDim > 320) hide_value(buffer);
    return buffer;
  }

  CUTE_DEVICE static void begin_scores(Control& control, uint32_t tiles, ConsumerState const& at,
                                       Queries const& queries, Accumulators& scores) {
    control.key.wait(at.key);
    fence_accumulators(scores);
    begin_products();
    Operands::multiply_keys(scores, queries, at_use(Kernel::queries(tiles, at.query)),
                            at_use(Kernel::keys(tiles, at.key)), at.row_warpgroup);
    commit_products();
  }

  CUTE_DEVICE static void begin_score_tangents(uint32_t tiles, ConsumerState const& at,
                                               Queries const& queries, Accumulators& tangents) {
    if constexpr (Operands::kScoreTangent) {
      fence_accumulators(tangents);
      begin_products();
      Operands::multiply_key_tangents(tangents, queries, at_use(Kernel::queries(tiles, at.query)),
                                      at_use(Kernel::keys(tiles, at.key)), at.row_warpgroup);
      commit_products();
    }
  }

  CUTE_DEVICE static void release_keys(Control& control, ConsumerState& at, bool releases_queries) {
    if (at.leader) {
      control.key.release(at.key);
      if (releases_queries) control.query[at.row_warpgroup].release(at.query);
    }
    at.key.advance();
  }

  CUTE_DEVICE static void release_values(Control& control, ConsumerState& at) {
    if (at.leader) control.value.release(at.value);
    at.value.advance();
  }

  // Turns scores into probabilities, an operand, and replaces the scores with P times their
  // derivative with respect to dQ K^T + Q dK^T.
  CUTE_DEVICE static void exponentiate(TangentParams const& params, Mask const& mask,
                                       WorkItem const& item, int tile, Blocks const& range,
                                       uint32_t tiles, ConsumerState const& consumer,
                                       Rows const& rows, KeptBlocks const& kept,
                                       Accumulators& scores, LeftOperand& probabilities) {
    int const column = tile * kTileKey;
    int const own_row = consumer.row_warpgroup * kWarpgroupRows;
    ScoreTilePosition const at = {item.batch, item.head, item.tile * kTileQuery, column};
    Modifiers const modifiers = modifiers_of(params, mask, item, tiles);
    auto derivatives = ScoreGrid::make_accumulators();  // no registers if they are constant
    modifiers.recompute_with_derivatives(scores, derivatives, at, column);
    modifiers.load_next(tile > range.begin, [&] { return range.next(tile) * kTileKey; });
    mask.template apply<kWarpgroupRows, kTileKey>(
        scores, params, at, range.is_partial(tile, consumer.row_warpgroup), own_row);
    if (range.is_empty(tile, consumer.row_warpgroup)) cute::fill(scores, -infinity());
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(scores); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& score = scores(i, 0, n);
        score = probability(score, params.scale.softmax_scale, rows.logsumexp[i / 2]);
      }
    }
    if constexpr (Config::kValueTangent) {
      probabilities = as_left_operand<Element>(scores);
      modify_probabilities(params, item, tile, kept, probabilities);
    }
    if constexpr (Operands::kScoreTangent) {
      float const scale = params.scale.gradient_scale;
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        if constexpr (Modifiers::kConstantDerivative) {
          scores(i) *= scale;
        } else {
          scores(i) = Modifiers::product(scores(i) * scale, derivatives(i));
        }
      }
    }
  }

  // dP = P dS, given P times the derivative of the scores.
  CUTE_DEVICE static void multiply(Accumulators const& scores, Accumulators& tangents) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) tangents(i) *= scores(i);
  }

  // Adds dP to the tangents of the logsumexp of the rows.
  CUTE_DEVICE static void rows_add(Rows& rows, Accumulators const& tangents) {
    if constexpr (Operands::kScoreTangent) {
      CUTE_UNROLL
      for (int r = 0; r < Rows::kRows; ++r) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(tangents); ++n) {
          rows.tangent[r] += tangents(2 * r, 0, n) + tangents(2 * r + 1, 0, n);
        }
      }
    }
  }

  CUTE_DEVICE static void modify_probabilities(TangentParams const& params, WorkItem const& item,
                                               int tile, KeptBlocks const& kept,
                                               LeftOperand& probabilities) {
    Probabilities::forward(params, kept, item.batch, item.head, item.tile * kTileQuery,
                           tile * kTileKey, probabilities);
  }

  CUTE_DEVICE static void finish_work_tile(TangentParams const& params, Control& control,
                                           ConsumerState& at, WorkTile const& work_tile) {
    WorkItem const& item = work_tile.item;
    int const row = item.tile * kTileQuery + at.row_warpgroup * kWarpgroupRows;
    Output::write_empty(params, item, work_tile.query_length, max(row, work_tile.query_length),
                        row + kWarpgroupRows);
    Consumer::clear_gap(params, item, work_tile.query_length);
    Consumer::release_work_tile(control, at);
  }

  // The modifiers of a work tile. They are constructed at each use, so that they occupy no
  // registers between two KV blocks.
  CUTE_DEVICE static Modifiers modifiers_of(TangentParams const& params, Mask const& mask,
                                            WorkItem const& item, uint32_t tiles) {
    return {{params.scale},
            {params},
            {params.bias,
             {params.bias, item},
             mask,
             item.tile * kTileQuery,
             tiles + Kernel::kBiasOffset}};
  }
};

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaTangentSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kConsumerGroups = 1;
  static constexpr int kRowWarpgroups = kTileQuery / kWarpgroupRows;  // consumers
  static constexpr int kConsumers = kRowWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;

  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, kConsumerWarps, 16>;
  using OutGrid = WarpGrid<kTileQuery, Config::kValueDim, kConsumerWarps, 16>;
  using Schedule = PersistentSchedule<Config, kTileQuery, sizeof(Element)>;
  using Scheduler = TileScheduler<Schedule>;
  using Operands = TangentOperands<Config, kThreads>;
  static constexpr int kConsumerRegisters =
      consumer_registers<kThreads, Operands::kProducerRegisters>();
  using Probabilities = ProbabilityModifiers<Config, ScoreGrid>;
  using KeptBlocks = typename Probabilities::Tile;
  using Keys = typename Operands::Keys;
  using Values = typename Operands::Values;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQueryStages = Config::kQueryStages;

  using Mask = ScoreMask<Config, ScoreGrid>;
  using Bias = WarpRowsBias<Config, ScoreGrid, kConsumerWarps, kTileKey, true,
                            WarpBiasPointer<Config, ScoreGrid>, Mask>;
  using Modifiers = ScoreModifiers<Config, Bias, ScoreFunction<Config, ScoreGrid>>;
  using Diagonals = NoSharedDiagonals<Config, ScoreGrid>;
  using Blocks = KvBlocks<Config, Mask, kConsumerGroups>;
  using Rows = TangentRows<Config, ScoreGrid>;
  using OutputWriter = TangentOutputSm90<Config, OutGrid>;
  using PingPong = PingPongBarrier<false, kRowWarpgroups, 0>;

  using WorkTile = QueryWorkTile;
  using Control = QueryTileRings<kQueryStages, kStages, kRowWarpgroups>;
  static constexpr int kWorkTileStages = Control::kWorkTileStages;
  static constexpr int kKeyOffset = kQueryStages * Operands::kQueryBufferBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * Keys::kBufferBytes;
  static constexpr int kBiasOffset = kValueOffset + kStages * Values::kBufferBytes;
  static constexpr int kControlOffset = kBiasOffset + Bias::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  // The addresses of the buffers in shared memory.
  CUTE_DEVICE static uint32_t queries(uint32_t tiles, PipelineStage<kQueryStages> const& stage) {
    return tiles + stage.index * Operands::kQueryBufferBytes;
  }
  CUTE_DEVICE static uint32_t keys(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kKeyOffset + stage.index * Keys::kBufferBytes;
  }
  CUTE_DEVICE static uint32_t values(uint32_t tiles, PipelineStage<kStages> const& stage) {
    return tiles + kValueOffset + stage.index * Values::kBufferBytes;
  }

  CUTE_DEVICE static void run(TangentParams const& params, TangentMaps const& maps) {
    Operands const operands{params, maps};
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      operands.prefetch();
      control.init(kConsumerWarps, kConsumerGroups);
    }
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      lower_registers<Operands::kProducerRegisters>();
      ForwardProducerSm90<Config, FmhaTangentSm90>::run(params, operands, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      TangentMainLoopSm90<Config, FmhaTangentSm90>::run(params, control, tiles);
    }
  }
};

}  // namespace memeff
