// Whether a mask function is true in none, some or all elements of a box of scores.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/core/function/ranges.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/mask/block_mask.cuh>

namespace memeff {

// Whether a kernel decides the tiles of a mask function itself. Otherwise XLA has decided them, or
// segment ids or a boolean mask have to be tested, too.
template <class Config>
CUTE_HOST_DEVICE constexpr bool decides_tiles() {
  return Config::kMaskFunction && !Config::kBlockMask && !Config::kSegments && !Config::kBoolean;
}

// The mask function over some rows of a tile. All lanes of a warp construct it together.
template <class Config, bool kPackGqa>
class MaskFunctionRange {
 public:
  using Function = typename Config::MaskFunction;
  template <class Scalar>
  using Range = function::ranges::Range<Scalar>;

  // For the rows [at.row, end) of the tile at `at`.
  template <class Params>
  CUTE_DEVICE MaskFunctionRange(Params const& params, ScoreTilePosition const& at, int end)
      : arrays_{feature_arrays(params).arrays + Config::kMaskCaptured,
                array<unsigned>(params, Config::kFunctionLiteralsArray) + Config::kMaskLiterals,
                at.batch},
        batch_(array<int>(params, Config::kFunctionBatchIndexArray)[at.batch]),
        heads_(heads(params, at.head)),
        key_position_(Config::kPositions ? params.mask.key_position[at.batch] : 0) {
    GqaRows<kPackGqa> const rows(params.shape);
    int const position = Config::kPositions ? params.mask.query_position[at.batch] : 0;
    queries_ = {position + rows.query(at.row), position + rows.query(end - 1)};
  }

  // Whether it is true in all elements of the columns [begin, end), and in any.
  CUTE_DEVICE Range<bool> of_columns(int begin, int end) const {
    return Function::range(arrays_, batch_, heads_, queries_,
                           {key_position_ + begin, key_position_ + end - 1});
  }

 private:
  // The user's indices of the heads of the tile.
  template <class Params>
  CUTE_DEVICE static Range<int> heads(Params const& params, int tile_head) {
    if constexpr (!Function::kDependsOnHead) return {0, 0};
    int const* const indices = array<int>(params, Config::kFunctionHeadIndexArray);
    GqaRows<kPackGqa> const rows(params.shape);
    int const lane = thread_index() % kWarpSize;
    int low = indices[rows.query_head(tile_head, 0)];
    int high = low;
    if constexpr (kPackGqa) {
      for (int head = lane; head < rows.heads; head += kWarpSize) {
        int const own = indices[rows.query_head(tile_head, head)];
        low = min(low, own), high = max(high, own);
      }
      CUTE_UNROLL
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        low = min(low, __shfl_xor_sync(0xffffffffu, low, distance));
        high = max(high, __shfl_xor_sync(0xffffffffu, high, distance));
      }
    }
    return {low, high};
  }

  template <class Element, class Params>
  CUTE_DEVICE static Element const* array(Params const& params, int index) {
    return static_cast<Element const*>(feature_array(params, index).data);
  }

  function::FunctionArrays<Config> arrays_;
  int batch_;
  Range<int> heads_;
  Range<int> queries_;
  int key_position_;
};

}  // namespace memeff
