// Writes the output of a part (KeyPart) in kernels/fmha_fwd_latent_sm90.cuh: results, or partial
// results that kernels/forward/latent/combine.cuh adds up.
#pragma once

#include <memeff/collective/epilogue.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/schedule/balanced_keys.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// A consumer calls write() after the last KV block of a part. It writes as many columns as Grid
// has, from its own first column on.
template <class Config, class Grid, class Softmax>
struct LatentOutputSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;

  // Consumer 0 writes the logsumexps.
  template <class Accumulators>
  CUTE_DEVICE static void write(ForwardParams const& params, KeyPart const& part, int query_length,
                                int warpgroup, int first_column, Softmax& softmax,
                                Accumulators& output) {
    int const row = part.tile * kTileQuery;
    // The combine kernel finishes rows of partial results, so none of them is valid here.
    RowsOfTile<true> const rows(params.shape, part.batch, part.head, row,
                                part.slot < 0 ? query_length : 0);
    softmax.finish(output, params.scale.softmax_scale, 1.0f,
                   LaneRowModifiers<Config, Grid>(params, rows));
    if (part.slot < 0) {
      store(params, part, query_length, warpgroup, first_column, softmax, output);
    } else {
      store_partial(params, part.slot, warpgroup, first_column, softmax, output);
    }
  }

  // Stores the finished output and logsumexps of a part that is a whole row tile.
  template <class Accumulators>
  CUTE_DEVICE static void store(ForwardParams const& params, KeyPart const& part, int query_length,
                                int warpgroup, int first_column, Softmax const& softmax,
                                Accumulators const& output) {
    ProblemShape const& shape = params.shape;
    PackedRows<true> const rows(shape);
    Origin const origin = query_origin<Config>(shape, part.batch);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const row = part.tile * kTileQuery + Grid::element_row(2 * r, 0);
      bool const valid = row < query_length;
      int const own = min(row, query_length - 1);
      int const query = rows.query(own);
      int const head = rows.query_head(part.head, own);
      store_global_if(valid && warpgroup == 0 && threadIdx.x % 4 == 0,
                      params.logsumexp + logsumexp_offset<Config>(shape, origin, head) + query,
                      softmax.softmax_reference[r]);
      char* const out = row_pointer<Element>(params.out, origin.batch, origin.row + query, head);
      store_row<Element>(out + (first_column + lane_column()) * int(sizeof(Element)), output, r,
                         shape.value_dim - first_column, valid);
    }
  }

 private:
  // Stores all rows, valid or not, so the combine kernel need not distinguish them.
  template <class Accumulators>
  CUTE_DEVICE static void store_partial(ForwardParams const& params, int slot, int warpgroup,
                                        int first_column, Softmax const& softmax,
                                        Accumulators const& output) {
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      long long const row = (long long)slot * kTileQuery + Grid::element_row(2 * r, 0);
      store_global_if(warpgroup == 0 && threadIdx.x % 4 == 0, params.partial_logsumexp + row,
                      softmax.softmax_reference[r]);
      float* const out = params.partial_out + row * Config::kValueDim + first_column;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        *reinterpret_cast<float2*>(out + Grid::element_column(0, n)) =
            make_float2(output(2 * r, 0, n), output(2 * r + 1, 0, n));
      }
    }
  }
};

}  // namespace memeff
