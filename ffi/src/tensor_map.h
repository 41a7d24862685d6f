// How the tensor memory accelerator of a device sees the buffers of a call.
#pragma once

#include "call.h"

namespace memeff::host {

// Encodes the maps of a kernel into `maps`, of which there are from `least` to `most`: of the
// buffers that its boxes name, [batch, sequence, head, dim] but for the bias, which broadcasts to
// [batch, head, query, key]. They hold the addresses of this execution. That of a buffer which the
// call does not have stays as it is.
xla::ffi::Error encode_maps(const DeviceKernel& kernel, Buffers& buffers, size_t least, size_t most,
                            TensorMap* maps);

// The same as the parameter of a kernel, which the boxes are in the order of; maps without a box or
// a buffer are zero.
template <class Maps>
xla::ffi::ErrorOr<Maps> encode_maps(const DeviceKernel& kernel, Buffers& buffers) {
  Maps maps = {};
  if (kernel.image->maps.empty()) return maps;
  constexpr size_t kMost = sizeof(Maps) / sizeof(TensorMap);
  auto error = encode_maps(kernel, buffers, kMost - Maps::kOptional, kMost,
                           reinterpret_cast<TensorMap*>(&maps));
  if (error.failure()) return xla::ffi::Unexpected(error);
  return maps;
}

}  // namespace memeff::host
