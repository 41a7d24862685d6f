#include <algorithm>

#include "call.h"
#include "tensor_map.h"

namespace memeff::host {
namespace {

long long key_tiles(const DeviceKernel& kernel, ProblemShape const& shape) {
  return ceil_div(shape.key_length, kernel.image->tile_key);
}

long long key_blocks(const DeviceKernel& kernel, ProblemShape const& shape) {
  return key_tiles(kernel, shape) * shape.key_heads * shape.batch;
}

// As many CTAs for each tile of keys as the device and the workspace have room for.
int choose_q_splits(const DeviceKernel& kernel, Buffers& buffers, ProblemShape const& shape) {
  Dimensions const parts = buffers.dimensions("key_gradient_sum");
  long long const most = parts.rank == 2 ? parts.sizes[0] : 1;
  long long const blocks = std::max(key_blocks(kernel, shape), 1ll);
  return static_cast<int>(std::clamp(kernel.multiprocessors / blocks, 1ll, std::max(most, 1ll)));
}

xla::ffi::ErrorOr<long long> blocks_of(Grid grid, const DeviceKernel& kernel,
                                       BackwardParams const& params) {
  ProblemShape const& shape = params.shape;
  ScoreView const& bias = params.bias_gradient;
  long long const bias_planes =
      (long long)bias.share.elements * (bias.head_stride == 0 ? 1 : shape.query_heads);
  // Blocks of a grid no larger than the device share the squares.
  long long const square = std::max(kernel.image->tile_query, kernel.image->tile_key);
  long long const bias_squares =
      bias_planes * ceil_div(shape.query_length, square) * ceil_div(shape.key_length, square);
  switch (grid) {
    case Grid::kQueries:
      return (long long)params.query_tiles * shape.query_heads * shape.batch;
    case Grid::kKeys:
      return key_blocks(kernel, shape);
    case Grid::kQSplits:
      return key_blocks(kernel, shape) * params.q_splits;
    case Grid::kBias:
      return bias_planes * (bias.row_stride == 0 ? 1 : params.query_tiles) *
             key_tiles(kernel, shape);
    case Grid::kBiasSquares:
      return std::min<long long>(bias_squares, kernel.multiprocessors);
    case Grid::kOperands:
      break;
  }
  return xla::ffi::Unexpected(
      failure(xla::ffi::ErrorCode::kInvalidArgument,
              "a backward has no grid of operands (was the program exported by another version?)"));
}

}  // namespace

xla::ffi::Error launch_backward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                                CUstream stream) {
  BackwardParams params = {};
  params.shape = buffers.shape();
  params.scale = call.scale;
  params.mask = mask_of(call, buffers);
  params.dropout = dropout_of(call, buffers);
  params.bias = buffers.scores("bias", call.bias_alignment);
  params.query = buffers.tensor("query");
  params.key = buffers.tensor("key");
  params.value = buffers.tensor("value");
  params.out = buffers.tensor("out");
  params.out_gradient = buffers.tensor("out_gradient");
  params.query_gradient = buffers.tensor("query_gradient");
  params.key_gradient = buffers.tensor("key_gradient");
  params.value_gradient = buffers.tensor("value_gradient");
  params.logsumexp = static_cast<const float*>(buffers.data("logsumexp"));
  params.logsumexp_gradient = static_cast<const float*>(buffers.data("logsumexp_gradient"));
  params.row_statistics = static_cast<float*>(buffers.data("row_statistics"));
  params.query_gradient_sum = static_cast<float*>(buffers.data("query_gradient_sum"));
  params.key_gradient_sum = static_cast<float*>(buffers.data("key_gradient_sum"));
  params.value_gradient_sum = static_cast<float*>(buffers.data("value_gradient_sum"));
  params.bias_gradient = buffers.scores("bias_gradient", call.bias_alignment);
  params.semaphores = static_cast<int*>(buffers.data("semaphores"));
  params.bias_gradient_sum = static_cast<float*>(buffers.data("bias_gradient_sum"));
  if (buffers.error().failure()) return buffers.error();

  params.query_tiles =
      static_cast<int>(ceil_div(params.shape.query_length, kernel.image->tile_query));
  params.q_splits = choose_q_splits(kernel, buffers, params.shape);

  auto maps = encode_maps<BackwardMaps>(kernel, buffers);
  if (!maps.has_value()) return maps.error();
  auto error = xla::ffi::Error::Success();
  if (params.bias_gradient_sum != nullptr) {
    error = fill_zero(kernel, params.bias_gradient_sum, buffers.bytes("bias_gradient_sum"), stream);
  }
  for (size_t entry = 0; entry < kernel.image->grids.size() && error.success(); ++entry) {
    params.block_mask = block_mask_of(buffers, kernel.image->block_masks[entry]);
    if (buffers.error().failure()) return buffers.error();
    auto const blocks = blocks_of(kernel.image->grids[entry], kernel, params);
    if (!blocks.has_value()) return blocks.error();
    error = launch(kernel, static_cast<int>(entry), *blocks, stream, &params, &*maps);
  }
  return error;
}

}  // namespace memeff::host
