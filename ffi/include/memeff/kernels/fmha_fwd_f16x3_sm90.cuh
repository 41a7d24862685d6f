// The float32 forward for Hopper (3xFP16): the split kernel, which runs first, and the Hopper
// forward.
#pragma once

#include <memeff/kernels/fmha_fwd_sm90.cuh>
#include <memeff/kernels/forward/f16x3_split.cuh>
