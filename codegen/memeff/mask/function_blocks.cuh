// The KV blocks of a tile under a mask function whose block mask is not computed before the kernel.
//
// Interval arithmetic bounds the function over a block for all rows of the tile. Each lane of a
// warp takes one block, so a warp decides 32 blocks at a time and keeps them as bits: a few
// instructions for each block, however long the function is. Every warp of a CTA reaches the same
// decision.
#pragma once

#include <memeff/arch/thread.cuh>
#include <memeff/core/math.cuh>
#include <memeff/mask/function_range.cuh>

namespace memeff {

// The blocks of kColumns columns in a range. kSkips: the main loop leaves out those in which the
// function is false everywhere.
template <class Config, bool kPackGqa, int kColumns, bool kSkips>
struct FunctionBlocks : TileRange {
  ForwardParams const& params;
  ScoreTilePosition at;  // of the tile's rows
  int row_end;
  int key_length;

  CUTE_DEVICE FunctionBlocks(TileRange const& range, ForwardParams const& params,
                             ScoreTilePosition const& at, int row_end, int key_length)
      : TileRange(range), params(params), at(at), row_end(row_end), key_length(key_length) {}

  CUTE_DEVICE bool empty() const { return begin >= end; }

  CUTE_DEVICE FunctionBlocks within(TileRange const& part) const {
    FunctionBlocks blocks = *this;
    blocks.begin = part.begin, blocks.end = part.end;
    return blocks;
  }

  // See RowWalk. The first kAhead blocks are copied before anything is decided, so that the
  // decision does not delay them; if they are masked they are not multiplied.
  template <int kAhead>
  class Walk {
   public:
    int ahead;

    CUTE_DEVICE explicit Walk(FunctionBlocks const& blocks) : ahead(blocks.begin), blocks_(blocks) {
      static_assert(kAhead < kWarpSize);
    }

    CUTE_DEVICE void copied_first() { ++ahead; }

    // Hazard: lanes exchange values in this function and in advance().
    CUTE_DEVICE void start() {
      if (blocks_.empty()) {
        queue_[0] = entry(blocks_.end);
        return;
      }
      decide(blocks_.begin);
      CUTE_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        queue_[i] = entry(min(blocks_.begin + i, blocks_.end), !(valid_ >> i & 1));
      }
      valid_ &= ~0u << kAhead;
      find_ahead();
    }

    CUTE_DEVICE bool more() const { return tile() < blocks_.end; }
    CUTE_DEVICE int tile() const { return queue_[0] >> 2; }
    CUTE_DEVICE bool partial() const { return queue_[0] & kPartial; }
    CUTE_DEVICE bool masked() const { return kSkips && (queue_[0] & kMasked); }
    CUTE_DEVICE void begin_block() {}
    CUTE_DEVICE void copied() {}

    CUTE_DEVICE void advance() {
      CUTE_UNROLL
      for (int i = 0; i < kAhead - 1; ++i) queue_[i] = queue_[i + 1];
      queue_[kAhead - 1] = entry(ahead);
      find_ahead();
    }

   private:
    static constexpr int kPartial = 1;
    static constexpr int kMasked = 2;

    CUTE_DEVICE int entry(int tile, bool is_masked = false) const {
      bool const is_partial = partial_ >> (unsigned(tile - first_) % kWarpSize) & 1;
      return tile * 4 + (is_masked ? kMasked : 0) + (is_partial ? kPartial : 0);
    }

    // Moves to the next block to copy; to the end if there is none.
    CUTE_DEVICE void find_ahead() {
      while (valid_ == 0) {
        if (blocks_.end - first_ <= kWarpSize) {
          ahead = blocks_.end;
          return;
        }
        decide(first_ + kWarpSize);
      }
      ahead = first_ + kWarpSize - 1 - __clz(int(valid_ & -valid_));
      valid_ &= valid_ - 1;
    }

    // Decides the 32 blocks from `first` on. The columns beyond the keys do not count.
    CUTE_DEVICE void decide(int first) {
      first_ = first;
      int const own = first + thread_index() % kWarpSize;
      int const column = own * kColumns;
      int const column_end = max(min(column + kColumns, blocks_.key_length), column + 1);
      MaskFunctionRange<Config, kPackGqa> const rows(blocks_.params, blocks_.at, blocks_.row_end);
      function::ranges::Range<bool> const valid = rows.of_columns(column, column_end);
      bool const is_kept = own < blocks_.end && (valid.high || !kSkips);
      valid_ = __ballot_sync(0xffffffffu, is_kept);
      partial_ = __ballot_sync(0xffffffffu, !valid.low);
    }

    FunctionBlocks const& blocks_;
    int first_ = 0;         // of the 32 blocks that are decided
    unsigned valid_ = 0;    // of these, the ones to copy
    unsigned partial_ = 0;  // those in which the function may be false
    int queue_[kAhead];     // the current block and the next ones, with their bits
  };
};

}  // namespace memeff
