// The operands of the Hopper forward: their copies to shared memory, and their products. The main
// loop and the producer call this interface, so they do not depend on the element type.
#pragma once

#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>

namespace memeff {

// A consumer's queries of a work tile, the left operand of every KV block, in shared memory.
template <class Tile>
struct SharedQueries {
  CUTE_DEVICE void take(uint32_t, int) {}
  CUTE_DEVICE auto operand(uint32_t buffer, int warpgroup) const {
    return DescriptorOperand<Tile, Contiguous::k>(buffer, warpgroup * kWarpgroupRows);
  }
};

// A consumer's queries in registers: products read less shared memory and need fewer descriptors.
// Hazard: release the buffer only after a product has used the registers, see Pipeline::release().
template <class Tile>
struct RegisterQueries {
  RegisterOperand<1, Tile::kColumns / 16, 2> fragments;

  CUTE_DEVICE void take(uint32_t buffer, int warpgroup) {
    fragments = load_operand<Tile, WarpgroupGrid<kWarpgroupRows, 16>>(
        buffer + warpgroup * kWarpgroupRows * Tile::kRowBytes);
  }
  CUTE_DEVICE auto const& operand(uint32_t, int) const { return fragments; }
};

// The registers that the main loop of a consumer needs besides accumulators and operands to overlap
// KV blocks.
template <class Config>
CUTE_HOST_DEVICE constexpr int main_loop_registers() {
  return 40 + (Config::kBias || modifies_probabilities<Config>() ? 40 : 0) +
         (Config::kMask == MaskKind::window ? 40 : 0);
}

// Operands of 16-bit elements, which TMA copies from query, key and value, for a CTA of kThreads.
template <class Config, int kThreads>
struct MappedOperands {
  using Element = typename Config::Element;
  using QueryTile = SharedTile<Config::kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<Config::kTileKey, Config::kHeadDim>;
  using ValueTile = SharedTile<Config::kTileKey, Config::kValueDim>;
  static constexpr int kRowWarpgroups = Config::kTileQuery / kWarpgroupRows;
  static constexpr int kQueryBufferBytes = QueryTile::kBytes;
  static constexpr int kQueryBytes = QueryTile::kBytes / kRowWarpgroups;  // per consumer
  static constexpr int kHeadSteps = Config::kHeadDim / 16;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  // Whether the main loop must zero values beyond a length: they lie in the tensor and may be NaN.
  static constexpr bool kClearsValues = true;
  // Whether probabilities depend on the values that they are multiplied with.
  static constexpr bool kScalesRows = false;
  // Whether the product of scores waits for the product with the previous KV block's values. A
  // consumer without registers for both overlaps only with the products of other consumers.
  static constexpr bool kSequential = false;
  static constexpr int kProducerRegisters = 32;

  // The registers of a consumer besides accumulators and probabilities. The compiler needs some to
  // overlap KV blocks, and more for features. Consumer groups have few KV blocks, so they spend
  // none on the two options below.
  static constexpr int kLeftRegisters = consumer_registers<kThreads, kProducerRegisters>() -
                                        Config::kValueDim / 2 - Config::kTileKey / 2 -
                                        Config::kTileKey / 4;
  static constexpr bool kWindow = Config::kMask == MaskKind::window;
  static constexpr bool kRegisterQueries =
      Config::kConsumerGroups == 1 &&
      kLeftRegisters - Config::kHeadDim / 4 >= main_loop_registers<Config>();
  // Whether the modifiers of a KV block's probabilities are computed while the product of its
  // scores runs, or only when they are needed.
  static constexpr bool kModifiesEarly =
      Config::kConsumerGroups == 1 &&
      kLeftRegisters - Config::kTileKey / 8 >= 32 + (Config::kBias ? 48 : 0) + (kWindow ? 16 : 0);
  using Queries =
      cute::conditional_t<kRegisterQueries, RegisterQueries<QueryTile>, SharedQueries<QueryTile>>;

  ForwardParams const& params;
  ForwardMaps const& maps;

  CUTE_DEVICE void prefetch() const {
    prefetch_map(maps.query);
    prefetch_map(maps.key);
    prefetch_map(maps.value);
  }

  // Starts the copy of a consumer's queries of a work tile.
  CUTE_DEVICE void load_queries(WorkItem const& item, int, int warpgroup, uint64_t& arrived,
                                uint32_t buffer) const {
    Origin const origin = query_origin<Config>(params.shape, item.batch);
    int const tile_row = warpgroup * kWarpgroupRows;
    load_tma_tile<QueryTile>(maps.query, arrived, buffer, tile_row,
                             origin.row + item.tile * Config::kTileQuery + tile_row, item.head,
                             origin.batch, CacheHint::EVICT_FIRST);
  }

  // The tiles of keys, or of values, of a work tile.
  template <class Tile>
  struct Rows {
    static constexpr int kBytes = Tile::kBytes;
    static constexpr int kBufferBytes = Tile::kBytes;
    TensorMap const& map;
    int row;
    int head;
    int batch;
    PageTable<Config> pages;
    int key_length;
    int pool_rows;

    CUTE_DEVICE void load(int tile, uint64_t& arrived, uint32_t buffer) const {
      int const first = tile * Config::kTileKey;
      if constexpr (PageTable<Config>::kPaged) {
        load_pages(first, arrived, buffer);
      } else {
        load_tma_tile<Tile>(map, arrived, buffer, 0, row + first, head, batch,
                            CacheHint::EVICT_LAST);
      }
    }

   private:
    // Copies one box for each page or part of a page. Keys without a valid page get a coordinate
    // beyond the end of the pool, for which TMA fills in zeros. All entries are read before the
    // first copy, so their latencies overlap.
    CUTE_DEVICE void load_pages(int first, uint64_t& arrived, uint32_t buffer) const {
      constexpr int kBoxRows = Config::kKeyBoxRows;
      constexpr int kBoxes = Config::kTileKey / kBoxRows;
      int found[kBoxes];
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        int const key = first + box * kBoxRows;
        found[box] = key < key_length ? pages.row(key) : -1;
      }
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        load_tma_tile<Tile>(map, arrived, buffer, box * kBoxRows,
                            found[box] < 0 ? pool_rows : found[box], head, batch,
                            CacheHint::EVICT_LAST);
      }
    }
  };
  using Keys = Rows<KeyTile>;
  using Values = Rows<ValueTile>;

  CUTE_DEVICE Keys keys(WorkItem const& item, int key_length) const {
    return rows<KeyTile>(params.key, maps.key, item, key_length);
  }
  CUTE_DEVICE Values values(WorkItem const& item, int key_length) const {
    return rows<ValueTile>(params.value, maps.value, item, key_length);
  }

  // Starts the product of a consumer's queries with keys.
  template <class Scores, class QueryOperand>
  CUTE_DEVICE static void multiply_keys(Scores& scores, QueryOperand const& queries,
                                        uint32_t keys) {
    warpgroup_gemm<Element, kHeadSteps>(scores, queries,
                                        DescriptorOperand<KeyTile, Contiguous::k>(keys), false);
  }
  template <class Scores>
  CUTE_DEVICE static void unscale(Scores&, uint32_t, uint32_t, int) {}

  template <class Scores>
  CUTE_DEVICE static auto probabilities(Scores& scores, uint32_t) {
    return as_left_operand<Element>(scores);
  }

  // The accumulators of the products with values are the output itself.
  struct Part {};
  template <class Output>
  CUTE_DEVICE static Output& sums(Output& output, Part&) {
    return output;
  }
  template <class Sums, class Probabilities>
  CUTE_DEVICE static void multiply_values(Sums& output, Probabilities const& probabilities,
                                          uint32_t values, bool begins) {
    warpgroup_gemm<Element, kKeySteps>(
        output, probabilities, DescriptorOperand<ValueTile, Contiguous::outer>(values), !begins);
  }
  template <class Output, class Probabilities>
  CUTE_DEVICE static void add(Output&, Part const&, Probabilities const&, bool) {}

  // Zeros the rows of a buffer of values from `first` to `end`, with the threads of a consumer.
  CUTE_DEVICE static void clear_values(uint32_t values, int first, int end = ValueTile::kRows) {
    clear_rows<ValueTile, kWarpgroupSize>(values, first, end);
  }

 private:
  template <class Tile>
  CUTE_DEVICE Rows<Tile> rows(TensorView const& tensor, TensorMap const& map, WorkItem const& item,
                              int key_length) const {
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    return {map,        source.origin.row,      source.head, source.batch(tensor), source.pages,
            key_length, params.shape.key_tokens};
  }
};

}  // namespace memeff
