// The producer warpgroup of kernels/fmha_fwd_latent_sm90.cuh: a warp plans the work of the CTA and
// copies queries, and one thread for each part of the columns copies keys.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/schedule/balanced_keys.cuh>

namespace memeff {

// The kernel calls produce_queries() with one warp, and produce_keys() with one thread per part.
template <class Config, class Kernel>
struct LatentProducerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using KeyTile = typename Kernel::KeyTile;
  using Mask = typename Kernel::Mask;
  using QueryTile = typename Kernel::QueryTile;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;
  static constexpr int kBoxRows = PageTable<Config>::kPaged ? Config::kKeyBoxRows : kTileKey;
  static constexpr int kBoxes = kTileKey / kBoxRows;

  // Run by the warp that hands out the parts of this CTA and copies their queries.
  CUTE_DEVICE static void produce_queries(ForwardParams const& params, Control& control,
                                          uint32_t tiles) {
    PipelineStage<1> query;
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
    schedule.for_each_part(int(blockIdx.x), [&](KeyPart const& part) {
      hand_out(part);
      control.query.acquire(query);
      load_queries(params, part, tiles);
      commit_copies();
      wait_copies<0>();
      fence_tma_store();
      __syncwarp();
      if (leader) control.query.commit(query);
      query.advance();
    });
    hand_out(KeyPart{-1, 0, 0, 0, 0, 0});
  }

  // Run by the thread that copies one part of the columns of all KV blocks.
  CUTE_DEVICE static void produce_keys(ForwardParams const& params, TensorMap const& map,
                                       Control& control, uint32_t tiles, int columns) {
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
        find_rows(params, control, source, key_length, block * kTileKey, rows);
        auto& barriers = control.keys[stage.index];
        wait_barrier(barriers.empty[columns], stage.parity ^ 1);
        random_sleep();
        uint32_t const target = Kernel::keys(tiles, stage.index);
        for_each_box(columns, [&](int panel, int box) {
          if (box == 0) arrive_and_expect(barriers.full[panel], KeyTile::kPanelBytes);
          load_box(map, barriers.full[panel],
                   target + panel * KeyTile::kPanelBytes + box * kBoxRows * KeyTile::kRowBytes,
                   panel * KeyTile::kPanelColumns, rows[box], part.head, batch,
                   CacheHint::EVICT_NORMAL);
        });
        stage.advance();

        int const ahead = block + kPrefetched;
        if (ahead >= part.end || !schedule.has_share(int(blockIdx.x), ahead)) continue;
        find_rows(params, control, source, key_length, ahead * kTileKey, rows);
        for_each_box(columns, [&](int panel, int box) {
          prefetch_box(map, panel * KeyTile::kPanelColumns, rows[box], part.head, batch);
        });
      }
    }
  }

 private:
  // How many KV blocks ahead a block is prefetched into L2. A block is loaded only when its buffer
  // is free, and then its latency is exposed, because both consumers wait for it. So one of the
  // CTAs that read it prefetches it earlier.
  static constexpr int kPrefetched = Kernel::kStages;

  // Calls use(panel, box) for the boxes of a part of the columns.
  template <class Use>
  CUTE_DEVICE static void for_each_box(int columns, Use use) {
    CUTE_NO_UNROLL
    for (int panel = Kernel::part_begin(columns); panel < Kernel::part_end(columns); ++panel) {
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) use(panel, box);
    }
  }

  // Finds the first row in the tensor of each box of a KV block. Keys without a valid page get a
  // row beyond the end of the pool, for which TMA fills in zeros.
  CUTE_DEVICE static void find_rows(ForwardParams const& params, Control& control,
                                    KeyValueSource<Config> const& source, int key_length, int first,
                                    int (&rows)[kBoxes]) {
    if constexpr (PageTable<Config>::kPaged) {
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        int const key = first + box * kBoxRows;
        int const row = key < key_length ? source.pages.row(key) : -1;
        if (row < 0 && key < key_length) control.may_miss_pages = true;
        rows[box] = row < 0 ? params.shape.key_tokens : row;
      }
    } else {
      rows[0] = source.origin.row + first;
    }
  }

  // Starts the copies of a tile of queries; rows and columns beyond the bounds become zero. Each
  // lane finds the addresses of two rows, so the warp divides by the number of heads only twice.
  CUTE_DEVICE static void load_queries(ForwardParams const& params, KeyPart const& part,
                                       uint32_t tile) {
    constexpr int kRowChunks = Config::kHeadDim / 8;
    constexpr int kUnrolled = 4;  // eight spill
    static_assert(kTileQuery == 2 * kWarpSize);
    int const lane = int(threadIdx.x) % kWarpSize;
    int const bound = Mask(params.mask, params.shape, part.batch).query_length;
    CUTE_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const first_row = part.tile * kTileQuery + half * kWarpSize;
      QueryRow const own(params, part, min(first_row + lane, bound - 1));
#pragma unroll kUnrolled
      for (int row = 0; row < kWarpSize; ++row) {
        char const* const source = own.of_lane(row);
        CUTE_UNROLL
        for (int first = 0; first < kRowChunks; first += kWarpSize) {
          int const chunk = first + lane;
          if (chunk >= kRowChunks) break;
          copy_async(tile + QueryTile::byte_offset(half * kWarpSize + row, chunk),
                     source + chunk * 16,
                     first_row + row < bound && chunk * 8 < params.shape.head_dim);
        }
      }
    }
  }

  // The address of a packed row of the query.
  struct QueryRow {
    unsigned low;
    unsigned high;

    CUTE_DEVICE QueryRow(ForwardParams const& params, KeyPart const& part, int row) {
      PackedRows<true> const rows(params.shape);
      Origin const origin = query_origin<Config>(params.shape, part.batch);
      auto const address = reinterpret_cast<unsigned long long>(
          row_pointer<Element>(params.query, origin.batch, origin.row + rows.query(row),
                               rows.query_head(part.head, row)));
      low = unsigned(address);
      high = unsigned(address >> 32);
    }

    // The address that another lane holds.
    CUTE_DEVICE char const* of_lane(int lane) const {
      unsigned long long const above = __shfl_sync(0xffffffffu, high, lane);
      return reinterpret_cast<char const*>(above << 32 | __shfl_sync(0xffffffffu, low, lane));
    }
  };
};

}  // namespace memeff
