// The gradient of the bias: dS, summed over the dims in which the bias is broadcast.
//
// Config::kBiasGradient selects one of four ways:
//   full          nothing is broadcast: each element has one owner, which writes it
//   common        broadcast over the batch or heads: f32 sums in global memory
//                 (layout/backward_workspaces.cuh)
//   dbias_kernel  broadcast over the batch or heads, and deterministic: a separate kernel,
//                 FmhaBackwardDbias
//   columns       broadcast over rows (and perhaps more): a tile is summed before it is added
// The sums of `common` and `columns` start at zero and are rounded by FmhaBackwardDbiasPostprocess.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/vector.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/layout/score_view.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/score/function.cuh>

namespace memeff {

// The index of a (batch, head) slice of a gradient. A broadcast dim has one index.
template <class Config>
CUTE_DEVICE long long bias_slice(BackwardParams const& params, int batch, int head) {
  ScoreView const& gradient = params.bias_gradient;
  int const heads = gradient.head_stride == 0 ? 1 : params.shape.query_heads;
  return (gradient.batch_stride == 0 ? 0ll : element_of<Config>(gradient, batch)) * heads +
         (gradient.head_stride == 0 ? 0 : head);
}

// The size of the batch dim of the gradient.
template <class Config>
CUTE_DEVICE int bias_elements(BackwardParams const& params) {
  if constexpr (Config::kBroadcastBatch) return params.bias_gradient.share.elements;
  return params.bias_gradient.batch_stride == 0 ? 1 : params.shape.batch;
}

// The dbias kernel; each generation specializes it for the Tiles of each family.
template <class Config, class Tiles = BackwardTiles<Config>>
struct FmhaBackwardDbias;

// One of the count() tiles of the gradient, written by a CTA of the dbias or dbias postprocess
// kernel.
template <class Config, class Tiles = BackwardTiles<Config>>
struct BiasGradientTile {
  using Slice = ScoreViewSlice<typename Config::BiasElement>;
  int slice;
  int row;
  int column;
  int row_bound;  // relative to the first element of the tile, as is column_bound
  int column_bound;
  Slice gradient;

  CUTE_DEVICE BiasGradientTile(BackwardParams const& params, unsigned index)
      : BiasGradientTile(params, index, row_tiles(params), key_tiles(params), heads(params)) {}

  CUTE_DEVICE static int count(BackwardParams const& params) {
    return bias_elements<Config>(params) * heads(params) * row_tiles(params) * key_tiles(params);
  }

  // Stores the elements of block (m, n) of the accumulators.
  CUTE_DEVICE void store(int m, int n, float x, float y, float z, float w) const {
    int const i = Tiles::ScoreGrid::element_row(0, m);
    int const j = Tiles::ScoreGrid::element_column(0, n);
    gradient.store(i, j, i < row_bound ? column_bound : 0, x, y);
    gradient.store(i + 8, j, i + 8 < row_bound ? column_bound : 0, z, w);
  }

  template <class Accumulators>
  CUTE_DEVICE void store_blocks(Accumulators const& sums) const {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(sums); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(sums); ++n) {
        store(m, n, sums(0, m, n), sums(1, m, n), sums(2, m, n), sums(3, m, n));
      }
    }
  }

  // Stores all elements, of accumulators with one row block.
  template <class Accumulators>
  CUTE_DEVICE void store(Accumulators const& sums) const {
    bool const whole = row_bound >= Tiles::kTileQuery && column_bound >= Tiles::kTileKey;
    if (gradient.paired && whole) {
      store_whole(sums);
    } else {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(sums); ++n) {
        store(0, n, sums(0, 0, n), sums(1, 0, n), sums(2, 0, n), sums(3, 0, n));
      }
    }
  }

 private:
  template <class Accumulators>
  CUTE_DEVICE void store_whole(Accumulators const& sums) const {
    using Element = typename Config::BiasElement;
    using Grid = typename Tiles::ScoreGrid;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      Element* const row = gradient.at(Grid::element_row(2 * half, 0), Grid::element_column(0, 0));
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(sums); ++n) {
        *reinterpret_cast<Pair<Element>*>(row + n * 8) = {Element(sums(2 * half, 0, n)),
                                                          Element(sums(2 * half + 1, 0, n))};
      }
    }
  }

  CUTE_DEVICE BiasGradientTile(BackwardParams const& params, unsigned index, unsigned row_tiles,
                               unsigned key_tiles, unsigned heads)
      : slice(index / key_tiles / row_tiles),
        row(index / key_tiles % row_tiles * Tiles::kTileQuery),
        column(index % key_tiles * Tiles::kTileKey),
        row_bound(params.shape.query_length - row),
        column_bound(params.shape.key_length - column),
        gradient(params.bias_gradient, slice / heads, slice % heads, row, column) {}

  CUTE_DEVICE static int row_tiles(BackwardParams const& params) {
    int const rows = params.bias_gradient.row_stride == 0 ? 1 : params.shape.query_length;
    return ceil_div(rows, Tiles::kTileQuery);
  }
  CUTE_DEVICE static int key_tiles(BackwardParams const& params) {
    return ceil_div(params.shape.key_length, Tiles::kTileKey);
  }
  CUTE_DEVICE static int heads(BackwardParams const& params) {
    return params.bias_gradient.head_stride == 0 ? 1 : params.shape.query_heads;
  }
};

// One (batch, head) slice of the scores.
struct ScoreSlice {
  int index;
  int batch;
  int head;
};

// Enumerates the slices of the scores that read one slice of the bias; the dbias kernels iterate
// over them.
template <class Config>
struct BroadcastSlices {
  int first_batch;
  int first_head;
  int heads;
  int count;

  CUTE_DEVICE BroadcastSlices(BackwardParams const& params, int gradient_slice) {
    ProblemShape const& shape = params.shape;
    bool const all_batches = params.bias_gradient.batch_stride == 0;
    bool const all_heads = params.bias_gradient.head_stride == 0;
    int batches = all_batches ? shape.batch : 1;
    first_batch = all_batches ? 0 : all_heads ? gradient_slice : gradient_slice / shape.query_heads;
    if constexpr (Config::kBroadcastBatch) {
      batches = shape.batch / bias_elements<Config>(params);
      first_batch *= batches;
    }
    first_head = all_heads ? 0 : gradient_slice % shape.query_heads;
    heads = all_heads ? shape.query_heads : 1;
    count = heads * batches;
  }

  CUTE_DEVICE int batch(int slice) const { return first_batch + slice / heads; }
  CUTE_DEVICE int head(int slice) const { return first_head + slice % heads; }

  // Iterates without a division.
  CUTE_DEVICE ScoreSlice first() const { return {0, first_batch, first_head}; }
  CUTE_DEVICE ScoreSlice after(ScoreSlice const& slice) const {
    bool const next_batch = slice.head + 1 == first_head + heads;
    return {slice.index + 1, slice.batch + next_batch, next_batch ? first_head : slice.head + 1};
  }
};

// The workspace for `columns`: sums per column of the scores, in rows. Warps add to the row of
// their slice in any order. If the sums must be deterministic, each row of warps (of
// Tiles::kBiasSumRows) has its own row of sums for each (batch, head) slice, and only one thread
// adds to each sum.
template <class Config, class Tiles = BackwardTiles<Config>>
struct ColumnSums {
  static constexpr int kRowWarps = Tiles::kBiasSumRows;

  CUTE_DEVICE static float* row_of(BackwardParams const& params, int batch, int head,
                                   int row_warp) {
    long long row = bias_slice<Config>(params, batch, head);
    if constexpr (Config::kDeterministic) {
      row = ((long long)batch * params.shape.query_heads + head) * kRowWarps + row_warp;
    }
    return params.bias_gradient_sum + row * Tiles::padded_keys(params.shape);
  }

  // The sum of a column over all rows of sums of a slice, in a fixed order.
  CUTE_DEVICE static float total(BackwardParams const& params, int gradient_slice, int column) {
    if constexpr (!Config::kDeterministic) {
      return params.bias_gradient_sum[gradient_slice * Tiles::padded_keys(params.shape) + column];
    }
    BroadcastSlices<Config> const slices(params, gradient_slice);
    float sum = 0.0f;
#pragma unroll 4
    for (int slice = 0; slice < slices.count; ++slice) {
      CUTE_UNROLL
      for (int warp = 0; warp < kRowWarps; ++warp) {
        sum += row_of(params, slices.batch(slice), slices.head(slice), warp)[column];
      }
    }
    return sum;
  }
};

// Writes zeros to a full gradient in the Q blocks that a KV block skips, for all heads of the
// group. kThreads threads divide the work.
template <class Config, int kThreads>
CUTE_DEVICE void clear_skipped(BackwardParams const& params, WorkItem const& item,
                               TileRange const& blocks) {
  if constexpr (Config::kBiasGradient == BiasGradient::full) {
    using Element = typename Config::BiasElement;
    int const column = item.tile * Config::kTileKey;
    int const columns = min(Config::kTileKey, params.shape.key_length - column);
    int const rows = params.shape.query_length;
    auto clear = [&](int head, int begin, int end) {
      ScoreViewSlice<Element> const slice(params.bias_gradient, item.batch, head, 0, column);
      for (int row = begin + threadIdx.x / kWarpSize; row < end; row += kThreads / kWarpSize) {
        for (int i = threadIdx.x % kWarpSize; i < columns; i += kWarpSize) {
          *slice.at(row, i) = Element(0.0f);
        }
      }
    };
    for (int i = 0; i < params.shape.group; ++i) {
      int const head = item.head * params.shape.group + i;
      BlockMaskRow<Config::kBlockMask> const row_of_blocks(blocks, params.block_mask, item.batch,
                                                           head, item.tile,
                                                           ceil_div(rows, Config::kTileQuery));
      if constexpr (Config::kBlockMask) {
        for (int tile = row_of_blocks.begin; tile < row_of_blocks.end;
             tile = row_of_blocks.after(tile)) {
          clear(head, (tile + 1) * Config::kTileQuery,
                row_of_blocks.after(tile) * Config::kTileQuery);
        }
      }
      clear(head, 0, min(row_of_blocks.begin * Config::kTileQuery, rows));
      clear(head, row_of_blocks.end * Config::kTileQuery, rows);
    }
  }
}

template <class Config, BiasGradient kWay = Config::kBiasGradient>
struct BiasGradientWriter;

// No gradient is asked for.
template <class Config>
struct BiasGradientWriter<Config, BiasGradient::none> {
  static constexpr bool kFromTile = false;
  CUTE_DEVICE BiasGradientWriter(BackwardParams const&, ScoreTilePosition) {}
  CUTE_DEVICE void block(int, int, float const (&)[2][4]) {}
  CUTE_DEVICE void finish() {}
};

// A separate kernel computes the gradient.
template <class Config>
struct BiasGradientWriter<Config, BiasGradient::dbias_kernel>
    : BiasGradientWriter<Config, BiasGradient::none> {
  using BiasGradientWriter<Config, BiasGradient::none>::BiasGradientWriter;
};

// The writer of the dbias kernel: adds the gradients of all slices of a CTA to its registers.
template <class Sums>
struct BiasGradientAdder {
  Sums& sums;

  CUTE_DEVICE void block(int m, int column_block, float const (&gradient)[2][4]) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) sums(i % 4, m, 2 * column_block + i / 4) += gradient[i / 4][i % 4];
  }

  CUTE_DEVICE void finish() {}
};

// Each element has one owner, which writes it.
template <class Config>
struct BiasGradientWriter<Config, BiasGradient::full> {
  using Tiles = BackwardTiles<Config>;
  using Grid = typename Tiles::ScoreGrid;
  using Element = typename Config::BiasElement;
  using Slice = ScoreViewSlice<Element>;
  // Whether the tile of dS in shared memory, which dq and dk read, is copied to the gradient. It
  // differs from the gradient if a modifier has a derivative other than 1.
  static constexpr bool kVectors = Config::kBiasAccess == BiasAccess::vectors;
  static constexpr bool kFromTile =
      kVectors && sizeof(Element) == 2 && has_constant_derivative<Config>();
  Slice slice;
  int row_bound;
  int column_bound;

  CUTE_DEVICE BiasGradientWriter(BackwardParams const& params, ScoreTilePosition const& tile)
      : slice(params.bias_gradient, tile.batch, tile.head, tile.row, tile.column),
        row_bound(params.shape.query_length - tile.row),
        column_bound(params.shape.key_length - tile.column) {}

  // gradient[chunk][element] of the 16x16 block (m, column_block).
  CUTE_DEVICE void block(int m, int column_block, float const (&gradient)[2][4]) {
    if constexpr (kFromTile) return;
    int const thread = thread_index();
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const row = Grid::element_row(2 * half, m, thread);
      CUTE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        slice.store(row, Grid::element_column(0, 2 * column_block + chunk, thread),
                    row < row_bound ? column_bound : 0, gradient[chunk][2 * half],
                    gradient[chunk][2 * half + 1]);
      }
    }
  }

  CUTE_DEVICE void finish() {}

  // Stores the dS of a Q block. Hazard: the whole CTA must have written it, and passed a barrier.
  CUTE_DEVICE static void store(BackwardParams const& params, ScoreTilePosition const& position,
                                uint32_t score_tile) {
    Slice const slice(params.bias_gradient, position.batch, position.head, position.row,
                      position.column);
    store_rows<typename Tiles::ScoreTile, Tiles::kThreads>(
        score_tile, reinterpret_cast<char*>(slice.origin), slice.row_stride * sizeof(Element),
        params.shape.query_length - position.row, params.shape.key_length - position.column);
  }
};

// Tiles are added to f32 sums.
template <class Config>
struct BiasGradientWriter<Config, BiasGradient::common> {
  using Tiles = BackwardTiles<Config>;
  static constexpr bool kFromTile = false;
  float* sums;

  CUTE_DEVICE BiasGradientWriter(BackwardParams const& params, ScoreTilePosition const& tile)
      : sums(params.bias_gradient_sum +
             Tiles::bias_tile_offset(params, bias_slice<Config>(params, tile.batch, tile.head),
                                     tile.row / Tiles::kTileQuery, tile.column / Tiles::kTileKey)) {
  }

  CUTE_DEVICE void block(int m, int column_block, float const (&gradient)[2][4]) {
    CUTE_UNROLL
    for (int chunk = 0; chunk < 2; ++chunk) {
      float const(&sum)[4] = gradient[chunk];
      Tiles::Sums::add(sums, m * 2 * Tiles::ScoreGrid::kColumnBlocks + 2 * column_block + chunk,
                       sum[0], sum[1], sum[2], sum[3]);
    }
  }

  CUTE_DEVICE void finish() {}
};

// A tile is summed over its rows, then added to the sums of its columns.
template <class Config>
struct BiasGradientWriter<Config, BiasGradient::columns> {
  using Tiles = BackwardTiles<Config>;
  using Grid = typename Tiles::ScoreGrid;
  static constexpr bool kFromTile = false;
  float* sums;
  float column_sums[Grid::kColumnBlocks][2][2];

  CUTE_DEVICE BiasGradientWriter(BackwardParams const& params, ScoreTilePosition const& tile)
      : sums(ColumnSums<Config>::row_of(params, tile.batch, tile.head,
                                        Grid::row() / Grid::kWarpRows) +
             tile.column) {
    CUTE_UNROLL
    for (int n = 0; n < Grid::kColumnBlocks; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) column_sums[n][i / 2][i % 2] = 0.0f;
    }
  }

  CUTE_DEVICE void block(int, int column_block, float const (&gradient)[2][4]) {
    CUTE_UNROLL
    for (int chunk = 0; chunk < 2; ++chunk) {
      CUTE_UNROLL
      for (int element = 0; element < 4; ++element) {
        column_sums[column_block][chunk][element % 2] += gradient[chunk][element];
      }
    }
  }

  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int n = 0; n < 2 * Grid::kColumnBlocks; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float const sum = row_lanes_sum(column_sums[n / 2][n % 2][i]);
        if (threadIdx.x % kWarpSize < 4) atomicAdd(sums + Grid::element_column(i, n), sum);
      }
    }
  }
};

}  // namespace memeff
