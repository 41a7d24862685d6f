// How the tensor memory accelerator of a device sees the arrays of a call.
#pragma once

#include "images/kernel_table.h"
#include "launch/buffers.h"
#include "memeff/params.h"

namespace memeff::host {

// The parameter of kernels that take tensor maps: a kernel declares as many as it has, ForwardMaps
// or BackwardMaps and those of further arrays behind them.
struct MapTable {
  TensorMap maps[16];
};

// Encodes the maps of a kernel, in the order of its description, with the addresses of this
// execution. Maps of arrays that the call does not have stay as they are.
xla::ffi::Error encode_maps(const DeviceKernel& kernel, Buffers& buffers, MapTable* maps);

}  // namespace memeff::host
