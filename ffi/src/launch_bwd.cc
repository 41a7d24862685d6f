#include "call.h"

namespace memeff::host {

xla::ffi::Error launch_backward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                                CUstream stream) {
  BackwardParams params = {};
  params.shape = buffers.shape();
  params.scale = call.scale;
  params.mask = mask_of(call, buffers);
  params.dropout = dropout_of(call, buffers);
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
  params.row_logsumexp2 = static_cast<float*>(buffers.data("row_logsumexp2"));
  params.row_delta = static_cast<float*>(buffers.data("row_delta"));
  params.query_gradient_sum = static_cast<float*>(buffers.data("query_gradient_sum"));
  if (buffers.error().failure()) return buffers.error();

  ProblemShape const& shape = params.shape;
  params.query_tiles =
      static_cast<int>(ceil_div(shape.query_length, kernel.image->tile_query));
  long long const key_tiles = ceil_div(shape.key_length, kernel.image->tile_key);
  long long const query_blocks = (long long)params.query_tiles * shape.query_heads * shape.batch;
  long long const key_blocks = key_tiles * shape.key_heads * shape.batch;

  enum { kPreprocess, kMain, kPostprocess };
  auto error = launch(kernel, kPreprocess, query_blocks, stream, &params);
  if (error.success()) error = launch(kernel, kMain, key_blocks, stream, &params);
  if (error.success() && buffers.has("query_gradient")) {
    error = launch(kernel, kPostprocess, query_blocks, stream, &params);
  }
  return error;
}

}  // namespace memeff::host
