// The Hopper forward of f32 in f16 products, and the kernel before it.
#pragma once

#include <memeff/kernels/fmha_fwd_halve.cuh>
#include <memeff/kernels/fmha_fwd_sm90.cuh>
