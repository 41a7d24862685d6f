#include <algorithm>

#include "call.h"
#include "tensor_map.h"

namespace memeff::host {
namespace {

// Of kernels/forward/f16x3_split.cuh, for query, key and value; a tile has one or more.
long long operand_blocks(ProblemShape const& shape, long long tile_key) {
  long long const query_blocks = ceil_div(std::max(shape.query_length, 1), kF16x3Rows);
  long long const key_blocks =
      ceil_div(std::max(shape.key_length, 1), tile_key) * (tile_key / kF16x3Rows);
  return shape.batch * (query_blocks * shape.query_heads + 2 * key_blocks * shape.key_heads);
}

}  // namespace

xla::ffi::Error launch_forward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                               CUstream stream) {
  ForwardParams params = {};
  params.shape = buffers.shape();
  params.scale = call.scale;
  params.mask = mask_of(call, buffers);
  params.dropout = dropout_of(call, buffers);
  params.bias = buffers.scores("bias", call.bias_alignment);
  params.query = buffers.tensor("query");
  params.key = buffers.tensor("key");
  params.value = buffers.tensor("value");
  params.out = buffers.tensor("out");
  params.logsumexp = static_cast<float*>(buffers.data("logsumexp"));
  params.tile_counter = static_cast<TileCounter*>(buffers.data("tile_counter"));
  params.out_sum = static_cast<float*>(buffers.data("out_sum"));
  params.score_sum = static_cast<float*>(buffers.data("score_sum"));
  params.query_hi_lo = static_cast<char*>(buffers.data("query_hi_lo"));
  params.key_hi_lo = static_cast<char*>(buffers.data("key_hi_lo"));
  params.value_hi_lo = static_cast<char*>(buffers.data("value_hi_lo"));
  bool const halves = kernel.image->grids[0] == Grid::kOperands;
  int const main = halves ? 1 : 0;
  params.block_mask = block_mask_of(buffers, kernel.image->block_masks[main]);
  if (buffers.error().failure()) return buffers.error();

  if (kernel.image->entry_points.size() > 1 && !halves) {
    return launch_split(kernel, buffers, params, stream);
  }
  long long const tiles = ceil_div(params.shape.query_length, kernel.image->tile_query);
  long long const blocks = tiles * params.shape.query_heads * params.shape.batch;
  long long const grid =
      kernel.image->persistent ? std::min<long long>(blocks, kernel.multiprocessors) : blocks;
  if (halves) {
    auto error =
        launch(kernel, 0, operand_blocks(params.shape, kernel.image->tile_key), stream, &params);
    if (error.failure()) return error;
  }
  if (kernel.image->maps.empty()) return launch(kernel, main, grid, stream, &params);

  auto maps = encode_maps<ForwardMaps>(kernel, buffers);
  if (!maps.has_value()) return maps.error();
  return launch(kernel, main, grid, stream, &params, &*maps);
}

}  // namespace memeff::host
