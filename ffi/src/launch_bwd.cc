#include <algorithm>

#include "call.h"
#include "tensor_map.h"

namespace memeff::host {
namespace {

// As many CTAs for each of `blocks` tiles of keys as the device and the workspace have room for.
int choose_shares(const DeviceKernel& kernel, Buffers& buffers, long long blocks) {
  auto const parts = buffers.dimensions("key_gradient_sum");
  long long const most = parts.size() == 2 ? parts[0] : 1;
  return static_cast<int>(
      std::clamp(kernel.multiprocessors / std::max(blocks, 1ll), 1ll, std::max(most, 1ll)));
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
  params.order = static_cast<int*>(buffers.data("order"));
  params.bias_gradient_sum = static_cast<float*>(buffers.data("bias_gradient_sum"));
  if (buffers.error().failure()) return buffers.error();

  ProblemShape const& shape = params.shape;
  params.query_tiles = static_cast<int>(ceil_div(shape.query_length, kernel.image->tile_query));
  long long const key_tiles = ceil_div(shape.key_length, kernel.image->tile_key);
  ScoreView const& bias = params.bias_gradient;
  long long const bias_planes =
      (long long)bias.share.elements * (bias.head_stride == 0 ? 1 : shape.query_heads);
  long long const bias_row_tiles = bias.row_stride == 0 ? 1 : params.query_tiles;
  // Blocks of a grid no larger than the device share the squares.
  long long const square = std::max(kernel.image->tile_query, kernel.image->tile_key);
  long long const bias_squares =
      bias_planes * ceil_div(shape.query_length, square) * ceil_div(shape.key_length, square);
  long long const key_blocks = key_tiles * shape.key_heads * shape.batch;
  params.shares = choose_shares(kernel, buffers, key_blocks);
  std::map<std::string, long long> const blocks = {
      {"queries", (long long)params.query_tiles * shape.query_heads * shape.batch},
      {"keys", key_blocks},
      {"key_shares", key_blocks * params.shares},
      {"bias", bias_planes * bias_row_tiles * key_tiles},
      {"bias_squares", std::min<long long>(bias_squares, kernel.multiprocessors)}};

  auto maps = encode_maps<BackwardMaps>(kernel.image->maps, buffers);
  if (!maps.has_value()) return maps.error();
  auto error = xla::ffi::Error::Success();
  if (buffers.has("bias_gradient_sum")) {
    error = fill_zero(params.bias_gradient_sum, buffers.bytes("bias_gradient_sum"), stream);
  }
  for (size_t entry = 0; entry < kernel.image->grids.size() && error.success(); ++entry) {
    const std::string& grid = kernel.image->grids[entry];
    params.tile_map = tile_map_of(buffers, kernel.image->tile_maps[entry]);
    if (buffers.error().failure()) return buffers.error();
    std::vector<const void*> arguments = {&params};
    if (kernel.image->takes_maps[entry] != 0) arguments.push_back(&*maps);
    error = launch(kernel, static_cast<int>(entry), blocks.at(grid), stream, arguments);
  }
  return error;
}

}  // namespace memeff::host
