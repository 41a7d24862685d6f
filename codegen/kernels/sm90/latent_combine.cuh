// Runs after the latent forward: adds up the partial results of row tiles whose KV blocks several
// CTAs have divided, and writes the rows without keys.
#pragma once

#include <kernels/common/combine.cuh>
#include <memeff/core/common.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/vector.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/schedule/balanced_keys.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// The memory for the outputs of a row tile in a batch-invariant call: a running sum or the result
// of one segment. LatentSegmentOutputSm90 writes it, and FmhaForwardLatentCombine reads it.

// An access of a consumer's warp is 512 adjacent bytes: each lane has four columns of a row, as two
// pairs, of neighbouring blocks of eight columns. Rows are in blocks of 16, one for each warp. With
// few rows in the whole call there is memory for their blocks only.
template <class Config>
struct SegmentTile {
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kWarpRows = 16;
  static constexpr int kPairs = Config::kValueDim / 16;  // of blocks of eight columns
  // The output, and for each consumer and lane the WeightSums of its two rows.
  static constexpr int kVectors = (2 * kPairs + 2) * kWarpSize;  // of a block of rows

  float4* first;  // of a block of rows

  CUTE_DEVICE SegmentTile(ForwardParams const& params, int slot, int block) {
    ProblemShape const& shape = params.shape;
    int const rows = min(GqaRows<true>(shape).count(shape.query_length), kTileQuery);
    int const blocks = ceil_div(rows, kWarpRows);
    first = reinterpret_cast<float4*>(params.partial_out) +
            ((long long)slot * blocks + block) * kVectors;
  }

  // The columns of a pair of blocks in row r of the two rows of a lane.
  CUTE_DEVICE float4& columns(int r, int pair, int lane) const {
    return first[(r * kPairs + pair) * kWarpSize + lane];
  }

  // The WeightSums of both rows of a lane. Each consumer has its own, so neither waits for the
  // other one.
  CUTE_DEVICE float4& weights(int consumer, int lane) const {
    return first[(2 * kPairs + consumer) * kWarpSize + lane];
  }
};

// A CTA combines kRows rows of a row tile; a thread has four columns of them.
template <class Config>
struct FmhaForwardLatentCombine {
  using Element = typename Config::Element;
  using Mask = IntervalMask<Config::kMask, true, Config::kPositions>;
  using Schedule = BalancedKeys<Config, Mask>;
  static constexpr int kTileQuery = Config::kTileQuery;
  using Sum = PartialSum<4>;
  static constexpr int kRows = Config::kCombineRows;
  static constexpr int kPartsInFlight = 8 / kRows;
  static constexpr int kThreads = Config::kValueDim / 4;
  static constexpr int kBlocksPerSm = Config::kCombineBlocksPerSm;
  static_assert(kTileQuery % kRows == 0);

  CUTE_DEVICE static void run(ForwardParams const& params) {
    ProblemShape const& shape = params.shape;
    if constexpr (Config::kPacked) clear_gaps(params);
    long long const blocks = Schedule::row_tiles(shape) * (kTileQuery / kRows);  // per key head
    long long const end = blocks * shape.key_heads * shape.batch;
    for (long long block = blockIdx.x; block < end;) {
      int const head_batch = int(block / blocks);
      Mask const mask(params.mask, shape, head_batch / shape.key_heads);
      int const row = int(block % blocks) * kRows;
      long long next = block + gridDim.x;
      if (Config::kPacked && row >= mask.query_length) {
        // Skips to the next sequence: sequences may be much shorter than the longest one.
        long long const skipped = (head_batch + 1) * blocks - block;
        next = block + (skipped + gridDim.x - 1) / gridDim.x * gridDim.x;
      } else {
        int const batch = head_batch / shape.key_heads;
        int const head = head_batch % shape.key_heads;
        combine(params, mask, batch, head, row);
      }
      block = next;
    }
  }

 private:
  // Combines the rows [row, row + kRows).
  CUTE_DEVICE static void combine(ForwardParams const& params, Mask const& mask, int batch,
                                  int head, int row) {
    ProblemShape const& shape = params.shape;
    int const tile = row / kTileQuery;
    // Loaded with the lengths and not after them. A row tile without keys has none.
    TileParts parts = params.tile_parts[Schedule::index(shape, batch, head, tile)];
    TileRange const keys = mask.key_tiles(tile * kTileQuery, kTileQuery, Config::kTileKey);
    if (keys.begin >= keys.end) parts.count = 0;
    Sum sums[kRows];
    CUTE_UNROLL
    for (Sum& sum : sums) sum = Sum::empty();
    if (parts.count > 1) {
#pragma unroll kPartsInFlight
      for (int part = 0; part < parts.count; ++part) {
        int const slot = part == 0 ? parts.first_slot : parts.second_slot + (part - 1) * parts.step;
        if constexpr (Schedule::kKeySegments) {
          add_segment(params, slot, row % kTileQuery, part == 0, sums);
        } else {
          add(params, (long long)slot * kTileQuery + row % kTileQuery, sums);
        }
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      bool const valid = row + r < mask.query_length;
      // The main kernel has already written row tiles with a single part. Hazard: the rows after a
      // packed sequence belong to the next one.
      bool const exists = !Config::kPacked && row + r < mask.rows.count(shape.query_length);
      if (valid ? parts.count != 1 : exists) store(params, batch, head, row + r, valid, sums[r]);
    }
  }

  // Adds one partial result to the sums of all rows; the first row is `row` of the partial results.
  CUTE_DEVICE static void add(ForwardParams const& params, long long row, Sum (&sums)[kRows]) {
    typename Sum::Columns outputs[kRows];
    float logsumexps[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const* const out =
          params.partial_out + (row + r) * Config::kValueDim + 4 * int(threadIdx.x);
      outputs[r].load(out);
      logsumexps[r] = params.partial_logsumexp[row + r];
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r].add(outputs[r], logsumexps[r], 1.0f);
  }

  // As above for the running sum of a batch-invariant call, which comes `first`, or for a segment.
  // The rows have the same place in lanes that are four apart.
  CUTE_DEVICE static void add_segment(ForwardParams const& params, int slot, int tile_row,
                                      bool first, Sum (&sums)[kRows]) {
    static_assert(kRows == kWarpSize / 4);
    using Tile = SegmentTile<Config>;
    Tile const tile(params, slot, tile_row / Tile::kWarpRows);
    int const half = tile_row / kRows % 2;
    Sum others[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float2 const weights = reinterpret_cast<float2 const*>(&tile.weights(0, 4 * r))[half];
      others[r].weights = {weights.x, weights.y};
      others[r].out.load(&tile.columns(half, int(threadIdx.x) / 4, 4 * r + int(threadIdx.x) % 4).x);
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (first) {
        sums[r] = others[r];
      } else {
        sums[r].add(others[r].out, others[r].weights.maximum, others[r].weights.weight);
      }
    }
  }

  CUTE_DEVICE static void store(ForwardParams const& params, int batch, int key_head, int row,
                                bool valid, Sum const& sum) {
    ProblemShape const& shape = params.shape;
    GqaRows<true> const rows(shape);
    int const query = rows.query(row);
    int const head = rows.query_head(key_head, row);
    Origin const origin = query_origin<Config>(shape, batch);
    RowModifiers<Config> const modifiers(params, {batch, head, query, valid});
    RowEnd const end = modifiers.finish(valid ? sum.weights.end() : RowEnd::empty());
    if (threadIdx.x == 0) {
      params.logsumexp[logsumexp_offset<Config>(shape, origin, head) + query] = end.logsumexp;
    }
    if constexpr (Schedule::kKeySegments) {
      char* const out = row_pointer<Element>(params.out, origin.batch, origin.row + query, head);
      store_pairs(out, shape.value_dim, sum, end.factor);
    } else {
      int const column = 4 * int(threadIdx.x);
      if (column >= shape.value_dim) return;
      char* const out = row_pointer<Element>(params.out, origin.batch, origin.row + query, head);
      sum.out.template store<Element>(out + column * sizeof(Element), end.factor);
    }
  }

  // Stores the columns of a thread in a SegmentTile; `row` is their row of the result.
  CUTE_DEVICE static void store_pairs(char* row, int columns, Sum const& sum, float factor) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const column = (int(threadIdx.x) / 4 * 2 + i) * 8 + int(threadIdx.x) % 4 * 2;
      OutputColumns<2> const pair = {{sum.out.values[2 * i], sum.out.values[2 * i + 1]}};
      if (column < columns) pair.template store<Element>(row + column * sizeof(Element), factor);
    }
  }

  // Clears this CTA's part of the query rows that belong to no sequence. Each lane of a warp checks
  // a different sequence.
  CUTE_DEVICE static void clear_gaps(ForwardParams const& params) {
    if (params.keeps_gaps) return;
    ProblemShape const& shape = params.shape;
    auto const has_gap = [&](int first) {
      int const own = min(first + int(threadIdx.x) % kWarpSize, shape.batch - 1);
      return !Gap::of_queries<Config>(params, own, queries(params, own)).empty();
    };
    bool found = false;
#pragma unroll 4  // overlaps the loads of lengths
    for (int first = 0; first < shape.batch; first += kWarpSize) found |= has_gap(first);
    if (!warp_any(found)) return;
    CUTE_NO_UNROLL
    for (int first = 0; first < shape.batch; first += kWarpSize) {
      unsigned gaps = __ballot_sync(0xffffffffu, has_gap(first));
      int const sequences = min(shape.batch - first, kWarpSize);
      CUTE_NO_UNROLL
      for (int i = 0; i < sequences; ++i) {
        if (!(gaps >> i & 1)) continue;
        int const batch = first + i;
        CUTE_NO_UNROLL
        for (int head = 0; head < shape.query_heads; ++head) {
          clear_query_gap<Config, kThreads>(params, {int(blockIdx.x), head, batch},
                                            queries(params, batch), int(gridDim.x));
        }
      }
    }
  }

  CUTE_DEVICE static int queries(ForwardParams const& params, int batch) {
    return IntervalMask<MaskKind::none>(params.mask, params.shape, batch).query_length;
  }
};

}  // namespace memeff
