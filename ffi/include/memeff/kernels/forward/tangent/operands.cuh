// The operands of the Hopper tangent kernel: each buffer holds rows of an operand, and after them
// the same rows of its tangent. The producer of the forward copies them through this interface.
#pragma once

#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/kernels/forward/operands_sm90.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>

namespace memeff {

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

}  // namespace memeff
