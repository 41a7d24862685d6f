// The producer warps of kernels/fmha_fwd_latent_sm90.cuh for a pool of float8 (e4m3): they convert
// keys to the query's dtype on the way to shared memory.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/arch/math.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/core/float8.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/kernels/forward/latent/float8_keys.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/schedule/balanced_keys.cuh>

namespace memeff {

// The kernel calls produce_keys() with one warp per column group, in place of a thread of
// LatentProducerSm90. Both fill the same buffers, so consumers do not depend on the pool.
//
// A warp converts every third panel of a KV block, in units of half a panel. Three units are in
// flight in its registers: each unit that is loaded takes the registers of the one that was just
// converted. So the latency of L2 is hidden, and a buffer that is released finds half of its keys
// in registers.
//
// CTAs do not share keys: an own copy in float8 has as many bytes as half of a copy in 16 bits,
// which a CTA reads if they do.
template <class Config, class Kernel>
struct LatentFloat8ProducerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using Keys = LatentFloat8Keys<Config, Kernel>;
  using KeyTile = typename Kernel::KeyTile;
  static constexpr int kWarps = Kernel::kColumnGroups;

  // A lane loads 16 bytes of a row, which become two chunks of the tile.
  static constexpr int kLoadColumns = 16;
  static constexpr int kLoadChunks = kLoadColumns / KeyTile::kChunkColumns;
  static constexpr int kRowLanes = KeyTile::kPanelColumns / kLoadColumns;
  static constexpr int kStepRows = kWarpSize / kRowLanes;
  static_assert(kStepRows % 8 == 0);  // so all rows of a lane have the same swizzle

  static constexpr int kPanelUnits = 2;
  static constexpr int kUnitRows = Kernel::kTileKey / kPanelUnits;
  static constexpr int kSteps = kUnitRows / kStepRows;
  static constexpr int kUnits = Kernel::kPanels / kWarps * kPanelUnits;  // of a warp and KV block
  static constexpr int kInFlight = 3;                                    // units
  static_assert(Kernel::kPanels % kWarps == 0 && kUnits % kInFlight == 0);
  static constexpr int kBoxSteps = cute::min(Keys::kBoxRows, kUnitRows) / kStepRows;
  static_assert(kSteps % kBoxSteps == 0 && Keys::kBoxRows % kStepRows == 0);
  using Bytes = uint32_t[kSteps][4];

  CUTE_DEVICE static void produce_keys(ForwardParams const& params, Control& control,
                                       uint32_t tiles, int warp) {
    PipelineStage<Kernel::kStages> stage;
    PipelineStage<Kernel::kWorkStages> slot;
    while (true) {
      control.work.wait(slot);
      KeyPart const part = control.parts[slot.index];
      __syncwarp();
      if (is_leader()) control.work.release(slot);
      slot.advance();
      if (part.batch < 0) break;
      Keys keys(params, control, part, warp == 0);
      Bytes bytes[kInFlight];
      CUTE_UNROLL
      for (int i = 0; i < kInFlight; ++i) load(params, keys, stage.index, warp, i, bytes[i]);
      CUTE_NO_UNROLL
      for (int block = part.begin; block < part.end; ++block) {
        produce_block(params, control, tiles, warp, stage, keys, bytes);
        stage.advance();
      }
    }
  }

 private:
  CUTE_DEVICE static bool is_leader() { return threadIdx.x % kWarpSize == 0; }
  CUTE_DEVICE static int lane_row() { return int(threadIdx.x % kWarpSize / kRowLanes); }
  CUTE_DEVICE static int lane_column() { return int(threadIdx.x % kRowLanes * kLoadColumns); }

  // The first row of a unit in its panel.
  CUTE_DEVICE static int row_of(int unit) { return unit % kPanelUnits * kUnitRows; }

  CUTE_DEVICE static int group_of(int panel) {
    return min(panel / Kernel::kValuePanels, Kernel::kColumnGroups - 1);
  }

  // The panel of a warp's unit in a buffer. Warps convert panels in the order of their release.
  CUTE_DEVICE static int panel_of(int buffer, int warp, int unit) {
    return Kernel::panel_in_order(buffer, unit / kPanelUnits * kWarps + warp);
  }

  // Converts the units of a KV block. When kInFlight units are left, those of the next block are
  // loaded.
  CUTE_DEVICE static void produce_block(ForwardParams const& params, Control& control,
                                        uint32_t tiles, int warp,
                                        PipelineStage<Kernel::kStages> const& stage, Keys& keys,
                                        Bytes (&bytes)[kInFlight]) {
    auto& barriers = control.keys[stage.index];
    float const scale = keys.scale;
    CUTE_NO_UNROLL
    for (int first = 0; first < kUnits; first += kInFlight) {
      bool const is_last = first + kInFlight == kUnits;
      if (is_last) keys.advance(params, control, warp == 0);
      int const loaded_buffer = is_last ? (stage.index + 1) % Kernel::kStages : stage.index;
      CUTE_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        int const unit = first + i;
        int const panel = panel_of(stage.index, warp, unit);
        wait_barrier(barriers.empty[group_of(panel)], stage.parity ^ 1);
        random_sleep();
        store(Kernel::keys(tiles, stage.index) + panel * KeyTile::kPanelBytes, unit, scale,
              bytes[i]);
        if (unit % kPanelUnits == kPanelUnits - 1) {
          fence_tma_store();
          __syncwarp();
          if (is_leader()) arrive_barrier(barriers.full[panel]);
          random_sleep();
        }
        load(params, keys, loaded_buffer, warp, is_last ? i : unit + kInFlight, bytes[i]);
      }
    }
  }

  // Loads the lane's bytes of a unit. Rows beyond the length, and those without a page, are zero:
  // NaN would make the products of the values NaN.
  CUTE_DEVICE static void load(ForwardParams const& params, Keys const& keys, int buffer, int warp,
                               int unit, Bytes& bytes) {
    using Float8 = KeyValueElement<Config>;
    int const column = panel_of(buffer, warp, unit) * KeyTile::kPanelColumns + lane_column();
    int const first_row = row_of(unit);
    int const left = column < params.shape.head_dim ? keys.limit - keys.first - first_row : 0;
    CUTE_UNROLL
    for (int first_step = 0; first_step < kSteps; first_step += kBoxSteps) {
      int const block_row = first_row + first_step * kStepRows;
      int const box_row = Keys::of_box(keys.row, block_row / Keys::kBoxRows);
      bool const exists = box_row < params.shape.key_tokens;
      char const* address =
          row_pointer<Float8>(params.key, keys.source.batch(params.key),
                              box_row + block_row % Keys::kBoxRows + lane_row(), keys.source.head) +
          column;
      CUTE_UNROLL
      for (int step = first_step; step < first_step + kBoxSteps; ++step) {
        load_global_vector_if(exists && lane_row() + step * kStepRows < left, address, bytes[step]);
        address += kStepRows * row_bytes<Float8>(params.key);
      }
    }
  }

  // Converts the lane's bytes of a unit and stores them in a panel.
  CUTE_DEVICE static void store(uint32_t panel, int unit, float box_scale, Bytes const& bytes) {
    int const first_row = row_of(unit);
    uint32_t chunks[kLoadChunks];  // of the lane's first row
    CUTE_UNROLL
    for (int i = 0; i < kLoadChunks; ++i) {
      chunks[i] = panel + first_row * KeyTile::kRowBytes +
                  KeyTile::byte_offset(lane_row(), lane_column() / KeyTile::kChunkColumns + i);
    }
    CUTE_UNROLL
    for (int first_step = 0; first_step < kSteps; first_step += kBoxSteps) {
      float scale = box_scale;
      if constexpr (Keys::kScales > 1) {
        scale = Keys::of_box(scale, (first_row + first_step * kStepRows) / Keys::kBoxRows);
      }
      CUTE_UNROLL
      for (int step = first_step; step < first_step + kBoxSteps; ++step) {
        CUTE_UNROLL
        for (int i = 0; i < kLoadChunks; ++i) {
          uint32_t pairs[4];
          scaled(bytes[step][2 * i], scale * kFloat8Factor, pairs[0], pairs[1]);
          scaled(bytes[step][2 * i + 1], scale * kFloat8Factor, pairs[2], pairs[3]);
          store_shared_vector(chunks[i] + step * kStepRows * KeyTile::kRowBytes,
                              __uint_as_float(pairs[0]), __uint_as_float(pairs[1]),
                              __uint_as_float(pairs[2]), __uint_as_float(pairs[3]));
        }
      }
    }
  }

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

}  // namespace memeff
