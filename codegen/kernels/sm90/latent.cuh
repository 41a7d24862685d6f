// Latent attention (MLA with absorbed projections) forward for Hopper: the values are the first
// columns of the keys, so a KV block is read from memory once.
//
// The two CTAs of a cluster compute the same rows and divide the columns: each has half of the
// values, and for the scores the same half of the keys' columns and half of the others. So each
// column of a KV block is in the shared memory of one CTA only, and half a block takes 36 KB. Both
// add up the scores of their columns (collective/sums/column_sum.cuh) and then compute the same
// softmax, so nothing else passes between them:
//
//   CTA 0 | S += Q K^T of columns 0..255, 512..543 | exchange, softmax | O[0..255] += P V
//   CTA 1 | S += Q K^T of columns 256..511, 544..575 |       "         | O[256..511] += P V
//
// A consumer warpgroup has 64 rows, whose 256 output columns take 128 registers of a thread, and
// keeps P in registers. While one waits for the other CTA's scores and computes its softmax, the
// tensor cores multiply for the other. A work tile is 128 rows (the query heads of a key head, of
// one or several tokens), or 64 rows of which two consumer groups take every second KV block.
#pragma once

#include <kernels/common/combine.cuh>
#include <kernels/sm90/latent_combine.cuh>
#include <memeff/arch/cluster.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/arch/math.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/sums/column_sum.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/float8.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
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

  // Prefetches the first `count` keys of a box into L2. Reading whole rows in order gives a higher
  // DRAM bandwidth than reading one panel of columns at a time.
  CUTE_DEVICE static void prefetch(ForwardParams const& params,
                                   KeyValueSource<Config> const& source, int count, int row) {
    using Element = KeyValueElement<Config>;
    int const valid = min(count, kBoxRows);
    bool const exists = !PageTable<Config>::kPaged || row < params.shape.key_tokens;
    if (valid <= 0 || !exists) return;
    prefetch_bytes(row_pointer<Element>(params.key, source.batch(params.key), row, source.head),
                   valid * int(row_bytes<Element>(params.key)));
  }
};

// Copies of the queries of a row tile.

// The threads of both consumers call load(). A single warp would take 15000 cycles: rows of several
// heads and tokens have no common stride, so there is an address for each row and an instruction
// for each 16 bytes.
template <class Config, class Kernel>
struct LatentQueriesSm90 {
  using Element = typename Config::Element;
  using ValueTile = typename Kernel::QueryValueTile;
  using OtherTile = typename Kernel::QueryOtherTile;
  static constexpr int kWarps = Kernel::kConsumers / kWarpSize;
  static constexpr int kRows = Kernel::kTileQuery / kWarps;  // of a warp
  static_assert(kRows * kWarps == Kernel::kTileQuery && kRows <= kWarpSize);
  static_assert(ValueTile::kColumns / ValueTile::kChunkColumns == kWarpSize);

  // Starts the copies of this warp's rows of the CTA's columns; rows and columns beyond the bounds
  // become zero. Each lane finds the address of one row, so a warp divides by the number of heads
  // only once.
  CUTE_DEVICE static void load(ForwardParams const& params, KeyPart const& part, int query_length,
                               uint32_t tiles) {
    int const lane = int(threadIdx.x) % kWarpSize;
    int const begin = int(threadIdx.x) / kWarpSize * kRows;
    int const first = part.tile * Kernel::kTileQuery + begin;
    int const value_column = Kernel::first_value_column() + lane * 8;
    int const other_column = Kernel::first_other_column() + lane * 8;
    Row const own(params, part, min(first + lane % kRows, query_length - 1));
#pragma unroll 4  // overlaps the shuffles
    for (int row = 0; row < kRows; ++row) {
      char const* const source = own.of_lane(row);
      bool const valid = first + row < query_length;
      copy_async(tiles + ValueTile::byte_offset(begin + row, lane), source + value_column * 2,
                 valid && value_column < params.shape.head_dim);
      if (lane < OtherTile::kColumns / 8) {
        copy_async(tiles + ValueTile::kBytes + OtherTile::byte_offset(begin + row, lane),
                   source + other_column * 2, valid && other_column < params.shape.head_dim);
      }
    }
  }

 private:
  // The address of a packed row of the query.
  struct Row {
    unsigned low;
    unsigned high;

    CUTE_DEVICE Row(ForwardParams const& params, KeyPart const& part, int row) {
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

// Producer warpgroup: a warp plans the work of the CTA, and one thread copies keys.

// The kernel calls produce_parts() with one warp, and produce_keys() with one thread.
template <class Config, class Kernel>
struct LatentProducerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using Mask = typename Kernel::Mask;
  using KeyRows = LatentKeyRows<Config, Kernel>;
  using OtherTile = typename Kernel::OtherTile;
  using ValueTile = typename Kernel::ValueTile;
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
    typename Kernel::Schedule const schedule(params, Kernel::clusters());
    schedule.for_each_part(Kernel::cluster(), hand_out);
    hand_out(KeyPart{-1, 0, 0, 0, 0, 0});
  }

  // Copies this CTA's columns of all KV blocks.
  CUTE_DEVICE static void produce_keys(ForwardParams const& params, KeyMap const& maps,
                                       Control& control, uint32_t tiles) {
    bool const contiguous = params.key.row_stride == params.shape.head_dim;
    PipelineStage<Kernel::kStages> stage;
    PipelineStage<Kernel::kWorkStages> slot;
    typename Kernel::Schedule const schedule(params, Kernel::clusters());
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
        uint64_t& arrived = control.keys.acquire(stage, Kernel::kStageBytes);
        uint32_t const target = Kernel::keys(tiles, stage.index);
        CUTE_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          load_tma_tile<OtherTile>(maps.key_half_panel, arrived, target + ValueTile::kBytes,
                                   box * kBoxRows, rows[box], part.head, batch,
                                   CacheHint::EVICT_NORMAL, Kernel::first_other_column());
          load_tma_tile<ValueTile>(maps.key, arrived, target, box * kBoxRows, rows[box], part.head,
                                   batch, CacheHint::EVICT_NORMAL, Kernel::first_value_column());
        }
        stage.advance();

        int const ahead = block + kPrefetched;
        if (ahead >= part.end || !contiguous) continue;
        if (!schedule.has_share(Kernel::cluster(), ahead) || ahead % 2 != cluster_rank()) continue;
        KeyRows::find(params, control, source, key_length, ahead * kTileKey, rows);
        CUTE_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          int const first = ahead * kTileKey + box * kBoxRows;
          KeyRows::prefetch(params, source, key_length - first, rows[box]);
        }
      }
    }
  }

 private:
  // How many KV blocks ahead a block is prefetched into L2, by one of the CTAs that read it.
  static constexpr int kPrefetched = Kernel::kStages;
};

// Producer warps for a pool of float8 (e4m3): they convert keys to the query's dtype on the way to
// shared memory.

// The kernel calls produce_keys() with kWarps warps, in place of a thread of LatentProducerSm90.
// Both fill the same buffers, so consumers do not depend on the pool. Each warp converts every
// third panel of the CTA's columns.
template <class Config, class Kernel>
struct LatentFloat8ProducerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using KeyRows = LatentKeyRows<Config, Kernel>;
  using Mask = typename Kernel::Mask;
  using OtherTile = typename Kernel::OtherTile;
  using ValueTile = typename Kernel::ValueTile;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kWarps = Kernel::kConvertingWarps;
  static constexpr int kScales = Config::kKeyScale == PoolScale::pages ? KeyRows::kBoxes : 1;

  // How the lanes of a warp divide a panel of a tile. A lane loads 16 bytes of a row, which become
  // two chunks of the tile.
  static constexpr int kLoadColumns = 16;
  template <class Tile>
  struct Panel {
    static constexpr int kRowLanes = Tile::kPanelColumns / kLoadColumns;
    static constexpr int kStepRows = kWarpSize / kRowLanes;
    static constexpr int kSteps = kTileKey / kStepRows;
    static constexpr int kBoxSteps = KeyRows::kBoxRows / kStepRows;
    static_assert(kBoxSteps * kStepRows == KeyRows::kBoxRows && kStepRows % 8 == 0);

    CUTE_DEVICE static int row() { return int(threadIdx.x % kWarpSize / kRowLanes); }
    CUTE_DEVICE static int column() { return int(threadIdx.x % kRowLanes * kLoadColumns); }
  };

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
        uint32_t const target = Kernel::keys(tiles, stage.index);
        CUTE_NO_UNROLL
        for (int panel = warp; panel < ValueTile::kPanels; panel += kWarps) {
          convert<ValueTile>(params, control, keys, stage, panel, Kernel::first_value_column(),
                             target);
        }
        if (warp == ValueTile::kPanels % kWarps) {
          convert<OtherTile>(params, control, keys, stage, 0, Kernel::first_other_column(),
                             target + ValueTile::kBytes);
        }
        fence_tma_store();
        __syncwarp();
        if (leader) control.keys.commit(stage);
        stage.advance();
        if (warp == 0 && block % 2 != cluster_rank() && block + 1 < part.end) {
          keys.prefetch(params, control, block + 1);
        }
      }
    }
  }

 private:
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

    // Loads the lane's bytes of a panel from a column on. Rows beyond the length, and those without
    // a page, are zero: NaN would make the products of the values NaN.
    template <class Tile>
    CUTE_DEVICE void load(ForwardParams const& params, int first_column,
                          uint32_t (&bytes)[Panel<Tile>::kSteps][4]) const {
      using Float8 = KeyValueElement<Config>;
      using Lane = Panel<Tile>;
      int const column = first_column + Lane::column();
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
                                                  int(row) + Lane::row(), source.head) +
                              column;
        CUTE_UNROLL
        for (int step = box * Lane::kBoxSteps; step < (box + 1) * Lane::kBoxSteps; ++step) {
          int const tile_row = Lane::row() + step * Lane::kStepRows;
          load_global_vector_if(exists && unsigned(tile_row) < left, address, bytes[step]);
          address += Lane::kStepRows * row_bytes<Float8>(params.key);
        }
      }
    }

    // Converts the lane's bytes and stores them in a panel.
    template <class Tile>
    CUTE_DEVICE void store(uint32_t panel,
                           uint32_t const (&bytes)[Panel<Tile>::kSteps][4]) const {
      using Lane = Panel<Tile>;
      constexpr int kChunks = kLoadColumns / Tile::kChunkColumns;
      uint32_t chunks[kChunks];  // of the lane's first row; all its rows have the same swizzle
      CUTE_UNROLL
      for (int i = 0; i < kChunks; ++i) {
        int const chunk = Lane::column() / Tile::kChunkColumns + i;
        chunks[i] = panel + Tile::byte_offset(Lane::row(), chunk);
      }
      CUTE_UNROLL
      for (int step = 0; step < Lane::kSteps; ++step) {
        float const scale = scales[step / Lane::kBoxSteps % kScales] * kFloat8Factor;
        CUTE_UNROLL
        for (int i = 0; i < kChunks; ++i) {
          uint32_t pairs[4];
          scaled(bytes[step][2 * i], scale, pairs[0], pairs[1]);
          scaled(bytes[step][2 * i + 1], scale, pairs[2], pairs[3]);
          store_shared_vector(chunks[i] + step * Lane::kStepRows * Tile::kRowBytes,
                              __uint_as_float(pairs[0]), __uint_as_float(pairs[1]),
                              __uint_as_float(pairs[2]), __uint_as_float(pairs[3]));
        }
      }
    }

   private:
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

  // Converts a panel of a tile, whose first column in the pool is `first_column`.
  template <class Tile>
  CUTE_DEVICE static void convert(ForwardParams const& params, Control& control, Keys const& keys,
                                  PipelineStage<Kernel::kStages> const& stage, int panel,
                                  int first_column, uint32_t tile) {
    uint32_t bytes[Panel<Tile>::kSteps][4];
    keys.template load<Tile>(params, first_column + panel * Tile::kPanelColumns, bytes);
    control.keys.acquire(stage);
    keys.template store<Tile>(tile + panel * Tile::kPanelBytes, bytes);
  }
};

// Output of a part (KeyPart): results, or partial results that the combine kernel adds up.

// Consumers call write() after the last KV block of a part. They write half of the columns, those
// of their CTA.
template <class Config, class Grid, class Softmax>
struct LatentOutputSm90 {
  using Element = typename Config::Element;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kColumns = Config::kValueDim / 2;

  // The first half comes with the logsumexps.
  template <class Accumulators>
  CUTE_DEVICE static void write(ForwardParams const& params, KeyPart const& part, int query_length,
                                int half, Softmax& softmax,
                                Accumulators& output) {
    int const row = part.tile * kTileQuery;
    // The combine kernel finishes rows of partial results, so none of them is valid here.
    RowsOfTile<true> const rows(params.shape, part.batch, part.head, row,
                                part.slot < 0 ? query_length : 0);
    softmax.finish(output, params.scale.softmax_scale, 1.0f,
                   LaneRowModifiers<Config, Grid>(params, rows));
    if (part.slot < 0) {
      store(params, part, query_length, half, softmax, output);
    } else {
      store_partial(params, part.slot, half, softmax, output);
    }
  }

  // Stores the finished output and logsumexps of a part that is a whole row tile.
  template <class Accumulators>
  CUTE_DEVICE static void store(ForwardParams const& params, KeyPart const& part, int query_length,
                                int half, Softmax const& softmax,
                                Accumulators const& output) {
    ProblemShape const& shape = params.shape;
    PackedRows<true> const rows(shape);
    Origin const origin = query_origin<Config>(shape, part.batch);
    int const first_column = half * kColumns;
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const row = part.tile * kTileQuery + Grid::element_row(2 * r, 0);
      bool const valid = row < query_length;
      int const own = min(row, query_length - 1);
      int const query = rows.query(own);
      int const head = rows.query_head(part.head, own);
      store_global_if(valid && half == 0 && threadIdx.x % 4 == 0,
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
  CUTE_DEVICE static void store_partial(ForwardParams const& params, int slot, int half,
                                        Softmax const& softmax,
                                        Accumulators const& output) {
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      long long const row = (long long)slot * kTileQuery + Grid::element_row(2 * r, 0);
      store_global_if(half == 0 && threadIdx.x % 4 == 0, params.partial_logsumexp + row,
                      softmax.softmax_reference[r]);
      float* const out = params.partial_out + row * Config::kValueDim + half * kColumns;
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
                                int half, Softmax& softmax,
                                Accumulators& output) {
    int const row = part.tile * kTileQuery;
    // The rows are finished when all segments are added up, so none of them is valid here.
    RowsOfTile<true> const none(params.shape, part.batch, part.head, row, 0);
    softmax.finish(output, params.scale.softmax_scale, 1.0f,
                   LaneRowModifiers<Config, Grid>(params, none));
    SegmentResult const result = SegmentResult::of(part);
    // Read anew, because the main loop of a window has no registers for rows and addresses.
    int const warp = int(thread_index()) / kWarpSize;
    int const lane = int(thread_index()) % kWarpSize;
    // All conditions are the same for a warp. Hazard: ptxas sees that by the votes only. Without
    // them it computes the matrix descriptors of the main loop in vector registers, and spills.
    if (!warp_any(row + warp * Tile::kWarpRows < query_length)) return;  // this warp has no rows
    WeightSum sums[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] = {softmax.softmax_reference[r], 1.0f};
    int const slot = result.slot < 0 ? int(block_index()) / Config::kCluster : result.slot;
    Tile const tile(params, slot, warp);
    if (warp_any(result.slot < 0)) {
      add(tile, warp_any(result.continues), half, lane, softmax, sums, output);
      if (warp_any(result.ends)) {
        finish(params, part, query_length, half, sums, softmax, output);
        return;
      }
    }
    store(tile, half, lane, sums, output);
  }

 private:
  static constexpr int kPairs = Tile::kPairs / 2;  // of one consumer
  static constexpr int kTogether = 8;  // loads in flight; there are no registers for more

  // Adds the running sum to the output, which becomes the new one.
  template <class Accumulators>
  CUTE_DEVICE static void add(Tile const& tile, bool continues, int half, int lane,
                              Softmax const& softmax, WeightSum (&sums)[kRows],
                              Accumulators& output) {
    static_assert(kRows == 2 && decltype(cute::size<2>(output))::value == 2 * kPairs);
    sums[0] = sums[1] = WeightSum::empty();
    if (continues) {
      float4 const weights = tile.weights(half, lane);
      sums[0] = {weights.x, weights.y};
      sums[1] = {weights.z, weights.w};
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SumFactors const factors = sums[r].add(softmax.softmax_reference[r], 1.0f);
      if (continues) {
        add_row(&tile.columns(r, half * kPairs, lane), r, factors, output);
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
  CUTE_DEVICE static void store(Tile const& tile, int half, int lane,
                                WeightSum const (&sums)[kRows], Accumulators const& output) {
    tile.weights(half, lane) =
        make_float4(sums[0].maximum, sums[0].weight, sums[1].maximum, sums[1].weight);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        tile.columns(r, half * kPairs + pair, lane) =
            make_float4(output(2 * r, 0, 2 * pair), output(2 * r + 1, 0, 2 * pair),
                        output(2 * r, 0, 2 * pair + 1), output(2 * r + 1, 0, 2 * pair + 1));
      }
    }
  }

  // Finishes the rows as the combine kernel does, and stores them.
  template <class Accumulators>
  CUTE_DEVICE static void finish(ForwardParams const& params, KeyPart const& part, int query_length,
                                 int half, WeightSum const (&sums)[kRows],
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
    LatentOutputSm90<Config, Grid, Softmax>::store(params, part, query_length, half, softmax,
                                                   output);
  }
};

// Consumer: 64 rows, and half of the output's columns.

// run() is called by the kernel with all threads of a consumer warpgroup.
template <class Config, class Kernel>
struct LatentConsumerSm90 {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using OtherTile = typename Kernel::OtherTile;
  using OutGrid = typename Kernel::OutGrid;
  using QueryOtherTile = typename Kernel::QueryOtherTile;
  using QueryValueTile = typename Kernel::QueryValueTile;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using ScoreSum = typename Kernel::ScoreSum;
  using Softmax = typename Kernel::Softmax;
  using ValueTile = typename Kernel::ValueTile;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  static constexpr bool kKeySegments = Kernel::Schedule::kKeySegments;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;

  // A consumer's position in the rings.
  struct Position {
    int warpgroup;
    int row;         // the first one in the tile
    int parity = 0;  // of the KV blocks whose scores it has added up
    PipelineStage<Kernel::kStages> key;
    PipelineStage<Kernel::kWorkStages> slot;
  };

  CUTE_DEVICE static void run(ForwardParams const& params, Control& control, uint32_t tiles) {
    Position at;
    // The index is uniform over the warpgroup; the shuffle makes that visible to the compiler.
    at.warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroupSize, 0);
    at.row = Kernel::kKeyGroups == 1 ? at.warpgroup * kWarpgroupRows : 0;
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
  CUTE_DEVICE static void release_part(Control& control, Position& at) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) control.work.release(at.slot);
    at.slot.advance();
  }

  // Computes a part: the KV blocks [begin, end) of a row tile.
  CUTE_DEVICE static void compute(ForwardParams const& params, Control& control, uint32_t tiles,
                                  KeyPart const& part, Position& at) {
    Mask const mask(params.mask, params.shape, part.batch);
    auto output = OutGrid::make_accumulators();    // (4, 1, MMA_N)
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(output);
    Softmax softmax;
    if (!has_queries(part)) {
      // Hazard: the other consumer must have read the queries of the previous part.
      sync_consumers();
      Kernel::Queries::load(params, part, mask.query_length, tiles);
      commit_copies();
      wait_copies<0>();
      fence_tma_store();
      sync_consumers();
    }
    // The range is uniform over the warp; the shuffles make that visible to the compiler. Without
    // them it computes matrix descriptors in vector registers.
    int const begin = __shfl_sync(0xffffffffu, part.begin, 0);
    int const end = __shfl_sync(0xffffffffu, part.end, 0);
    CUTE_NO_UNROLL
    for (int block = begin; block < end; ++block) {
      // Hazard: a buffer always belongs to the same group. A group that waited for a buffer whose
      // phase the other group reads would find it full of the KV block before.
      if (Kernel::kKeyGroups == 1 || at.key.index % Kernel::kKeyGroups == at.warpgroup) {
        add_block(params, control, tiles, at, mask, part, block, scores, softmax, output);
      }
      at.key.advance();
    }
    if constexpr (Kernel::kKeyGroups > 1) {
      merge_groups(params, tiles, at.warpgroup, softmax, output);
      if (at.warpgroup > 0) return;
    }
    if constexpr (kKeySegments) {
      // Read anew, because the main loop of a window has no registers for them.
      KeyPart const own = control.parts[at.slot.index];
      int const query_length = Mask(params.mask, params.shape, own.batch).query_length;
      Kernel::Output::write(params, own, query_length, cluster_rank(), softmax, output);
    } else {
      Kernel::Output::write(params, part, mask.query_length, cluster_rank(), softmax, output);
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

  CUTE_DEVICE static void sync_consumers() {
    named_barrier_sync(Kernel::kConsumerBarrier, Kernel::kConsumers);
  }

  template <class Scores, class Output>
  CUTE_DEVICE static void add_block(ForwardParams const& params, Control& control, uint32_t tiles,
                                    Position& at, Mask const& mask, KeyPart const& part, int block,
                                    Scores& scores, Softmax& softmax, Output& output) {
    uint32_t const keys = Kernel::keys(tiles, at.key.index);
    control.keys.wait(at.key);
    fence_accumulators(scores);
    begin_products();
    warpgroup_gemm<Element, QueryValueTile::kColumns / 16>(
        scores, operand<QueryValueTile, Contiguous::k>(tiles, at.row),
        operand<ValueTile, Contiguous::k>(keys), false);
    warpgroup_gemm<Element, QueryOtherTile::kColumns / 16>(
        scores, operand<QueryOtherTile, Contiguous::k>(tiles + QueryValueTile::kBytes, at.row),
        operand<OtherTile, Contiguous::k>(keys + ValueTile::kBytes), true);
    commit_products();
    wait_products<0>();
    fence_accumulators(scores);
    ScoreSum::add(control.sums[at.warpgroup],
                  tiles + Kernel::kScoreSumOffset + at.warpgroup * ScoreSum::kBytes,
                  1 - cluster_rank(), at.parity, scores);
    at.parity ^= 1;
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const tile = {part.batch, part.head, part.tile * kTileQuery,
                                    block * kTileKey};
    modifiers.forward(scores, tile);
    mask.template apply<kTileQuery, kTileKey>(scores, params, tile, true, 0,
                                              control.may_miss_pages);
    auto const correction = softmax.exponentiate(scores, params.scale.softmax_scale);
    fence_accumulators(scores);
    auto const probabilities = as_left_operand<Element>(scores);
    clear_unneeded(params, keys, at.warpgroup, mask, part, block);
    Softmax::rescale(output, correction);
    fence_accumulators(output);
    begin_products();
    warpgroup_gemm<Element, kKeySteps>(output, probabilities,
                                       operand<ValueTile, Contiguous::outer>(keys), true);
    commit_products();
    wait_products<0>();
    fence_accumulators(output);
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) control.keys.release(at.key);
  }

  // Clears the values of keys that no row needs, which may be NaN. With one key group both consumers
  // do it: their zeros are the same, and scores of these keys are masked.
  CUTE_DEVICE static void clear_unneeded(ForwardParams const& params, uint32_t keys, int warpgroup,
                                         Mask const& mask, KeyPart const& part, int block) {
    int const column = block * kTileKey;
    bool clears = reads_beyond<Config>(mask.key_length, column + kTileKey, params.shape.key_length);
    if (clears) {
      clear_rows<ValueTile, kWarpgroupSize>(keys, max(mask.key_length - column, 0));
    }
    if constexpr (kMayBeFreed<Config>) {
      int const unneeded = unneeded_rows<Config>(mask, part.tile * kTileQuery, column, kTileKey);
      clears = clears || unneeded > 0;
      clear_rows<ValueTile, kWarpgroupSize>(keys, 0, unneeded);
    }
    if (!clears) return;
    fence_tma_store();
    named_barrier_sync(Kernel::warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  // Merges the results of both key groups into the first one's registers, through the memory of the
  // queries, half of the columns at a time.
  template <class Output>
  CUTE_DEVICE static void merge_groups(ForwardParams const& params, uint32_t tiles, int warpgroup,
                                       Softmax& softmax, Output& output) {
    constexpr int kBlocks = decltype(cute::size<2>(output))::value / 2;
    constexpr int kStatistics = kBlocks * kWarpgroupSize * 16;
    static_assert(kStatistics + kWarpgroupSize * Softmax::kStagedBytes <= Kernel::kKeyOffset);
    uint32_t const slots = tiles + int(threadIdx.x) % kWarpgroupSize * 16;
    typename Softmax::Weights weights;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      sync_consumers();  // the queries, or the columns before, have been read
      if (warpgroup > 0) {
        // The place of a thread counts from thread 0 of the CTA.
        constexpr int kBefore = kWarpgroupSize * Softmax::kStagedBytes;
        if (half == 0) softmax.stage_registers(tiles + kStatistics - kBefore);
        CUTE_UNROLL
        for (int n = 0; n < kBlocks; ++n) {
          auto const x = [&](int i) { return output(i, 0, half * kBlocks + n); };
          store_shared_vector(slots + n * kWarpgroupSize * 16, x(0), x(1), x(2), x(3));
        }
      }
      sync_consumers();
      if (warpgroup > 0) continue;
      if (half == 0) {
        Softmax other;
        other.unstage(tiles + kStatistics);
        weights = softmax.merge(other, params.scale.softmax_scale);
      }
      CUTE_UNROLL
      for (int n = 0; n < kBlocks; ++n) {
        uint4 const words = load_shared_vector(slots + n * kWarpgroupSize * 16);
        float const theirs[4] = {__uint_as_float(words.x), __uint_as_float(words.y),
                                 __uint_as_float(words.z), __uint_as_float(words.w)};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& x = output(i, 0, half * kBlocks + n);
          x = x * weights.own[i / 2] + theirs[i] * weights.other[i / 2];
        }
      }
    }
  }

  template <class Tile, Contiguous kOrder>
  CUTE_DEVICE static DescriptorOperand<Tile, kOrder> operand(uint32_t tile, int row = 0) {
    return DescriptorOperand<Tile, kOrder>(descriptor_address(tile), row);
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
  static constexpr int kCluster = Config::kCluster;  // CTAs, which divide the columns
  static_assert(kCluster == 2);
  // With fewer, the warp that plans the work spills before the first copy.
  static constexpr int kProducerRegisters = 88;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

  // Groups of consumers that share the rows of a tile and take every second KV block.
  static constexpr int kKeyGroups = kWarpgroups * kWarpgroupRows / kTileQuery;
  static constexpr int kRowWarps = kTileQuery / 16;
  static constexpr int kColumns = Config::kValueDim / kCluster;  // of the output, of this CTA
  // The columns of keys without values, of this CTA.
  static constexpr int kOtherColumns = (Config::kHeadDim - Config::kValueDim) / kCluster;
  template <int kWidth>
  using Grid = cute::conditional_t<kKeyGroups == 1, WarpGrid<kTileQuery, kWidth, kRowWarps, 16>,
                                   WarpgroupGrid<kTileQuery, kWidth>>;
  using ScoreGrid = Grid<kTileKey>;
  using OutGrid = Grid<kColumns>;
  using Mask = ScoreMask<Config, ScoreGrid, true>;
  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid, false, true>>;
  using Softmax = OnlineSoftmax<1, false, has_large_scores<Config>()>;
  using ScoreSum = ColumnSum<ScoreGrid, true>;
  using Schedule = BalancedKeys<Config, Mask>;
  using Output =
      cute::conditional_t<Schedule::kKeySegments, LatentSegmentOutputSm90<Config, OutGrid, Softmax>,
                          LatentOutputSm90<Config, OutGrid, Softmax>>;
  using Queries = LatentQueriesSm90<Config, FmhaForwardLatentSm90>;

  using QueryValueTile = SharedTile<kTileQuery, kColumns>;
  using QueryOtherTile = SharedTile<kTileQuery, kOtherColumns>;
  using ValueTile = SharedTile<kTileKey, kColumns>;
  using OtherTile = SharedTile<kTileKey, kOtherColumns>;
  static_assert(OtherTile::kPanels == 1);

  static constexpr int kStages = Config::kStages;
  static_assert(kStages % kKeyGroups == 0);
  static constexpr int kStageBytes = ValueTile::kBytes + OtherTile::kBytes;
  static constexpr int kWorkStages = 4;
  static constexpr int kConvertingWarps = 3;
  // Everything in shared memory except the tiles.
  struct Control {
    typename ScoreSum::Barriers sums[kWarpgroups];
    Pipeline<kStages> keys;
    Pipeline<kWorkStages> work;
    KeyPart parts[kWorkStages];
    // Set by the producer before a KV block with an invalid page is complete, and never cleared.
    bool may_miss_pages;
  };

  static constexpr int kKeyOffset = QueryValueTile::kBytes + QueryOtherTile::kBytes;
  static constexpr int kScoreSumOffset = kKeyOffset + kStages * kStageBytes;
  static constexpr int kControlOffset = kScoreSumOffset + kWarpgroups * ScoreSum::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for the threads of each consumer, and one for both.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }
  static constexpr int kConsumerBarrier = 1 + kWarpgroups;

  CUTE_DEVICE static uint32_t keys(uint32_t tiles, int stage) {
    return tiles + kKeyOffset + stage * kStageBytes;
  }

  CUTE_DEVICE static int cluster() { return int(block_index()) / kCluster; }
  CUTE_DEVICE static int clusters() { return int(gridDim.x) / kCluster; }

  // The first of this CTA's columns with values, and of the others.
  CUTE_DEVICE static int first_value_column() { return cluster_rank() * kColumns; }
  CUTE_DEVICE static int first_other_column() {
    return Config::kValueDim + cluster_rank() * kOtherColumns;
  }

  CUTE_DEVICE static void init(Control& control) {
    constexpr int kWarps = kWarpgroupSize / kWarpSize;  // per consumer
    constexpr int kProducers = Config::kFloat8Pages ? kConvertingWarps : 1;
    CUTE_UNROLL
    for (auto& sum : control.sums) ScoreSum::init(sum);
    control.keys.init(kWarps * kWarpgroups / kKeyGroups, kProducers);
    control.work.init(kWarpgroups * kWarps + kProducers);
    control.may_miss_pages = false;
    fence_barrier_init();
  }

  // `maps` is a KeyMap. It is empty if warps load the keys, to convert them from float8.
  template <class... Maps>
  CUTE_DEVICE static void run(ForwardParams const& params, Maps const&... maps) {
    using Producer = LatentProducerSm90<Config, FmhaForwardLatentSm90>;
    using Consumer = LatentConsumerSm90<Config, FmhaForwardLatentSm90>;
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      (prefetch_map(maps.key), ...);
      (prefetch_map(maps.key_half_panel), ...);
      init(control);
    }
    // Makes the barriers of each CTA visible to the threads of both.
    arrive_cluster();
    wait_cluster();

    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      int const warp = (int(threadIdx.x) - kConsumers) / kWarpSize;
      if (warp == kConvertingWarps) {
        Producer::produce_parts(params, control);
      } else if constexpr (Config::kFloat8Pages) {
        LatentFloat8ProducerSm90<Config, FmhaForwardLatentSm90>::produce_keys(params, control,
                                                                              tiles, warp);
      } else if (threadIdx.x == kConsumers) {
        Producer::produce_keys(params, maps..., control, tiles);
      }
    } else {
      raise_registers<kConsumerRegisters>();
      Consumer::run(params, control, tiles);
    }
    // Hazard: this CTA must not end while the other one may still send scores or arrive here.
    __syncwarp();
    arrive_cluster();
    wait_cluster();
  }
};

}  // namespace memeff
