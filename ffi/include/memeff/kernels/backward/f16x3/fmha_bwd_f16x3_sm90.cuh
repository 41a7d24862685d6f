// Attention backward in float32 for Hopper, multiplied as f16 (3xFP16, see core/f16x3.cuh), in two
// kernels, each of which owns the gradients it writes:
//
//   FmhaBackwardF16x3Dq    one CTA per 128 queries: dQ += dS K for every KV block
//   FmhaBackwardF16x3Dkdv  one CTA per 64 keys: dV += P^T dO and dK += dS^T Q for every Q block
//
// dS is an operand of both dQ and dK, but is split differently: it absorbs the factors of the keys
// for dQ and those of the queries for dK. Each kernel therefore splits its own dS, from registers
// into registers. So recomputing S and dP costs no more than the exchange that it saves, and every
// run adds in the same order.
#pragma once

#include <memeff/kernels/backward/f16x3/dkdv.cuh>
#include <memeff/kernels/backward/f16x3/dq.cuh>
#include <memeff/kernels/backward/f16x3/split.cuh>
#include <memeff/kernels/backward/preprocess.cuh>
#include <memeff/layout/backward_tiles_two_kernel.cuh>

namespace memeff {

// Computes the statistics of the rows; there are no sums to zero.
template <class Config>
struct FmhaBackwardF16x3Preprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesTwoKernel<Config>> {};

}  // namespace memeff
