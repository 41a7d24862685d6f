// The gradients of the arrays that a score function reads: the gradient of each modified score,
// times the derivative of the function by a read, is added to the element that was read.
//
// Terms of a tile that belong to the same element of an array are added up first, in registers or
// in shared memory. Config::CapturedGradients::kSums chooses the terms for each read:
//
//   head      all elements of all tiles of a head: registers
//   query     elements of one query; as rows of the accumulators they stay in registers over all
//             tiles, as columns they are summed in a strip
//   key       likewise, elements of one key
//   diagonal  elements with the same difference of query and key: a strip (strip_sums.cuh)
//   element   each element by itself
//
// additions.cuh adds to global memory.
#pragma once

#include <memeff/core/function/of_tile.cuh>
#include <memeff/core/function/sums.cuh>
#include <memeff/score/captured/additions.cuh>
#include <memeff/score/captured/diagonal_ring.cuh>
#include <memeff/score/captured/strip_sums.cuh>

namespace memeff {

// Sums the gradients for the scores in the accumulators of Grid; backward main loops make one for
// each tile. kTransposed: rows of the accumulators are keys. Does nothing if no captured array
// needs a gradient.
template <class Config, class Grid, bool kTransposed = false, bool kOn = Config::kFunctionGradient>
struct FunctionGradient {
  static constexpr int kSharedBytes = 0;
  struct Sums {};

  CUTE_DEVICE static void begin(uint32_t) {}
  CUTE_DEVICE FunctionGradient(BackwardParams const&, ScoreTilePosition const&, uint32_t) {}
  CUTE_DEVICE void chunk(Sums&, int, int, float const (&)[4], float (&)[4]) {}
  CUTE_DEVICE void add_strip(int) const {}
  CUTE_DEVICE void add_sums(Sums const&) const {}
};

template <class Config, class Grid, bool kTransposed>
class FunctionGradient<Config, Grid, kTransposed, true> {
  using Function = typename Config::ScoreFunction;
  using OfTile = FunctionOfTile<Config, Function, Config::kScoreCaptured, Config::kScoreLiterals>;
  using Arrays = typename Config::CapturedGradients;
  using Sum = function::ReadSum;
  using Strip = StripSums<Grid>;
  static constexpr int kReads = Function::kFloatReads;
  static constexpr int kChunks = 2 * Grid::kColumnBlocks;
  static constexpr Sum kOfRows = kTransposed ? Sum::key : Sum::query;     // of the accumulators
  static constexpr Sum kOfColumns = kTransposed ? Sum::query : Sum::key;  // of the accumulators

  CUTE_HOST_DEVICE static constexpr bool in_strip(int read) {
    return Arrays::kSums[read] == kOfColumns || Arrays::kSums[read] == Sum::diagonal;
  }
  // The number of strips of the reads before this one.
  CUTE_HOST_DEVICE static constexpr int strips_before(int read) {
    int count = 0;
    for (int i = 0; i < read; ++i) count += in_strip(i);
    return count;
  }
  static constexpr int kStrips = strips_before(kReads);
  static constexpr int kWarps = Grid::kRowWarps * Grid::kColumnWarps;

 public:
  static constexpr int kSharedBytes = kStrips * kWarps * Strip::kWarpBytes;

  // The reads that are summed along diagonals, for a kernel in which one warp adds up the sums of
  // all warps (diagonal_ring.cuh). No other read may have a strip.
  static constexpr int kDiagonalReads = kStrips;
  using Ring = DiagonalRing<Grid>;

  // Calls use(read, index) for each of these reads.
  template <class Use>
  CUTE_DEVICE static void for_each_diagonal_read(Use const& use) {
    cute::for_each(cute::make_seq<kReads>{}, [&](auto read) {
      constexpr int kRead = decltype(read)::value;
      static_assert(Arrays::kSums[kRead] != kOfColumns);
      if constexpr (in_strip(kRead)) use(read, cute::C<strips_before(kRead)>{});
    });
  }

  // Sums in registers over several tiles of one head with the same rows of the accumulators.
  struct Sums {
    float of_head[kReads] = {};
    float of_rows[kReads][Grid::kRowBlocks][2] = {};
  };

  // Clears the padding of the strips. All threads call it before the first tile; `shared` has
  // kSharedBytes bytes.
  CUTE_DEVICE static void begin(uint32_t shared) {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int i = 0; i < kStrips; ++i) strip(shared, i, thread).clear_pads(thread % kWarpSize);
    __syncwarp();
  }

  CUTE_DEVICE FunctionGradient(BackwardParams const& params, ScoreTilePosition const& at,
                               uint32_t shared)
      : params_(params),
        batch_(at.batch),
        shared_(shared),
        thread_(thread_index()),
        of_tile_(params, at),
        arrays_(of_tile_.template first_element<Grid, kTransposed>(thread_)) {}

  // Takes four elements of a lane: the gradients of the modified scores in chunk n of eight
  // columns. Call it for the chunks of each m in order, then add_strip(m). `scaled` comes from
  // ScoreModifiers::recompute(); with kKeepsScores derivatives replace the scores in it.
  CUTE_DEVICE void chunk(Sums& sums, int m, int n, float const (&gradient)[4], float (&scaled)[4]) {
    constexpr bool kScores = Function::kReadDerivativesUseScore;
    float terms[kReads][4];
    CUTE_UNROLL
    for (int element = 0; element < 4; ++element) {
      float score = kScores ? scaled[element] : 0.0f;
      auto const differentiate = [&](float&, auto const&... inputs) {
        float derivatives[kReads];
        Function::read_derivatives(inputs..., derivatives);
        if constexpr (kScores) scaled[element] = Function::derivative(inputs...);
        CUTE_UNROLL
        for (int read = 0; read < kReads; ++read) {
          // Hazard: a masked element has gradient 0, but its derivative may be inf or NaN.
          bool const masked =
              !Function::kReadDerivativesAreFinite[read] && gradient[element] == 0.0f;
          terms[read][element] = masked ? 0.0f : gradient[element] * derivatives[read];
        }
      };
      of_tile_.template at_element<Grid, kTransposed>(arrays_, thread_, element, m, n, score,
                                                      differentiate);
    }
    cute::for_each(cute::make_seq<kReads>{}, [&](auto read) {
      add_terms<decltype(read)::value>(sums, m, n, terms[decltype(read)::value]);
    });
  }

  // Adds the strips of row block m to global memory.
  CUTE_DEVICE void add_strip(int m) const {
    if constexpr (kStrips > 0) {
      __syncwarp();  // all lanes have stored
      cute::for_each(cute::make_seq<kReads>{}, [&](auto read) {
        constexpr int kRead = decltype(read)::value;
        if constexpr (in_strip(kRead)) add_strip_of<kRead>(m);
      });
      __syncwarp();  // all lanes have read
    }
  }

  // Stores the sums along diagonals in the rings that begin at `rings`.
  CUTE_DEVICE void store_diagonals(uint32_t rings) const {
    for_each_diagonal_read([&](auto read, auto index) {
      Ring::store(rings + index * Ring::kBytes, own_strip<decltype(read)::value>());
    });
  }

  // Adds the sums in registers to global memory.
  CUTE_DEVICE void add_sums(Sums const& sums) const {
    cute::for_each(cute::make_seq<kReads>{}, [&](auto read) {
      constexpr int kRead = decltype(read)::value;
      if constexpr (Arrays::kSums[kRead] == Sum::head) {
        add<kRead>(0, 0, sums.of_head[kRead]);
      } else if constexpr (Arrays::kSums[kRead] == kOfRows) {
        CUTE_UNROLL
        for (int m = 0; m < Grid::kRowBlocks; ++m) {
          CUTE_UNROLL
          for (int half = 0; half < 2; ++half) {
            add<kRead>(Grid::element_row(2 * half, m, thread_), 0, sums.of_rows[kRead][m][half]);
          }
        }
      }
    });
  }

  // Adds to the element that is read at a row and a column of the accumulators. Hazard: all lanes
  // of the warp must call it.
  template <int kRead>
  CUTE_DEVICE void add(int major, int minor, float sum) const {
    at(major, minor, [&](auto const&... inputs) {
      long long offsets[kReads];
      Function::read_offsets(inputs..., offsets);
      // A masked element may have any offset. Its sum is 0, so it passes -1.
      CapturedGradient<Config, kRead>(params_, batch_).add(sum == 0.0f ? -1 : offsets[kRead], sum);
    });
  }

 private:
  CUTE_DEVICE static Strip strip(uint32_t shared, int index, int thread) {
    int const warp = thread / kWarpSize % kWarps;
    return {shared + uint32_t((index * kWarps + warp) * Strip::kWarpBytes)};
  }

  template <int kRead>
  CUTE_DEVICE void add_terms(Sums& sums, int m, int n, float const (&terms)[4]) {
    constexpr Sum kSum = Arrays::kSums[kRead];
    int const lane = thread_ % kWarpSize;
    if constexpr (kSum == Sum::head) {
      sums.of_head[kRead] += (terms[0] + terms[1]) + (terms[2] + terms[3]);
    } else if constexpr (kSum == kOfRows) {
      sums.of_rows[kRead][m][0] += terms[0] + terms[1];
      sums.of_rows[kRead][m][1] += terms[2] + terms[3];
    } else if constexpr (kSum == kOfColumns) {
      own_strip<kRead>().store(lane, n, terms[0] + terms[2], terms[1] + terms[3]);
    } else if constexpr (kSum == Sum::diagonal) {
      // A lane's second row in this chunk lies on the same diagonals as its first row in the
      // previous chunk.
      float (&first_row)[2] = first_row_[kRead];
      if (n == 0) first_row[0] = first_row[1] = 0.0f;
      own_strip<kRead>().store(lane, n, first_row[0] + terms[2], first_row[1] + terms[3]);
      first_row[0] = terms[0];
      first_row[1] = terms[1];
      if (n == kChunks - 1) own_strip<kRead>().store(lane, kChunks, terms[0], terms[1]);
    } else if constexpr (kSum == Sum::element) {
      CUTE_UNROLL
      for (int element = 0; element < 4; ++element) {
        add<kRead>(Grid::element_row(element, m, thread_),
                   Grid::element_column(element, n, thread_), terms[element]);
      }
    }
  }

  template <int kRead>
  CUTE_DEVICE void add_strip_of(int m) const {
    constexpr bool kDiagonal = Arrays::kSums[kRead] == Sum::diagonal;
    constexpr int kSums = kDiagonal ? Strip::kDiagonals : Strip::kColumns;
    int const lane = thread_ % kWarpSize;
    int const first_row = Grid::row(thread_) + m * 16;
    int const first_column = Grid::column(thread_) + (kDiagonal ? Strip::kFirstDiagonal : 0);
    CUTE_UNROLL
    for (int first = 0; first < kSums; first += kWarpSize) {
      int const index = first + lane;
      float sum = 0.0f;
      if (index < kSums) {
        auto const own = own_strip<kRead>();
        sum = kDiagonal ? own.diagonal(index) : own.column(index);
      }
      // Any element of the column or diagonal gives the offset, even one outside the tile.
      add<kRead>(first_row, first_column + index, sum);
    }
  }

  template <class Use>
  CUTE_DEVICE void at(int major, int minor, Use use) const {
    of_tile_.at(kTransposed ? minor : major, kTransposed ? major : minor, 0.0f, use);
  }

  template <int kRead>
  CUTE_DEVICE Strip own_strip() const {
    return strip(shared_, strips_before(kRead), thread_);
  }

  BackwardParams const& params_;
  int batch_;
  uint32_t shared_;
  int thread_;
  OfTile of_tile_;
  ElementArrays<Config> arrays_;
  float first_row_[kReads][2];
};

}  // namespace memeff
