#include <algorithm>
#include <numeric>

#include "launch/launch.h"

namespace memeff::host {
namespace {

// The most CTAs for each SM that divide Q blocks: as many as codegen/strategy.py asks for. Under a
// causal mask the first KV block has twice the mean work.
int most_ctas_per_sm(MaskParams const& mask) {
  bool const is_left_bounded = std::min(mask.top_left_left, mask.bottom_right_left) < kUnbounded;
  bool const is_right_bounded = std::min(mask.top_left_right, mask.bottom_right_right) < kUnbounded;
  return is_right_bounded && !is_left_bounded ? 2 : 1;
}

// Sets how many CTAs share a KV block: schedule/split_q.cuh. The workspace has room for `most`. As
// many as possible divide query heads, and the others Q blocks, if they fill the device.
void set_splits(const DeviceKernel& kernel, Buffers& buffers, BackwardParams& params) {
  params.head_splits = 1;
  params.row_splits = 1;
  const ArrayType* const sums = buffers.type("key_gradient_sum");
  if (sums == nullptr || sums->rank != 2) return;
  long long const most = std::clamp(sums->sizes[0], 1ll, 1ll << 20);
  // Without query heads the group is 0, and gcd(most, 0) is `most`.
  long long const heads = std::gcd(most, std::max(params.shape.group, 1));
  params.head_splits = static_cast<int>(heads);
  params.shape.group /= params.head_splits;
  params.shape.key_heads *= params.head_splits;
  long long const tiles = ceil_div(params.shape.key_length, kernel.description->tile_key);
  // Three sizes of 31 bits may have a product of more than 63 bits. Such a call has enough blocks.
  long long blocks = 0;
  if (__builtin_mul_overflow(tiles * params.shape.key_heads, params.shape.batch, &blocks)) return;
  long long const ctas =
      static_cast<long long>(most_ctas_per_sm(params.mask)) * kernel.multiprocessors;
  long long const rows = ctas / std::max(blocks, 1ll);
  params.row_splits = static_cast<int>(std::clamp(rows, 1ll, most / heads));
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
  params.query_gradient_states = static_cast<int*>(buffers.data("query_gradient_states"));
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
  set_splits(kernel, buffers, params);
  dims.q_splits = static_cast<long long>(params.head_splits) * params.row_splits;
  if (params.bias_gradient_sum != nullptr) {
    xla::ffi::Error error =
        fill_zero(kernel, params.bias_gradient_sum, buffers.bytes("bias_gradient_sum"), stream);
    if (error.failure()) return error;
  }
  return launch_all(call, kernel, buffers, dims, &params, &params.block_mask, &params.table,
                    stream);
}

}  // namespace memeff::host
