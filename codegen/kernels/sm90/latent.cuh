// Latent attention (MLA with absorbed projections) forward for Hopper: the values are the first
// columns of the keys, so a KV block is read from memory once.
//
// A work tile is 64 rows of one sequence: the query heads of a key head, of one or several tokens.
// Its output has 512 columns, too many for the registers of one warpgroup, while 64 x 64 scores are
// too few to divide over two. So two consumer warpgroups own 256 columns of the output each and
// take the scores in turn: one owns those of even KV blocks, the other those of odd ones. The owner
// turns scores into probabilities, multiplies its own columns, and passes the probabilities through
// shared memory to the other warpgroup, which multiplies the other columns:
//
//   warpgroup 0 | S(0) softmax P(0) V(0)        P(1) V(1)  S(2) softmax P(2) V(2) ...
//   warpgroup 1 |        S(1)       P(0) V(0)  softmax  P(1) V(1)        P(2) V(2)  S(3) ...
//
// While one computes its softmax, the tensor cores multiply for the other. S(b) begins before
// P(b - 1) V(b - 1) of the other warpgroup's block and ends after it, because some of its keys
// arrive later. Both accumulate the KV blocks in the same order and with the same softmax
// reference, which is passed along with the probabilities. FlashMLA (DeepSeek, 2025) introduced
// this schedule and rescales a block's probabilities in shared memory. Here the reference has slack
// (collective/softmax/online.cuh), so each warpgroup rescales its own output instead, and only
// rarely.
//
// 64 rows of queries and two buffers of keys take 216 KB, which leaves no room for a third. Instead
// three column groups of a buffer are released separately: the two halves of the value columns,
// each by the warpgroup that multiplies them, and the other columns, which only scores need. So
// columns of the next KV block arrive while others of this one are still read.
//
// The bandwidth of L2 is too small for one copy of the keys per SM. So two CTAs form a cluster, and
// if both compute row tiles of the same sequence, each copies half of the keys to both.
#pragma once

#include <kernels/common/combine.cuh>
#include <kernels/sm90/latent_combine.cuh>
#include <memeff/arch/cluster.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/arch/math.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/copies/gathered_rows.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/softmax/exchange.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/float8.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/balanced_keys.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// The rows of keys that the producers read.

// A KV block is divided into boxes of contiguous rows.
template <class Config, class Kernel>
struct LatentKeyRows {
  using Control = typename Kernel::Control;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kBoxRows = PageTable<Config>::kPaged ? Config::kKeyBoxRows : kTileKey;
  static constexpr int kBoxes = kTileKey / kBoxRows;

  // Finds the first row in the tensor of each box of a KV block.
  CUTE_DEVICE static void find(ForwardParams const& params, Control& control,
                               KeyValueSource<Config> const& source, int key_length, int first,
                               int (&rows)[kBoxes]) {
    CUTE_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      rows[box] = row_of(params, control, source, key_length, first + box * kBoxRows);
    }
  }

  // The row in the tensor of the first key of a box. Keys without a valid page get a row beyond the
  // end of the pool, for which TMA fills in zeros.
  CUTE_DEVICE static int row_of(ForwardParams const& params, Control& control,
                                KeyValueSource<Config> const& source, int key_length, int key) {
    if constexpr (PageTable<Config>::kPaged) {
      int const row = key < key_length ? source.pages.row(key) : -1;
      if (row < 0 && key < key_length) control.may_miss_pages = true;
      return row < 0 ? params.shape.key_tokens : row;
    } else {
      return source.origin.row + key;
    }
  }
};

// Copies of the queries of a row tile.

// The threads of both consumers call load(). A single warp would take 15000 cycles: rows of several
// heads and tokens have no common stride, so there is an address for each row and an instruction
// for each 16 bytes.
template <class Config, class Kernel>
struct LatentQueriesSm90 {
  using Element = typename Config::Element;
  using Tile = typename Kernel::QueryTile;
  static constexpr int kWarps = Kernel::kConsumers / kWarpSize;
  static constexpr int kRows = Kernel::kTileQuery / kWarps;  // of a warp
  static_assert(kRows * kWarps == Kernel::kTileQuery && kRows <= kWarpSize);

  // Starts the copies of this warp's rows; rows and columns beyond the bounds become zero. Each
  // lane finds the address of one row, so a warp divides by the number of heads only once.
  CUTE_DEVICE static void load(ForwardParams const& params, KeyPart const& part, int query_length,
                               uint32_t tile) {
    constexpr int kRowChunks = Config::kHeadDim / 8;
    int const lane = int(threadIdx.x) % kWarpSize;
    int const begin = int(threadIdx.x) / kWarpSize * kRows;
    int const first = part.tile * Kernel::kTileQuery + begin;
    Row const own(params, part, min(first + lane % kRows, query_length - 1));
#pragma unroll 4  // overlaps the shuffles
    for (int row = 0; row < kRows; ++row) {
      char const* const source = own.of_lane(row);
      CUTE_UNROLL
      for (int chunk = lane; chunk < kRowChunks; chunk += kWarpSize) {
        copy_async(tile + Tile::byte_offset(begin + row, chunk), source + chunk * 16,
                   first + row < query_length && chunk * 8 < params.shape.head_dim);
      }
    }
  }

 private:
  // The address of a row of the query.
  struct Row {
    unsigned low;
    unsigned high;

    CUTE_DEVICE Row(ForwardParams const& params, KeyPart const& part, int row) {
      GqaRows<true> const rows(params.shape);
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

// Producer warpgroup: a warp plans the work of the CTA, and one thread for each column group copies
// keys.

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
    static_assert(Kernel::kCluster == 2);
    int const others = sharers - 1;  // 0 or 1: a mask in place of a modulo
    int const rank = cluster_rank() & others;
    PipelineStage<Kernel::kStages> stage;
    PipelineStage<Kernel::kWorkStages> slot;
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
          if (((panel + block) & others) != rank) return;
          load(map, barriers.full[panel],
               target + panel * KeyTile::kPanelBytes + box * kBoxRows * KeyTile::kRowBytes,
               panel * KeyTile::kPanelColumns, rows[box], part.head, batch, sharers);
        });
        stage.advance();
      }
    }
  }

 private:
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

// The next part of a warp that fills buffers; all lanes call it.
template <class Kernel>
CUTE_DEVICE KeyPart next_part(typename Kernel::Control& control,
                              PipelineStage<Kernel::kWorkStages>& slot) {
  control.work.wait(slot);
  KeyPart const part = control.parts[slot.index];
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) control.work.release(slot);
  slot.advance();
  return part;
}

// Producer warps for small pages, whose rows they copy one by one.

// The kernel calls produce_keys() with one warp per column group, in place of a thread of
// LatentProducerSm90. The warps copy each column group together, in the order in which groups are
// released. CTAs do not share keys, because only TMA writes to several of them.
template <class Config, class Kernel>
struct LatentGatherProducerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using KeyTile = typename Kernel::KeyTile;
  using Mask = typename Kernel::Mask;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kWarps = Kernel::kColumnGroups;
  using Rows = DividedRows<Config, typename Kernel::PanelTile, kWarps>;

  CUTE_DEVICE static void produce_keys(ForwardParams const& params, Control& control,
                                       uint32_t tiles, int warp) {
    PipelineStage<Kernel::kStages> stage;
    PipelineStage<Kernel::kWorkStages> slot;
    while (true) {
      KeyPart const part = next_part<Kernel>(control, slot);
      if (part.batch < 0) break;
      int const key_length = Mask(params.mask, params.shape, part.batch).key_length;
      KeyValueSource<Config> const source(params, part.batch, part.head);
      char const* const pool = source.row(params.key);
      Rows next;
      next.load(source.pages, warp, part.begin * kTileKey, key_length);
      CUTE_NO_UNROLL
      for (int block = part.begin; block < part.end; ++block) {
        int const first = block * kTileKey;
        Rows rows = next;
        if (rows.find(source.pages, warp, first, key_length)) control.may_miss_pages = true;
        // Loaded before the copies, because loads arrive in order.
        next.load(source.pages, warp, first + kTileKey, key_length);
        auto& barriers = control.keys[stage.index];
        // The group without values is released first, then that of the consumer with the scores.
        copy_group<Kernel::kOthers>(params, control, tiles, stage, rows, warp, pool,
                                    Kernel::kOtherColumns);
        copy_group<Kernel::kValuePanels>(params, control, tiles, stage, rows, warp, pool,
                                         stage.index);
        copy_group<Kernel::kValuePanels>(params, control, tiles, stage, rows, warp, pool,
                                         1 - stage.index);
        stage.advance();
      }
    }
  }

 private:
  template <int kCount>
  CUTE_DEVICE static void copy_group(ForwardParams const& params, Control& control, uint32_t tiles,
                                     PipelineStage<Kernel::kStages> const& stage, Rows const& rows,
                                     int warp, char const* pool, int group) {
    auto& barriers = control.keys[stage.index];
    wait_barrier(barriers.empty[group], stage.parity ^ 1);
    random_sleep();
    int const first = Kernel::group_begin(group);
    rows.template copy<kCount>(Kernel::keys(tiles, stage.index), warp, pool,
                               unsigned(memeff::row_bytes<Element>(params.key)),
                               params.shape.head_dim, first, barriers.full[first]);
  }
};

// Producer warps for a pool of float8 (e4m3): they convert keys to the query's dtype on the way to
// shared memory.

// The kernel calls produce_keys() with one warp per column group, in place of a thread of
// LatentProducerSm90. Both fill the same buffers, so consumers do not depend on the pool.
//
// A warp converts every third panel of a KV block. CTAs do not share keys: a whole block in float8
// has as many bytes as the half in 16 bits that each would copy if they did.
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
  static_assert(kStepRows % 8 == 0);

  // A lane knows the rows of all boxes, or of every 32nd key if pages are small.
  static constexpr bool kByKey = kSmallPages<Config>;
  static constexpr int kRows = kByKey ? ceil_div(kTileKey, kWarpSize) : KeyRows::kBoxes;
  static constexpr int kScales = Config::kKeyScale == PoolScale::pages ? kRows : 1;
  static constexpr int kBoxSteps = KeyRows::kBoxRows / kStepRows;
  static_assert(kByKey || kBoxSteps * kStepRows == KeyRows::kBoxRows);

  CUTE_DEVICE static void produce_keys(ForwardParams const& params, Control& control,
                                       uint32_t tiles, int warp) {
    bool const leader = threadIdx.x % kWarpSize == 0;
    PipelineStage<Kernel::kStages> stage;
    PipelineStage<Kernel::kWorkStages> slot;
    while (true) {
      KeyPart const part = next_part<Kernel>(control, slot);
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
          wait_barrier(barriers.empty[Kernel::group_of(panel)], stage.parity ^ 1);
          random_sleep();
          keys.store(Kernel::keys(tiles, stage.index) + panel * KeyTile::kPanelBytes, bytes);
          fence_tma_store();
          __syncwarp();
          if (leader) arrive_barrier(barriers.full[panel]);
          random_sleep();
        }
        stage.advance();
      }
    }
  }

 private:
  // The keys of a part, and the rows of the current KV block.
  struct Keys {
    KeyValueSource<Config> source;
    int key_length;
    int first;
    int rows[kRows];
    float scales[kScales];  // of each of these rows, or of all

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
      if constexpr (kByKey) {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          int const key = first + i * kWarpSize + int(threadIdx.x) % kWarpSize;
          rows[i] = KeyRows::row_of(params, control, source, key_length, key);
        }
      } else {
        KeyRows::find(params, control, source, key_length, first, rows);
      }
      if constexpr (Config::kKeyScale == PoolScale::pages) {
        PoolScales const pool(params, Config::kKeyScaleArray, source.head);
        CUTE_UNROLL
        for (int i = 0; i < kScales; ++i) {
          // Hazard: a page outside of the pool has no scale.
          bool const exists = rows[i] < params.shape.key_tokens;
          int const page = unsigned(rows[i]) / Config::kPageSize;
          scales[i] = exists ? __ldg(pool.first + page * pool.page_stride) : 0.0f;
        }
      }
    }

    // Loads the lane's bytes of a panel. Rows beyond the length, and those without a page, are
    // zero: NaN would make the products of the values NaN.
    CUTE_DEVICE void load(ForwardParams const& params, int panel,
                          uint32_t (&bytes)[kSteps][4]) const {
      using Float8 = KeyValueElement<Config>;
      int const column = panel * KeyTile::kPanelColumns + lane_column();
      // The values are hidden from the compiler, or it keeps the addresses and conditions of all
      // rows of a block in registers, and spills others.
      unsigned left = unsigned(max(key_length - first, 0));
      hide_value(left);
      left = column < params.shape.head_dim ? left : 0;
      if constexpr (kByKey) {
        CUTE_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          int const row = of_lane(rows, step);
          char const* const address =
              row_pointer<Float8>(params.key, source.batch(params.key), row, source.head) + column;
          load_global_vector_if(row < params.shape.key_tokens && left > 0, address, bytes[step]);
        }
        return;
      }
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
        float const scale = scale_of(step) * kFloat8Factor;
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

    // Returns the value that a lane holds for the key in this lane's row of a step, if pages are
    // small.
    template <class Value>
    CUTE_DEVICE static Value of_lane(Value const (&values)[kRows], int step) {
      int const row = step * kStepRows;
      return __shfl_sync(0xffffffffu, values[row / kWarpSize], row % kWarpSize + lane_row());
    }

    CUTE_DEVICE float scale_of(int step) const {
      if constexpr (kScales == 1) {
        return scales[0];
      } else if constexpr (kByKey) {
        return of_lane(scales, step);
      } else {
        return scales[step / kBoxSteps % kScales];
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
};

// Output of a part (KeyPart): results, or partial results that the combine kernel adds up.

// A consumer calls write() after the last KV block of a part. It writes as many columns as Grid
// has, from its own first column on.
template <class Config, class Grid, class Softmax>
struct LatentOutputSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;

  // Consumer 0 writes the logsumexps.
  template <class Accumulators>
  CUTE_DEVICE static void write(ForwardParams const& params, KeyPart const& part, int query_length,
                                int warpgroup, int first_column, Softmax& softmax,
                                Accumulators& output) {
    int const row = part.tile * kTileQuery;
    // The combine kernel finishes rows of partial results, so none of them is valid here.
    RowsOfTile<true> const rows(params.shape, part.batch, part.head, row,
                                part.slot < 0 ? query_length : 0);
    softmax.finish(output, params.scale.softmax_scale, 1.0f,
                   LaneRowModifiers<Config, Grid>(params, rows));
    if (part.slot < 0) {
      store(params, part, query_length, warpgroup, first_column, softmax, output);
    } else {
      store_partial(params, part.slot, warpgroup, first_column, softmax, output);
    }
  }

  // Stores the finished output and logsumexps of a part that is a whole row tile.
  template <class Accumulators>
  CUTE_DEVICE static void store(ForwardParams const& params, KeyPart const& part, int query_length,
                                int warpgroup, int first_column, Softmax const& softmax,
                                Accumulators const& output) {
    ProblemShape const& shape = params.shape;
    GqaRows<true> const rows(shape);
    Origin const origin = query_origin<Config>(shape, part.batch);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const row = part.tile * kTileQuery + Grid::element_row(2 * r, 0);
      bool const valid = row < query_length;
      int const own = min(row, query_length - 1);
      int const query = rows.query(own);
      int const head = rows.query_head(part.head, own);
      store_global_if(valid && warpgroup == 0 && threadIdx.x % 4 == 0,
                      params.logsumexp + logsumexp_offset<Config>(shape, origin, head) + query,
                      softmax.softmax_reference[r]);
      char* const out = row_pointer<Element>(params.out, origin.batch, origin.row + query, head);
      store_row<Element>(out + (first_column + lane_column()) * int(sizeof(Element)), output, r,
                         shape.value_dim - first_column, valid);
    }
  }

 private:
  // Stores all rows, valid or not, so the combine kernel need not distinguish them.
  template <class Accumulators>
  CUTE_DEVICE static void store_partial(ForwardParams const& params, int slot, int warpgroup,
                                        int first_column, Softmax const& softmax,
                                        Accumulators const& output) {
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      long long const row = (long long)slot * kTileQuery + Grid::element_row(2 * r, 0);
      store_global_if(warpgroup == 0 && threadIdx.x % 4 == 0, params.partial_logsumexp + row,
                      softmax.softmax_reference[r]);
      float* const out = params.partial_out + row * Config::kValueDim + first_column;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        *reinterpret_cast<float2*>(out + Grid::element_column(0, n)) =
            make_float2(output(2 * r, 0, n), output(2 * r + 1, 0, n));
      }
    }
  }
};

// Output of a segment (KeySegments) of a batch-invariant call.

// A consumer calls write() after the last KV block of a segment, which is then normalized by
// itself. It is stored in a slot, or added to the running sum with the arithmetic of the combine
// kernel. Each thread reads the part of the sum that it has written itself, and the last segment of
// a row tile finishes the rows.
template <class Config, class Grid, class Softmax>
struct LatentSegmentOutputSm90 {
  using Tile = SegmentTile<Config>;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kRows = Softmax::kRows;

  template <class Accumulators>
  CUTE_DEVICE static void write(ForwardParams const& params, KeyPart const& part, int query_length,
                                int warpgroup, int first_column, Softmax& softmax,
                                Accumulators& output) {
    int const row = part.tile * kTileQuery;
    // The rows are finished when all segments are added up, so none of them is valid here.
    RowsOfTile<true> const none(params.shape, part.batch, part.head, row, 0);
    softmax.finish(output, params.scale.softmax_scale, 1.0f,
                   LaneRowModifiers<Config, Grid>(params, none));
    SegmentResult const result = SegmentResult::of(part);
    // Read anew: with a window, rows and addresses would spill across the main loop.
    int const thread = int(thread_index()) % kWarpgroupSize;
    int const warp = thread / kWarpSize;
    int const lane = thread % kWarpSize;
    // All conditions are the same for a warp. Hazard: ptxas sees that by the votes only. Without
    // them it computes the matrix descriptors of the main loop in vector registers, and spills.
    if (!warp_any(row + warp * Tile::kWarpRows < query_length)) return;  // this warp has no rows
    WeightSum sums[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] = {softmax.softmax_reference[r], 1.0f};
    int const slot = result.slot < 0 ? int(block_index()) : result.slot;
    Tile const tile(params, slot, warp);
    if (warp_any(result.slot < 0)) {
      add(tile, warp_any(result.continues), warpgroup, lane, softmax, sums, output);
      if (warp_any(result.ends)) {
        finish(params, part, query_length, warpgroup, first_column, sums, softmax, output);
        return;
      }
    }
    store(tile, warpgroup, lane, sums, output);
  }

 private:
  static constexpr int kPairs = Tile::kPairs / 2;  // of one consumer
  static constexpr int kTogether = 8;  // loads in flight; there are no registers for more

  // Adds the running sum to the output, which becomes the new one.
  template <class Accumulators>
  CUTE_DEVICE static void add(Tile const& tile, bool continues, int warpgroup, int lane,
                              Softmax const& softmax, WeightSum (&sums)[kRows],
                              Accumulators& output) {
    static_assert(kRows == 2 && decltype(cute::size<2>(output))::value == 2 * kPairs);
    sums[0] = sums[1] = WeightSum::empty();
    if (continues) {
      float4 const weights = tile.weights(warpgroup, lane);
      sums[0] = {weights.x, weights.y};
      sums[1] = {weights.z, weights.w};
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SumFactors const factors = sums[r].add(softmax.softmax_reference[r], 1.0f);
      if (continues) {
        add_row(&tile.columns(r, warpgroup * kPairs, lane), r, factors, output);
      } else {
        CUTE_UNROLL
        for (int n = 0; n < 2 * kPairs; ++n) {
          output(2 * r, 0, n) = factors.add(0.0f, output(2 * r, 0, n));
          output(2 * r + 1, 0, n) = factors.add(0.0f, output(2 * r + 1, 0, n));
        }
      }
    }
  }

  // Adds row r of the running sum; `sums` points to the first vector of this lane.
  template <class Accumulators>
  CUTE_DEVICE static void add_row(float4 const* sums, int r, SumFactors const& factors,
                                  Accumulators& output) {
    CUTE_UNROLL
    for (int begin = 0; begin < kPairs; begin += kTogether) {
      float4 columns[kTogether];
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) columns[i] = sums[(begin + i) * kWarpSize];
      // Hazard: without it ptxas starts the loads of all rows, and spills.
      asm volatile("" ::: "memory");
      CUTE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        int const n = 2 * (begin + i);
        auto const add_to = [&](float& x, float sum) { x = factors.add(sum, x); };
        add_to(output(2 * r, 0, n), columns[i].x);
        add_to(output(2 * r + 1, 0, n), columns[i].y);
        add_to(output(2 * r, 0, n + 1), columns[i].z);
        add_to(output(2 * r + 1, 0, n + 1), columns[i].w);
      }
    }
  }

  template <class Accumulators>
  CUTE_DEVICE static void store(Tile const& tile, int warpgroup, int lane,
                                WeightSum const (&sums)[kRows], Accumulators const& output) {
    tile.weights(warpgroup, lane) =
        make_float4(sums[0].maximum, sums[0].weight, sums[1].maximum, sums[1].weight);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        tile.columns(r, warpgroup * kPairs + pair, lane) =
            make_float4(output(2 * r, 0, 2 * pair), output(2 * r + 1, 0, 2 * pair),
                        output(2 * r, 0, 2 * pair + 1), output(2 * r + 1, 0, 2 * pair + 1));
      }
    }
  }

  // Finishes the rows as the combine kernel does, and stores them.
  template <class Accumulators>
  CUTE_DEVICE static void finish(ForwardParams const& params, KeyPart const& part, int query_length,
                                 int warpgroup, int first_column, WeightSum const (&sums)[kRows],
                                 Softmax& softmax, Accumulators& output) {
    RowsOfTile<true> const rows(params.shape, part.batch, part.head, part.tile * kTileQuery,
                                query_length);
    LaneRowModifiers<Config, Grid> const modifiers(params, rows);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      RowEnd const end = modifiers.finish(r, sums[r].end());
      softmax.softmax_reference[r] = end.logsumexp;
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(output); ++n) {
        output(2 * r, 0, n) *= end.factor;
        output(2 * r + 1, 0, n) *= end.factor;
      }
    }
    LatentOutputSm90<Config, Grid, Softmax>::store(params, part, query_length, warpgroup,
                                                   first_column, softmax, output);
  }
};

// Consumer: the scores of every second KV block, and half of the output's columns over all KV
// blocks.

// run() is called by the kernel with all threads of a consumer warpgroup.
template <class Config, class Kernel>
struct LatentConsumerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using Exchange = typename Kernel::Exchange;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using OutGrid = typename Kernel::OutGrid;
  using PanelTile = typename Kernel::PanelTile;
  using ProbabilityTile = typename Kernel::ProbabilityTile;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using Softmax = typename Kernel::Softmax;
  using ValueTile = typename Kernel::ValueTile;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  static constexpr int kPanelSteps = PanelTile::kColumns / 16;
  static constexpr int kOtherColumns = Kernel::kOtherColumns;
  static constexpr int kOthers = Kernel::kOthers;
  static constexpr int kOwnPanels = kOthers + Kernel::kValuePanels;  // without the other's values
  static constexpr bool kKeySegments = Kernel::Schedule::kKeySegments;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;

  // A consumer's stages in the rings. The KV blocks whose scores it owns are in the buffer with
  // its number.
  struct ConsumerState {
    int warpgroup;
    bool leader;         // one per warp
    int releases;        // the CTA in whose barriers this lane releases keys, or -1
    int next = 0;        // the buffer of the next part's first KV block
    int own_parity = 0;  // of the consumer's own buffer
    int other_parity = 0;
    int sums = 0;  // the buffer of row sums
    PipelineStage<Kernel::kWorkStages> slot;
  };

  CUTE_DEVICE static void run(ForwardParams const& params, Control& control, uint32_t tiles,
                              int sharers) {
    ConsumerState at;
    at.warpgroup = warpgroup_index();
    int const lane = int(threadIdx.x) % kWarpSize;
    at.leader = lane == 0;
    at.releases = lane >= sharers ? -1 : sharers == 1 ? cluster_rank() : lane;
    while (true) {
      control.work.wait(at.slot);
      KeyPart const part = control.parts[at.slot.index];
      if (part.batch < 0) break;
      if constexpr (!kKeySegments) release_part(control, at);
      compute(params, control, tiles, part, at);
      if constexpr (kKeySegments) release_part(control, at);
    }
  }

 private:
  // All lanes of a warp call it when they have read the part.
  CUTE_DEVICE static void release_part(Control& control, ConsumerState& at) {
    __syncwarp();
    if (at.leader) control.work.release(at.slot);
    at.slot.advance();
  }

  // Computes a part: the KV blocks [begin, end) of a row tile, two at a time, one per consumer.
  CUTE_DEVICE static void compute(ForwardParams const& params, Control& control, uint32_t tiles,
                                  KeyPart const& part, ConsumerState& at) {
    Mask const mask(params.mask, params.shape, part.batch);
    auto output = OutGrid::make_accumulators();    // (4, 1, MMA_N)
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(output);
    Softmax softmax;
    if (!has_queries(part)) {
      // Hazard: the other consumer must have read the queries of the previous part. It has, because
      // it has passed the barrier of add_row_sums().
      Kernel::Queries::load(params, part, mask.query_length, tiles);
      commit_copies();
      wait_copies<0>();
      fence_tma_store();
      named_barrier_sync(Kernel::kConsumerBarrier, Kernel::kConsumers);
    }
    bool const starts = at.next == at.warpgroup;
    // The number of KV blocks of a segment is even.
    if constexpr (!kKeySegments) at.next ^= (part.end - part.begin) & 1;
    // The range is uniform over the warp; the shuffles make that visible to the compiler. Without
    // them it computes matrix descriptors in vector registers: 168 R2UR for each KV block.
    int block = __shfl_sync(0xffffffffu, part.begin, 0);
    int const end = __shfl_sync(0xffffffffu, part.end, 0);
    if (starts) {
      add_own_block<false>(params, control, tiles, at, mask, part, block, scores, softmax, output);
      ++block;
    }
    // `block` belongs to the other consumer.
    CUTE_NO_UNROLL
    for (; block + 1 < end; block += Kernel::kWarpgroups) {
      add_own_block<true>(params, control, tiles, at, mask, part, block + 1, scores, softmax,
                          output);
    }
    if (block < end) add_other_values(control, tiles, at, softmax, output);
    Exchange::add_row_sums(control.row_sums[at.sums], at.warpgroup, Kernel::kConsumerBarrier,
                           softmax);
    at.sums ^= 1;  // hazard: the other consumer may still read these
    if constexpr (kKeySegments) {
      // Read anew: with a window it would spill across the main loop.
      KeyPart const own = control.parts[at.slot.index];
      int const query_length = Mask(params.mask, params.shape, own.batch).query_length;
      Kernel::Output::write(params, own, query_length, at.warpgroup,
                            at.warpgroup * Kernel::kColumns, softmax, output);
    } else {
      Kernel::Output::write(params, part, mask.query_length, at.warpgroup,
                            at.warpgroup * Kernel::kColumns, softmax, output);
    }
  }

  // Whether the queries of a part are in shared memory, because the part before it had the same.
  CUTE_DEVICE static bool has_queries(KeyPart const& part) {
    if constexpr (kKeySegments) {
      return SegmentResult::of(part).continues;
    } else {
      return false;
    }
  }

  // Adds a KV block whose scores this consumer owns, and with kFollows the other consumer's block
  // before it. That one is added between the two halves of the scores: the panels for their second
  // half arrive last, because the other consumer released them last. Added before the scores, it
  // would delay them; added after them, it would occupy the other consumer's buffer for longer.
  //
  // Hazard: kFollows must be a compile-time constant, because ptxas serializes products if a branch
  // separates them from the wait for other products.
  template <bool kFollows, class Scores, class Output>
  CUTE_DEVICE static void add_own_block(ForwardParams const& params, Control& control,
                                        uint32_t tiles, ConsumerState& at, Mask const& mask,
                                        KeyPart const& part, int block, Scores& scores,
                                        Softmax& softmax, Output& output) {
    add_scores(control, tiles, at, 0, kOwnPanels, scores);
    if constexpr (kFollows) add_other_values(control, tiles, at, softmax, output);
    add_scores(control, tiles, at, kOwnPanels, Kernel::kPanels, scores);
    wait_products<0>();
    fence_accumulators(scores);
    release_keys(control, at, at.warpgroup, kOtherColumns);
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const tile = {part.batch, part.head, part.tile * kTileQuery,
                                    block * kTileKey};
    modifiers.forward(scores, tile);
    mask.template apply<kTileQuery, kTileKey>(scores, params, tile, true, 0,
                                              warp_any(control.may_miss_pages));
    auto const correction = softmax.exponentiate(scores, params.scale.softmax_scale);
    fence_accumulators(scores);
    auto const probabilities = as_left_operand<Element>(scores);
    publish(params, control, tiles, at, mask, part, block, softmax, correction, probabilities);
    Softmax::rescale(output, correction);
    add_values(control, tiles, at, at.warpgroup, probabilities, output);
    at.own_parity ^= 1;
  }

  // Starts the products [begin, end) of S = Q K^T of the KV block in this consumer's buffer. Each
  // product reads one panel, as soon as it has arrived. The panels that this consumer has released
  // itself come first.
  template <class Scores>
  CUTE_DEVICE static void add_scores(Control& control, uint32_t tiles, ConsumerState const& at,
                                     int begin, int end, Scores& scores) {
    auto& barriers = control.keys[at.warpgroup];
    uint32_t const keys = Kernel::keys(tiles, at.warpgroup);
    fence_accumulators(scores);
    CUTE_UNROLL
    for (int i = begin; i < end; ++i) {
      int const panel = Kernel::score_panel(at.warpgroup, i);
      Kernel::wait_panel(barriers, panel, at.own_parity);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      warpgroup_gemm<Element, kPanelSteps>(
          scores, operand<PanelTile, Contiguous::k>(tiles + panel * PanelTile::kBytes),
          operand<PanelTile, Contiguous::k>(keys + panel * PanelTile::kBytes), i > 0);
    }
    commit_products();
  }

  // Passes the probabilities of a KV block to the other consumer, with the softmax references.
  template <class Probabilities>
  CUTE_DEVICE static void publish(ForwardParams const& params, Control& control, uint32_t tiles,
                                  ConsumerState const& at, Mask const& mask, KeyPart const& part,
                                  int block, Softmax const& softmax,
                                  typename Softmax::Correction const& correction,
                                  Probabilities const& probabilities) {
    // Hazard: every warp of this consumer must have read the other's probabilities, which these
    // replace.
    named_barrier_sync(Kernel::warpgroup_barrier(at.warpgroup), kWarpgroupSize);
    store_operand<ProbabilityTile, ScoreGrid>(tiles + Kernel::kProbabilityOffset, probabilities);
    Exchange::publish(control.references, softmax, correction);
    int const column = block * kTileKey;
    bool clears = reads_beyond<Config>(mask.key_length, column + kTileKey, params.shape.key_length);
    // Hazard: clear the value columns only. The other columns are already released.
    using Values = SharedTile<kTileKey, Config::kValueDim>;
    if (clears) {
      clear_rows<Values, kWarpgroupSize>(Kernel::keys(tiles, at.warpgroup),
                                         max(mask.key_length - column, 0));
    }
    if constexpr (kMayBeFreed<Config>) {
      int const unneeded = unneeded_rows<Config>(mask, part.tile * kTileQuery, column, kTileKey);
      clears = clears || unneeded > 0;
      clear_rows<Values, kWarpgroupSize>(Kernel::keys(tiles, at.warpgroup), 0, unneeded);
    }
    fence_tma_store();
    if (clears) named_barrier_sync(Kernel::warpgroup_barrier(at.warpgroup), kWarpgroupSize);
    __syncwarp();
    if (at.leader) arrive_barrier(control.probabilities[at.warpgroup]);
    random_sleep();
  }

  // Computes O += P V of a KV block of the other consumer, whose probabilities are in shared
  // memory.
  template <class Output>
  CUTE_DEVICE static void add_other_values(Control& control, uint32_t tiles, ConsumerState& at,
                                           Softmax& softmax, Output& output) {
    int const other = 1 - at.warpgroup;
    wait_barrier(control.probabilities[other], at.other_parity);
    random_sleep();
    auto const correction = Exchange::adopt(control.references, softmax);
    Softmax::rescale(output, correction);
    // Redundant wait: the owner of the scores has waited for these keys. It makes their arrival
    // visible to this thread without relying on the other consumer.
    CUTE_UNROLL
    for (int panel = 0; panel < Kernel::kValuePanels; ++panel) {
      Kernel::wait_panel(control.keys[other], at.warpgroup * Kernel::kValuePanels + panel,
                         at.other_parity);
    }
    add_values(control, tiles, at, other,
               operand<ProbabilityTile, Contiguous::k>(tiles + Kernel::kProbabilityOffset), output);
    at.other_parity ^= 1;
  }

  // Computes O += P V for this consumer's columns of the values in a buffer, and releases them.
  template <class Probabilities, class Output>
  CUTE_DEVICE static void add_values(Control& control, uint32_t tiles, ConsumerState const& at,
                                     int buffer, Probabilities const& probabilities,
                                     Output& output) {
    uint32_t const values = Kernel::keys(tiles, buffer) + at.warpgroup * ValueTile::kBytes;
    fence_accumulators(output);
    begin_products();
    warpgroup_gemm<Element, kKeySteps>(output, probabilities,
                                       operand<ValueTile, Contiguous::outer>(values), true);
    commit_products();
    wait_products<0>();
    fence_accumulators(output);
    release_keys(control, at, buffer, at.warpgroup);
  }

  // Releases a column group of a buffer in all CTAs that share its keys. All lanes of a warp call
  // it.
  CUTE_DEVICE static void release_keys(Control& control, ConsumerState const& at, int buffer,
                                       int group) {
    if (at.releases >= 0) arrive_cluster_barrier(control.keys[buffer].empty[group], at.releases);
    random_sleep();
  }

  template <class Tile, Contiguous kOrder>
  CUTE_DEVICE static DescriptorOperand<Tile, kOrder> operand(uint32_t tile) {
    return DescriptorOperand<Tile, kOrder>(descriptor_address(tile));
  }
};

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaForwardLatentSm90 {
  static_assert(!Config::kBias && !Config::kRowMaxima);
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  // With fewer, the warp that plans the work spills before the first copy. Consumers need 208.
  static constexpr int kProducerRegisters = 88;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

  static constexpr int kColumns = Config::kValueDim / kWarpgroups;  // of a consumer's output
  using ScoreGrid = WarpgroupGrid<kTileQuery, kTileKey>;
  using OutGrid = WarpgroupGrid<kTileQuery, kColumns>;
  using Mask = ScoreMask<Config, ScoreGrid, true>;
  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid, false, true>>;
  using Softmax = OnlineSoftmax<1, false, has_large_scores<Config>()>;
  using Exchange = SoftmaxExchange<ScoreGrid, Softmax>;
  using Schedule = BalancedKeys<Config, Mask>;
  using Output =
      cute::conditional_t<Schedule::kKeySegments, LatentSegmentOutputSm90<Config, OutGrid, Softmax>,
                          LatentOutputSm90<Config, OutGrid, Softmax>>;
  using Queries = LatentQueriesSm90<Config, FmhaForwardLatentSm90>;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;
  using ValueTile = SharedTile<kTileKey, kColumns>;  // the columns of a consumer, in a KeyTile
  using PanelTile = SharedTile<kTileKey, KeyTile::kPanelColumns>;
  using ProbabilityTile = SharedTile<kTileQuery, kTileKey>;
  static_assert(kTileQuery == kTileKey && KeyTile::kPanelBytes == PanelTile::kBytes);

  // A buffer of keys is released by column groups. Groups 0 and 1 are the consumers' value columns.
  static constexpr int kColumnGroups = 3;
  static constexpr int kPanels = KeyTile::kPanels;
  static constexpr int kValuePanels = ValueTile::kPanels;  // per consumer
  CUTE_HOST_DEVICE static constexpr int group_begin(int group) { return group * kValuePanels; }
  CUTE_HOST_DEVICE static constexpr int group_end(int group) {
    return group < kWarpgroups ? (group + 1) * kValuePanels : kPanels;
  }
  CUTE_DEVICE static int group_of(int panel) {
    return min(panel / kValuePanels, kColumnGroups - 1);
  }
  static_assert(kPanels > group_begin(kWarpgroups));
  static constexpr int kOtherColumns = kColumnGroups - 1;  // the group without values
  static constexpr int kOthers = kPanels - group_begin(kOtherColumns);

  // The i-th panel that the scores of a consumer read. The columns without values are the last
  // ones. Those that the consumer has released itself come first, because they arrive first.
  CUTE_DEVICE static int score_panel(int warpgroup, int i) {
    int const value_panel = (i - kOthers + warpgroup * kValuePanels) % group_begin(kOtherColumns);
    return i < kOthers ? group_begin(kOtherColumns) + i : value_panel;
  }

  // A KV block occupies the buffer of the consumer that owns its scores, so buffers alternate.
  static constexpr int kStages = kWarpgroups;
  // The barriers of a buffer of keys: one per panel that arrives, and one per column group that is
  // released.
  struct KeyBarriers {
    uint64_t full[kPanels];
    uint64_t empty[kColumnGroups];
  };

  static constexpr int kCluster = Config::kCluster;  // CTAs
  static constexpr bool kCopiesByWarps = Config::kFloat8Pages || kSmallPages<Config>;
  using Gather = LatentGatherProducerSm90<Config, FmhaForwardLatentSm90>;
  static constexpr bool kGathersRows = kSmallPages<Config> && !Config::kFloat8Pages;
  static constexpr int kWorkStages = 4;
  // Everything in shared memory except the tiles.
  struct Control {
    RowReference references[kTileQuery];
    float row_sums[2][kWarpgroups][kTileQuery];  // alternating between parts
    KeyBarriers keys[kStages];
    uint64_t probabilities[kWarpgroups];  // of KV blocks of each consumer
    Pipeline<kWorkStages> work;
    KeyPart parts[kWorkStages];
    // Set by the producer before a KV block with an invalid page is complete, and never cleared.
    bool may_miss_pages;
  };

  static constexpr int kKeyOffset = QueryTile::kBytes;
  static constexpr int kProbabilityOffset = kKeyOffset + kStages * KeyTile::kBytes;
  static constexpr int kControlOffset = kProbabilityOffset + ProbabilityTile::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer, and one for both.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }
  static constexpr int kConsumerBarrier = 1 + kWarpgroups;

  CUTE_DEVICE static uint32_t keys(uint32_t tiles, int stage) {
    return tiles + kKeyOffset + stage * KeyTile::kBytes;
  }

  // Gathered rows arrive with all panels of a column group at once, at the barrier of the first.
  CUTE_DEVICE static void wait_panel(KeyBarriers& barriers, int panel, int parity) {
    if (kGathersRows && panel != group_begin(group_of(panel))) return;
    wait_barrier(barriers.full[panel], parity);
    if constexpr (kGathersRows) fence_tma_store();  // see arrive_when_copied()
  }

  CUTE_DEVICE static void init(Control& control, int sharers) {
    constexpr int kWarps = kWarpgroupSize / kWarpSize;  // per consumer
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      CUTE_UNROLL
      for (uint64_t& barrier : control.keys[stage].full) {
        init_barrier(barrier, kGathersRows ? Gather::Rows::kArrivals : 1);
      }
      CUTE_UNROLL
      for (uint64_t& barrier : control.keys[stage].empty) init_barrier(barrier, kWarps * sharers);
      init_barrier(control.probabilities[stage], kWarps);
    }
    control.work.init(kWarpgroups * kWarps + kColumnGroups);
    control.may_miss_pages = false;
    fence_barrier_init();
  }

  // `maps` is a KeyMap. It is empty if warps copy the keys.
  template <class... Maps>
  CUTE_DEVICE static void run(ForwardParams const& params, Maps const&... maps) {
    using Producer = LatentProducerSm90<Config, FmhaForwardLatentSm90>;
    using Consumer = LatentConsumerSm90<Config, FmhaForwardLatentSm90>;
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    int const sharers =
        kCopiesByWarps ? 1 : Schedule(params, int(gridDim.x)).template sharers<kCluster>();
    if (threadIdx.x == kConsumers) {
      (prefetch_map(maps.key), ...);
      init(control, sharers);
    }
    // Makes the barriers of each CTA visible to the threads of all of them.
    arrive_cluster();
    wait_cluster();

    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      int const warp = (int(threadIdx.x) - kConsumers) / kWarpSize;
      if (warp == kColumnGroups) {
        Producer::produce_parts(params, control);
      } else if constexpr (kCopiesByWarps) {
        using Copying =
            cute::conditional_t<Config::kFloat8Pages,
                                LatentFloat8ProducerSm90<Config, FmhaForwardLatentSm90>, Gather>;
        Copying::produce_keys(params, control, tiles, warp);
      } else if (threadIdx.x % kWarpSize == 0) {
        Producer::produce_keys(params, maps.key..., control, tiles, warp, sharers);
      }
    } else {
      raise_registers<kConsumerRegisters>();
      Consumer::run(params, control, tiles, sharers);
    }
    // Hazard: this CTA must not end while the other one may still arrive at its barriers.
    __syncwarp();
    arrive_cluster();
    wait_cluster();
  }
};

}  // namespace memeff
