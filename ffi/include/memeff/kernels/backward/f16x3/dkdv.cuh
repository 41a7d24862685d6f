// The gradients of key and value of the 3xFP16 backward: see fmha_bwd_f16x3_sm90.cuh.
//
// One CTA owns 64 keys and iterates over the Q blocks that attend to them. One consumer computes
// P^T and owns dV, the other computes dS^T and owns dK. So each computes two products, and only P^T
// passes through shared memory, in f32. Each splits its own operand into hi and lo parts in
// registers.
#pragma once

#include <memeff/kernels/backward/f16x3/gradient_consumer.cuh>
#include <memeff/kernels/backward/f16x3/probability_consumer.cuh>
#include <memeff/kernels/backward/f16x3/work.cuh>
#include <memeff/schedule/grid.cuh>

namespace memeff {

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaBackwardF16x3Dkdv : F16x3DkdvWork<Config> {
  using Base = F16x3DkdvWork<Config>;
  using Base::kConsumerRegisters;
  using Base::kConsumers;
  using Base::kControlOffset;
  using Base::kProducerRegisters;
  using typename Base::Control;
  using typename Base::KeyTile;
  using typename Base::OutTile;
  using typename Base::QBlockCursor;
  using typename Base::QueryTile;
  using typename Base::Stage;
  using typename Base::Tiles;
  using typename Base::ValueTile;
  using typename Base::Work;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      constexpr int kWarps = kWarpgroupSize / kWarpSize;  // per consumer
      control.key.init(1);
      control.value.init(1);
      control.query.init(kWarps * (1 + Config::kKeyGradient));
      control.out_gradient.init(kWarps * (Config::kValueGradient + Config::kKeyGradient));
      control.probability.init(kWarps, kWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, work, control, tiles);
      return;
    }
    raise_registers<kConsumerRegisters>();
    // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
    if (__shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0) == 0) {
      F16x3ProbabilityConsumer<Config>::run(params, work, control, tiles);
    } else if constexpr (Config::kKeyGradient) {
      F16x3GradientConsumer<Config>::run(params, work, control, tiles);
    }
    if constexpr (Config::kVarlen) {
      GridTiles<Config, GridRows::keys, Base::kTileKey> const grid = {params.shape};
      clear_key_gap<Config, kConsumers>(
          params, work.item,
          typename Base::Mask(params.mask, params.shape, work.item.batch).key_length,
          grid.of_batch_index(work.item.batch));
    }
  }

  // The producer, one thread: copies keys and values once, then queries, statistics and dO of each
  // Q block.
  CUTE_DEVICE static void produce(BackwardParams const& params, Work const& work, Control& control,
                                  uint32_t tiles) {
    WorkItem const& item = work.item;
    int const count = Base::Blocks::q_block_count(params, work);
    if (count == 0) return;
    load_f16x3<KeyTile>(Tiles::key(params, item.batch, item.head, item.tile),
                        control.key.acquire({}, KeyTile::kBytes), tiles, tiles + Base::kKeyFactors);
    load_f16x3<ValueTile>(Tiles::value(params, item.batch, item.head, item.tile),
                          control.value.acquire({}, ValueTile::kBytes), tiles + Base::kValueOffset,
                          tiles + Base::kValueFactors);
    QBlockCursor q_block(params, work);
    Stage stage;
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + Base::kStatisticsBytes);
      load_f16x3<QueryTile>(Tiles::query(params, item.batch, q_block.head, q_block.tile), query,
                            Base::query_tile(tiles, stage), Base::query_factors(tiles, stage));
      load_tma(Base::Statistics::statistics(params, item.batch, q_block.head, q_block.row()), query,
               Base::statistics(tiles, stage), Base::kStatisticsBytes);
      load_f16x3<OutTile>(Tiles::out_gradient(params, item.batch, q_block.head, q_block.tile),
                          control.out_gradient.acquire(stage, OutTile::kBytes),
                          Base::out_tile(tiles, stage), Base::out_factors(tiles, stage));
      q_block.advance(params, work);
      stage.advance();
    }
  }
};

}  // namespace memeff
