// What a consumer of the Hopper forward writes when it has visited all key tiles of its rows.
#pragma once

#include <memeff/bias/rows.cuh>
#include <memeff/collective/bulk_tile.cuh>
#include <memeff/collective/drop.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/sequences.cuh>

namespace memeff {

template <class Config, class Grid, class Softmax>
struct ForwardOutputSm90 {
  using Element = typename Config::Element;

  // Output and logsumexp of this warp's rows of a piece, of which `query_length` rows are valid.
  template <class Output>
  CUTE_DEVICE static void write(ForwardParams const& params, WorkItem const& item, int query_length,
                                Softmax& softmax, Output& output) {
    ProblemShape const& shape = params.shape;
    int const row = item.tile * Config::kTileQuery;
    finish(params, item, row, query_length - row, softmax, output);
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const row_bound = existing_rows(shape, query_length);
    float* const logsumexp = params.logsumexp + logsumexp_offset<Config>(shape, origin, item.head);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const query = row + Grid::element_row(2 * r, 0);
      bool const exists = query < row_bound;
      bool const valid = query < query_length;
      if (threadIdx.x % 4 == 0 && exists) {
        logsumexp[query] = valid ? softmax.row_reference[r] : -infinity();
      }
      store_row<Element>(
          row_pointer<Element>(params.out, origin.batch, origin.row + query, item.head), output, r,
          shape.value_dim, exists, valid);
    }
  }

  // Output 0 and logsumexp -inf of the rows [row, row + rows) of a piece, by the threads of a
  // warpgroup: they are not valid, but may exist.
  CUTE_DEVICE static void write_empty(ForwardParams const& params, WorkItem const& item,
                                      int query_length, int row, int rows) {
    ProblemShape const& shape = params.shape;
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const end = min(row + rows, existing_rows(shape, query_length));
    float* const logsumexp = params.logsumexp + logsumexp_offset<Config>(shape, origin, item.head);
    int const thread = int(threadIdx.x) % kWarpgroupSize;
    CUTE_NO_UNROLL
    for (int query = row + thread; query < end; query += kWarpgroupSize) {
      logsumexp[query] = -infinity();
    }
    constexpr int kVectorColumns = 16 / int(sizeof(Element));
    int const vectors = shape.value_dim / kVectorColumns;
    CUTE_NO_UNROLL
    for (int i = thread; i < (end - row) * vectors; i += kWarpgroupSize) {
      char* const out =
          row_pointer<Element>(params.out, origin.batch, origin.row + row + i / vectors, item.head);
      *reinterpret_cast<uint4*>(out + i % vectors * 16) = make_uint4(0, 0, 0, 0);
    }
  }

 private:
  // Past a packed sequence the next one begins.
  CUTE_DEVICE static int existing_rows(ProblemShape const& shape, int query_length) {
    return Config::kVarlen ? query_length : shape.query_length;
  }

  // The end of the softmax. A bias that is broadcast over columns has an effect here alone.
  template <class Output>
  CUTE_DEVICE static void finish(ForwardParams const& params, WorkItem const& item, int row,
                                 int row_bound, Softmax& softmax, Output& output) {
    float const output_scale = kept_scale<Config>(params.dropout);
    if constexpr (Config::kBias && !has_bias_tile<Config>()) {
      RowBias<Config, Grid> const bias(params.bias, item.batch, item.head, row, row_bound);
      bias.mask(softmax);
      softmax.finish(output, params.scale.softmax_scale, output_scale);
      bias.add(softmax);
    } else {
      softmax.finish(output, params.scale.softmax_scale, output_scale);
    }
  }
};

}  // namespace memeff
