// Attention backward for Hopper and head dims above 128, in two kernels, each of which owns the
// gradients it writes:
//
//   FmhaBackwardTwoKernelDq    one CTA per 128 queries: dQ += dS K for every KV block
//   FmhaBackwardTwoKernelDkdv  one CTA per 64 keys: dV += P^T dO and dK += dS^T Q for every Q block
//
// dK and dV of 128 keys do not fit in the registers of an SM, and with 64 keys the f32 sums of dQ
// of a single kernel would exceed the L2 bandwidth. Two kernels compute S and dP twice (seven
// products instead of five), but keep no sums in global memory, and every run adds in the same
// order.
#pragma once

#include <memeff/kernels/backward/dbias/postprocess.cuh>
#include <memeff/kernels/backward/dbias/sm90.cuh>
#include <memeff/kernels/backward/dkdv/kernel.cuh>
#include <memeff/kernels/backward/dq/kernel.cuh>
#include <memeff/kernels/backward/preprocess.cuh>

namespace memeff {

// Computes the statistics of the rows; there are no sums to zero.
template <class Config>
struct FmhaBackwardTwoKernelPreprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesTwoKernel<Config>> {};

// Rounds the sums of a bias gradient.
template <class Config>
struct FmhaBackwardTwoKernelDbiasPostprocess
    : FmhaBackwardDbiasPostprocess<Config, BackwardTilesTwoKernel<Config>> {};

// The deterministic gradient of a bias that is broadcast over the batch or heads.
template <class Config>
struct FmhaBackwardTwoKernelDbias : DbiasSm90<Config, BackwardTilesTwoKernel<Config>> {};

}  // namespace memeff
