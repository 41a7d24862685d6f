// The common part of Hopper kernels whose CTAs own queries: dq, and delta of each row.
#pragma once

#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/split_q.cuh>

namespace memeff {

// What a CTA of a kernel that owns queries has: its work, its shared memory, and the producer that
// copies queries and dO once, and then keys and values of each KV block. kQueryBox is the number of
// rows in a TMA box of queries.
template <class Config, int kTileQuery_, int kQueryBox, int kKeyStages_, int kValueStages_>
struct QueryOwnerSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = kTileQuery_;
  static constexpr int kTileKey = Config::kTileKey;
  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;
  using ValueTile = SharedTile<kTileKey, Config::kValueDim>;
  static constexpr int kConsumers = kTileQuery / kWarpgroupRows * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

  using ScoreGrid = WarpGrid<kTileQuery, kTileKey, kConsumerWarps, 16>;
  using Mask = ScoreMask<Config, ScoreGrid>;

  static constexpr int kKeyStages = kKeyStages_;
  static constexpr int kValueStages = kValueStages_;
  static constexpr int kOutOffset = QueryTile::kBytes;
  static constexpr int kKeyOffset = kOutOffset + OutTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kKeyStages * KeyTile::kBytes;
  static constexpr int kControlOffset = kValueOffset + kValueStages * ValueTile::kBytes;

  // The barriers, behind the tiles in shared memory.
  struct Control {
    Pipeline<1> query;  // also covers dO
    Pipeline<kKeyStages> key;
    Pipeline<kValueStages> value;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }

  // The work of a CTA: the KV blocks that its queries attend to.
  struct Work {
    WorkItem item;
    int row;
    BlockMaskRow<Config::kBlockMask> kv_blocks;

    CUTE_DEVICE Work(BackwardParams const& params) {
      item = work_item<Config, Heaviest::last, kTileQuery>(params.shape, params.bias, blockIdx.x);
      row = item.tile * kTileQuery;
      Mask const mask(params.mask, params.shape, item.batch);
      TileRange const range = mask.key_tiles(row, kTileQuery, kTileKey);
      kv_blocks = {range,
                   params.block_mask,
                   item.batch,
                   item.head,
                   block_mask_row<Config>(range, item.tile),
                   ceil_div(params.shape.key_length, kTileKey)};
    }
  };

  // Kernel::consume() is what the consumers run.
  template <class Kernel>
  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      control.query.init(1);
      control.key.init(kConsumerWarps);
      control.value.init(kConsumerWarps);
      fence_barrier_init();
    }
    __syncthreads();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) produce(params, maps, work, control, tiles);
    } else {
      raise_registers<kConsumerRegisters>();
      Kernel::consume(params, maps, work, control, tiles);
    }
  }

  // The producer, one thread: copies queries and dO once, then keys and values of each KV block.
  CUTE_DEVICE static void produce(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles) {
    auto constexpr kOnce = CacheHint::EVICT_FIRST;
    auto constexpr kAgain = CacheHint::EVICT_LAST;
    WorkItem const& item = work.item;
    if (work.kv_blocks.begin >= work.kv_blocks.end) return;
    uint64_t& arrived = control.query.acquire({}, QueryTile::kBytes + OutTile::kBytes);
    Origin const queries = query_origin<Config>(params.shape, item.batch);
    CUTE_UNROLL
    for (int tile_row = 0; tile_row < kTileQuery; tile_row += kQueryBox) {
      int const row = queries.row + work.row + tile_row;
      load_tma_tile<QueryTile>(maps.query, arrived, tiles, tile_row, row, item.head, queries.batch,
                               kOnce);
      load_tma_tile<OutTile>(maps.out_gradient, arrived, tiles + kOutOffset, tile_row, row,
                             item.head, queries.batch, kOnce);
    }
    PipelineStage<kKeyStages> key;
    PipelineStage<kValueStages> value;
    // Computed after the query copies have started, because finding the key head takes a division.
    KeyValueSource<Config> const keys(params, item.batch,
                                      key_head_of<Config>(params, item.head / params.shape.group));
    int const key_batch = keys.batch(params.key);
    int const value_batch = keys.batch(params.value);
    CUTE_NO_UNROLL
    for (int tile = work.kv_blocks.end - 1; tile >= work.kv_blocks.begin;
         tile = work.kv_blocks.before(tile)) {
      int const row = keys.origin.row + tile * kTileKey;
      load_tma_tile<KeyTile>(maps.key, control.key.acquire(key, KeyTile::kBytes),
                             tiles + kKeyOffset + key.index * KeyTile::kBytes, 0, row, keys.head,
                             key_batch, kAgain);
      load_tma_tile<ValueTile>(maps.value, control.value.acquire(value, ValueTile::kBytes),
                               tiles + kValueOffset + value.index * ValueTile::kBytes, 0, row,
                               keys.head, value_batch, kAgain);
      key.advance();
      value.advance();
    }
  }

  // S = Q K^T or dP = dO V^T.
  template <class RightTile, class Left, class Scores>
  CUTE_DEVICE static void begin_scores(Left const& left, uint32_t right_tile, Scores& scores) {
    fence_accumulators(scores);
    begin_products();
    warpgroup_gemm<Element, RightTile::kColumns / 16>(
        scores, left, DescriptorOperand<RightTile, Contiguous::k>(right_tile), false);
    commit_products();
  }

  // Clears the rows of the first KV block beyond the key length, where NaN would reach dq. Each
  // consumer clears all of them, without a barrier between consumers: they write the same zeros.
  CUTE_DEVICE static void clear_beyond(Control& control, Mask const& mask,
                                       ProblemShape const& shape, Work const& work, int warpgroup,
                                       uint32_t tiles) {
    int const column = (work.kv_blocks.end - 1) * kTileKey;
    if (!reads_beyond<Config>(mask.key_length, column + kTileKey, shape.key_length)) return;
    control.key.wait({});
    control.value.wait({});
    clear_rows<KeyTile, kWarpgroupSize>(tiles + kKeyOffset, mask.key_length - column);
    clear_rows<ValueTile, kWarpgroupSize>(tiles + kValueOffset, mask.key_length - column);
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
  }
};

}  // namespace memeff
