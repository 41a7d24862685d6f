// Reads of a score function that are constant along diagonals, through the shared memory of a
// Hopper kernel. A warp of the producer reads each diagonal of a tile once, while the consumers
// compute other tiles. The consumers then neither compute addresses nor wait for global memory.
//
// The values belong to the buffer of the keys in a forward, and of the queries in a backward: one
// barrier says that both are complete, and a consumer releases both at once.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/core/function/of_tile.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/score/function.cuh>

namespace memeff {

// No buffers: Function reads global memory. kTransposed: see FunctionOfTile.
template <class Config, class Grid, bool kTransposed = false>
struct NoSharedDiagonals {
  static constexpr bool kIsOn = false;
  static constexpr int kBytes = 0;
  using Function = ScoreFunctionWithReads<Config, Grid, kTransposed>;

  template <class Params>
  CUTE_DEVICE static void fill(Params const&, ScoreTilePosition const&, uint32_t) {}
};

// The buffers for accumulators of kRows rows and kColumns columns, if Config::kSharedDiagonals.
template <class Config, class Grid, int kRows, int kColumns, bool kTransposed = false,
          bool kOn = Config::kSharedDiagonals>
struct SharedDiagonals : NoSharedDiagonals<Config, Grid, kTransposed> {};

template <class Config, class Grid, int kRows, int kColumns, bool kTransposed>
struct SharedDiagonals<Config, Grid, kRows, kColumns, kTransposed, true> {
  static constexpr bool kIsOn = true;
  using Params = typename Config::Params;
  using Program = typename Config::ScoreFunction;
  using OfTile = FunctionOfTile<Config, Program, Config::kScoreCaptured, Config::kScoreLiterals>;
  static constexpr int kReads = Program::kFloatReads;

  // Diagonals are ordered by the difference of column and row. There are two copies, shifted by one
  // word, so that lanes of even and of odd rows load aligned pairs. They are 16 banks apart: rows 0
  // to 3 of an m16n8 block, half a warp, use ten banks of each.
  static constexpr int kDiagonals = kRows + kColumns;
  static constexpr int kCopyWords = (kDiagonals + 1 - 16 + 31) / 32 * 32 + 16;
  static constexpr int kReadBytes = 2 * kCopyWords * int(sizeof(float));

  // The number of reads along diagonals before this one.
  CUTE_HOST_DEVICE static constexpr int reads_before(int read) {
    int count = 0;
    for (int i = 0; i < read; ++i) count += Program::kDiagonalReads[i];
    return count;
  }
  static constexpr int kBytes = reads_before(kReads) * kReadBytes;  // of one buffer

  // Fills a buffer for the tile at `at`. A whole warp calls it.
  CUTE_DEVICE static void fill(Params const& params, ScoreTilePosition const& at, uint32_t buffer) {
    OfTile const of_tile(params, at);
#pragma unroll 2  // 4 spills, because the producer has few registers
    for (int i = thread_index() % kWarpSize; i < kDiagonals; i += kWarpSize) {
      float values[kReads];
      int const difference = i - kRows;
      of_tile.at(kTransposed ? difference : 0, kTransposed ? 0 : difference, 0.0f,
                 [&](auto const&... inputs) { Program::read_values(inputs..., values); });
      CUTE_UNROLL
      for (int read = 0; read < kReads; ++read) {
        if (!Program::kDiagonalReads[read]) continue;
        uint32_t const address = buffer + reads_before(read) * kReadBytes + i * 4;
        store_shared(address, __float_as_uint(values[read]));
        store_shared(address + kCopyWords * 4 + 4, __float_as_uint(values[read]));
      }
    }
  }

  // The values of a lane, with the interface of function::DiagonalReads.
  struct Reads {
    static constexpr bool kAny = false;  // nothing is read ahead
    static constexpr int kReads = SharedDiagonals::kReads;

    uint32_t buffer;

    CUTE_DEVICE void at(int, int chunk, float (&pair)[2][kReads]) const {
      int const thread = thread_index();
      int const row = Grid::element_row(0, 0, thread);
      int const column = Grid::element_column(0, 0, thread);
      uint32_t const shift = row % 2 * (kCopyWords + 1);
      uint32_t const first = buffer + (shift + column - row + kRows) * 4;
      CUTE_UNROLL
      for (int read = 0; read < kReads; ++read) {
        if (!Program::kDiagonalReads[read]) continue;
        float2 const loaded =
            load_shared_pair(first + reads_before(read) * kReadBytes + (chunk - 1) * 32);
        pair[0][read] = loaded.x;
        pair[1][read] = loaded.y;
      }
    }
  };

  struct Function : ScoreFunction<Config, Grid, kTransposed> {
    using Base = ScoreFunction<Config, Grid, kTransposed>;
    using Reads = SharedDiagonals::Reads;

    Reads const* reads;

    CUTE_DEVICE Function(Params const& params, Reads const* reads) : Base(params), reads(reads) {}

    template <class Scores>
    CUTE_DEVICE void forward(Scores& scores, ScoreTilePosition const& at) const {
      OfTile(Base::params, at)
          .template for_each_in_rows<Grid, kTransposed>(
              0, *reads, scores,
              [](float& score, auto const&... inputs) { score = Program::value(inputs...); });
    }
  };
};

}  // namespace memeff
