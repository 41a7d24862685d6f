// The operands of the split forward's products: how tiles get to shared memory and are read from
// it.
#pragma once

#include <memeff/collective/consumer_groups.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/warp_grid.cuh>

namespace memeff {

// How warps divide a score tile and an output tile. Groups that take whole segments have a KV block
// of kTileKey keys each, of different segments. Other groups divide the keys of one block.
template <class Config>
struct SplitTiles {
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;

  using ConsumerGroup = WarpConsumerGroups<Config::kWarps, Config::kKeyWarps>;
  static constexpr int kWarpRows = kTileQuery / ConsumerGroup::kWarps;
  static constexpr bool kGroupsTakeSegments = Config::kSegmentKeys > 0 && Config::kKeyWarps > 1;
  static constexpr int kConsumerGroupKeys =
      kGroupsTakeSegments ? kTileKey : kTileKey / Config::kKeyWarps;
  template <int kColumns, int kWarps>
  using Grid =
      cute::conditional_t<kGroupsTakeSegments,
                          GroupGrid<kTileQuery, kColumns, ConsumerGroup::kWarps, kWarpRows>,
                          WarpGrid<kTileQuery, kColumns, kWarps, kWarpRows>>;
  using ScoreGrid = Grid<kTileKey, Config::kWarps>;
  using OutGrid = Grid<Config::kValueDim, ConsumerGroup::kWarps>;  // per group
  static_assert(ScoreGrid::kWarpColumns == kConsumerGroupKeys && OutGrid::kColumnWarps == 1);
};

// A row of queries in global memory. If it is not valid, its row of the tile becomes zero.
struct QueryRow {
  char const* first;
  bool valid;
};

// The operands of FmhaForwardSplitSm80 if keys and values have the query's dtype. Float8Operands
// has the same interface and converts them.
template <class Config>
struct SplitOperands : SplitTiles<Config> {
  using Tiles = SplitTiles<Config>;
  using OutGrid = typename Tiles::OutGrid;
  using Element = typename Config::Element;  // for both products
  using QueryTile = SharedTile<Tiles::kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<Tiles::kConsumerGroupKeys, Config::kHeadDim>;
  using ValueTile = SharedTile<Tiles::kConsumerGroupKeys, Config::kValueDim>;

  static constexpr bool kCopiesQuery = true;  // by cp.async
  static constexpr int kScaleBytes = 0;       // in shared memory, after the tiles

  CUTE_DEVICE SplitOperands(ForwardParams const&, int, int, uint32_t) {}

  // Starts the copies of a tile of queries. row_at(row of the tile) returns a QueryRow.
  template <class RowAt>
  CUTE_DEVICE void load_query(RowAt row_at, int head_dim, uint32_t tile) const {
    constexpr int kRowChunks = Config::kHeadDim / 8;
    for (int i = threadIdx.x; i < Tiles::kTileQuery * kRowChunks; i += Tiles::kThreads) {
      int const tile_row = i / kRowChunks;
      int const chunk = i % kRowChunks;
      QueryRow const row = row_at(tile_row);
      copy_async(tile + QueryTile::byte_offset(tile_row, chunk), row.first + chunk * 16,
                 row.valid && chunk * 8 < head_dim);
    }
  }

  // Called once all queries are in shared memory, to read the factors of their rows; there are
  // none.
  CUTE_DEVICE void begin() {}

  // Starts the copies of the scales of keys; there are none.
  template <class Pages>
  CUTE_DEVICE void load_scales(int, int, Pages const&) const {}

  // scores = query * keys of a stage.
  template <class Scores, class Query>
  CUTE_DEVICE void multiply_keys(Scores& scores, Query const& query, uint32_t keys, int) const {
    using Keys = RightOperand<KeyTile, Contiguous::k, Tiles::ScoreGrid::kColumnBlocks>;
    warp_gemm<Element, Config::kHeadDim / 16>(scores, query, Keys(keys, 0));
  }

  // output += probabilities * values of a stage.
  template <class Output, class Probabilities>
  CUTE_DEVICE void multiply_values(Output& output, Probabilities const& probabilities,
                                   uint32_t values, int) const {
    using Values = RightOperand<ValueTile, Contiguous::outer, OutGrid::kColumnBlocks>;
    warp_gemm<Element, Tiles::kConsumerGroupKeys / 16>(output, probabilities, Values(values, 0));
  }

  // The factor of the output at the end.
  CUTE_DEVICE float output_scale() const { return 1.0f; }

  // Orders the columns of the output: elements 2i and 2i + 1 of output(., m, n) are columns
  // column(n) and column(n) + 1, here from the start.
  template <class Output>
  CUTE_DEVICE static void order_columns(Output&) {}
  CUTE_DEVICE static int column(int n) {
    return OutGrid::element_column(0, n, Tiles::ConsumerGroup::thread());
  }
};

}  // namespace memeff
