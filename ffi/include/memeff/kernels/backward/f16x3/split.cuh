// Runs before a 3xFP16 backward: splits query, dO, key and value.
#pragma once

#include <memeff/kernels/forward/f16x3/split_rows.cuh>

namespace memeff {

// The entry point. Its grid covers the tiles of all heads of query, dO, key and value.
template <class Config>
struct FmhaBackwardF16x3Split : F16x3RowSplit<Config> {
  using Base = F16x3RowSplit<Config>;
  using typename Base::Tiles;
  static constexpr int kBlocksPerSm = 3;  // four leave 64 registers, which spills at 128 columns

  CUTE_DEVICE static void run(BackwardParams const& params) {
    ProblemShape const& shape = params.shape;
    int const block = int(blockIdx.x);
    int const query_blocks = Base::template blocks<typename Tiles::Query>(shape.query_length);
    int const queries = query_blocks * shape.query_heads * shape.batch;
    if (block >= 2 * queries) {
      Base::split_keys_or_values(params, block - 2 * queries);
      return;
    }
    bool const is_query = block < queries;
    WorkItem const item =
        WorkItem::of_block(block - (is_query ? 0 : queries), query_blocks, shape.query_heads);
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const length = Base::lengths(params, item).query_length;
    if (is_query) {
      Base::template split_rows<typename Tiles::Query>(
          params.query, origin, item, shape.head_dim, length,
          Tiles::query(params, item.batch, item.head, 0));
    } else {
      Base::template split_rows<typename Tiles::OutGradient>(
          params.out_gradient, origin, item, shape.value_dim, length,
          Tiles::out_gradient(params, item.batch, item.head, 0));
    }
  }
};

}  // namespace memeff
