// Evaluates a user's function at the elements of a tile of scores.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/common.cuh>
#include <memeff/core/function/arrays.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff::function {

// Reads of a function that are constant along diagonals, such as `table[head, query - key]`: a warp
// reads each diagonal of its accumulators once and distributes the values by shuffles.

// The arrays of a function for one element whose diagonal reads are already in registers.
template <class Arrays, class Function>
struct ArraysWithReads : Arrays {
  float values[Function::kFloatReads];

  template <int kRead>
  CUTE_DEVICE float read(float value) const {
    return Function::kDiagonalReads[kRead] ? values[kRead] : value;
  }
};

// The values that a warp reads for 16 rows and kColumns columns of accumulators. Diagonals are
// ordered by the difference of column and row, from kFirst on; consecutive lanes hold consecutive
// diagonals, in kSlots slots.
template <class Function, int kColumns>
struct DiagonalReads {
  static constexpr int kReads = Function::kFloatReads;
  static constexpr int kFirst = -15;
  static constexpr int kSlots = (kColumns + 15 + kWarpSize - 1) / kWarpSize;

  float values[kReads][kSlots];

  // read(difference, values) performs the reads of elements with this difference of column and row.
  template <class Read>
  CUTE_DEVICE DiagonalReads(int lane, Read read) {
    CUTE_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      float found[kReads];
      read(kFirst + slot * kWarpSize + lane, found);
      CUTE_UNROLL
      for (int i = 0; i < kReads; ++i) values[i][slot] = found[i];
    }
  }

  // The values at columns 2q and 2q + 1 of row g in an m16n8 block (lane 4g + q) that lies
  // 8 * (chunk - 1) columns to the right of the first one. All lanes of the warp must call it.
  CUTE_DEVICE void at(int lane, int chunk, float (&pair)[2][kReads]) const {
    // The position in a slot, 0 to 14 after the start of the chunk. In the last of every four
    // chunks it can reach into the next slot.
    int const slot = chunk / 4;
    int const first = chunk % 4 * 8 + 7 + lane % 4 * 2 - lane / 4;
    bool const crosses = chunk % 4 == 3;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int read = 0; read < kReads; ++read) {
        if (!Function::kDiagonalReads[read]) continue;
        float& value = pair[i][read];
        int const place = first + i;
        int const source = crosses ? place & (kWarpSize - 1) : place;
        value = __shfl_sync(0xffffffffu, values[read][slot], source);
        if (!crosses) continue;
        float const next = __shfl_sync(0xffffffffu, values[read][slot + 1], source);
        if (place >= kWarpSize) value = next;
      }
    }
  }
};

}  // namespace memeff::function

namespace memeff {

// The arrays of a function at one element of a lane. `first` is the difference of column and row at
// the lane's first element, as a float; another element adds a constant, `more`, so no conversion
// remains in the loop. `slope * first` is the same for all elements and is evaluated once. The
// product of a slope with a difference is therefore rounded once more.
template <class Config>
struct ElementArrays : function::FunctionArrays<Config> {
  float first;
  float more;

  CUTE_DEVICE float difference(int, int) const { return first + more; }
  CUTE_DEVICE float scaled_difference(float slope, int, int) const {
    return fmaf(slope, more, slope * first);
  }
  // Two fused steps: the products differ between the elements of a lane and would take registers.
  CUTE_DEVICE float plus_scaled_difference(float x, float slope, int, int) const {
    return fmaf(slope, more, x + slope * first);
  }
};

// Evaluates a function for ScoreFunction, MaskFunction and FunctionGradient: it has the user's
// indices of the elements of a tile and the arrays of the function, which begin at kArrays and
// kLiterals in the tables.
template <class Config, class Function, int kArrays, int kLiterals>
class FunctionOfTile {
 public:
  template <class Params>
  CUTE_DEVICE FunctionOfTile(Params const& params, ScoreTilePosition const& at)
      : row_(at.row + (Config::kPositions ? params.mask.query_position[at.batch] : 0)),
        column_(at.column + (Config::kPositions ? params.mask.key_position[at.batch] : 0)),
        arrays_{feature_arrays(params).arrays + kArrays,
                array<unsigned>(params, Config::kFunctionLiteralsArray) + kLiterals, at.batch},
        of_head_(Function::of_head(arrays_,
                                   array<int>(params, Config::kFunctionBatchIndexArray)[at.batch],
                                   array<int>(params, Config::kFunctionHeadIndexArray)[at.head])) {}

  // Calls use(accumulator, the arguments of Function::value...) for each element of this lane.
  // kTransposed: rows of the accumulators are keys, columns are queries.
  template <class Grid, bool kTransposed, class Scores, class Use>
  CUTE_DEVICE void for_each(Scores& scores, Use use) const {
    if constexpr (Function::kHasDiagonalReads) {
      CUTE_UNROLL
      for (int m = 0; m < cute::size<1>(scores); ++m) {
        auto const reads = read_diagonals<Grid, kTransposed>(m);
        for_each_in_rows<Grid, kTransposed>(m, reads, scores, use);
      }
    } else {
      for_each_in_turn<Grid, kTransposed>(scores, use);
    }
  }

  // The reads of this lane along the diagonals of rows 16 m to 16 m + 15 of a warp's accumulators.
  template <class Grid, bool kTransposed>
  CUTE_DEVICE auto read_diagonals(int m) const {
    using Reads = function::DiagonalReads<Function, Grid::kWarpColumns>;
    int const thread = thread_index();
    int const major = Grid::row(thread) + m * 16;
    return Reads(thread % kWarpSize, [&](int difference, float (&values)[Reads::kReads]) {
      int const minor = Grid::column(thread) + difference;
      at(kTransposed ? minor : major, kTransposed ? major : minor, 0.0f,
         [&](auto const&... inputs) { Function::read_values(inputs..., values); });
    });
  }

  // for_each() for these rows; `reads` is the result of read_diagonals().
  template <class Grid, bool kTransposed, class Reads, class Scores, class Use>
  CUTE_DEVICE void for_each_in_rows(int m, Reads const& reads, Scores& scores, Use use) const {
    constexpr int kChunks = 2 * Grid::kColumnBlocks;
    int const thread = thread_index();
    function::ArraysWithReads<ElementArrays<Config>, Function> arrays;
    static_cast<ElementArrays<Config>&>(arrays) = first_element<Grid, kTransposed>(thread);
    // A lane's first row in a chunk of columns lies on the same diagonals as its second row in the
    // next chunk.
    CUTE_UNROLL
    for (int chunk = 0; chunk <= kChunks; ++chunk) {
      float pair[2][Reads::kReads];
      reads.at(thread % kWarpSize, chunk, pair);
      CUTE_UNROLL
      for (int element = 0; element < 4; ++element) {
        int const n = chunk - 1 + element / 2;
        if (n < 0 || n == kChunks) continue;
        CUTE_UNROLL
        for (int read = 0; read < Reads::kReads; ++read) {
          arrays.values[read] = pair[element % 2][read];
        }
        at_element<Grid, kTransposed>(arrays, thread, element, m, n, scores(element, m, n), use);
      }
    }
  }

  // Calls use(the arguments of Function::value...) for a row and a column of the tile.
  template <class Use>
  CUTE_DEVICE void at(int row, int column, float score, Use use) const {
    at(arrays_, row, column, score, use);
  }

  // The factor of key - query, if the function is linear in it (Function::slope).
  CUTE_DEVICE float slope() const { return Function::slope(arrays_, of_head_); }

  // The position of the tile's first column minus that of its first row.
  CUTE_DEVICE int difference_of_positions() const { return column_ - row_; }

  // The arrays of this lane's first element.
  template <class Grid, bool kTransposed>
  CUTE_DEVICE ElementArrays<Config> first_element(int thread) const {
    int const first_major = Grid::element_row(0, 0, thread);
    int const first_minor = Grid::element_column(0, 0, thread);
    int const first = kTransposed ? first_major - first_minor : first_minor - first_major;
    return {{arrays_}, float(column_ - row_ + first), 0.0f};
  }

  // One element of this lane.
  template <class Grid, bool kTransposed, class Arrays, class Use>
  CUTE_DEVICE void at_element(Arrays& arrays, int thread, int element, int m, int n, float& score,
                              Use use) const {
    int const first_major = Grid::element_row(0, 0, thread);
    int const first_minor = Grid::element_column(0, 0, thread);
    // The distance from the first element is the same in all lanes, so computing it for lane 0
    // makes it a constant.
    int const major = Grid::element_row(element, m, 0u) - Grid::element_row(0, 0, 0u);
    int const minor = Grid::element_column(element, n, 0u) - Grid::element_column(0, 0, 0u);
    arrays.more = float(kTransposed ? major - minor : minor - major);
    int const row = kTransposed ? first_minor + minor : first_major + major;
    int const column = kTransposed ? first_major + major : first_minor + minor;
    at(arrays, row, column, score, [&](auto const&... inputs) { use(score, inputs...); });
  }

 private:
  template <class Grid, bool kTransposed, class Scores, class Use>
  CUTE_DEVICE void for_each_in_turn(Scores& scores, Use use) const {
    int const thread = thread_index();
    ElementArrays<Config> arrays = first_element<Grid, kTransposed>(thread);
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(scores); ++n) {
        CUTE_UNROLL
        for (int element = 0; element < 4; ++element) {
          at_element<Grid, kTransposed>(arrays, thread, element, m, n, scores(element, m, n), use);
        }
      }
    }
  }

  template <class Arrays, class Use>
  CUTE_DEVICE void at(Arrays const& arrays, int row, int column, float score, Use use) const {
    int const query = row_ + row;
    int const key = column_ + column;
    use(arrays, of_head_, Function::of_row(arrays_, of_head_, query),
        Function::of_column(arrays_, of_head_, key), score, query, key);
  }

  template <class Element, class Params>
  CUTE_DEVICE static Element const* array(Params const& params, int index) {
    return static_cast<Element const*>(feature_array(params, index).data);
  }

  int row_;
  int column_;
  function::FunctionArrays<Config> arrays_;
  typename Function::OfHead of_head_;
};

// FunctionOfTile with kPackGqa: Rows (layout/gqa_rows.cuh) maps a row to its query and head.
// Neighbouring rows may have different heads, so reads are not constant along diagonals, and values
// of a head are computed per row.
template <class Config, class Function, int kArrays, int kLiterals, class Rows>
class FunctionOfRows {
 public:
  template <class Params>
  CUTE_DEVICE FunctionOfRows(Params const& params, ScoreTilePosition const& at)
      : rows_(params.shape),
        at_(at),
        query_position_(Config::kPositions ? params.mask.query_position[at.batch] : 0),
        key_position_(Config::kPositions ? params.mask.key_position[at.batch] : 0),
        arrays_{feature_arrays(params).arrays + kArrays,
                array<unsigned>(params, Config::kFunctionLiteralsArray) + kLiterals, at.batch},
        batch_(array<int>(params, Config::kFunctionBatchIndexArray)[at.batch]),
        heads_(array<int>(params, Config::kFunctionHeadIndexArray)) {}

  // Calls use(accumulator, the arguments of Function::value...) for each element of this lane.
  template <class Grid, bool kTransposed, class Scores, class Use>
  CUTE_DEVICE void for_each(Scores& scores, Use use) const {
    static_assert(!kTransposed);
    int const thread = thread_index();
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(scores); ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const row = at_.row + Grid::element_row(2 * half, m, thread);
        int const query = query_position_ + rows_.query(row);
        auto const of_head =
            Function::of_head(arrays_, batch_, heads_[rows_.query_head(at_.head, row)]);
        auto const of_row = Function::of_row(arrays_, of_head, query);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(scores); ++n) {
          CUTE_UNROLL
          for (int element = 2 * half; element < 2 * half + 2; ++element) {
            int const key = key_position_ + at_.column + Grid::element_column(element, n, thread);
            float& score = scores(element, m, n);
            use(score, arrays_, of_head, of_row, Function::of_column(arrays_, of_head, key), score,
                query, key);
          }
        }
      }
    }
  }

 private:
  template <class Element, class Params>
  CUTE_DEVICE static Element const* array(Params const& params, int index) {
    return static_cast<Element const*>(feature_array(params, index).data);
  }

  Rows rows_;
  ScoreTilePosition at_;
  int query_position_;
  int key_position_;
  function::FunctionArrays<Config> arrays_;
  int batch_;
  int const* heads_;
};

}  // namespace memeff
