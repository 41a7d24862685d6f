// The rows of [batch, sequence, head, dim] tensors in global memory, and where those of a batch
// index begin: at row 0 of its own batch index, or at a token of packed sequences.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff {

// The first element of row `row` of one head of a tensor.
template <class Element>
CUTE_DEVICE char* row_pointer(TensorView const& tensor, int batch, int row, int head) {
  return reinterpret_cast<char*>(static_cast<Element*>(tensor.data) + batch * tensor.batch_stride +
                                 row * tensor.row_stride + head * tensor.head_stride);
}

// The bytes from one row of a tensor to the next.
template <class Element>
CUTE_DEVICE long long row_bytes(TensorView const& tensor) {
  return tensor.row_stride * sizeof(Element);
}

// The tensor's batch index and row at which the rows of a batch index begin.
struct Origin {
  int batch;
  int row;
};

template <class Config>
CUTE_DEVICE Origin query_origin(ProblemShape const& shape, int batch) {
  if constexpr (Config::kPacked) return {0, shape.query_starts[batch]};
  return {batch, 0};
}

template <class Config>
CUTE_DEVICE Origin key_origin(ProblemShape const& shape, int batch) {
  if constexpr (Config::kPageSize > 0) return {0, 0};
  if constexpr (Config::kPacked) return {0, shape.key_starts[batch]};
  return {batch, 0};
}

// The offset of the logsumexp of row 0 of a head.
template <class Config>
CUTE_DEVICE long long logsumexp_offset(ProblemShape const& shape, Origin const& origin, int head) {
  long long const head_batch = (long long)origin.batch * shape.query_heads + head;
  return head_batch * (Config::kPacked ? shape.query_tokens : shape.query_length) + origin.row;
}

// The tokens after a sequence that belong to no sequence. Their results must be zeros, and no CTA
// owns them, so the CTAs of the preceding sequence divide them: each clears part `tile` of `tiles`.
//
// A call may compute only some of the sequences; the others have length 0 in it, and their tokens
// count as gaps. With ForwardParams::marks_empty, their length is kNoGap if nothing is to be
// cleared.
struct Gap {
  int begin;
  int end;
  int tokens;

  CUTE_DEVICE static Gap of_queries(ProblemShape const& shape, int batch, int length) {
    return {shape.query_starts[batch] + length, shape.query_starts[batch + 1], shape.query_tokens};
  }
  template <class Config>
  CUTE_DEVICE static Gap of_queries(ForwardParams const& params, int batch, int length) {
    if constexpr (Config::kPageSize > 0) {
      bool const may_be_marked = params.marks_empty && length == 0;
      if (may_be_marked && params.mask.query_lengths[batch] == kNoGap) return {0, 0, 0};
    }
    return of_queries(params.shape, batch, length);
  }
  CUTE_DEVICE static Gap of_keys(ProblemShape const& shape, int batch, int length) {
    return {shape.key_starts[batch] + length, shape.key_starts[batch + 1], shape.key_tokens};
  }

  CUTE_DEVICE bool empty() const { return begin >= end; }
  CUTE_DEVICE int token(int row) const { return row < tokens ? row : row - tokens; }

  // Writes zeros to this CTA's rows of one head, one warp per row.
  template <class Element, int kThreads>
  CUTE_DEVICE void clear(TensorView const& tensor, int head, int columns, int tile,
                         int tiles) const {
    constexpr int kWarps = kThreads / kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    for (int row = begin + tile * kWarps + warp; row < end; row += tiles * kWarps) {
      Element* const target =
          reinterpret_cast<Element*>(row_pointer<Element>(tensor, 0, token(row), head));
      for (int i = threadIdx.x % kWarpSize; i < columns; i += kWarpSize) target[i] = Element(0.0f);
    }
  }

  // Writes `number` to the statistics of this CTA's rows of one head.
  template <int kThreads>
  CUTE_DEVICE void fill_statistics(float* head_rows, float number, int tile, int tiles) const {
    for (int row = begin + tile * kThreads + int(threadIdx.x); row < end; row += tiles * kThreads) {
      head_rows[token(row)] = number;
    }
  }
};

// Writes zeros to `out`, and `number` to the statistics of its rows, in this CTA's part of the gap
// after a sequence. `tiles` is the number of CTAs of the sequence.
template <class Config, int kThreads>
CUTE_DEVICE void clear_query_gap(Gap const& gap, ProblemShape const& shape, TensorView const& out,
                                 float* statistics, float number, WorkItem const& item, int tiles) {
  gap.template clear<typename Config::Element, kThreads>(out, item.head, shape.value_dim, item.tile,
                                                         tiles);
  gap.template fill_statistics<kThreads>(
      statistics + logsumexp_offset<Config>(shape, {0, 0}, item.head), number, item.tile, tiles);
}

// Writes output 0 and logsumexp -inf to this CTA's part of the queries that belong to no sequence.
// `length` is the length of the sequence. Hazard: with keeps_gaps another kernel has computed those
// queries, and they must stay.
template <class Config, int kThreads>
CUTE_DEVICE void clear_query_gap(ForwardParams const& params, WorkItem const& item, int length,
                                 int tiles) {
  if (params.keeps_gaps) return;
  Gap const gap = Gap::of_queries<Config>(params, item.batch, length);
  clear_query_gap<Config, kThreads>(gap, params.shape, params.out, params.logsumexp, -infinity(),
                                    item, tiles);
}

// Writes zeros to dq in this CTA's part of the queries that belong to no sequence. `length` is the
// length of the sequence, `tiles` its number of CTAs.
template <class Config, int kThreads>
CUTE_DEVICE void clear_query_gap(BackwardParams const& params, WorkItem const& item, int length,
                                 int tiles) {
  Gap::of_queries(params.shape, item.batch, length)
      .template clear<typename Config::Element, kThreads>(params.query_gradient, item.head,
                                                          params.shape.head_dim, item.tile, tiles);
}

// Writes zeros to dk and dv in this CTA's part of the keys that belong to no sequence. `length` is
// the length of the sequence, `tiles` its number of CTAs.
template <class Config, int kThreads>
CUTE_DEVICE void clear_key_gap(BackwardParams const& params, WorkItem const& item, int length,
                               int tiles) {
  using Element = typename Config::Element;
  Gap const gap = Gap::of_keys(params.shape, item.batch, length);
  if constexpr (Config::kKeyGradient) {
    gap.template clear<Element, kThreads>(params.key_gradient, item.head, params.shape.head_dim,
                                          item.tile, tiles);
  }
  if constexpr (Config::kValueGradient) {
    gap.template clear<Element, kThreads>(params.value_gradient, item.head, params.shape.value_dim,
                                          item.tile, tiles);
  }
}

}  // namespace memeff
