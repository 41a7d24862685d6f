#include <algorithm>

#include "call.h"
#include "tensor_map.h"

namespace memeff::host {

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
  params.piece_counter = static_cast<PieceCounter*>(buffers.data("piece_counter"));
  params.out_sum = static_cast<float*>(buffers.data("out_sum"));
  params.score_sum = static_cast<float*>(buffers.data("score_sum"));
  params.tile_map = tile_map_of(buffers, kernel.image->tile_maps[0]);
  if (buffers.error().failure()) return buffers.error();

  if (kernel.image->entry_points.size() > 1) return launch_split(kernel, buffers, params, stream);
  long long const tiles = ceil_div(params.shape.query_length, kernel.image->tile_query);
  long long const blocks = tiles * params.shape.query_heads * params.shape.batch;
  if (kernel.image->maps.empty()) return launch(kernel, 0, blocks, stream, {&params});

  auto maps = encode_maps<ForwardMaps>(kernel.image->maps, buffers);
  if (!maps.has_value()) return maps.error();
  long long const grid =
      kernel.image->persistent ? std::min<long long>(blocks, kernel.multiprocessors) : blocks;
  return launch(kernel, 0, grid, stream, {&params, &*maps});
}

}  // namespace memeff::host
