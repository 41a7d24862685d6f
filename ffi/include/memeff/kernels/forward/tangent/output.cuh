// The rows of a consumer of the Hopper tangent kernel: what it reads of the forward's results, and
// what it writes.
#pragma once

#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/kernels/forward/output_sm90.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/score/bias/rows.cuh>

namespace memeff {

// The two rows of a work tile in which a lane has elements. Grid is that of the scores.
template <class Config, class Grid>
struct TangentRows {
  static constexpr int kRows = 2;

  float logsumexp[kRows];  // in base 2; +inf makes every probability exactly 0
  float tangent[kRows];    // of the logsumexp: this lane's part of the sums of a row

  CUTE_DEVICE TangentRows(TangentParams const& params, WorkItem const& item, int query_length) {
    Origin const origin = query_origin<Config>(params.shape, item.batch);
    float const* const of_head =
        params.logsumexp + logsumexp_offset<Config>(params.shape, origin, item.head);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      int const row = item.tile * Config::kTileQuery + Grid::element_row(2 * r, 0);
      float own = row < query_length ? of_head[row] : -infinity();
      // As in a backward: such a row has no keys, or a bias so large that its exponents lose all
      // precision.
      bool const empty = fabsf(own) >= kWholeFloats;
      if constexpr (shifts_rows<Config>()) {
        // The logsumexp contains this bias, but the scores of the main loop do not.
        if (!empty) own -= row_bias<Config>(params.bias, item.batch, item.head, row);
      }
      logsumexp[r] = empty ? infinity() : own * kLog2e;
      tangent[r] = 0.0f;
    }
  }

  // The tangents of the logsumexp, summed over the lanes of a row.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      tangent[r] += __shfl_xor_sync(0xffffffffu, tangent[r], 1);
      tangent[r] += __shfl_xor_sync(0xffffffffu, tangent[r], 2);
    }
  }
};

template <class Config, class Grid>
struct TangentOutputSm90 {
  using Element = typename Config::Element;
  static constexpr int kBlocks = Config::kValueDim / 8;

  using ForwardRow = RowVectors<kBlocks>;
  // Both rows of the forward's output, loaded while the last product runs. Above 192 columns they
  // would spill.
  static constexpr bool kLoadsEarly = Config::kValueDim <= 192;
  struct ForwardRows {
    ForwardRow rows[kLoadsEarly ? 2 : 1];
  };

  CUTE_DEVICE static ForwardRows load(TangentParams const& params, WorkItem const& item,
                                      int query_length) {
    ForwardRows found;
    if constexpr (kLoadsEarly) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) found.rows[r] = load_row(params, item, query_length, r);
    }
    return found;
  }

  // Writes the tangents of output and logsumexp of this warp's valid rows of a work tile, those
  // below `query_length`. `sums` are those of P dV + dP V.
  template <class Rows, class Sums>
  CUTE_DEVICE static void write(TangentParams const& params, WorkItem const& item, int query_length,
                                Rows& rows, ForwardRows const& forward, Sums& sums) {
    ProblemShape const& shape = params.shape;
    rows.finish();
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const query = item.tile * Config::kTileQuery + Grid::element_row(0, 0);
    char* const out =
        row_pointer<Element>(params.out_tangent, origin.batch, origin.row + query, item.head) +
        lane_column() * int(sizeof(Element));
    float* const logsumexp =
        params.logsumexp_tangent + logsumexp_offset<Config>(shape, origin, item.head) + query;
    float const scale = probability_scale<Config>(params);
    CUTE_UNROLL
    for (int r = 0; r < Rows::kRows; ++r) {
      ForwardRow row = kLoadsEarly ? forward.rows[r % (kLoadsEarly ? 2 : 1)]
                                   : load_row(params, item, query_length, r);
      row.transpose();
      CUTE_UNROLL
      for (int n = 0; n < kBlocks; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& sum = sums(2 * r + i, 0, n);
          float const shift = rows.tangent[r] * unpack<Element>(row.pair(n), i);
          sum = fmaf(sum, scale, -shift);
        }
      }
      int const below = Grid::element_row(2 * r, 0) - Grid::element_row(0, 0);
      bool const valid = query + below < query_length;
      store_global_if(valid && threadIdx.x % 4 == 0, logsumexp + below, rows.tangent[r]);
      store_row<Element>(out + below * params.out_tangent.row_stride * int(sizeof(Element)), sums,
                         r, shape.value_dim, valid);
    }
  }

  // Writes zeros to the rows [row, row_end) of a work tile that are not valid.
  CUTE_DEVICE static void write_empty(TangentParams const& params, WorkItem const& item,
                                      int query_length, int row, int row_end) {
    write_empty_rows<Config>(params.shape, params.out_tangent, params.logsumexp_tangent, 0.0f, item,
                             query_length, row, row_end);
  }

  // Writes zeros to a CTA's part of the queries that belong to no sequence.
  template <int kThreads>
  CUTE_DEVICE static void clear_gap(TangentParams const& params, WorkItem const& item, int length,
                                    int tiles) {
    clear_query_gap<Config, kThreads>(Gap::of_queries(params.shape, item.batch, length),
                                      params.shape, params.out_tangent, params.logsumexp_tangent,
                                      0.0f, item, tiles);
  }

 private:
  CUTE_DEVICE static ForwardRow load_row(TangentParams const& params, WorkItem const& item,
                                         int query_length, int r) {
    ProblemShape const& shape = params.shape;
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const query = item.tile * Config::kTileQuery + Grid::element_row(2 * r, 0);
    ForwardRow found;
    found.load(row_pointer<Element>(params.out, origin.batch, origin.row + query, item.head) +
                   lane_column() * int(sizeof(Element)),
               shape.value_dim, query < query_length);
    return found;
  }
};

}  // namespace memeff
