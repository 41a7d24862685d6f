// The rows of a work item of the split forward, and its results in global memory.
#pragma once

#include <memeff/kernels/forward/split/operands.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/schedule/key_splits.cuh>

namespace memeff {

// Coordinates are computed anew, so that no register holds them across the main loop.
template <class Config, class Kernel>
struct SplitOutput {
  using Element = typename Config::Element;
  using Mask = typename Kernel::Mask;
  using Operands = typename Kernel::Operands;
  using OutGrid = typename Kernel::OutGrid;
  using Rows = typename Kernel::Rows;
  using Softmax = typename Kernel::Softmax;
  static constexpr int kTileQuery = Config::kTileQuery;

  CUTE_DEVICE static SplitWorkItem work_item(ForwardParams const& params) {
    Rows const rows(params.shape);
    int const tiles = ceil_div(rows.count(params.shape.query_length), kTileQuery);
    return SplitWorkItem::of_block(block_index(), params.shape.query_heads / rows.heads, tiles,
                                   params.splits);
  }

  // The number of rows to write. Hazard: the rows after a packed sequence belong to the next one.
  CUTE_DEVICE static int row_bound(ForwardParams const& params, int batch) {
    return Config::kVarlen ? Mask(params.mask, params.shape, batch).query_length
                           : Rows(params.shape).count(params.shape.query_length);
  }

  // Calls use(row, is within the query length, row of the accumulators) for this lane's rows.
  template <class Use>
  CUTE_DEVICE static void for_each_row(ForwardParams const& params, SplitWorkItem const& item,
                                       Use use) {
    int const bound = row_bound(params, item.batch);
    int const length = Mask(params.mask, params.shape, item.batch).query_length;
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const row = item.tile * kTileQuery + OutGrid::element_row(2 * (r % 2), r / 2);
      if (row < bound) use(row, row < length, r);
    }
  }

  // Writes finished rows. Rows beyond the query length get output 0 and logsumexp -inf.
  template <class Output>
  CUTE_DEVICE static void store(ForwardParams const& params, Softmax const& softmax,
                                Output const& output) {
    ProblemShape const& shape = params.shape;
    SplitWorkItem const item = work_item(params);
    Rows const rows(shape);
    Origin const origin = query_origin<Config>(shape, item.batch);
    for_each_row(params, item, [&](int row, bool valid, int r) {
      int const query = rows.query(row);
      int const head = rows.query_head(item.head, row);
      if (threadIdx.x % 4 == 0) {
        params.logsumexp[logsumexp_offset<Config>(shape, origin, head) + query] =
            valid ? softmax.softmax_reference[r] : -infinity();
      }
      char* const out = row_pointer<Element>(params.out, origin.batch, origin.row + query, head);
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        int const column = Operands::column(n);
        if (column < shape.value_dim) {
          uint32_t const pair =
              pack<Element>(output(2 * (r % 2), r / 2, n), output(2 * (r % 2) + 1, r / 2, n));
          *reinterpret_cast<uint32_t*>(out + column * sizeof(Element)) = valid ? pair : 0;
        }
      }
    });
  }

  // Writes unfinished rows to a part: a split or a segment. Rows without keys are written too,
  // because the combine kernel loads outputs before it has seen the logsumexps.
  template <class Output>
  CUTE_DEVICE static void store_partial(ForwardParams const& params, int part,
                                        Softmax const& softmax, Output const& output) {
    SplitWorkItem const item = work_item(params);
    long long const first =
        partial_row(params.shape, Rows(params.shape), part, item.batch, item.head);
    for_each_row(params, item, [&](int row, bool valid, int r) {
      if (threadIdx.x % 4 == 0) {
        params.partial_logsumexp[first + row] = valid ? softmax.softmax_reference[r] : -infinity();
      }
      float* const out = params.partial_out + (first + row) * Config::kValueDim;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        *reinterpret_cast<float2*>(out + Operands::column(n)) =
            make_float2(valid ? output(2 * (r % 2), r / 2, n) : 0.0f,
                        valid ? output(2 * (r % 2) + 1, r / 2, n) : 0.0f);
      }
    });
  }
};

}  // namespace memeff
