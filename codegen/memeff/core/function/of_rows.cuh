// Evaluates a user's function at the elements of a tile whose rows belong to several heads.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/core/feature_arrays.cuh>
#include <memeff/core/function/arrays.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff {

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
