// The Hopper forward of f32 in f16 products, and the kernel before it.
#pragma once

#include <memeff/kernels/fmha_fwd_sm90.cuh>
#include <memeff/kernels/forward/f16x3_split.cuh>
