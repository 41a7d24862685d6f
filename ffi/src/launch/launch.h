// From a call and its buffers to launches.
#pragma once

#include "images/kernel_table.h"
#include "launch/buffers.h"
#include "memeff/params.h"

namespace memeff::host {

// The parts of the parameters that all directions have.
ProblemShape shape_of(const KernelDescription& kernel, Buffers& buffers);
MaskParams mask_of(const Call& call, Buffers& buffers);
// Null pointers if the call has no such array.
BlockMask block_mask_of(Buffers& buffers, std::string_view name);

// At most so many partial results have room in a workspace; larger sizes count as this one.
constexpr long long kMostSplits = 1ll << 20;

// The fastest number of splits of the keys that the workspaces have room for.
long long choose_splits(const DeviceKernel& kernel, Buffers& buffers);

xla::ffi::Error fill_zero(const DeviceKernel& kernel, void* data, size_t bytes, CUstream stream);

// Launches all entry points of a kernel. `params` is the first parameter of each; `table` and
// `block_mask` are parts of it. The fields of features and the table are filled once, `block_mask`
// for each entry point.
xla::ffi::Error launch_all(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                           const LaunchDims& dims, void* params, BlockMask* block_mask,
                           ArrayTable* table, CUstream stream);

// The parts of the parameters that a forward and a tangent kernel have.
void fill_forward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                  ForwardParams* params);

xla::ffi::Error launch_forward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                               CUstream stream);
xla::ffi::Error launch_backward(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                                CUstream stream);
xla::ffi::Error launch_tangent(const Call& call, const DeviceKernel& kernel, Buffers& buffers,
                               CUstream stream);

}  // namespace memeff::host
