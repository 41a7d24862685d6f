#include "launch/launch.h"

namespace memeff::host {

xla::ffi::Error launch_tangent(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                               CUstream stream) {
  WithArrays<TangentParams> params = {};
  fill_forward(call, kernel, buffers, &params);
  params.query_tangent = buffers.tensor("query_tangent");
  params.key_tangent = buffers.tensor("key_tangent");
  params.value_tangent = buffers.tensor("value_tangent");
  params.out_tangent = buffers.tensor("out_tangent");
  params.logsumexp_tangent = static_cast<float*>(buffers.data("logsumexp_tangent"));
  if (buffers.error().failure()) return buffers.error();
  return launch_all(call, kernel, buffers, LaunchDims(), &params, &params.block_mask, &params.table,
                    stream);
}

}  // namespace memeff::host
