// Runs after a forward whose keys were split: out = sum of exp(lse_split - lse) * out_split.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/kernels/forward/segment_sum.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// A sum of weighted outputs, and of the weights.
struct PartialSum {
  float4 out;
  WeightSum weights;

  CUTE_DEVICE static PartialSum empty() {
    return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), WeightSum::empty()};
  }

  CUTE_DEVICE void add(float4 const& other, float other_maximum, float other_weight) {
    SumFactors const factors = weights.add(other_maximum, other_weight);
    out.x = factors.add(out.x, other.x);
    out.y = factors.add(out.y, other.y);
    out.z = factors.add(out.z, other.z);
    out.w = factors.add(out.w, other.w);
  }
};

// The combine kernel of kernels/fmha_fwd_split_sm80.cuh. A CTA combines one or several rows.
template <class Config>
struct FmhaForwardCombine {
  using Element = typename Config::Element;
  using Rows = PackedRows<Config::kPackHeads>;
  static constexpr int kThreads = 128;
  static constexpr int kBlocksPerSm = 8;

  // A thread has four columns of a row. If a row has many splits, several such sets of threads
  // divide them.
  static constexpr int kColumnThreads = Config::kValueDim / 4;
  static constexpr int kSets = kThreads / kColumnThreads;
  static_assert(kSets > 0);

  static constexpr bool kKeySegments = Config::kSegmentKeys > 0;
  static constexpr int kUnroll = kKeySegments ? 8 : 4;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    long long const rows = partial_rows(params.shape);
    // Segments are added up by one set of threads, because their order matters.
    int const row_sets = kKeySegments ? 1 : min(params.splits, kSets);
    int const block_rows = kSets / row_sets;
    long long const step = (long long)gridDim.x * block_rows;
    for (long long first = (long long)blockIdx.x * block_rows; first < rows; first += step) {
      combine(params, first, int(min((long long)block_rows, rows - first)), row_sets);
    }
  }

 private:
  // Combines the rows [first, first + count), each with row_sets sets of threads.
  CUTE_DEVICE static void combine(ForwardParams const& params, long long first, int count,
                                  int row_sets) {
    auto& sums = static_shared<PartialSum[kSets][kColumnThreads]>();
    int const set = threadIdx.x / kColumnThreads;
    int const column_thread = threadIdx.x % kColumnThreads;
    long long const row = first + set / row_sets;
    bool const active = set / row_sets < count;
    PartialSum sum = PartialSum::empty();
    if (active) {
      int const parts = kKeySegments ? segments(params, row) : params.splits;
#pragma unroll kUnroll
      for (int split = set % row_sets; split < parts; split += row_sets) {
        long long const index = split * partial_rows(params.shape) + row;
        float const logsumexp = params.partial_logsumexp[index];
        float const* const out = params.partial_out + index * Config::kValueDim + 4 * column_thread;
        float4 part = *reinterpret_cast<float4 const*>(out);
        // The output of a masked segment is uninitialized. It is loaded and discarded, because a
        // branch around the load would make the loads of all segments wait for each other.
        bool const is_written = !kKeySegments || logsumexp != -infinity();
        if (!is_written) part = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sum.add(part, logsumexp, 1.0f);
      }
      sums[set][column_thread] = sum;
    }
    __syncthreads();
    if (active && set % row_sets == 0) {
      for (int other = 1; other < row_sets; ++other) {
        PartialSum const& found = sums[set + other][column_thread];
        sum.add(found.out, found.weights.maximum, found.weights.weight);
      }
      store(params, row, 4 * column_thread, sum);
    }
    __syncthreads();  // every thread has read the sums
  }

  // The number of segments of the sequence of a row.
  CUTE_DEVICE static int segments(ForwardParams const& params, long long partial_row) {
    ProblemShape const& shape = params.shape;
    int const batch = int(partial_row / ((long long)shape.query_heads * shape.query_length));
    int const keys = IntervalMask<MaskKind::none>(params.mask, shape, batch).key_length;
    return ceil_div(keys, Config::kSegmentKeys);
  }

  // Finishes a row with its modifiers and writes four columns of it.
  CUTE_DEVICE static void store(ForwardParams const& params, long long partial_row, int column,
                                PartialSum const& sum) {
    ProblemShape const& shape = params.shape;
    Rows const rows(shape);
    int const row_count = rows.count(shape.query_length);
    int const row = int(partial_row % row_count);
    int const tile_heads = shape.query_heads / rows.heads;
    int const head_batch = int(partial_row / row_count);
    int const batch = head_batch / tile_heads;
    int const query = rows.query(row);
    int const head = rows.query_head(head_batch % tile_heads, row);
    int const query_length = IntervalMask<MaskKind::none>(params.mask, shape, batch).query_length;
    if (Config::kVarlen && query >= query_length) return;  // a row of another sequence
    Origin const origin = query_origin<Config>(shape, batch);
    RowModifiers<Config> const modifiers(params, {batch, head, query, query < query_length});
    auto const end = [&] { return modifiers.finish(sum.weights.end()); };
    if (column == 0) {
      params.logsumexp[logsumexp_offset<Config>(shape, origin, head) + query] = end().logsumexp;
    }
    if (column < shape.value_dim) {
      float const scale = end().factor;
      char* const out = row_pointer<Element>(params.out, origin.batch, origin.row + query, head);
      *reinterpret_cast<uint2*>(out + column * sizeof(Element)) =
          make_uint2(pack<Element>(sum.out.x * scale, sum.out.y * scale),
                     pack<Element>(sum.out.z * scale, sum.out.w * scale));
    }
  }
};

}  // namespace memeff
