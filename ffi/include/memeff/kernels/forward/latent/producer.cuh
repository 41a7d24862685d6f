// The producer warpgroup of kernels/fmha_fwd_latent_sm90.cuh: a warp plans the work of the CTA, and
// one thread for each column group copies keys.
#pragma once

#include <memeff/arch/cluster.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/kernels/forward/latent/key_rows.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/schedule/balanced_keys.cuh>

namespace memeff {

// The kernel calls produce_parts() with one warp, and produce_keys() with one thread per column
// group.
template <class Config, class Kernel>
struct LatentProducerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using KeyTile = typename Kernel::KeyTile;
  using Mask = typename Kernel::Mask;
  using KeyRows = LatentKeyRows<Config, Kernel>;
  static constexpr int kBoxRows = KeyRows::kBoxRows;
  static constexpr int kBoxes = KeyRows::kBoxes;
  static constexpr int kTileKey = Kernel::kTileKey;

  // Run by the warp that hands out the parts of this CTA.
  CUTE_DEVICE static void produce_parts(ForwardParams const& params, Control& control) {
    PipelineStage<Kernel::kWorkStages> slot;
    bool const leader = threadIdx.x % kWarpSize == 0;
    auto hand_out = [&](KeyPart const& part) {
      control.work.acquire(slot);
      __syncwarp();  // hazard: else a lane may miss the phase that it waits for
      if (leader) {
        control.parts[slot.index] = part;
        control.work.commit(slot);
      }
      slot.advance();
    };
    typename Kernel::Schedule const schedule(params, int(gridDim.x));
    schedule.for_each_part(int(blockIdx.x), hand_out);
    hand_out(KeyPart{-1, 0, 0, 0, 0, 0});
  }

  // Run by the thread that copies one column group of all KV blocks. CTAs that share KV
  // blocks take turns copying panels.
  CUTE_DEVICE static void produce_keys(ForwardParams const& params, TensorMap const& map,
                                       Control& control, uint32_t tiles, int columns, int sharers) {
    int const rank = cluster_rank() % sharers;
    bool const contiguous = params.key.row_stride == params.shape.head_dim;
    PipelineStage<Kernel::kStages> stage;
    PipelineStage<Kernel::kWorkStages> slot;
    typename Kernel::Schedule const schedule(params, int(gridDim.x));
    while (true) {
      control.work.wait(slot);
      KeyPart const part = control.parts[slot.index];
      control.work.release(slot);
      slot.advance();
      if (part.batch < 0) break;
      int const key_length = Mask(params.mask, params.shape, part.batch).key_length;
      KeyValueSource<Config> const source(params, part.batch, part.head);
      int const batch = source.batch(params.key);
      CUTE_NO_UNROLL
      for (int block = part.begin; block < part.end; ++block) {
        // The table is read before the wait, which hides its latency.
        int rows[kBoxes];
        KeyRows::find(params, control, source, key_length, block * kTileKey, rows);
        auto& barriers = control.keys[stage.index];
        wait_barrier(barriers.empty[columns], stage.parity ^ 1);
        random_sleep();
        uint32_t const target = Kernel::keys(tiles, stage.index);
        for_each_box(columns, [&](int panel, int box) {
          if (box == 0) arrive_and_expect(barriers.full[panel], KeyTile::kPanelBytes);
          if ((panel + block) % sharers != rank) return;
          load(map, barriers.full[panel],
               target + panel * KeyTile::kPanelBytes + box * kBoxRows * KeyTile::kRowBytes,
               panel * KeyTile::kPanelColumns, rows[box], part.head, batch, sharers);
        });
        stage.advance();

        int const ahead = block + kPrefetched;
        if (ahead >= part.end || !schedule.has_share(int(blockIdx.x), ahead)) continue;
        if (contiguous && columns > 0) continue;
        KeyRows::find(params, control, source, key_length, ahead * kTileKey, rows);
        if (contiguous) {
          CUTE_UNROLL
          for (int box = 0; box < kBoxes; ++box) {
            int const first = ahead * kTileKey + box * kBoxRows;
            KeyRows::prefetch(params, source, key_length - first, rows[box]);
          }
        } else {
          for_each_box(columns, [&](int panel, int box) {
            prefetch_box(map, panel * KeyTile::kPanelColumns, rows[box], part.head, batch);
          });
        }
      }
    }
  }

 private:
  // How many KV blocks ahead a block is prefetched into L2. It can be loaded only when its buffer
  // is free, when both consumers already wait for it. The latency of DRAM would be exposed then, so
  // one of the CTAs that read the block prefetches it.
  static constexpr int kPrefetched = 1;

  // Copies a box to all CTAs that share it.
  CUTE_DEVICE static void load(TensorMap const& map, uint64_t& arrived, uint32_t target, int column,
                               int row, int head, int batch, int sharers) {
    if (sharers == 1) {
      load_box(map, arrived, target, column, row, head, batch, CacheHint::EVICT_NORMAL);
    } else {
      load_cluster_box<Kernel::kCluster>(map, arrived, target, column, row, head, batch,
                                         CacheHint::EVICT_NORMAL);
    }
  }

  // Calls use(panel, box) for the boxes of a column group.
  template <class Use>
  CUTE_DEVICE static void for_each_box(int columns, Use use) {
    CUTE_NO_UNROLL
    for (int panel = Kernel::group_begin(columns); panel < Kernel::group_end(columns); ++panel) {
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) use(panel, box);
    }
  }
};

}  // namespace memeff
