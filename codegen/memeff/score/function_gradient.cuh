// The gradients of the arrays that a score function reads: the gradient of each modified score,
// times the derivative of the function with respect to a read value, is added to the element that
// was read.
//
// Terms of a tile that belong to the same element of an array are added up first, in registers or
// in shared memory. Config::CapturedGradients::kSums chooses the terms for each read:
//
//   head      all elements of all tiles of a head: registers
//   query     elements of one query; as rows of the accumulators they stay in registers over all
//             tiles, as columns they are summed in a strip
//   key       likewise, elements of one key
//   diagonal  elements with the same difference of query and key: a strip (StripSums)
//   element   each element by itself
//
// CapturedAdder adds to global memory.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/core/common.cuh>
#include <memeff/core/function/of_tile.cuh>
#include <memeff/core/math.cuh>

namespace memeff::function {

// How the gradient of a captured array is summed, chosen for each read by
// codegen/functions/sums.py.

// The arguments on which the index of a read depends, besides batch index and head. `none`: the
// array needs no gradient.
enum class ReadSum { none, head, query, key, diagonal, element };

}  // namespace memeff::function

namespace memeff {

// Additions to the gradients of captured arrays in global memory.

// Adds to the gradient of one array, for one batch index. The order of the additions, and so the
// last bits, differ between runs.
template <class Config, bool kFixedPoint = Config::kFixedPointSums>
struct CapturedAdder {
  float* first;

  CUTE_DEVICE CapturedAdder(BackwardParams const&, ArrayView const& view, int batch)
      : first(static_cast<float*>(view.data) + element_of<Config>(view, batch) * view.strides[0]) {}

  CUTE_DEVICE void add(long long offset, float x) const { atomicAdd(first + offset, x); }
};

// Sums in fixed point, which do not depend on the order: two 64-bit integers per element, in units
// of 1 and of 2^kFixedPointBits. jax_memeff/_cuda/fixed_point_sums.py chooses the scale and rounds
// the sums. A term adds at most half of the larger unit to the first integer, so with 35 bits an
// overflow takes 2^29 terms.
template <class Config>
struct CapturedAdder<Config, true> {
  long long* first;
  float scale;

  CUTE_DEVICE CapturedAdder(BackwardParams const& params, ArrayView const& view, int batch)
      : first(static_cast<long long*>(view.data) +
              element_of<Config>(view, batch) * (view.strides[0] / 2)),
        scale(*static_cast<float const*>(feature_array(params, Config::kCapturedScaleArray).data)) {
  }

  CUTE_DEVICE void add(long long offset, float x) const {
    long long* const sums = first + 2 * offset;
    float const scaled = x * scale;
    if (!(fabsf(scaled) < 0x1p79f)) {
      // Out of range, inf or NaN: the result becomes NaN, whatever else is added.
      atomicExch(reinterpret_cast<unsigned long long*>(sums + 1), kNotANumber);
      return;
    }
    float const high = rintf(scaled * (1.0f / kUnit));
    add(sums, static_cast<long long>(rintf(scaled - high * kUnit)));
    if (high != 0.0f) add(sums + 1, static_cast<long long>(high));
  }

 private:
  static constexpr float kUnit = float(1ll << Config::kFixedPointBits);

  // Sums of terms in range stay far below this.
  static constexpr unsigned long long kNotANumber = 0x6000000000000000;

  CUTE_DEVICE static void add(long long* address, long long x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(x));
  }
};

// The gradient of the array of read kRead, for one batch index of the call.
template <class Config, int kRead>
struct CapturedGradient {
  using Function = typename Config::ScoreFunction;
  using Arrays = typename Config::CapturedGradients;

  CapturedAdder<Config> adder;

  CUTE_DEVICE CapturedGradient(BackwardParams const& params, int batch)
      : adder(params, feature_array(params, Arrays::kArrays[Function::kReadArrays[kRead]]), batch) {
  }

  // Hazard: all lanes of a warp must call it; offset -1 means no element. Neighbouring lanes with
  // the same element add up their sums first: atomics on one address are serialized, and every tile
  // adds to the same slope or bucket of distances.
  CUTE_DEVICE void add(long long offset, float sum) const {
    int const lane = thread_index() % kWarpSize;
    int const before = lane > 0 ? lane - 1 : 0;
    int const low = __shfl_sync(0xffffffffu, int(offset), before);
    int const high = __shfl_sync(0xffffffffu, int(offset >> 32), before);
    bool const repeats = lane > 0 && offset >= 0 && low == int(offset) && high == int(offset >> 32);
    unsigned const begins = __ballot_sync(0xffffffffu, !repeats);
    bool ends = true;
    if (begins != 0xffffffffu) {
      // 2u << 31 is 0.
      int const begin = 31 - __clz(int(begins & ((2u << lane) - 1)));
      CUTE_UNROLL
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        int const other = lane - distance;
        float const theirs = __shfl_sync(0xffffffffu, sum, other > 0 ? other : 0);
        if (other >= begin) sum += theirs;
      }
      ends = lane == kWarpSize - 1 || (begins >> (lane + 1) & 1) != 0;
    }
    if (ends && offset >= 0 && sum != 0.0f) adder.add(offset, sum);
  }
};

// Sums over the rows of a warp's accumulators, for each column or each diagonal.
//
// A strip is 16 rows. A lane owns two rows, 8 apart, and adds them in registers first; for
// diagonals it shifts one of them by 8 columns. The remaining eight rows pass through shared
// memory, where each lane adds up the numbers of a column or a diagonal. Shuffles would take more
// instructions, because each row is shifted by a different distance.

// The strip of one warp in shared memory: eight rows of floats, with zeros on both sides. The
// stride is an odd multiple of eight floats, so the four rows that half a warp stores lie in
// different banks.
template <class Grid>
struct StripSums {
  static constexpr int kRows = 8;
  static constexpr int kPad = 8;
  static constexpr int kColumns = Grid::kWarpColumns;
  static constexpr int kStride = kColumns + 8 + 2 * kPad;
  static constexpr int kWarpBytes = kRows * kStride * int(sizeof(float));
  static_assert(kStride % 16 == 8);

  // Diagonals are ordered by the difference of column and row, from kFirstDiagonal on.
  static constexpr int kDiagonals = kColumns + 15;
  static constexpr int kFirstDiagonal = -15;

  uint32_t memory;

  // Zeros both sides. Call it once, before the first store.
  CUTE_DEVICE void clear_pads(int lane) const {
    for (int i = lane; i < kRows * 2 * kPad; i += kWarpSize) {
      int const column = i % (2 * kPad);
      int const place = column < kPad ? column : kStride - 2 * kPad + column;
      store_shared(memory + (i / (2 * kPad) * kStride + place) * 4, 0);
    }
  }

  // Stores two adjacent numbers of a lane's row in chunk n of eight columns. Diagonals have one
  // chunk more than columns: chunk 0 contains only second rows, the last chunk only first rows.
  CUTE_DEVICE void store(int lane, int n, float x, float y) const {
    int const place = lane / 4 * kStride + kPad + lane % 4 * 2;
    store_shared_pair(memory + place * 4 + n * 32, x, y);
  }

  CUTE_DEVICE float column(int index) const { return sum<0>(kPad + index); }
  CUTE_DEVICE float diagonal(int index) const { return sum<1>(kPad - 7 + index); }

 private:
  template <int kShift>
  CUTE_DEVICE float sum(int place) const {
    float found = 0.0f;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      found += __uint_as_float(load_shared(memory + place * 4 + row * (kStride + kShift) * 4));
    }
    return found;
  }
};

// Sums along the diagonals of a CTA's KV block, over the Q blocks of one head. One warp adds up the
// sums of all warps. It adds a diagonal to global memory once the next Q block can no longer add
// to it.

// Rows of Grid's accumulators are keys, columns are queries. Shared memory holds, for each warp of
// Grid, the sums of its own diagonals for one Q block, and a ring of sums for the warp that adds
// them up.
template <class Grid>
struct DiagonalRing {
  using Strip = StripSums<Grid>;
  static constexpr int kWarps = Grid::kRowWarps;
  static constexpr int kRows = 16 * kWarps;  // keys of the CTA
  static constexpr int kColumns = Strip::kColumns;
  static constexpr int kDiagonals = kRows + kColumns - 1;
  static constexpr int kFirstDiagonal = 1 - kRows;                 // column - row
  static constexpr int kOfWarp = (Strip::kDiagonals + 3) / 4 * 4;  // sums, padded
  static constexpr int kPlaces = 256;                              // of the ring
  static constexpr int kWarpBytes = kOfWarp * int(sizeof(float));
  static constexpr int kPlaceBytes = kPlaces * int(sizeof(float));
  static constexpr int kBytes = kWarps * kWarpBytes + kPlaceBytes;
  static constexpr int kGroupWarps = kWarpgroupSize / kWarpSize;
  static_assert(Grid::kRowBlocks == 1 && Grid::kColumnWarps == 1);
  static_assert(kDiagonals <= kPlaces && kPlaces % kColumns == 0);

  uint32_t memory;
  int begin = 0;  // the place of the first diagonal of the current Q block

  // Stores the sums of the calling warp, which is one of Grid's.
  CUTE_DEVICE static void store(uint32_t memory, Strip const& strip) {
    int const thread = thread_index();
    CUTE_UNROLL
    for (int first = 0; first < kOfWarp; first += kWarpSize) {
      int const index = first + thread % kWarpSize;
      float const sum = index < Strip::kDiagonals ? strip.diagonal(index) : 0.0f;
      uint32_t const own = memory + thread / kWarpSize % kWarps * kWarpBytes;
      if (index < kOfWarp) store_shared(own + index * 4, __float_as_uint(sum));
    }
  }

  // Zeros the ring. Called first, by the warp that adds up.
  CUTE_DEVICE void clear() const {
    for (int i = lane(); i < kPlaces; i += kWarpSize) store_shared(ring() + i * 4, 0);
    __syncwarp();
  }

  // Adds the sums of a warpgroup to the ring.
  CUTE_DEVICE void add(int warpgroup) const {
    // Rows of the next warp come 16 later, so its diagonals begin 16 earlier.
    constexpr int kOfGroup = kOfWarp + 16 * (kGroupWarps - 1);
    int const warps_after = kWarps - (warpgroup + 1) * kGroupWarps;
    uint32_t const sums = memory + warpgroup * kGroupWarps * kWarpBytes;
    CUTE_NO_UNROLL
    for (int first = lane() * 4; first < kOfGroup; first += kWarpSize * 4) {
      uint32_t const own = ring() + (begin + 16 * warps_after + first) % kPlaces * 4;
      uint4 total = load_shared_vector(own);
      CUTE_UNROLL
      for (int warp = 0; warp < kGroupWarps; ++warp) {
        int const index = first - 16 * (kGroupWarps - 1 - warp);
        if (index < 0 || index >= kOfWarp) continue;
        uint4 const x = load_shared_vector(sums + warp * kWarpBytes + index * 4);
        total = {sum(total.x, x.x), sum(total.y, x.y), sum(total.z, x.z), sum(total.w, x.w)};
      }
      store_shared_vector(own, __uint_as_float(total.x), __uint_as_float(total.y),
                          __uint_as_float(total.z), __uint_as_float(total.w));
    }
    __syncwarp();
  }

  // Calls use(diagonal, sum) for the first `count` diagonals, counted from kFirstDiagonal, and
  // zeros their sums. All lanes call it; those beyond `count` pass a sum of 0.
  template <class Use>
  CUTE_DEVICE void take(int count, Use const& use) const {
    CUTE_NO_UNROLL
    for (int first = 0; first < count; first += kWarpSize) {
      int const diagonal = first + lane();
      float found = 0.0f;
      if (diagonal < count) {
        uint32_t const own = ring() + (begin + diagonal) % kPlaces * 4;
        found = __uint_as_float(load_shared(own));
        store_shared(own, 0);
      }
      use(diagonal, found);
    }
    __syncwarp();
  }

  // The next Q block begins kColumns queries later.
  CUTE_DEVICE void advance() { begin = (begin + kColumns) % kPlaces; }

 private:
  CUTE_DEVICE static int lane() { return thread_index() % kWarpSize; }
  CUTE_DEVICE uint32_t ring() const { return memory + kWarps * kWarpBytes; }
  CUTE_DEVICE static uint32_t sum(uint32_t x, uint32_t y) {
    return __float_as_uint(__uint_as_float(x) + __uint_as_float(y));
  }
};

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
  // all warps (DiagonalRing). No other read may have a strip.
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
