// A bias in shared memory. Each warp copies the rows that it owns, so it waits for no other warp.
#pragma once

#include <memeff/core/work_item.cuh>
#include <memeff/score/bias/add.cuh>

namespace memeff {

// The address of the bias of a warp's rows, recomputed each time so that it occupies no register
// between two tiles.
template <class Config, class Grid>
struct WarpBiasPointer {
  ScoreView const& bias;
  WorkItem const& item;

  CUTE_DEVICE char const* get() const {
    return bias_row<Config>(bias, item.batch, item.head,
                            item.tile * Config::kTileQuery + Grid::row(thread_index()));
  }
};

// The bias of a forward whose warps own rows, with the interface that ScoreModifiers expects.
// kWarps warps have tiles of kColumns columns each. FirstRow::get() is the address of a warp's
// first row; Mask has the numbers of valid rows and columns. kWaits: add() waits for the copies,
// instead of the main loop. Does nothing without a bias.
template <class Config, class Grid, int kWarps, int kColumns, bool kWaits, class FirstRow,
          class Mask, bool kBias = has_bias_tile<Config>()>
struct WarpRowsBias {
  using Element = typename Config::BiasElement;
  using Tile = BiasTile<Config, Grid::kWarpRows, kColumns, kWarpSize>;
  static constexpr int kBytes = kWarps * Tile::kBytes;
  static constexpr int kCopyGroups = 1;  // that load() leaves in flight

  ScoreView const& bias;
  FirstRow first_row;
  Mask const& mask;
  int row;         // first of the CTA
  uint32_t tiles;  // in shared memory

  // Starts the copy of the tile at `column`. The whole warp must have added the previous tile.
  CUTE_DEVICE void load(int column) const {
    int const thread = thread_index();
    Tile::copy(tiles + thread / kWarpSize * Tile::kBytes, thread % kWarpSize, source(column),
               row_bytes(), mask.query_length - row - Grid::row(thread), mask.key_length - column);
    commit_copies();
  }

  // As above if there is a next tile, at next_column().
  template <class NextColumn>
  CUTE_DEVICE void load_next(bool exists, NextColumn next_column) const {
    if (exists) load(next_column());
  }

  // Adds the tile at `column`.
  template <class Scores>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, int column) const {
    if constexpr (kWaits) {
      wait_copies<0>();
      __syncwarp();  // the bias of all lanes has arrived
    }
    uint32_t const tile = tiles + thread_index() / kWarpSize * Tile::kBytes;
    add_bias(scores, BiasReader<Tile>(tile, 0, 0, first_row.get(), row_bytes()), bias_scale);
    __syncwarp();  // all lanes have read this tile
  }

 private:
  CUTE_DEVICE char const* source(int column) const {
    return first_row.get() + column * (long long)sizeof(Element);
  }
  CUTE_DEVICE long long row_bytes() const { return bias.row_stride * (long long)sizeof(Element); }
};

template <class Config, class Grid, int kWarps, int kColumns, bool kWaits, class FirstRow,
          class Mask>
struct WarpRowsBias<Config, Grid, kWarps, kColumns, kWaits, FirstRow, Mask, false> {
  static constexpr int kBytes = 0;
  static constexpr int kCopyGroups = 0;

  CUTE_DEVICE WarpRowsBias(ScoreView const&, FirstRow const&, Mask const&, int, uint32_t) {}
  CUTE_DEVICE void load(int) const {}
  template <class NextColumn>
  CUTE_DEVICE void load_next(bool, NextColumn) const {}
  template <class Scores>
  CUTE_DEVICE void add(Scores&, float, int) const {}
};

}  // namespace memeff
