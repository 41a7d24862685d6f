// From a call and its buffers to launches.
#pragma once

#include "buffers.h"
#include "kernels.h"
#include "memeff/params.h"

namespace memeff::host {

// At most so many partial results have room in a workspace; larger sizes count as this one.
constexpr long long kMostSplits = 1ll << 20;

// The fastest number of splits of the keys of a forward that the workspaces have room for.
long long choose_splits(const Call& call, const DeviceKernel& kernel);

// Sets how many CTAs share a KV block of a backward: schedule/split_q.cuh.
void set_splits(const Call& call, const DeviceKernel& kernel, BackwardParams& params);

void launch_forward(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                    CUstream stream);
void launch_backward(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                     CUstream stream);
void launch_tangent(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                    CUstream stream);

}  // namespace memeff::host
