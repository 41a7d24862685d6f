// The gradients of key and value for Hopper and head dims above 128: see
// fmha_bwd_two_kernel_sm90.cuh.
//
// One consumer computes P^T = exp2(K Q^T - lse) and owns dK, the other computes dS^T = P^T (V dO^T
// - delta) and owns dV. They exchange P^T and dS^T through shared memory. S and dP of one Q block
// overlap dK and dV of the previous one, while the next Q block arrives in a third buffer. The
// first consumer holds the scores, so it multiplies dS^T by the derivative of a soft cap.
#pragma once

#include <memeff/kernels/backward/dkdv/out_consumer.cuh>
#include <memeff/kernels/backward/dkdv/query_consumer.cuh>
#include <memeff/kernels/backward/dkdv/work.cuh>

namespace memeff {

// The entry point that the generated source instantiates. One CTA owns 64 keys of a key head.
template <class Config>
struct FmhaBackwardTwoKernelDkdv : DkdvSm90<Config> {
  using Base = DkdvSm90<Config>;
  using Base::kBiasOffset;
  using Base::kConsumerRegisters;
  using Base::kConsumers;
  using Base::kControlOffset;
  using Base::kProducerRegisters;
  using Base::kStatisticsBytes;
  using Base::kValueOffset;
  using Base::kWarpgroupWarps;
  using typename Base::Bias;
  using typename Base::Control;
  using typename Base::KeyTile;
  using typename Base::OutTile;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::Stage;
  using typename Base::Tiles;
  using typename Base::ValueTile;
  using typename Base::Work;

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      control.key.init(1);
      control.value.init(1);
      control.query.init(kWarpgroupWarps);
      control.out_gradient.init(kWarpgroupWarps);
      control.probability.init(kWarpgroupWarps, kWarpgroupWarps);
      control.score_gradient.init(kWarpgroupWarps, kWarpgroupWarps);
      Bias::init(control, kWarpgroupWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, maps, work, control, tiles);
      return;
    }
    raise_registers<kConsumerRegisters>();
    // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
    if (__shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0) == 0) {
      DkdvQueryConsumer<Config>::run(params, maps, work, control, tiles);
    } else {
      DkdvOutConsumer<Config>::run(params, maps, work, control, tiles);
    }
  }

  // The producer, one thread: copies keys and values once, then queries, dO, statistics and bias of
  // each Q block.
  CUTE_DEVICE static void produce(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles) {
    auto constexpr kOnce = CacheHint::EVICT_FIRST;
    auto constexpr kAgain = CacheHint::EVICT_LAST;
    WorkItem const& item = work.item;
    int const count = Base::q_block_count(params, work);
    if (count == 0) return;
    Origin const queries = query_origin<Config>(params.shape, item.batch);
    KeyValueSource<Config> const source(params, item.batch, item.head);
    int const key_row = source.origin.row + work.column;
    load_tma_tile<KeyTile>(maps.key, control.key.acquire({}, KeyTile::kBytes), tiles, 0, key_row,
                           source.head, source.batch(params.key), kOnce);
    load_tma_tile<ValueTile>(maps.value, control.value.acquire({}, ValueTile::kBytes),
                             tiles + kValueOffset, 0, key_row, source.head,
                             source.batch(params.value), kOnce);
    QBlockCursor q_block(params, work);
    Stage stage;
    Bias bias(tiles + kBiasOffset);
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      float const* const statistics =
          Tiles::statistics(params, item.batch, q_block.head, q_block.row());
      uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + kStatisticsBytes);
      load_tma_tile<QueryTile>(maps.query, query, Base::query_tile(tiles, stage), 0,
                               queries.row + q_block.row(), q_block.head, queries.batch, kAgain);
      load_tma(statistics, query, Base::query_statistics(tiles, stage), kStatisticsBytes);
      bias.produce(params, maps, work, q_block, control);
      uint64_t& out = control.out_gradient.acquire(stage, OutTile::kBytes + kStatisticsBytes);
      load_tma_tile<OutTile>(maps.out_gradient, out, Base::out_tile(tiles, stage), 0,
                             queries.row + q_block.row(), q_block.head, queries.batch, kAgain);
      load_tma(statistics, out, Base::out_statistics(tiles, stage), kStatisticsBytes);
      q_block.advance(params, work);
      stage.advance();
    }
  }
};

}  // namespace memeff
