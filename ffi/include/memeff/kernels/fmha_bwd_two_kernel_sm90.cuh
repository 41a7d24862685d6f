// Attention backward for Hopper and head dims above 128, in two kernels that own what they write:
//
//   FmhaBackwardTwoKernelDq   one CTA 128 queries: dQ += dS K for every tile of keys
//   FmhaBackwardTwoKernelDkdv     one CTA 64 keys: dV += P^T dO and dK += dS^T Q for every tile of
//                              queries
//
// dK and dV of 128 keys do not fit the registers of an SM, and with 64 keys a single kernel would
// send the f32 sums of dQ to L2 at more than its bandwidth. Two kernels compute S and dP twice,
// seven products instead of five, and send no sums anywhere; every run adds in one order.
#pragma once

#include <memeff/kernels/backward/dbias/postprocess.cuh>
#include <memeff/kernels/backward/dbias/sm90.cuh>
#include <memeff/kernels/backward/dkdv/kernel.cuh>
#include <memeff/kernels/backward/dq_sm90.cuh>
#include <memeff/kernels/backward/preprocess.cuh>

namespace memeff {

// The statistics of the rows; nothing is summed in global memory.
template <class Config>
struct FmhaBackwardTwoKernelPreprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesTwoKernel<Config>> {};

template <class Config>
struct FmhaBackwardTwoKernelDbiasPostprocess
    : FmhaBackwardDbiasPostprocess<Config, BackwardTilesTwoKernel<Config>> {};

template <class Config>
struct FmhaBackwardTwoKernelDbias : DbiasSm90<Config, BackwardTilesTwoKernel<Config>> {};

}  // namespace memeff
