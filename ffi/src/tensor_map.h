// How the tensor memory accelerator of a device sees the buffers of a call.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "call.h"

namespace memeff::host {

// The maps of the named buffers, [batch, sequence, head, dim] but for the bias, which broadcasts to
// [batch, head, query, key], encoded for this execution: they hold addresses. That of a buffer
// which the call does not have is zero.
xla::ffi::ErrorOr<std::vector<TensorMap>> encode_maps(const std::vector<MapBox>& boxes,
                                                      Buffers& buffers);

// The same as the parameter of a kernel, which the boxes are in the order of; maps without a box
// are zero.
template <class Maps>
xla::ffi::ErrorOr<Maps> encode_maps(const std::vector<MapBox>& boxes, Buffers& buffers) {
  Maps maps = {};
  if (boxes.empty()) return maps;
  auto encoded = encode_maps(boxes, buffers);
  if (!encoded.has_value()) return xla::ffi::Unexpected(encoded.error());
  constexpr std::size_t kMost = sizeof(Maps) / sizeof(TensorMap);
  constexpr std::size_t kLeast = kMost - Maps::kOptional;
  if (encoded->size() < kLeast || encoded->size() > kMost) {
    return xla::ffi::Unexpected(failure(xla::ffi::ErrorCode::kInvalidArgument,
                                        "expected " + std::to_string(kLeast) + " to " +
                                            std::to_string(kMost) + " tensor maps, got " +
                                            std::to_string(encoded->size()) +
                                            " (was the program exported by another version?)"));
  }
  std::memcpy(&maps, encoded->data(), encoded->size() * sizeof(TensorMap));
  return maps;
}

}  // namespace memeff::host
