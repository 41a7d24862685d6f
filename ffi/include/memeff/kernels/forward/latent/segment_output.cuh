// Writes the output of a segment (KeySegments) of a batch-invariant call in
// kernels/fmha_fwd_latent_sm90.cuh.
#pragma once

#include <memeff/arch/thread.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/kernels/forward/latent/output.cuh>
#include <memeff/kernels/forward/latent/segment_tile.cuh>
#include <memeff/kernels/forward/segment_sum.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/schedule/balanced_keys.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// A consumer calls write() after the last KV block of a segment, which is then normalized by
// itself. It is stored in a slot, or added to the running sum with the arithmetic of the combine
// kernel. Each thread reads the part of the sum that it has written itself, and the last segment of
// a row tile finishes the rows.
template <class Config, class Grid, class Softmax>
struct LatentSegmentOutputSm90 {
  using Tile = SegmentTile<Config>;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kRows = Softmax::kRows;

  template <class Accumulators>
  CUTE_DEVICE static void write(ForwardParams const& params, KeyPart const& part, int query_length,
                                int warpgroup, int first_column, Softmax& softmax,
                                Accumulators& output) {
    int const row = part.tile * kTileQuery;
    // The rows are finished when all segments are added up, so none of them is valid here.
    RowsOfTile<true> const none(params.shape, part.batch, part.head, row, 0);
    softmax.finish(output, params.scale.softmax_scale, 1.0f,
                   LaneRowModifiers<Config, Grid>(params, none));
    SegmentResult const result = SegmentResult::of(part);
    // Read anew, because the main loop of a window has no registers for rows and addresses.
    int const thread = int(thread_index()) % kWarpgroupSize;
    int const warp = thread / kWarpSize;
    int const lane = thread % kWarpSize;
    // All conditions are the same for a warp. Hazard: ptxas sees that by the votes only. Without
    // them it computes the matrix descriptors of the main loop in vector registers, and spills.
    if (!warp_any(row + warp * Tile::kWarpRows < query_length)) return;  // this warp has no rows
    WeightSum sums[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] = {softmax.softmax_reference[r], 1.0f};
    int const slot = result.slot < 0 ? int(block_index()) : result.slot;
    Tile const tile(params, slot, warp);
    if (warp_any(result.slot < 0)) {
      add(tile, warp_any(result.continues), warpgroup, lane, softmax, sums, output);
      if (warp_any(result.ends)) {
        finish(params, part, query_length, warpgroup, first_column, sums, softmax, output);
        return;
      }
    }
    store(tile, warpgroup, lane, sums, output);
  }

 private:
  static constexpr int kPairs = Tile::kPairs / 2;  // of one consumer
  static constexpr int kTogether = 8;  // loads in flight; there are no registers for more

  // Adds the running sum to the output, which becomes the new one.
  template <class Accumulators>
  CUTE_DEVICE static void add(Tile const& tile, bool continues, int warpgroup, int lane,
                              Softmax const& softmax, WeightSum (&sums)[kRows],
                              Accumulators& output) {
    static_assert(kRows == 2 && decltype(cute::size<2>(output))::value == 2 * kPairs);
    sums[0] = sums[1] = WeightSum::empty();
    if (continues) {
      float4 const weights = tile.weights(warpgroup, lane);
      sums[0] = {weights.x, weights.y};
      sums[1] = {weights.z, weights.w};
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SumFactors const factors = sums[r].add(softmax.softmax_reference[r], 1.0f);
      if (continues) {
        add_row(&tile.columns(r, warpgroup * kPairs, lane), r, factors, output);
      } else {
        CUTE_UNROLL
        for (int n = 0; n < 2 * kPairs; ++n) {
          output(2 * r, 0, n) = factors.add(0.0f, output(2 * r, 0, n));
          output(2 * r + 1, 0, n) = factors.add(0.0f, output(2 * r + 1, 0, n));
        }
      }
    }
  }

  // Adds row r of the running sum; `sums` points to the first vector of this lane.
  template <class Accumulators>
  CUTE_DEVICE static void add_row(float4 const* sums, int r, SumFactors const& factors,
                                  Accumulators& output) {
    CUTE_UNROLL
    for (int begin = 0; begin < kPairs; begin += kTogether) {
      float4 columns[kTogether];
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) columns[i] = sums[(begin + i) * kWarpSize];
      // Hazard: without it ptxas starts the loads of all rows, and spills.
      asm volatile("" ::: "memory");
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        int const n = 2 * (begin + i);
        auto const add_to = [&](float& x, float sum) { x = factors.add(sum, x); };
        add_to(output(2 * r, 0, n), columns[i].x);
        add_to(output(2 * r + 1, 0, n), columns[i].y);
        add_to(output(2 * r, 0, n + 1), columns[i].z);
        add_to(output(2 * r + 1, 0, n + 1), columns[i].w);
      }
    }
  }

  template <class Accumulators>
  CUTE_DEVICE static void store(Tile const& tile, int warpgroup, int lane,
                                WeightSum const (&sums)[kRows], Accumulators const& output) {
    tile.weights(warpgroup, lane) =
        make_float4(sums[0].maximum, sums[0].weight, sums[1].maximum, sums[1].weight);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        tile.columns(r, warpgroup * kPairs + pair, lane) =
            make_float4(output(2 * r, 0, 2 * pair), output(2 * r + 1, 0, 2 * pair),
                        output(2 * r, 0, 2 * pair + 1), output(2 * r + 1, 0, 2 * pair + 1));
      }
    }
  }

  // Finishes the rows as the combine kernel does, and stores them.
  template <class Accumulators>
  CUTE_DEVICE static void finish(ForwardParams const& params, KeyPart const& part, int query_length,
                                 int warpgroup, int first_column, WeightSum const (&sums)[kRows],
                                 Softmax& softmax, Accumulators& output) {
    RowsOfTile<true> const rows(params.shape, part.batch, part.head, part.tile * kTileQuery,
                                query_length);
    LaneRowModifiers<Config, Grid> const modifiers(params, rows);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      RowEnd const end = modifiers.finish(r, sums[r].end());
      softmax.softmax_reference[r] = end.logsumexp;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        output(2 * r, 0, n) *= end.factor;
        output(2 * r + 1, 0, n) *= end.factor;
      }
    }
    LatentOutputSm90<Config, Grid, Softmax>::store(params, part, query_length, warpgroup,
                                                   first_column, softmax, output);
  }
};

}  // namespace memeff
