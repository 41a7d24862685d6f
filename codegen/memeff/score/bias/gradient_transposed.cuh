// The gradient of a bias in kernels whose scores are transposed: keys are rows of the accumulators.
// See gradient.cuh.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/score/bias/gradient.cuh>

namespace memeff {

// The gradient that the main kernel writes or sums. A consumer calls pair() for its elements of dS,
// and finish() after a head; a thread keeps `Sums` over the Q blocks of the head.
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

}  // namespace memeff
