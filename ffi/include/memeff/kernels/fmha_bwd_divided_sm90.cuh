// Attention backward for Hopper and head dims above 128, in two kernels that own what they write:
//
//   FmhaBackwardDividedQuery   one CTA 128 queries: dQ += dS K for every tile of keys
//   FmhaBackwardDividedKey     one CTA 64 keys: dV += P^T dO and dK += dS^T Q for every tile of
//                              queries
//
// dK and dV of 128 keys do not fit the registers of an SM, and with 64 keys a single kernel would
// send the f32 sums of dQ to L2 at more than its bandwidth. Two kernels compute S and dP twice,
// seven products instead of five, and send no sums anywhere; every run adds in one order.
#pragma once

#include <memeff/kernels/fmha_bwd_bias.cuh>
#include <memeff/kernels/fmha_bwd_key_sm90.cuh>
#include <memeff/kernels/fmha_bwd_preprocess.cuh>
#include <memeff/kernels/fmha_bwd_query_sm90.cuh>
#include <memeff/kernels/fmha_bwd_recompute_sm90.cuh>

namespace memeff {

// The statistics of the rows; nothing is summed in global memory.
template <class Config>
struct FmhaBackwardDividedPreprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesDivided<Config>> {};

template <class Config>
struct FmhaBackwardDividedBias : FmhaBackwardBias<Config, BackwardTilesDivided<Config>> {};

template <class Config>
struct FmhaBackwardDividedRecompute : RecomputeSm90<Config, BackwardTilesDivided<Config>> {};

}  // namespace memeff
