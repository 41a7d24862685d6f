// Attention backward for Hopper with head dims above 256, in two kernels, each of which owns the
// gradients it writes:
//
//   FmhaBackwardLargeDimSm90Dq    clusters of three CTAs own 128 queries
//   FmhaBackwardLargeDimSm90Dkdv  clusters of two CTAs own 64 keys
//
// The accumulators of 64 rows and 512 columns take all registers of an SM, and 64 rows of an
// operand with its buffers take most of shared memory. So each CTA has one pair of operands, either
// queries and keys or dO and values, and computes one of the two score products. CTAs exchange
// tiles of P and dS through distributed shared memory, and nothing is computed twice within a
// kernel:
//
//   owned     | CTA 0                     | CTA 1                       | CTA 2
//   keys      | S^T = K Q^T, dK += dS^T Q | dP^T = V dO^T, dV += P^T dO |
//   queries   | S = Q K^T, dQ += dS K     | the same for 64 more rows   | dP = dO V^T for 128 rows
//
// The two consumers of a CTA divide the columns of its sum, and take turns computing the scores of
// blocks, as in the forward (kernels/fmha_fwd_large_dim_sm90.cuh).
//
// Above 576 columns a cluster has all of these CTAs twice: two groups divide the columns.
#pragma once

#include <memeff/kernels/backward/large_dim/out_role.cuh>
#include <memeff/kernels/backward/large_dim/producer.cuh>
#include <memeff/kernels/backward/large_dim/score_role.cuh>
#include <memeff/kernels/backward/large_dim/summing_consumer.cuh>
#include <memeff/kernels/backward/preprocess.cuh>

namespace memeff {

// Computes the statistics of the rows; there are no sums to zero.
template <class Config>
struct FmhaBackwardLargeDimSm90Preprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesTwoKernel<Config>> {};

// The common part of both kernels.
template <class Config, Owned kOwned>
struct LargeDimBackwardKernel : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Base::kConsumerRegisters;
  using Base::kConsumers;
  using Base::kControlOffset;
  using Base::kOutRank;
  using Base::kOwnsKeys;
  using Base::kProducerRegisters;
  using typename Base::OutTiles;
  using typename Base::ScoreTiles;
  using typename Base::Work;

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    int const rank = Base::group_rank();
    if (rank == kOutRank) {
      run<OutTiles>(params, maps, rank);
    } else {
      run<ScoreTiles>(params, maps, rank);
    }
  }

 private:
  template <class Role>
  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps, int rank) {
    using Control = typename Base::template Control<Role::kStages>;
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) Base::template init<Role>(control, rank);
    // Makes the barriers of each CTA visible to the threads of all of them.
    arrive_cluster();
    wait_cluster();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) {
        LargeDimBackwardProducer<Config, kOwned>::template run<Role>(params, maps, work, control,
                                                                     tiles, rank);
      }
      return;
    }
    raise_registers<kConsumerRegisters>();
    if constexpr (!Role::kIsOut) {
      LargeDimSummingConsumer<Config, kOwned, LargeDimScoreRole>::run(params, maps, work, control,
                                                                      tiles, rank);
    } else if constexpr (kOwnsKeys) {
      LargeDimSummingConsumer<Config, kOwned, LargeDimOutRole>::run(params, maps, work, control,
                                                                    tiles, rank);
    } else {
      LargeDimOutConsumer<Config>::run(params, work, control, tiles);
    }
  }
};

// The entry points that the generated source instantiates.
template <class Config>
struct FmhaBackwardLargeDimSm90Dq : LargeDimBackwardKernel<Config, Owned::queries> {};

template <class Config>
struct FmhaBackwardLargeDimSm90Dkdv : LargeDimBackwardKernel<Config, Owned::keys> {};

}  // namespace memeff
