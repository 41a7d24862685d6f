// Runs before a 3xFP16 forward: splits query, key and value.
#pragma once

#include <memeff/kernels/forward/f16x3/split_rows.cuh>

namespace memeff {

// The entry point. Its grid covers the tiles of all heads of query, key and value.
template <class Config>
struct FmhaForwardF16x3Split : F16x3RowSplit<Config> {
  using Base = F16x3RowSplit<Config>;
  using typename Base::Tiles;

  CUTE_DEVICE static void run(ForwardParams const& params) {
    ProblemShape const& shape = params.shape;
    int const block = int(blockIdx.x);
    int const query_blocks = Base::template blocks<typename Tiles::Query>(shape.query_length);
    int const queries = query_blocks * shape.query_heads * shape.batch;
    if (block >= queries) {
      Base::split_keys_or_values(params, block - queries);
      return;
    }
    WorkItem const item = WorkItem::of_block(block, query_blocks, shape.query_heads);
    Base::template split_rows<typename Tiles::Query>(
        params.query, query_origin<Config>(shape, item.batch), item, shape.head_dim,
        Base::lengths(params, item).query_length, Tiles::query(params, item.batch, item.head, 0));
  }
};

}  // namespace memeff
