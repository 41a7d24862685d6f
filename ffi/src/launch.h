// From a call and its buffers to launches.
#pragma once

#include "buffers.h"
#include "kernels.h"
#include "memeff/params.h"

namespace memeff::host {

void launch_forward(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                    CUstream stream);
void launch_backward(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                     CUstream stream);
void launch_tangent(const Call& call, const DeviceKernel& kernel, const Buffers& buffers,
                    CUstream stream);

}  // namespace memeff::host
