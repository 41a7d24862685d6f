// Writes the output of a consumer of the Hopper forward, after the last KV block of its rows.
#pragma once

#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/linear_scores.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// Writes zeros to the rows [row, row_end) of a work tile's output, and `number` to its statistics
// of these rows, with the threads of a warpgroup. These rows are not valid, but may exist.
template <class Config>
CUTE_DEVICE void write_empty_rows(ProblemShape const& shape, TensorView const& out,
                                  float* statistics, float number, WorkItem const& item,
                                  int query_length, int row, int row_end) {
  using Element = typename Config::Element;
  // Hazard: the rows after a packed sequence belong to the next one.
  int const end = min(row_end, Config::kVarlen ? query_length : shape.query_length);
  if (row >= end) return;
  Origin const origin = query_origin<Config>(shape, item.batch);
  float* const of_head = statistics + logsumexp_offset<Config>(shape, origin, item.head);
  int const thread = int(threadIdx.x) % kWarpgroupSize;
  CUTE_NO_UNROLL
  for (int query = row + thread; query < end; query += kWarpgroupSize) of_head[query] = number;
  constexpr int kVectorColumns = 16 / int(sizeof(Element));
  int const vectors = shape.value_dim / kVectorColumns;
  CUTE_NO_UNROLL
  for (int i = thread; i < (end - row) * vectors; i += kWarpgroupSize) {
    char* const rows =
        row_pointer<Element>(out, origin.batch, origin.row + row + i / vectors, item.head);
    *reinterpret_cast<uint4*>(rows + i % vectors * 16) = make_uint4(0, 0, 0, 0);
  }
}

// A consumer calls write() after the last KV block of a work tile; with consumer groups only the
// first group does.
template <class Config, class Grid, class Softmax>
struct ForwardOutputSm90 {
  using Element = typename Config::Element;

  // Writes output and logsumexp of this warp's valid rows of a work tile, those below
  // `query_length`. If consumers divide the columns, those of this one begin at `first_column`.
  template <class Linear, class Output>
  CUTE_DEVICE static void write(ForwardParams const& params, WorkItem const& item, int query_length,
                                Linear const& linear, Softmax& softmax, Output& output,
                                int first_column = 0) {
    ProblemShape const& shape = params.shape;
    int const row = item.tile * Config::kTileQuery;
    RowsOfTile<> const rows(shape, item.batch, item.head, row, query_length);
    softmax.finish(
        output, linear.softmax_scale(params.scale), probability_scale<Config>(params),
        linear.template rows<Grid>(LaneRowModifiers<Config, Grid>(params, rows), params.scale));
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const query = row + Grid::element_row(0, 0);
    char* out = row_pointer<Element>(params.out, origin.batch, origin.row + query, item.head) +
                (first_column + lane_column()) * int(sizeof(Element));
    float* logsumexp =
        params.logsumexp + logsumexp_offset<Config>(shape, origin, item.head) + query;
    // Otherwise the compiler computes each of the addresses below from scratch.
    hide_value(out);
    hide_value(logsumexp);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const below = Grid::element_row(2 * r, 0) - Grid::element_row(0, 0);
      bool const valid = query + below < query_length;
      store_global_if(valid && first_column == 0 && threadIdx.x % 4 == 0, logsumexp + below,
                      softmax.softmax_reference[r]);
      store_row<Element>(out + below * params.out.row_stride * int(sizeof(Element)), output, r,
                         shape.value_dim - first_column, valid);
    }
  }

  // Writes output 0 and logsumexp -inf to the rows [row, row_end) of a work tile that are not
  // valid.
  CUTE_DEVICE static void write_empty(ForwardParams const& params, WorkItem const& item,
                                      int query_length, int row, int row_end) {
    write_empty_rows<Config>(params.shape, params.out, params.logsumexp, -infinity(), item,
                             query_length, row, row_end);
  }

  // Does the same for a CTA's part of the queries that belong to no sequence.
  template <int kThreads>
  CUTE_DEVICE static void clear_gap(ForwardParams const& params, WorkItem const& item, int length,
                                    int tiles) {
    clear_query_gap<Config, kThreads>(params, item, length, tiles);
  }
};

}  // namespace memeff
