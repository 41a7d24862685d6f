// After kernels/fmha_fwd_latent_sm90.cuh: adds up the partial results of row tiles whose KV blocks
// several CTAs have divided, and writes the rows without keys.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/core/vector.cuh>
#include <memeff/kernels/forward/combine.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/schedule/balanced_keys.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// A CTA has kRows rows of a row tile, and a thread four columns of them.
template <class Config>
struct FmhaForwardLatentCombine {
  using Element = typename Config::Element;
  using Mask = IntervalMask<Config::kMask, true, Config::kPositions>;
  using Schedule = BalancedKeys<Config, Mask>;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kRows = Config::kCombineRows;
  static constexpr int kThreads = Config::kValueDim / 4;
  static constexpr int kBlocksPerSm = 8;
  static_assert(kTileQuery % kRows == 0);

  CUTE_DEVICE static void run(ForwardParams const& params) {
    ProblemShape const& shape = params.shape;
    int const blocks = Schedule::row_tiles(shape) * (kTileQuery / kRows);  // of a key head
    int const block = int(blockIdx.x) % blocks;
    int const head_batch = int(blockIdx.x) / blocks;
    int const head = head_batch % shape.key_heads;
    int const batch = head_batch / shape.key_heads;
    Mask const mask(params.mask, shape, batch);
    if constexpr (Config::kVarlen) clear_gap(params, mask, batch, head, block, blocks);

    int const row = block * kRows;
    int const tile = row / kTileQuery;
    TileRange const keys = mask.key_tiles(tile * kTileQuery, kTileQuery, Config::kTileKey);
    TileParts parts = {0, 0, 0, 0};
    if (keys.begin < keys.end) {
      parts = params.tile_parts[Schedule::index(shape, batch, head, tile)];
    }
    PartialSum sums[kRows];
    CUTE_UNROLL
    for (PartialSum& sum : sums) {
      sum = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), -infinity(), 0.0f};
    }
    if (parts.count > 1) {
      CUTE_NO_UNROLL
      for (int part = 0; part < parts.count; ++part) {
        int const slot = part == 0 ? parts.first_slot : parts.second_slot + (part - 1) * parts.step;
        add(params, (long long)slot * kTileQuery + row % kTileQuery, sums);
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      bool const valid = row + r < mask.query_length;
      // Rows of a whole row tile are written already. After a packed sequence the next one begins.
      bool const exists = !Config::kVarlen && row + r < mask.rows.count(shape.query_length);
      if (valid ? parts.count != 1 : exists) store(params, batch, head, row + r, valid, sums[r]);
    }
  }

 private:
  // Adds a partial result of all rows, the first of which is `row` of the partial results.
  CUTE_DEVICE static void add(ForwardParams const& params, long long row,
                              PartialSum (&sums)[kRows]) {
    float4 outputs[kRows];
    float logsumexps[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float const* const out =
          params.partial_out + (row + r) * Config::kValueDim + 4 * int(threadIdx.x);
      outputs[r] = *reinterpret_cast<float4 const*>(out);
      logsumexps[r] = params.partial_logsumexp[row + r];
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r].add(outputs[r], logsumexps[r], 1.0f);
  }

  CUTE_DEVICE static void store(ForwardParams const& params, int batch, int key_head, int row,
                                bool valid, PartialSum const& sum) {
    ProblemShape const& shape = params.shape;
    PackedRows<true> const rows(shape);
    int const query = rows.query(row);
    int const head = rows.query_head(key_head, row);
    Origin const origin = query_origin<Config>(shape, batch);
    RowModifiers<Config> const modifiers(params, {batch, head, query, valid});
    bool const empty = sum.weight == 0.0f || !valid;
    RowEnd const end =
        modifiers.finish({empty ? 0.0f : 1.0f / sum.weight,
                          empty ? -infinity() : sum.maximum + __logf(sum.weight), -infinity()});
    if (threadIdx.x == 0) {
      params.logsumexp[logsumexp_offset<Config>(shape, origin, head) + query] = end.logsumexp;
    }
    int const column = 4 * int(threadIdx.x);
    if (column >= shape.value_dim) return;
    char* const out = row_pointer<Element>(params.out, origin.batch, origin.row + query, head);
    *reinterpret_cast<uint2*>(out + column * sizeof(Element)) =
        make_uint2(pack<Element>(sum.out.x * end.factor, sum.out.y * end.factor),
                   pack<Element>(sum.out.z * end.factor, sum.out.w * end.factor));
  }

  // Clears this CTA's part of the query rows after the sequence, for all heads of the key head.
  CUTE_DEVICE static void clear_gap(ForwardParams const& params, Mask const& mask, int batch,
                                    int key_head, int block, int blocks) {
    int const length = mask.rows.query(mask.query_length);
    Gap const gap = Gap::of_queries(params.shape, batch, length);
    if (gap.begin >= gap.end) return;
    for (int head = 0; head < mask.rows.heads; ++head) {
      WorkItem const part = {block, mask.rows.query_head(key_head, head), batch};
      clear_query_gap<Config, kThreads>(params, part, length, blocks);
    }
  }
};

}  // namespace memeff
