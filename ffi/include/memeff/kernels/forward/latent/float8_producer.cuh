// The producer warps of kernels/fmha_fwd_latent_sm90.cuh for a pool of float8 (e4m3): they convert
// keys to the query's dtype on the way to shared memory.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/math.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/core/float8.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/kernels/forward/latent/key_rows.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/schedule/balanced_keys.cuh>

namespace memeff {

// The kernel calls produce_keys() with one warp per column group, in place of a thread of
// LatentProducerSm90. Both fill the same buffers, so consumers do not depend on the pool.
//
// A warp converts every third panel of a KV block. CTAs do not share keys: an own copy in float8
// has as many bytes as half of a copy in 16 bits, which a CTA reads if they do.
template <class Config, class Kernel>
struct LatentFloat8ProducerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using KeyRows = LatentKeyRows<Config, Kernel>;
  using KeyTile = typename Kernel::KeyTile;
  using Mask = typename Kernel::Mask;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kWarps = Kernel::kColumnGroups;

  // A lane loads 16 bytes of a row, which become two chunks of the tile.
  static constexpr int kLoadColumns = 16;
  static constexpr int kRowLanes = KeyTile::kPanelColumns / kLoadColumns;
  static constexpr int kStepRows = kWarpSize / kRowLanes;
  static constexpr int kSteps = kTileKey / kStepRows;
  static constexpr int kBoxSteps = KeyRows::kBoxRows / kStepRows;
  static_assert(kBoxSteps * kStepRows == KeyRows::kBoxRows);
  static constexpr int kScales = Config::kKeyScale == PoolScale::pages ? KeyRows::kBoxes : 1;
  static_assert(kStepRows % 8 == 0);

  CUTE_DEVICE static void produce_keys(ForwardParams const& params, Control& control,
                                       uint32_t tiles, int warp) {
    bool const leader = threadIdx.x % kWarpSize == 0;
    PipelineStage<Kernel::kStages> stage;
    PipelineStage<Kernel::kWorkStages> slot;
    while (true) {
      control.work.wait(slot);
      KeyPart const part = control.parts[slot.index];
      __syncwarp();
      if (leader) control.work.release(slot);
      slot.advance();
      if (part.batch < 0) break;
      Keys keys(params, part);
      CUTE_NO_UNROLL
      for (int block = part.begin; block < part.end; ++block) {
        keys.seek(params, control, block);
        CUTE_NO_UNROLL
        for (int panel = warp; panel < Kernel::kPanels; panel += kWarps) {
          auto& barriers = control.keys[stage.index];
          uint32_t bytes[kSteps][4];
          keys.load(params, panel, bytes);
          wait_barrier(barriers.empty[group_of(panel)], stage.parity ^ 1);
          random_sleep();
          keys.store(Kernel::keys(tiles, stage.index) + panel * KeyTile::kPanelBytes, bytes);
          fence_tma_store();
          __syncwarp();
          if (leader) arrive_barrier(barriers.full[panel]);
          random_sleep();
        }
        stage.advance();
        if (warp == 0 && block + 1 < part.end) keys.prefetch(params, control, block + 1);
      }
    }
  }

 private:
  CUTE_DEVICE static int group_of(int panel) {
    return min(panel / Kernel::kValuePanels, Kernel::kColumnGroups - 1);
  }

  // The keys of a part, and where those of the current KV block are.
  struct Keys {
    KeyValueSource<Config> source;
    int key_length;
    int first;
    int rows[KeyRows::kBoxes];
    float scales[kScales];  // of each box, or of all

    CUTE_DEVICE Keys(ForwardParams const& params, KeyPart const& part)
        : source(params, part.batch, part.head),
          key_length(Mask(params.mask, params.shape, part.batch).key_length) {
      scales[0] = 1.0f;
      if constexpr (Config::kKeyScale == PoolScale::heads) {
        scales[0] = __ldg(PoolScales(params, Config::kKeyScaleArray, part.head).first);
      }
    }

    CUTE_DEVICE void seek(ForwardParams const& params, Control& control, int block) {
      first = block * kTileKey;
      KeyRows::find(params, control, source, key_length, first, rows);
      if constexpr (Config::kKeyScale == PoolScale::pages) {
        PoolScales const pool(params, Config::kKeyScaleArray, source.head);
        CUTE_UNROLL
        for (int box = 0; box < kScales; ++box) {
          // Hazard: a page outside of the pool has no scale.
          bool const exists = rows[box] < params.shape.key_tokens;
          int const page = unsigned(rows[box]) / Config::kPageSize;
          scales[box] = exists ? __ldg(pool.first + page * pool.page_stride) : 0.0f;
        }
      }
    }

    // Prefetches a KV block into L2 if its rows are contiguous; a lane for each box.
    CUTE_DEVICE void prefetch(ForwardParams const& params, Control& control, int block) const {
      int const box = int(threadIdx.x) % kWarpSize;
      if (params.key.row_stride != params.shape.head_dim || box >= KeyRows::kBoxes) return;
      int const key = block * kTileKey + box * KeyRows::kBoxRows;
      int const row = KeyRows::row_of(params, control, source, key_length, key);
      KeyRows::prefetch(params, source, key_length - key, row);
    }

    // Loads the lane's bytes of a panel. Rows beyond the length, and those without a page, are
    // zero: NaN would make the products of the values NaN.
    CUTE_DEVICE void load(ForwardParams const& params, int panel,
                          uint32_t (&bytes)[kSteps][4]) const {
      using Float8 = KeyValueElement<Config>;
      int const column = panel * KeyTile::kPanelColumns + lane_column();
      // Hidden values: else the compiler keeps the addresses and conditions of all rows of a block
      // in registers, and spills others.
      unsigned left = unsigned(max(key_length - first, 0));
      hide_value(left);
      left = column < params.shape.head_dim ? left : 0;
      CUTE_UNROLL
      for (int box = 0; box < KeyRows::kBoxes; ++box) {
        unsigned row = unsigned(rows[box]);
        hide_value(row);
        bool const exists = int(row) < params.shape.key_tokens;
        char const* address = row_pointer<Float8>(params.key, source.batch(params.key),
                                                  int(row) + lane_row(), source.head) +
                              column;
        CUTE_UNROLL
        for (int step = box * kBoxSteps; step < (box + 1) * kBoxSteps; ++step) {
          int const tile_row = lane_row() + step * kStepRows;
          load_global_vector_if(exists && unsigned(tile_row) < left, address, bytes[step]);
          address += kStepRows * row_bytes<Float8>(params.key);
        }
      }
    }

    // Converts the lane's bytes and stores them in a panel.
    CUTE_DEVICE void store(uint32_t panel, uint32_t const (&bytes)[kSteps][4]) const {
      constexpr int kChunks = kLoadColumns / KeyTile::kChunkColumns;
      uint32_t chunks[kChunks];  // of the lane's first row; all its rows have the same swizzle
      CUTE_UNROLL
      for (int i = 0; i < kChunks; ++i) {
        int const chunk = lane_column() / KeyTile::kChunkColumns + i;
        chunks[i] = panel + KeyTile::byte_offset(lane_row(), chunk);
      }
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        float const scale = scales[step / kBoxSteps % kScales] * kFloat8Factor;
        CUTE_UNROLL
        for (int i = 0; i < kChunks; ++i) {
          uint32_t pairs[4];
          scaled(bytes[step][2 * i], scale, pairs[0], pairs[1]);
          scaled(bytes[step][2 * i + 1], scale, pairs[2], pairs[3]);
          store_shared_vector(chunks[i] + step * kStepRows * KeyTile::kRowBytes,
                              __uint_as_float(pairs[0]), __uint_as_float(pairs[1]),
                              __uint_as_float(pairs[2]), __uint_as_float(pairs[3]));
        }
      }
    }

   private:
    CUTE_DEVICE static int lane_row() { return int(threadIdx.x % kWarpSize / kRowLanes); }
    CUTE_DEVICE static int lane_column() { return int(threadIdx.x % kRowLanes * kLoadColumns); }

    // Four numbers times a scale, as pairs of elements.
    CUTE_DEVICE static void scaled(uint32_t packed, float scale, uint32_t& low, uint32_t& high) {
      uint32_t numbers[2];  // pairs of float16
      unpack_float8<false>(packed, numbers[0], numbers[1]);
      auto const product = [&](uint32_t pair) {
        return pack<Element>(unpack<cutlass::half_t>(pair, 0) * scale,
                             unpack<cutlass::half_t>(pair, 1) * scale);
      };
      low = product(numbers[0]);
      high = product(numbers[1]);
    }
  };
};

}  // namespace memeff
