#include <algorithm>

#include "launch/launch.h"

namespace memeff::host {
namespace {

// The number of CTAs per KV block: as many as the device and the workspace have room for.
long long choose_q_splits(const DeviceKernel& kernel, Buffers& buffers) {
  const KernelDescription& description = *kernel.description;
  const ArrayType* const sums = buffers.type("key_gradient_sum");
  if (sums == nullptr || sums->rank != 2) return 1;
  long long const most = std::clamp(sums->sizes[0], 1ll, 1ll << 20);
  ProblemShape const& shape = description.shape;
  long long const tiles = ceil_div(shape.key_length, description.tile_key);
  // Three sizes of 31 bits may have a product of more than 63 bits. Such a call needs no split.
  long long blocks = 0;
  if (__builtin_mul_overflow(tiles * shape.key_heads, shape.batch, &blocks)) return 1;
  return std::clamp(kernel.multiprocessors / std::max(blocks, 1ll), 1ll, most);
}

}  // namespace

xla::ffi::Error launch_backward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                                CUstream stream) {
  WithArrays<BackwardParams> params = {};
  params.shape = shape_of(*kernel.description, buffers);
  params.scale = call.scale;
  params.mask = mask_of(call, buffers);
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
  params.query_hi_lo = static_cast<char*>(buffers.data("query_hi_lo"));
  params.key_hi_lo = static_cast<char*>(buffers.data("key_hi_lo"));
  params.value_hi_lo = static_cast<char*>(buffers.data("value_hi_lo"));
  params.out_gradient_hi_lo = static_cast<char*>(buffers.data("out_gradient_hi_lo"));
  if (buffers.error().failure()) return buffers.error();

  params.query_tiles =
      static_cast<int>(ceil_div(params.shape.query_length, kernel.description->tile_query));
  LaunchDims dims;
  dims.q_splits = choose_q_splits(kernel, buffers);
  params.q_splits = static_cast<int>(dims.q_splits);
  if (params.bias_gradient_sum != nullptr) {
    xla::ffi::Error error =
        fill_zero(kernel, params.bias_gradient_sum, buffers.bytes("bias_gradient_sum"), stream);
    if (error.failure()) return error;
  }
  return launch_all(call, kernel, buffers, dims, &params, &params.block_mask, &params.table,
                    stream);
}

}  // namespace memeff::host
