// The bias of a Q block and its gradient, in the Hopper backward kernels whose scores are
// transposed: keys are rows of the accumulators, and queries are columns. backward.cuh has a
// QBlockBiasRing, dkdv_work.cuh a QBlockBias, and both a TransposedBiasGradient.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/math.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/layout/score_view.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/score/bias/gradient.cuh>
#include <memeff/score/bias/tile.cuh>

namespace memeff {

// Reads a lane's elements of a BiasTile whose columns are the 16 keys of its warp.
template <class Tile>
class TransposedBiasReader {
 public:
  using Element = typename Tile::Element;
  static constexpr bool kPerRow = Tile::kPerRow;

  // `source` is the address of the tile's first element in global memory.
  CUTE_DEVICE TransposedBiasReader(uint32_t tile, char const* source, long long row_bytes) {
    int const lane = thread_index() % kWarpSize;
    CUTE_UNROLL
    for (int i = 0; i < kPairRows; ++i) {
      int const row = kPerRow ? lane % 4 * 2 + i : 0;
      base_[i] = tile + row * Tile::kRowBytes + lane / 4 * int(sizeof(Element)) +
                 Tile::bit_shift(source + row * row_bytes) / 8;
    }
  }

  // pairs[chunk][half]: two adjacent queries; half is 1 for keys 8-15, chunk is 1 for the second
  // eight queries of a block of 16.
  CUTE_DEVICE void load(float2 (&pairs)[2][2], int block) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const offset =
          (kPerRow ? (2 * block + i / 2) * 8 * Tile::kRowBytes : 0) + i % 2 * 8 * sizeof(Element);
      float const first = load_element(base_[0] + offset);
      float const second = kPairRows == 1 ? first : load_element(base_[kPairRows - 1] + offset);
      pairs[i / 2][i % 2] = make_float2(first, second);
    }
  }

 private:
  static constexpr int kPairRows = kPerRow ? 2 : 1;  // of the tile, for a pair of queries

  CUTE_DEVICE static float load_element(uint32_t address) {
    if constexpr (sizeof(Element) == 4) {
      return __uint_as_float(load_shared(address));
    } else {
      return unpack<Element>(load_shared(address & ~3u) >> address % 4 * 8, 0);
    }
  }

  uint32_t base_[kPairRows];
};

// TransposedBiasReader for a SharedTile of queries and keys, in which the keys of the warp begin at
// `column`.
template <class Element, class Tile>
class TransposedTmaBiasReader {
 public:
  static constexpr bool kPerRow = true;

  CUTE_DEVICE TransposedTmaBiasReader(uint32_t tile, int column) {
    unsigned const lane = unsigned(thread_index()) % kWarpSize;
    base_ = tile + Tile::byte_offset(int(lane / 16 * 8 + lane % 8),
                                     column / Tile::kChunkColumns + int(lane / 8 % 2));
  }

  CUTE_DEVICE void load(float2 (&pairs)[2][2], int block) const {
    uint32_t fragment[4];
    load_matrix<true>(fragment, base_ + block * 16 * Tile::kRowBytes);
    unpack_matrices<Element>(pairs, fragment);
  }

 private:
  uint32_t base_;
};

// Like add_bias(), for transposed scores.
template <class Reader, class Accumulators>
CUTE_DEVICE void add_bias_transposed(Accumulators& scores, Reader const& bias, float bias_scale) {
  float2 pairs[2][2];
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(scores); ++n) {
    if (n % 2 == 0 && (Reader::kPerRow || n == 0)) bias.load(pairs, n / 2);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float2 const pair = pairs[Reader::kPerRow ? n % 2 : 0][half];
      float& first = scores(2 * half, 0, n);
      float& second = scores(2 * half + 1, 0, n);
      first = biased_score(first, pair.x, bias_scale);
      second = biased_score(second, pair.y, bias_scale);
    }
  }
}

// A bias in registers, for kernels without shared memory for it. Each lane loads its own elements
// of a tile while the tensor cores compute the scores, and adds them afterwards.
template <class Config, class Grid, bool kHolds = has_bias_tile<Config>()>
struct RegisterTransposedBias {
  CUTE_DEVICE void load(ScoreView const&, int, int, int, int, int, int) {}
  template <class Accumulators>
  CUTE_DEVICE void add(Accumulators&, float) const {}
};

template <class Config, class Grid>
struct RegisterTransposedBias<Config, Grid, true> {
  using Element = typename Config::BiasElement;
  static constexpr int kRows = 2 * Grid::kRowBlocks;
  // The pairs that a lane holds, of adjacent queries. If the bias is broadcast over rows, one
  // element serves all queries.
  static constexpr bool kPerQuery = Config::kBiasAccess != BiasAccess::columns;
  static constexpr int kPairs = kPerQuery ? 2 * Grid::kColumnBlocks : 1;
  Pair<Element> pairs[kRows][kPairs];

  // Loads the bias of the tile at (row, column) of the scores. Elements beyond the bounds, which
  // are relative to the tile, are 0.
  CUTE_DEVICE void load(ScoreView const& bias, int batch, int head, int row, int column,
                        int row_bound, int column_bound) {
    int const thread = thread_index();
    ScoreViewSlice<Element> const slice(bias, element_of<Config>(bias, batch), head, row, column);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      int const key = Grid::element_row(2 * (r % 2), r / 2, thread);
      int const bound = key < column_bound ? row_bound : 0;
      CUTE_UNROLL
      for (int n = 0; n < kPairs; ++n) {
        int const query = kPerQuery ? Grid::element_column(0, n, thread) : 0;
        pairs[r][n] = {Element(0), Element(0)};
        if (query < bound) pairs[r][n].first = *slice.at(query, key);
        if (kPerQuery && query + 1 < bound) pairs[r][n].second = *slice.at(query + 1, key);
      }
    }
    // Packs pairs; otherwise each 16-bit element would take a whole register.
    if constexpr (sizeof(Element) == 2) {
      CUTE_UNROLL
      for (int i = 0; i < kRows * kPairs; ++i) {
        hide_value(reinterpret_cast<uint32_t&>(pairs[i / kPairs][i % kPairs]));
      }
    }
  }

  template <class Accumulators>
  CUTE_DEVICE void add(Accumulators& scores, float bias_scale) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        Pair<Element> const& pair = pairs[r][kPerQuery ? n : 0];
        float& first = scores(2 * (r % 2), r / 2, n);
        float& second = scores(2 * (r % 2) + 1, r / 2, n);
        first = biased_score(first, float(pair.first), bias_scale);
        second = biased_score(second, float(kPerQuery ? pair.second : pair.first), bias_scale);
      }
    }
  }
};

// The gradient that the main kernel writes or sums: see score/bias/gradient.cuh. A consumer calls
// pair() for its elements of dS, and finish() after a head; a thread keeps `Sums` over the Q blocks
// of the head.
template <class Config, class Tiles, BiasGradient kWay = Config::kBiasGradient>
struct TransposedBiasGradient {
  static constexpr bool kNeeded = false;
  static constexpr bool kFromTile = false;
  struct Sums {};

  CUTE_DEVICE TransposedBiasGradient(BackwardParams const&, ScoreTilePosition const&) {}
  CUTE_DEVICE void pair(Sums&, int, int, float const (&)[2]) const {}
  CUTE_DEVICE static void finish(BackwardParams const&, int, int, int, Sums const&) {}
};

// Each element has one owner, which writes it.
template <class Config, class Tiles>
struct TransposedBiasGradient<Config, Tiles, BiasGradient::full> {
  using Grid = typename Tiles::ScoreGrid;
  using ScoreTile = typename Tiles::ScoreTile;
  using Element = typename Config::BiasElement;
  static constexpr bool kNeeded = true;
  // Whether the tile of dS in shared memory, which dq reads, is copied to the gradient. It differs
  // from the gradient if a modifier has a derivative other than 1.
  static constexpr bool kFromTile = Config::kBiasAccess == BiasAccess::vectors &&
                                    sizeof(Element) == 2 && Config::kQueryGradient &&
                                    has_constant_derivative<Config>();
  struct Sums {};
  ScoreViewSlice<Element> slice;
  int row_bound;
  int column_bound;

  CUTE_DEVICE TransposedBiasGradient(BackwardParams const& params, ScoreTilePosition const& tile)
      : slice(params.bias_gradient, tile.batch, tile.head, tile.row, tile.column),
        row_bound(params.shape.query_length - tile.row),
        column_bound(params.shape.key_length - tile.column) {}

  // Takes two adjacent queries of block n of the accumulators.
  CUTE_DEVICE void pair(Sums&, int n, int half, float const (&gradient)[2]) const {
    if constexpr (kFromTile) return;
    int const thread = thread_index();
    int const key = Grid::element_row(2 * half, 0, thread);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const query = Grid::element_column(i, n, thread);
      if (query < row_bound && key < column_bound) *slice.at(query, key) = Element(gradient[i]);
    }
  }

  // Stores this warp's 16 keys of the dS^T of a Q block. A lane stores four consecutive keys, and
  // the four lanes of a query write one sector.
  CUTE_DEVICE static void store(BackwardParams const& params, ScoreTilePosition const& position,
                                uint32_t score_tile) {
    TransposedBiasGradient const tile(params, position);
    int const thread = thread_index();
    int const lane = thread % kWarpSize;
    int const first_key = Grid::row(thread);
    int const row = first_key + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
    int const key = first_key + lane % 4 * 4;
    __syncwarp();  // all lanes have written
    CUTE_UNROLL
    for (int block = 0; block < Config::kTileQuery / 16; ++block) {
      uint32_t fragment[4];
      load_matrix<true>(fragment, score_tile + ScoreTile::byte_offset(row, 2 * block + lane / 16));
      CUTE_UNROLL
      for (int chunk = 0; chunk < 2; ++chunk) {
        int const query = (2 * block + chunk) * 8 + lane / 4;
        if (query < tile.row_bound && key < tile.column_bound) {
          *reinterpret_cast<uint2*>(tile.slice.at(query, key)) =
              make_uint2(fragment[2 * chunk], fragment[2 * chunk + 1]);
        }
      }
    }
  }

  CUTE_DEVICE static void finish(BackwardParams const&, int, int, int, Sums const&) {}
};

// A lane sums its keys over the queries of a head in registers, then adds them to global memory.
template <class Config, class Tiles>
struct TransposedBiasGradient<Config, Tiles, BiasGradient::columns> {
  using Grid = typename Tiles::ScoreGrid;
  static constexpr bool kNeeded = true;
  static constexpr bool kFromTile = false;
  struct Sums {
    float keys[2] = {0.0f, 0.0f};
  };

  CUTE_DEVICE TransposedBiasGradient(BackwardParams const&, ScoreTilePosition const&) {}

  CUTE_DEVICE void pair(Sums& sums, int, int half, float const (&gradient)[2]) const {
    sums.keys[half] += gradient[0] + gradient[1];
  }

  // After the last Q block of a head; `column` is the first of the KV block.
  CUTE_DEVICE static void finish(BackwardParams const& params, int batch, int head, int column,
                                 Sums const& sums) {
    float* const row = ColumnSums<Config, Tiles>::row_of(params, batch, head, 0) + column;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float const sum = quad_sum(sums.keys[half]);
      if (threadIdx.x % 4 == 0) atomicAdd(row + Grid::element_row(2 * half, 0), sum);
    }
  }
};

// In the dkdv kernel of the two-kernel backward, whose shared memory has no room for a ring.

// Loaded by TMA, into one buffer: the next bias is loaded once this one has been read. The producer
// and the consumer of queries each have an object.
template <class Config, class Tile, class Grid, bool kTma = has_tma_bias<Config>()>
class QBlockBias {
 public:
  static constexpr int kBytes = Tile::kBytes;
  static constexpr bool kRegisterSteps = false;
  struct Control {
    Pipeline<1> bias;
  };

  CUTE_DEVICE static void init(Control& control, int warps) { control.bias.init(warps); }

  CUTE_DEVICE explicit QBlockBias(uint32_t tile) : tile_(tile) {}

  // Called by the producer.
  template <class Work, class QBlock>
  CUTE_DEVICE void produce(BackwardParams const& params, BackwardMaps const& maps, Work const& work,
                           QBlock const& q_block, Control& control) {
    BiasSlice const slice = BiasSlice::of<Config>(params.bias, work.item.batch, q_block.head);
    load_tma_tile<Tile>(maps.bias, control.bias.acquire(stage_, kBytes), tile_, 0, q_block.row(),
                        slice.head, slice.batch, CacheHint::EVICT_NORMAL, work.column);
    stage_.advance();
  }

  // Called by the consumer, while its scores are computed.
  template <class Work, class QBlock, class Mask>
  CUTE_DEVICE void load(BackwardParams const&, Work const&, QBlock const&, Mask const&) {}

  // Adds the bias to the scores. The bias of a row beyond the length may be NaN and would make P
  // NaN, so clear(tile, row) clears the rows of a tile from `row` on, with all threads.
  template <class Scores, class QBlock, class Mask, class Clear>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const& params,
                       QBlock const& q_block, Mask const& mask, Control& control,
                       Clear const& clear) {
    int const row = q_block.row();
    control.bias.wait(stage_);
    if (reads_beyond<Config>(mask.query_length, row + Tile::kRows, params.shape.query_length)) {
      clear(tile_, mask.query_length - row);
    }
    TransposedTmaBiasReader<typename Config::BiasElement, Tile> const reader(
        tile_, Grid::row(thread_index()));
    add_bias_transposed(scores, reader, bias_scale);
  }

  // Called by one lane of each warp. Hazard: everything that depends on the bias must have been
  // stored, because an arrival overtakes pending loads.
  CUTE_DEVICE void release(Control& control) { control.bias.release(stage_); }

  CUTE_DEVICE void advance() { stage_.advance(); }

 private:
  uint32_t tile_;
  PipelineStage<1> stage_;
};

// Each lane loads the bias of its own elements into registers, if there is a bias.
template <class Config, class Tile, class Grid>
class QBlockBias<Config, Tile, Grid, false> {
  using Registers = RegisterTransposedBias<Config, Grid>;

 public:
  static constexpr int kBytes = 0;
  static constexpr bool kRegisterSteps = has_bias_tile<Config>();
  struct Control {};

  CUTE_DEVICE static void init(Control&, int) {}

  CUTE_DEVICE explicit QBlockBias(uint32_t) {}

  template <class Work, class QBlock>
  CUTE_DEVICE void produce(BackwardParams const&, BackwardMaps const&, Work const&, QBlock const&,
                           Control&) {}

  template <class Work, class QBlock, class Mask>
  CUTE_DEVICE void load(BackwardParams const& params, Work const& work, QBlock const& q_block,
                        Mask const& mask) {
    registers_.load(params.bias, work.item.batch, q_block.head, q_block.row(), work.column,
                    mask.query_length - q_block.row(), mask.key_length - work.column);
  }

  template <class Scores, class QBlock, class Mask, class Clear>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const&, QBlock const&,
                       Mask const&, Control&, Clear const&) const {
    registers_.add(scores, bias_scale);
  }

  CUTE_DEVICE void release(Control&) {}

  CUTE_DEVICE void advance() {}

 private:
  Registers registers_;
};

// In the one-kernel backward: a bias arrives with dO of its Q block. One interface has three
// implementations: TMA, with a buffer for each stage; copies by each warp for its own 16 keys, if
// TMA cannot read the array; and no bias.

// No bias: does nothing.
template <class Config, class Tiles, int kStages, bool kTma = has_tma_bias<Config>(),
          bool kBias = has_bias_tile<Config>()>
class QBlockBiasRing {
 public:
  static constexpr bool kTmaBias = false;
  static constexpr int kTmaStageBytes = 0;
  static constexpr int kWarpBytes = 0;

  CUTE_DEVICE explicit QBlockBiasRing(uint32_t) {}
  CUTE_DEVICE void prefetch_map(BackwardMaps const&) const {}
  template <class Work>
  CUTE_DEVICE void produce(BackwardParams const&, BackwardMaps const&, Work const&, int, int, int,
                           uint64_t&) const {}
  template <class Work, class Mask>
  CUTE_DEVICE void load_first(BackwardParams const&, Work const&, Mask const&, int, int) const {}
  template <class Work, class Mask>
  CUTE_DEVICE void load_next(BackwardParams const&, Work const&, Mask const&, int, int) const {}
  CUTE_DEVICE void clear_rows_beyond(int, int) const {}
  template <class Work, class Scores>
  CUTE_DEVICE void add(Scores&, float, BackwardParams const&, Work const&, int, int, int) const {}
};

// TMA: the producer copies a tile per stage.
template <class Config, class Tiles, int kStages>
class QBlockBiasRing<Config, Tiles, kStages, true, true>
    : public QBlockBiasRing<Config, Tiles, kStages, false, false> {
  using Grid = typename Tiles::ScoreGrid;
  using Tile = SharedTile<Tiles::kTileQuery, Tiles::kTileKey>;

 public:
  static constexpr bool kTmaBias = true;
  static constexpr int kTmaStageBytes = Tile::kBytes;

  CUTE_DEVICE explicit QBlockBiasRing(uint32_t tiles)
      : QBlockBiasRing<Config, Tiles, kStages, false, false>(tiles), tiles_(tiles) {}

  CUTE_DEVICE void prefetch_map(BackwardMaps const& maps) const { memeff::prefetch_map(maps.bias); }

  // Called by the producer. `arrived` also counts the bytes of dO.
  template <class Work>
  CUTE_DEVICE void produce(BackwardParams const& params, BackwardMaps const& maps, Work const& work,
                           int head, int q_block, int stage, uint64_t& arrived) const {
    BiasSlice const slice = BiasSlice::of<Config>(params.bias, work.item.batch, head);
    load_tma_tile<Tile>(maps.bias, arrived, tile(stage), 0, q_block * Tiles::kTileQuery, slice.head,
                        slice.batch, CacheHint::EVICT_NORMAL, work.column);
  }

  // The bias of a row beyond the query length may be NaN, which would make P NaN.
  CUTE_DEVICE void clear_rows_beyond(int stage, int row_bound) const {
    clear_rows<Tile, Tiles::kThreads>(tile(stage), row_bound);
  }

  template <class Work, class Scores>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const&, Work const&, int,
                       int, int stage) const {
    TransposedTmaBiasReader<typename Config::BiasElement, Tile> const reader(
        tile(stage), Grid::row(thread_index()));
    add_bias_transposed(scores, reader, bias_scale);
  }

 private:
  CUTE_DEVICE uint32_t tile(int stage) const { return tiles_ + stage * Tile::kBytes; }

  uint32_t tiles_;
};

// Each warp copies the bias of its own 16 keys by cp.async.
template <class Config, class Tiles, int kStages>
class QBlockBiasRing<Config, Tiles, kStages, false, true>
    : public QBlockBiasRing<Config, Tiles, kStages, false, false> {
  using Grid = typename Tiles::ScoreGrid;
  using Element = typename Config::BiasElement;
  using Tile = BiasTile<Config, Tiles::kTileQuery, 16, kWarpSize>;

 public:
  static constexpr int kWarpBytes = Tiles::kWarps * Tile::kBytes;

  CUTE_DEVICE explicit QBlockBiasRing(uint32_t tiles)
      : QBlockBiasRing<Config, Tiles, kStages, false, false>(tiles), tiles_(tiles) {}

  // Called by the consumers, before the main loop.
  template <class Work, class Mask>
  CUTE_DEVICE void load_first(BackwardParams const& params, Work const& work, Mask const& mask,
                              int head, int q_block) const {
    int const thread = thread_index();
    int const row = q_block * Tiles::kTileQuery;
    Tile::copy(warp_tile(), thread % kWarpSize, source(params, work, head, row), row_bytes(params),
               mask.query_length - row, mask.key_length - work.column - Grid::row(thread));
    commit_copies();
  }

  // Starts the copy for the next Q block. Hazard: call it after the exponentials. Its branch ends
  // the basic block; without it ptxas sinks the exponentials below the wait for dP.
  template <class Work, class Mask>
  CUTE_DEVICE void load_next(BackwardParams const& params, Work const& work, Mask const& mask,
                             int head, int q_block) const {
    __syncwarp();  // all lanes have read this bias
    auto const blocks = work.row_of_blocks(params, head);
    bool const last = blocks.after(q_block) == blocks.end;
    if (last) head = work.head_with_blocks(params, head + 1);
    if (head < (work.item.head + 1) * params.shape.group) {
      load_first(params, work, mask, head,
                 last ? work.row_of_blocks(params, head).begin : blocks.after(q_block));
    }
  }

  template <class Work, class Scores>
  CUTE_DEVICE void add(Scores& scores, float bias_scale, BackwardParams const& params,
                       Work const& work, int head, int row, int) const {
    wait_copies<0>();
    __syncwarp();  // the bias of all lanes has arrived
    TransposedBiasReader<Tile> const reader(warp_tile(), source(params, work, head, row),
                                            row_bytes(params));
    add_bias_transposed(scores, reader, bias_scale);
  }

 private:
  CUTE_DEVICE uint32_t warp_tile() const {
    return tiles_ + thread_index() / kWarpSize * Tile::kBytes;
  }

  // The address of the first bias of this warp's keys.
  template <class Work>
  CUTE_DEVICE static char const* source(BackwardParams const& params, Work const& work, int head,
                                        int row) {
    return bias_row<Config>(params.bias, work.item.batch, head, row) +
           (work.column + Grid::row(thread_index())) * (long long)sizeof(Element);
  }

  CUTE_DEVICE static long long row_bytes(BackwardParams const& params) {
    return params.bias.row_stride * (long long)sizeof(Element);
  }

  uint32_t tiles_;
};

}  // namespace memeff
