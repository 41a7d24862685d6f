// Writes the output of a segment (KeySegments) of a batch-invariant call in
// kernels/fmha_fwd_latent_sm90.cuh. kernels/forward/latent/combine.cuh finishes the rows.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/kernels/forward/segment_sum.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/schedule/balanced_keys.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// A consumer calls write() after the last KV block of a segment, which is then normalized by
// itself. Segments either have slots of their own, or are added to the sum of their row tile with
// the arithmetic of the combine kernel. A CTA has all segments of such a row tile, in ascending
// order.
template <class Config, class Grid, class Softmax, class Schedule>
struct LatentSegmentOutputSm90 {
  static constexpr int kTileQuery = Config::kTileQuery;

  // Rows beyond the sequence are not written, because the combine kernel does not use them.
  template <class Accumulators>
  CUTE_DEVICE static void write(ForwardParams const& params, KeyPart const& part, int query_length,
                                int warpgroup, int first_column, Softmax& softmax,
                                Accumulators& output) {
    int const row = part.tile * kTileQuery;
    // The combine kernel finishes the rows, so none of them is valid here.
    RowsOfTile<true> const rows(params.shape, part.batch, part.head, row, 0);
    softmax.finish(output, params.scale.softmax_scale, 1.0f,
                   LaneRowModifiers<Config, Grid>(params, rows));
    KeySegments<Config> const segments = {params};
    int const tile = Schedule::index(params.shape, part.batch, part.head, part.tile);
    long long const slot = segments.divided() ? segments.partial_row(tile, segments.segment(part))
                                              : (long long)tile * kTileQuery;
    // Read anew, because the main loop of a window has no registers for rows and addresses.
    unsigned const thread = thread_index();
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const tile_row = Grid::element_row(2 * r, 0, thread);
      bool const valid = row + tile_row < query_length;
      long long const own = slot + tile_row;
      long long const column = first_column + Grid::element_column(0, 0, thread);
      float const logsumexp = softmax.softmax_reference[r];
      if (segments.divided()) {
        store_global_if(valid && warpgroup == 0 && thread % 4 == 0, params.partial_logsumexp + own,
                        logsumexp);
        if (valid) store(params.partial_out + own * Config::kValueDim + column, r, output);
      } else {
        float2& weights = segments.weights(own, warpgroup);
        WeightSum sum = WeightSum::empty();
        if (valid && segments.continues(part)) sum = {weights.x, weights.y};
        SumFactors const factors = sum.add(logsumexp, 1.0f);
        __syncwarp();  // hazard: the lanes of a row have read the weights that the first replaces
        if (valid && thread % 4 == 0) weights = make_float2(sum.maximum, sum.weight);
        float* const out = params.out_sum + own * Config::kValueDim + column;
        if (valid) add(out, r, segments.continues(part), factors, output);
      }
    }
  }

 private:
  // Blocks of eight columns whose sums are loaded together: ptxas does not move a load before a
  // store.
  static constexpr int kTogether = 16;

  // Stores row r of the accumulators; `out` is the first element of this lane.
  template <class Accumulators>
  CUTE_DEVICE static void store(float* out, int r, Accumulators const& output) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(output); ++n) {
      at(out, n) = make_float2(output(2 * r, 0, n), output(2 * r + 1, 0, n));
    }
  }

  // Adds row r of the accumulators to a sum, which is 0 if the row tile begins.
  template <class Accumulators>
  CUTE_DEVICE static void add(float* out, int r, bool continues, SumFactors const& factors,
                              Accumulators const& output) {
    constexpr int kBlocks = decltype(cute::size<2>(output))::value;
    static_assert(kBlocks % kTogether == 0);
    CUTE_UNROLL
    for (int first = 0; first < kBlocks; first += kTogether) {
      float2 sums[kTogether];
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        sums[i] = continues ? at(out, first + i) : make_float2(0.0f, 0.0f);
      }
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        at(out, first + i) = make_float2(factors.add(sums[i].x, output(2 * r, 0, first + i)),
                                         factors.add(sums[i].y, output(2 * r + 1, 0, first + i)));
      }
    }
  }

  // The pair of a lane in block n of eight columns.
  CUTE_DEVICE static float2& at(float* out, int n) {
    return *reinterpret_cast<float2*>(out + 8 * n);
  }
};

}  // namespace memeff
