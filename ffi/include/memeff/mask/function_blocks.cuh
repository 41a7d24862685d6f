// The KV blocks of a tile under a mask function whose block mask is not computed before the kernel.
//
// Interval arithmetic bounds the function over a block for all rows of the tile. Each lane of a
// warp takes one block, so a warp decides 32 blocks at a time and keeps them as bits: about three
// instructions for each block, however long the function is. Every warp of a CTA decides the same.
#pragma once

#include <memeff/arch/thread.cuh>
#include <memeff/core/math.cuh>
#include <memeff/mask/function_range.cuh>

namespace memeff {

// The blocks of kColumns columns in a range. kSkips: cursors leave out those in which the function
// is false everywhere; otherwise only those at both ends are left out.
template <class Config, bool kPackHeads, int kColumns, bool kSkips>
struct FunctionBlocks : TileRange {
  using Rows = MaskFunctionRange<Config, kPackHeads>;
  static_assert(is_power_of_two(kWarpSize));

  ForwardParams const& params;
  ScoreTilePosition at;  // of the tile's rows
  int row_end;
  int key_length;

  CUTE_DEVICE FunctionBlocks(TileRange const& range, ForwardParams const& params,
                             ScoreTilePosition const& at, int row_end, int key_length)
      : TileRange(range), params(params), at(at), row_end(row_end), key_length(key_length) {
    drop_ends();
  }

  CUTE_DEVICE bool empty() const { return begin >= end; }

  CUTE_DEVICE FunctionBlocks within(TileRange const& part) const {
    FunctionBlocks blocks = *this;
    blocks.begin = part.begin, blocks.end = part.end;
    return blocks;
  }

  // The position of a warp, whose lanes call these functions together.
  struct Cursor {
    static constexpr bool kInOrder = false;

    FunctionBlocks const& blocks;
    int tile;           // `end` above the last
    unsigned above;     // bits of the next blocks, of the 32 that begin at a multiple of 32
    unsigned partial_;  // bits of blocks in which the function may be false, of the same 32

    CUTE_DEVICE explicit Cursor(FunctionBlocks const& blocks) : blocks(blocks), tile(blocks.end) {
      if (blocks.empty()) return;
      tile = blocks.begin;
      decide(first_of_32(tile));
      advance();
    }

    CUTE_DEVICE void advance() {
      int first = first_of_32(tile);
      while (above == 0) {
        first += kWarpSize;
        if (first >= blocks.end) {
          tile = blocks.end;
          return;
        }
        decide(first);
      }
      tile = first + kWarpSize - 1 - __clz(int(above & -above));
      above &= above - 1;
    }

    CUTE_DEVICE bool partial() const { return partial_ >> (tile % kWarpSize) & 1; }

   private:
    CUTE_DEVICE static int first_of_32(int tile) { return tile & -kWarpSize; }

    CUTE_DEVICE void decide(int first) {
      int const own = first + thread_index() % kWarpSize;
      bool const is_own = own >= blocks.begin && own < blocks.end;
      function::ranges::Range<bool> const valid = blocks.valid(own, own + 1);
      above = __ballot_sync(0xffffffffu, is_own && (valid.high || !kSkips));
      partial_ = __ballot_sync(0xffffffffu, !valid.low);
    }
  };

 private:
  // Whether all elements of the blocks [first, last) are valid, and whether any is. The columns
  // beyond the keys do not count. Hazard: lanes exchange values, so all of them call this.
  CUTE_DEVICE function::ranges::Range<bool> valid(int first, int last) const {
    int const column_end = max(min(last * kColumns, key_length), first * kColumns + 1);
    return Rows(params, at, row_end).of_columns(first * kColumns, column_end);
  }

  // Each lane takes a part of the range. Parts without valid elements at the ends are dropped, as
  // long as that shortens the range.
  CUTE_DEVICE void drop_ends() {
    int step = 0;
    int dropped = 1;
    while (begin < end && dropped > 0 && step != 1) {
      int const count = end - begin;
      step = ceil_div(count, kWarpSize);
      int const own = begin + thread_index() % kWarpSize * step;
      function::ranges::Range<bool> const own_part = valid(own, min(own + step, end));
      unsigned const parts = __ballot_sync(0xffffffffu, own < end && own_part.high);
      if (parts == 0) {
        end = begin;
        return;
      }
      int const last = kWarpSize - 1 - __clz(int(parts));
      int const first = kWarpSize - 1 - __clz(int(parts & -parts));
      end = min(end, begin + (last + 1) * step);
      begin += first * step;
      dropped = count - (end - begin);
    }
  }
};

}  // namespace memeff
