// Computes which elements of a tile of scores dropout keeps, in the accumulator layout of m16n8.
//
// The byte of element (row r, column c) of head index bh depends only on these, so every tile shape
// and both directions drop the same elements:
//
//   counter = ((r>>4)<<2 | (r>>1)&3, (c>>4)<<2 | (c>>1)&3, bh, 0)
//   word    = philox4x32_7(counter, key)[2*(r&1) + (c&1)]
//   byte    = word >> 8*(2*((r>>3)&1) + ((c>>3)&1)) & 255        kept if byte >= threshold
//
// One call serves 16 elements of a 16x16 block, of which lanes l and l^4 (rows of even and of odd
// index) own eight each. One lane computes the words of a block, the other those of the next block,
// and they exchange half of them.
#pragma once

#include <memeff/arch/math.cuh>
#include <memeff/core/common.cuh>
#include <memeff/core/math.cuh>

namespace memeff {

// Counter-based random numbers: they need no state and do not depend on the order of evaluation.

// Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, SC'11): four random words from a counter
// and a key.
CUTE_DEVICE uint4 philox4x32_7(uint4 counter, uint2 key) {
  CUTE_UNROLL
  for (int round = 0; round < 7; ++round) {
    unsigned long long const first = 0xD2511F53ull * counter.x;
    unsigned long long const second = 0xCD9E8D57ull * counter.z;
    counter = make_uint4(uint32_t(second >> 32) ^ counter.y ^ key.x, uint32_t(second),
                         uint32_t(first >> 32) ^ counter.w ^ key.y, uint32_t(first));
    key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
  }
  return counter;
}

// A lane's eight elements of a 16x16 block: `half` is 1 in rows 8-15, `chunk` is 1 in columns 8-15,
// and `i` is the column's lowest bit.
struct KeepBlock {
  uint32_t flags[2];  // of even and odd columns; highest bit of byte 2*half + chunk: kept

  // All bits set if the element is kept, none if it is dropped.
  CUTE_DEVICE uint32_t mask(int half, int chunk, int i) const {
    return permute_bytes(flags[i], flags[i], 0x1111u * (8 + 2 * half + chunk));
  }

  // mask() for two packed 16-bit elements; the even column is in the low 16 bits.
  CUTE_DEVICE uint32_t pair_mask(int half, int chunk) const {
    return permute_bytes(flags[0], flags[1], 0xCC88u + 0x1111u * (2 * half + chunk));
  }

  CUTE_DEVICE float select(float x, int half, int chunk, int i) const {
    return __uint_as_float(__float_as_uint(x) & mask(half, chunk, i));
  }
};

// The same interface as KeepBlock, without dropout.
struct KeepAll {
  CUTE_DEVICE float select(float x, int, int, int) const { return x; }
};

// The keep bits of a batch index; ProbabilityModifiers and KeptTile call for_each_block().
// kTransposed: rows of the accumulators are columns of the scores. `half` and `chunk` of a
// KeepBlock still refer to the scores, and its flags are those of even and odd rows.
template <class Config, class Grid, bool kTransposed = false>
struct Dropout {
  uint2 key;
  uint32_t addend;  // see flags()
  uint32_t either;
  int first_row;  // global position of row 0, a multiple of 16
  int first_column;

  template <class Params>
  CUTE_DEVICE Dropout(Params const& params, int batch) {
    DropoutParams const& dropout = params.dropout;
    MaskParams const& mask = params.mask;
    key = make_uint2(dropout.key_words[2 * batch], dropout.key_words[2 * batch + 1]);
    addend = 0x01010101u * (128 - (dropout.threshold & 127));
    either = dropout.threshold < 128 ? ~0u : 0u;
    if constexpr (Config::kPositions) {
      first_row = mask.query_position[batch];
      first_column = mask.key_position[batch];
    } else {
      // Keep these loads, although the pointers are null and the loads never execute. Without them
      // ptxas orders the main loop differently: with the constant 0 the forward loses 6 % at head
      // dims 64 and 128 (H200), with an opaque 0 it loses 2 to 6 %.
      first_row = mask.query_position != nullptr ? *mask.query_position : 0;
      first_column = mask.key_position != nullptr ? *mask.key_position : 0;
    }
  }

  // Compares four bytes at once: sets the highest bit of each byte to byte >= threshold. Adding
  // `addend` to the low seven bits carries into the highest bit if they reach those of the
  // threshold. The carry is then combined with the byte's own highest bit: OR for a threshold below
  // 128, AND from 128 on.
  CUTE_DEVICE uint32_t flags(uint32_t word) const {
    uint32_t const carry = (word & 0x7F7F7F7Fu) + addend;
    return (word & carry) | (either & (word | carry));
  }

  // Calls use(row block, column block, KeepBlock) for every 16x16 block that this warp owns of the
  // tile at (row, column), both multiples of 16.
  template <class Use>
  CUTE_DEVICE void for_each_block(uint32_t head_index, int row, int column, Use use) const {
    int const thread = thread_index();
    int const lane = thread % kWarpSize;
    bool const odd = lane & 4;
    int const grid_row = kTransposed ? Grid::column(thread) : Grid::row(thread);
    int const grid_column = kTransposed ? Grid::row(thread) : Grid::column(thread);
    uint32_t const row_counter =
        uint32_t(first_row + row + grid_row) / 4 + (kTransposed ? lane % 4 : lane / 8);
    uint32_t const column_counter =
        uint32_t(first_column + column + grid_column) / 4 + (kTransposed ? lane / 8 : lane % 4);
    constexpr int kBlocks = Grid::kRowBlocks * Grid::kColumnBlocks;
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; block += 2) {
      bool const paired = block + 1 < kBlocks;
      int const next = paired ? block + 1 : block;
      int const m[2] = {block / Grid::kColumnBlocks, next / Grid::kColumnBlocks};
      int const n[2] = {block % Grid::kColumnBlocks, next % Grid::kColumnBlocks};
      int const own_row = kTransposed ? (odd ? n[1] : n[0]) : (odd ? m[1] : m[0]);
      int const own_column = kTransposed ? (odd ? m[1] : m[0]) : (odd ? n[1] : n[0]);
      uint4 const words = philox4x32_7(
          make_uint4(row_counter + 4 * own_row, column_counter + 4 * own_column, head_index, 0),
          key);
      uint2 const even_rows = make_uint2(words.x, kTransposed ? words.z : words.y);
      uint2 const odd_rows = make_uint2(kTransposed ? words.y : words.z, words.w);
      uint2 const own = odd ? odd_rows : even_rows;
      if (!paired) {
        use(m[0], n[0], KeepBlock{flags(own.x), flags(own.y)});
        continue;
      }
      uint2 other = odd ? even_rows : odd_rows;
      other.x = __shfl_xor_sync(0xffffffffu, other.x, 4);
      other.y = __shfl_xor_sync(0xffffffffu, other.y, 4);
      uint2 const first = odd ? other : own;
      uint2 const second = odd ? own : other;
      use(m[0], n[0], KeepBlock{flags(first.x), flags(first.y)});
      use(m[1], n[1], KeepBlock{flags(second.x), flags(second.y)});
    }
  }
};

// The head index bh of the formula above.
template <class Params>
CUTE_DEVICE uint32_t dropout_head(Params const& params, int batch, int head) {
  return params.dropout.batch_base[batch] + params.dropout.head_index[head];
}

// The KeepBlocks of a tile, computed ahead of their use while a product runs.
template <class Config, class Grid, bool kTransposed = false, bool kDropout = Config::kDropout>
class KeptTile {
 public:
  // The inputs of the bits for a batch index and head. A kernel may load them earlier than it
  // computes the bits.
  struct Source {
    Dropout<Config, Grid, kTransposed> dropout;
    uint32_t head;

    template <class Params>
    CUTE_DEVICE Source(Params const& params, int batch, int head)
        : dropout(params, batch), head(dropout_head(params, batch, head)) {}
  };

  template <class Params>
  CUTE_DEVICE KeptTile(Params const& params, int batch, int head, int row, int column)
      : KeptTile(Source(params, batch, head), row, column) {}

  CUTE_DEVICE KeptTile(Source const& source, int row, int column) {
    source.dropout.for_each_block(source.head, row, column,
                                  [&](int m, int n, KeepBlock const& block) {
                                    blocks_[m][n] = block;
                                    // Computes the bits here, and not where they are read.
                                    hide_value(blocks_[m][n].flags[0]);
                                    hide_value(blocks_[m][n].flags[1]);
                                  });
  }

  CUTE_DEVICE KeepBlock const& block(int m, int n) const { return blocks_[m][n]; }

  // Ends the basic block before the bits with a redundant wait for a stage that has arrived.
  // Otherwise ptxas mixes their instructions with those that issue the product.
  template <class Pipeline, class Stage>
  CUTE_DEVICE static void end_basic_block(Pipeline& pipeline, Stage const& stage) {
    pipeline.wait_again(stage);
  }

 private:
  KeepBlock blocks_[Grid::kRowBlocks][Grid::kColumnBlocks];
};

template <class Config, class Grid, bool kTransposed>
class KeptTile<Config, Grid, kTransposed, false> {
 public:
  struct Source {
    template <class Params>
    CUTE_DEVICE Source(Params const&, int, int) {}
  };
  CUTE_DEVICE KeptTile(Source const&, int, int) {}
  template <class Params>
  CUTE_DEVICE KeptTile(Params const&, int, int, int, int) {}
  CUTE_DEVICE KeepAll block(int, int) const { return {}; }
  template <class Pipeline, class Stage>
  CUTE_DEVICE static void end_basic_block(Pipeline&, Stage const&) {}
};

// Passes keep bits from the consumer that computes probabilities to the one that uses them: a
// negative sign marks a dropped probability. Without dropout it does nothing.
template <class Config, class Grid>
struct DropoutSigns {
  using Element = typename Config::Element;

  // Marks the dropped elements of P^T, at (row, column) of the scores.
  template <class Params, class Scores>
  CUTE_DEVICE static void mark(Params const& params, int batch, int head, int row, int column,
                               Scores& scores) {
    if constexpr (Config::kDropout) {
      Dropout<Config, Grid, true> const dropout(params, batch);
      dropout.for_each_block(dropout_head(params, batch, head), row, column,
                             [&](int, int row_block, auto const& keep) {
                               CUTE_UNROLL
                               for (int i = 0; i < 8; ++i) {
                                 int const chunk = i / 4;
                                 float& score = scores(i % 4, 0, 2 * row_block + chunk);
                                 score = keep.select(2.0f * score, chunk, i % 4 / 2, i % 2) - score;
                               }
                             });
    }
  }

  // Sets the marked elements of a 16-bit operand to zero.
  template <class Operand>
  CUTE_DEVICE static void drop(Operand& probabilities) {
    if constexpr (Config::kDropout) {
      CUTE_UNROLL
      for (int i = 0; i < int(sizeof(Operand) / sizeof(uint32_t)); ++i) {
        uint32_t& pair = probabilities.fragments[0][i / 4][i % 4];
        pair = pack<Element>(fmaxf(unpack<Element>(pair, 0), 0.0f),
                             fmaxf(unpack<Element>(pair, 1), 0.0f));
      }
    }
  }

  // dP of an element if it is kept, else 0.
  CUTE_DEVICE static float select(float gradient, float marked) {
    return Config::kDropout && marked < 0.0f ? 0.0f : gradient;
  }
};

}  // namespace memeff
