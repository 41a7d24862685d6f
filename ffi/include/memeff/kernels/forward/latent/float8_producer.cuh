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
// A warp converts every third panel of a KV block, a quarter at a time. The registers of a quarter
// that was converted take the same quarter of the warp's next panel, so a panel is always in
// flight. That hides most of the latency of L2, and a buffer that is released finds its first
// panels in registers.
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

  static constexpr int kQuarters = 4;
  static constexpr int kQuarterRows = Kernel::kTileKey / kQuarters;
  static constexpr int kSteps = kQuarterRows / kStepRows;
  static constexpr int kWarpPanels = Kernel::kPanels / kWarps;  // of a KV block
  static_assert(kWarpPanels * kWarps == Kernel::kPanels);
  static_assert(Keys::kBoxRows % kQuarterRows == 0);
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
      Bytes bytes[kQuarters];
      CUTE_UNROLL
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        load(params, keys, panel_of(stage.index, warp, 0), quarter, bytes[quarter]);
      }
      CUTE_NO_UNROLL
      for (int left = part.end - part.begin; left > 0; --left) {
        produce_block(params, control, tiles, warp, stage, keys, bytes);
        stage.advance();
      }
    }
  }

 private:
  CUTE_DEVICE static bool is_leader() { return threadIdx.x % kWarpSize == 0; }
  // Of the thread index read anew: else the compiler keeps what it derives from them, and spills.
  CUTE_DEVICE static int lane_row() { return thread_index() % kWarpSize / kRowLanes; }
  CUTE_DEVICE static int lane_column() { return thread_index() % kRowLanes * kLoadColumns; }

  CUTE_DEVICE static int group_of(int panel) {
    return min(panel / Kernel::kValuePanels, Kernel::kColumnGroups - 1);
  }

  // Panel `i` of a warp. Warps convert panels in the order of their release.
  CUTE_DEVICE static int panel_of(int buffer, int warp, int i) {
    return Kernel::panel_in_order(buffer, i * kWarps + warp);
  }

  // Converts the warp's panels of a KV block, and loads those after them.
  CUTE_DEVICE static void produce_block(ForwardParams const& params, Control& control,
                                        uint32_t tiles, int warp,
                                        PipelineStage<Kernel::kStages> const& stage, Keys& keys,
                                        Bytes (&bytes)[kQuarters]) {
    auto& barriers = control.keys[stage.index];
    float const scale = keys.scale;
    CUTE_NO_UNROLL
    for (int i = 0; i < kWarpPanels; ++i) {
      bool const is_last = i == kWarpPanels - 1;
      if (is_last) keys.advance(params, control, warp == 0);
      int const loaded = is_last ? panel_of((stage.index + 1) % Kernel::kStages, warp, 0)
                                 : panel_of(stage.index, warp, i + 1);
      int const panel = panel_of(stage.index, warp, i);
      uint32_t const target = Kernel::keys(tiles, stage.index) + panel * KeyTile::kPanelBytes;
      CUTE_UNROLL
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        // After the first one redundant: it separates basic blocks. In a single one, ptxas moves
        // all loads to its end.
        wait_barrier(barriers.empty[group_of(panel)], stage.parity ^ 1);
        random_sleep();
        store(target, quarter, scale, bytes[quarter]);
        if (quarter == kQuarters - 1) {
          fence_tma_store();
          __syncwarp();
          if (is_leader()) arrive_barrier(barriers.full[panel]);
          random_sleep();
        }
        load(params, keys, loaded, quarter, bytes[quarter]);
      }
    }
  }

  // Loads the lane's bytes of a quarter of a panel. Rows beyond the length, and those without a
  // page, are zero: NaN would make the products of the values NaN.
  CUTE_DEVICE static void load(ForwardParams const& params, Keys const& keys, int panel,
                               int quarter, Bytes& bytes) {
    using Float8 = KeyValueElement<Config>;
    int const first_row = quarter * kQuarterRows;
    int const box = first_row / Keys::kBoxRows;
    int const column = panel * KeyTile::kPanelColumns + lane_column();
    // Hidden values: else the compiler keeps the addresses and conditions of all quarters in
    // registers, and spills others.
    unsigned left = unsigned(max(keys.limit - keys.first, 0));
    hide_value(left);
    left = column < params.shape.head_dim ? left : 0;
    unsigned row = unsigned(Keys::of_box(keys.row, box));
    hide_value(row);
    bool const exists = int(row) < params.shape.key_tokens;
    int const box_row = first_row - box * Keys::kBoxRows + lane_row();
    char const* address = keys.base + (int(row) + box_row) * row_bytes<Float8>(params.key) + column;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      int const tile_row = first_row + step * kStepRows + lane_row();
      load_global_vector_if(exists && unsigned(tile_row) < left, address, bytes[step]);
      address += kStepRows * row_bytes<Float8>(params.key);
    }
  }

  // Converts the lane's bytes of a quarter and stores them in a panel.
  CUTE_DEVICE static void store(uint32_t panel, int quarter, float box_scale, Bytes const& bytes) {
    int const first_row = quarter * kQuarterRows;
    float scale = box_scale;
    if constexpr (Keys::kScales > 1) scale = Keys::of_box(scale, first_row / Keys::kBoxRows);
    scale *= kFloat8Factor;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < kLoadChunks; ++i) {
        int const chunk = lane_column() / KeyTile::kChunkColumns + i;
        uint32_t const target = panel + KeyTile::byte_offset(lane_row(), chunk) +
                                (first_row + step * kStepRows) * KeyTile::kRowBytes;
        uint32_t pairs[4];
        scaled(bytes[step][2 * i], scale, pairs[0], pairs[1]);
        scaled(bytes[step][2 * i + 1], scale, pairs[2], pairs[3]);
        store_shared_vector(target, __uint_as_float(pairs[0]), __uint_as_float(pairs[1]),
                            __uint_as_float(pairs[2]), __uint_as_float(pairs[3]));
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
