// Encodes the tensor maps through which TMA accesses the arrays of a call.
#pragma once

#include "buffers.h"
#include "memeff/params.h"

namespace memeff::host {

// The parameter of kernels that take tensor maps. A kernel declares as many as it has: ForwardMaps
// or BackwardMaps, followed by the maps of further arrays.
struct MapTable {
  static constexpr size_t kMost = 16;
  TensorMap maps[kMost];
};

// The maps of a kernel, in the order of its description, with the addresses of this execution.
// A map is zero if the call does not have its array.
MapTable encode_maps(const DeviceKernel& kernel, const Buffers& buffers);

}  // namespace memeff::host
