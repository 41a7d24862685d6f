#include <algorithm>

#include "launch/launch.h"

namespace memeff::host {

void fill_forward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                  ForwardParams* params) {
  params->shape = shape_of(*kernel.description, buffers);
  params->scale = call.scale;
  params->mask = mask_of(call, buffers);
  params->bias = buffers.scores("bias", call.bias_alignment);
  params->query = buffers.tensor("query");
  params->key = buffers.tensor("key");
  params->value = buffers.tensor("value");
  params->out = buffers.tensor("out");
  params->logsumexp = static_cast<float*>(buffers.data("logsumexp"));
  params->tile_counter = static_cast<TileCounter*>(buffers.data("tile_counter"));
}

xla::ffi::Error launch_forward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                               CUstream stream) {
  WithArrays<ForwardParams> params = {};
  fill_forward(call, kernel, buffers, &params);
  params.partial_logsumexp = static_cast<float*>(buffers.data("partial_logsumexp"));
  params.partial_out = static_cast<float*>(buffers.data("partial_out"));
  params.out_sum = static_cast<float*>(buffers.data("out_sum"));
  params.score_sum = static_cast<float*>(buffers.data("score_sum"));
  params.query_hi_lo = static_cast<char*>(buffers.data("query_hi_lo"));
  params.key_hi_lo = static_cast<char*>(buffers.data("key_hi_lo"));
  params.value_hi_lo = static_cast<char*>(buffers.data("value_hi_lo"));
  params.tile_parts = static_cast<TileParts*>(buffers.data("tile_parts"));
  params.keeps_gaps = buffers.has("filled_out");
  params.marks_empty = buffers.has("marked_query_lengths");
  if (params.marks_empty) {
    params.mask.query_lengths = static_cast<const int*>(buffers.data("marked_query_lengths"));
  }
  if (buffers.error().failure()) return buffers.error();

  LaunchDims dims;
  dims.splits = choose_splits(kernel, buffers);
  params.splits = static_cast<int>(dims.splits);
  // The latent forward divides the keys itself, and needs the number of slots. Hazard: a program
  // may come from anywhere, so the array may be missing, and its size is bounded before the cast.
  const ArrayType* const slots = buffers.type("partial_out");
  if (slots != nullptr && buffers.has("tile_parts")) {
    params.splits = static_cast<int>(std::min(slots->sizes[0], kMostSplits));
  }
  return launch_all(call, kernel, buffers, dims, &params, &params.block_mask, &params.table,
                    stream);
}

}  // namespace memeff::host
