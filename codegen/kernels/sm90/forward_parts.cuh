// What the Hopper forward shares with the tangent kernel (all) and with the forward for large head
// dims (the output): operands, producer, the steps of a consumer between work tiles, and output.
#pragma once

#include <memeff/collective/copies/gathered_rows.cuh>
#include <memeff/collective/epilogue.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/linear_scores.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// Operands: their copies to shared memory, and their products. Main loop and producer call this
// interface, so they do not depend on the element type.

// A consumer's queries of a work tile, the left operand of every KV block, in shared memory.
template <class Tile>
struct SharedQueries {
  CUTE_DEVICE void take(uint32_t, int) {}
  CUTE_DEVICE auto operand(uint32_t buffer, int warpgroup) const {
    return DescriptorOperand<Tile, Contiguous::k>(buffer, warpgroup * kWarpgroupRows);
  }
};

// A consumer's queries in registers: products read less shared memory and need fewer descriptors.
// Hazard: release the buffer only after a product has used the registers, see Pipeline::release().
template <class Tile>
struct RegisterQueries {
  RegisterOperand<1, Tile::kColumns / 16, 2> fragments;

  CUTE_DEVICE void take(uint32_t buffer, int warpgroup) {
    fragments = load_operand<Tile, WarpgroupGrid<kWarpgroupRows, 16>>(
        buffer + warpgroup * kWarpgroupRows * Tile::kRowBytes);
  }
  CUTE_DEVICE auto const& operand(uint32_t, int) const { return fragments; }
};

// The registers that the main loop of a consumer needs besides accumulators and operands to overlap
// KV blocks.
template <class Config>
CUTE_HOST_DEVICE constexpr int main_loop_registers() {
  return 40 + (Config::kBias || modifies_probabilities<Config>() ? 40 : 0) +
         (Config::kMask == MaskKind::window ? 40 : 0);
}

// Operands of 16-bit elements, which TMA copies from query, key and value, for a CTA of kThreads.
template <class Config, int kThreads>
struct MappedOperands {
  using Element = typename Config::Element;
  using QueryTile = SharedTile<Config::kTileQuery, Config::kHeadDim>;
  using KeyTile = SharedTile<Config::kTileKey, Config::kHeadDim>;
  using ValueTile = SharedTile<Config::kTileKey, Config::kValueDim>;
  static constexpr int kRowWarpgroups = Config::kTileQuery / kWarpgroupRows;
  static constexpr int kQueryBufferBytes = QueryTile::kBytes;
  static constexpr int kQueryBytes = QueryTile::kBytes / kRowWarpgroups;  // per consumer
  static constexpr int kHeadSteps = Config::kHeadDim / 16;
  static constexpr int kKeySteps = Config::kTileKey / 16;
  // The main loop must zero values beyond a length: they lie in the tensor and may be NaN.
  static constexpr bool kClearsValues = true;
  // Probabilities are multiplied by factors of the values.
  static constexpr bool kScalesRows = false;
  // The product of scores waits for the product with the previous KV block's values. A consumer
  // without registers for both overlaps only with the products of other consumers.
  static constexpr bool kSequential = false;
  // Warps that copy from small pages need more than threads that start TMA copies. 40 registers
  // take none from two consumers, but eight from each of three.
  static constexpr int kProducerRegisters =
      kSmallPages<Config> &&
              consumer_registers<kThreads, 40>() == consumer_registers<kThreads, 32>()
          ? 40
          : 32;

  // The registers of a consumer besides accumulators and probabilities. The compiler needs some to
  // overlap KV blocks, and more for features. Consumer groups have few KV blocks, so they spend
  // none on the two options below.
  static constexpr int kLeftRegisters = consumer_registers<kThreads, kProducerRegisters>() -
                                        Config::kValueDim / 2 - Config::kTileKey / 2 -
                                        Config::kTileKey / 4;
  static constexpr bool kWindow = Config::kMask == MaskKind::window;
  static constexpr bool kRegisterQueries =
      Config::kConsumerGroups == 1 &&
      kLeftRegisters - Config::kHeadDim / 4 >= main_loop_registers<Config>();
  // The modifiers of a KV block's probabilities are computed while the product of its scores runs,
  // not only when they are needed.
  static constexpr bool kModifiesEarly =
      Config::kConsumerGroups == 1 &&
      kLeftRegisters - Config::kTileKey / 8 >= 32 + (Config::kBias ? 48 : 0) + (kWindow ? 16 : 0);
  using Queries =
      cute::conditional_t<kRegisterQueries, RegisterQueries<QueryTile>, SharedQueries<QueryTile>>;

  ForwardParams const& params;
  ForwardMaps const& maps;

  CUTE_DEVICE void prefetch() const {
    prefetch_map(maps.query);
    prefetch_map(maps.key);
    prefetch_map(maps.value);
  }

  // Starts the copy of a consumer's queries of a work tile.
  CUTE_DEVICE void load_queries(WorkItem const& item, int, int warpgroup, uint64_t& arrived,
                                uint32_t buffer) const {
    Origin const origin = query_origin<Config>(params.shape, item.batch);
    int const tile_row = warpgroup * kWarpgroupRows;
    load_tma_tile<QueryTile>(maps.query, arrived, buffer, tile_row,
                             origin.row + item.tile * Config::kTileQuery + tile_row, item.head,
                             origin.batch, CacheHint::EVICT_FIRST);
  }

  // The tiles of keys, or of values, of a work tile.
  template <class Tile>
  struct Rows {
    static constexpr int kBytes = Tile::kBytes;
    static constexpr int kBufferBytes = Tile::kBytes;
    TensorMap const& map;
    int row;
    int head;
    int batch;
    PageTable<Config> pages;
    int key_length;
    int pool_rows;

    CUTE_DEVICE void load(int tile, uint64_t& arrived, uint32_t buffer) const {
      int const first = tile * Config::kTileKey;
      if constexpr (PageTable<Config>::kPaged) {
        load_pages(first, arrived, buffer);
      } else {
        load_tma_tile<Tile>(map, arrived, buffer, 0, row + first, head, batch,
                            CacheHint::EVICT_LAST);
      }
    }

   private:
    // Copies one box for each page or part of a page. Keys without a valid page get a coordinate
    // beyond the end of the pool, for which TMA fills in zeros. All entries are read before the
    // first copy, so their latencies overlap.
    CUTE_DEVICE void load_pages(int first, uint64_t& arrived, uint32_t buffer) const {
      constexpr int kBoxRows = Config::kKeyBoxRows;
      constexpr int kBoxes = Config::kTileKey / kBoxRows;
      int found[kBoxes];
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        int const key = first + box * kBoxRows;
        found[box] = key < key_length ? pages.row(key) : -1;
      }
      CUTE_UNROLL
      for (int box = 0; box < kBoxes; ++box) {
        load_tma_tile<Tile>(map, arrived, buffer, box * kBoxRows,
                            found[box] < 0 ? pool_rows : found[box], head, batch,
                            CacheHint::EVICT_LAST);
      }
    }
  };

  // The same in small pages: a warp copies them.
  template <class Tile>
  struct SmallPageRows {
    static constexpr int kBufferBytes = Tile::kBytes;
    PageTable<Config> pages;
    char const* pool;
    unsigned row_bytes;
    int columns;
    int key_length;
    GatheredRows<Config, Config::kTileKey> rows;

    // See GatheredRows.
    CUTE_DEVICE void load(int tile) { rows.load(pages, tile * Config::kTileKey, key_length); }
    CUTE_DEVICE bool find(int tile) {
      return rows.find(pages, tile * Config::kTileKey, key_length);
    }
    CUTE_DEVICE void copy(uint32_t buffer) const {
      rows.template copy<Tile>(buffer, pool, row_bytes, columns);
    }
  };
  template <class Tile>
  using TileRows = cute::conditional_t<kSmallPages<Config>, SmallPageRows<Tile>, Rows<Tile>>;
  using Keys = TileRows<KeyTile>;
  using Values = TileRows<ValueTile>;

  CUTE_DEVICE Keys keys(WorkItem const& item, int key_length) const {
    return rows<KeyTile>(params.key, maps.key, item, key_length, params.shape.head_dim);
  }
  CUTE_DEVICE Values values(WorkItem const& item, int key_length) const {
    return rows<ValueTile>(params.value, maps.value, item, key_length, params.shape.value_dim);
  }

  // Starts the product of a consumer's queries with keys.
  template <class Scores, class QueryOperand>
  CUTE_DEVICE static void multiply_keys(Scores& scores, QueryOperand const& queries,
                                        uint32_t keys) {
    warpgroup_gemm<Element, kHeadSteps>(scores, queries,
                                        DescriptorOperand<KeyTile, Contiguous::k>(keys), false);
  }
  template <class Scores>
  CUTE_DEVICE static void unscale(Scores&, uint32_t, uint32_t, int) {}

  template <class Scores>
  CUTE_DEVICE static auto probabilities(Scores& scores, uint32_t) {
    return as_left_operand<Element>(scores);
  }

  // The accumulators of the products with values are the output itself.
  struct Part {};
  template <class Output>
  CUTE_DEVICE static Output& sums(Output& output, Part&) {
    return output;
  }
  template <class Sums, class Probabilities>
  CUTE_DEVICE static void multiply_values(Sums& output, Probabilities const& probabilities,
                                          uint32_t values, bool begins) {
    warpgroup_gemm<Element, kKeySteps>(
        output, probabilities, DescriptorOperand<ValueTile, Contiguous::outer>(values), !begins);
  }
  template <class Output, class Probabilities>
  CUTE_DEVICE static void add(Output&, Part const&, Probabilities const&, bool) {}

  // Zeros the rows of a buffer of values from `first` to `end`, with the threads of a consumer.
  CUTE_DEVICE static void clear_values(uint32_t values, int first, int end = ValueTile::kRows) {
    clear_rows<ValueTile, kWarpgroupSize>(values, first, end);
  }

 private:
  template <class Tile>
  CUTE_DEVICE TileRows<Tile> rows(TensorView const& tensor, TensorMap const& map,
                                  WorkItem const& item, int key_length, int columns) const {
    KeyValueSource<Config> const source(params, item.batch, item.head / params.shape.group);
    if constexpr (kSmallPages<Config>) {
      TileRows<Tile> found = {source.pages, source.row(tensor),
                              unsigned(row_bytes<Element>(tensor)), columns, key_length};
      hide_value(found.pages.entries);  // else each entry's address is computed from scratch
      return found;
    } else {
      return {map,        source.origin.row,      source.head, source.batch(tensor), source.pages,
              key_length, params.shape.key_tokens};
    }
  }
};

// Output of a consumer, written after the last KV block of its rows.

// Writes zeros to the rows [row, row_end) of a work tile's output, and `number` to its statistics
// of these rows, with the threads of a warpgroup. They are beyond the query length, perhaps still
// within the array.
template <class Config>
CUTE_DEVICE void write_empty_rows(ProblemShape const& shape, TensorView const& out,
                                  float* statistics, float number, WorkItem const& item,
                                  int query_length, int row, int row_end) {
  using Element = typename Config::Element;
  // Hazard: the rows after a packed sequence belong to the next one.
  int const end = min(row_end, Config::kPacked ? query_length : shape.query_length);
  if (row >= end) return;
  Origin const origin = query_origin<Config>(shape, item.batch);
  float* const of_head = statistics + logsumexp_offset<Config>(shape, origin, item.head);
  int const thread = int(threadIdx.x) % kWarpgroupSize;
  CUTE_NO_UNROLL
  for (int query = row + thread; query < end; query += kWarpgroupSize) of_head[query] = number;
  constexpr int kVectorColumns = 16 / int(sizeof(Element));
  int const vectors = shape.value_dim / kVectorColumns;
  CUTE_NO_UNROLL
  for (int i = thread; i < (end - row) * vectors; i += kWarpgroupSize) {
    char* const rows =
        row_pointer<Element>(out, origin.batch, origin.row + row + i / vectors, item.head);
    *reinterpret_cast<uint4*>(rows + i % vectors * 16) = make_uint4(0, 0, 0, 0);
  }
}

// A consumer calls write() after the last KV block of a work tile; with consumer groups only the
// first group does.
template <class Config, class Grid, class Softmax>
struct ForwardOutputSm90 {
  using Element = typename Config::Element;

  // Writes output and logsumexp of this warp's valid rows of a work tile, those below
  // `query_length`. If consumers divide the columns, those of this one begin at `first_column`.
  template <class Linear, class Output>
  CUTE_DEVICE static void write(ForwardParams const& params, WorkItem const& item, int query_length,
                                Linear const& linear, Softmax& softmax, Output& output,
                                int first_column = 0) {
    ProblemShape const& shape = params.shape;
    int const row = item.tile * Config::kTileQuery;
    RowsOfTile<> const rows(shape, item.batch, item.head, row, query_length);
    softmax.finish(
        output, linear.softmax_scale(params.scale), probability_scale<Config>(params),
        linear.template rows<Grid>(LaneRowModifiers<Config, Grid>(params, rows), params.scale));
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const query = row + Grid::element_row(0, 0);
    char* out = row_pointer<Element>(params.out, origin.batch, origin.row + query, item.head) +
                (first_column + lane_column()) * int(sizeof(Element));
    float* logsumexp =
        params.logsumexp + logsumexp_offset<Config>(shape, origin, item.head) + query;
    // Otherwise the compiler computes each of the addresses below from scratch.
    hide_value(out);
    hide_value(logsumexp);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      int const below = Grid::element_row(2 * r, 0) - Grid::element_row(0, 0);
      bool const valid = query + below < query_length;
      store_global_if(valid && first_column == 0 && threadIdx.x % 4 == 0, logsumexp + below,
                      softmax.softmax_reference[r]);
      store_row<Element>(out + below * params.out.row_stride * int(sizeof(Element)), output, r,
                         shape.value_dim - first_column, valid);
    }
  }

  // Writes output 0 and logsumexp -inf to the rows [row, row_end) of a work tile that are not
  // valid.
  CUTE_DEVICE static void write_empty(ForwardParams const& params, WorkItem const& item,
                                      int query_length, int row, int row_end) {
    write_empty_rows<Config>(params.shape, params.out, params.logsumexp, -infinity(), item,
                             query_length, row, row_end);
  }

  // Does the same for a CTA's part of the queries that belong to no sequence.
  template <int kThreads>
  CUTE_DEVICE static void clear_gap(ForwardParams const& params, WorkItem const& item, int length,
                                    int tiles) {
    clear_query_gap<Config, kThreads>(params, item, length, tiles);
  }
};

// Producer: one thread hands out work tiles, and three others copy queries, keys and values. With
// shared diagonals, the warp of the thread that copies queries also reads diagonals. From small
// pages a warp copies keys, and another values.

template <class Config, class Kernel>
struct ForwardProducerSm90 {
  using Blocks = typename Kernel::Blocks;
  using Control = typename Kernel::Control;
  using Diagonals = typename Kernel::Diagonals;
  using Mask = typename Kernel::Mask;
  using Operands = typename Kernel::Operands;
  using Schedule = typename Kernel::Schedule;
  using Scheduler = typename Kernel::Scheduler;
  using WorkTile = typename Kernel::WorkTile;
  static constexpr int kQueryStages = Kernel::kQueryStages;
  static constexpr int kRowWarpgroups = Kernel::kRowWarpgroups;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kTileQuery = Kernel::kTileQuery;
  static constexpr int kWorkTileStages = Kernel::kWorkTileStages;

  // Run by all threads of the warpgroup. One thread of each warp does the work, except in the warp
  // that reads diagonals.
  CUTE_DEVICE static void run(ForwardParams const& params, Operands const& operands,
                              Control& control, uint32_t tiles) {
    int const thread = threadIdx.x - Kernel::kConsumers;
    if constexpr (Diagonals::kIsOn) {
      if (thread / kWarpSize == 1) {
        produce_queries_and_diagonals(params, operands, control, tiles);
        return;
      }
    }
    // Whole warps copy from small pages.
    bool const is_warp = kSmallPages<Config> && thread >= 2 * kWarpSize;
    switch (is_warp ? thread / kWarpSize * kWarpSize : thread) {
      case 0:
        produce_work_tiles(params, control);
        break;
      case kWarpSize:
        produce_queries(operands, control, tiles);
        break;
      case 2 * kWarpSize:
        produce_keys(params, operands, control, tiles + Kernel::kKeyOffset);
        break;
      case 3 * kWarpSize:
        produce_values(params, operands, control, tiles + Kernel::kValueOffset);
        break;
    }
  }

 private:
  // Run by the thread that hands out work tiles.
  CUTE_DEVICE static void produce_work_tiles(ForwardParams const& params, Control& control) {
    PipelineStage<kWorkTileStages> slot;
    Scheduler::begin(params);
    int number = int(blockIdx.x);
    while (true) {
      WorkTile work_tile = numbered_work_tile(params, number);
      while (is_idle(params, work_tile)) {
        skip_empty_sequences(params, work_tile, number);
        number = Scheduler::next(params);
        work_tile = numbered_work_tile(params, number);
      }
      control.work_tile.acquire(slot);
      control.work_tiles[slot.index] = work_tile;
      control.work_tile.commit(slot);
      if (work_tile.item.batch < 0) break;
      control.next_tile.wait(slot);
      slot.advance();
      number = Scheduler::next(params);
    }
    Scheduler::finish(params);
  }

  // Run by the thread that copies queries.
  CUTE_DEVICE static void produce_queries(Operands const& operands, Control& control,
                                          uint32_t buffers) {
    PipelineStage<kQueryStages> query;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkTile const work_tile = control.take_work_tile(slot);
      control.work_tile.release(slot);
      slot.advance();
      if (work_tile.item.batch < 0) break;
      load_queries(operands, control, work_tile, query, buffers);
      query.advance();
    }
  }

  CUTE_DEVICE static void load_queries(Operands const& operands, Control& control,
                                       WorkTile const& work_tile,
                                       PipelineStage<kQueryStages> const& query, uint32_t buffers) {
    CUTE_UNROLL
    for (int warpgroup = 0; warpgroup < kRowWarpgroups; ++warpgroup) {
      operands.load_queries(work_tile.item, work_tile.query_length, warpgroup,
                            control.query[warpgroup].acquire(query, Operands::kQueryBytes),
                            buffers + query.index * Operands::kQueryBufferBytes);
    }
  }

  // Run by the warp that copies queries, if it also fills the buffers of diagonals. It copies the
  // queries of a work tile when it has filled the last buffer of the previous work tile. The
  // consumers then still have as many KV blocks to compute as there are buffers.
  CUTE_DEVICE static void produce_queries_and_diagonals(ForwardParams const& params,
                                                        Operands const& operands, Control& control,
                                                        uint32_t tiles) {
    bool const leader = threadIdx.x % kWarpSize == 0;
    PipelineStage<kQueryStages> query;
    PipelineStage<kStages> key;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkTile const work_tile = control.take_work_tile(slot);
      __syncwarp();  // all lanes have read the work tile
      if (leader) control.work_tile.release(slot);
      slot.advance();
      if (work_tile.item.batch < 0) break;
      if (leader) load_queries(operands, control, work_tile, query, tiles);
      query.advance();
      produce_diagonals(params, control, work_tile.item, key, tiles);
    }
  }

  // Fills the buffers of diagonals of a work tile, in the order in which produce_tiles() copies
  // keys.
  CUTE_DEVICE static void produce_diagonals(ForwardParams const& params, Control& control,
                                            WorkItem const& item, PipelineStage<kStages>& key,
                                            uint32_t tiles) {
    Mask const mask(params.mask, params.shape, item.batch);
    Blocks const range(params, mask, item);
    CUTE_NO_UNROLL
    for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile, 1)) {
      control.key.acquire(key);
      Diagonals::fill(params,
                      {item.batch, item.head, item.tile * kTileQuery, tile * Kernel::kTileKey},
                      Kernel::diagonals(tiles, key));
      __syncwarp();  // all lanes have stored
      if (threadIdx.x % kWarpSize == 0) control.key.commit(key);
      key.advance();
    }
  }

  // Run by the thread that copies keys. It also signals when the next work tile may be taken.
  CUTE_DEVICE static void produce_keys(ForwardParams const& params, Operands const& operands,
                                       Control& control, uint32_t buffers) {
    produce_tiles(
        params, control, control.key, buffers,
        [&](auto... work_tile) { return operands.keys(work_tile...); },
        [&](auto const& slot) { control.next_tile.commit(slot); });
  }

  // Run by the thread that copies values.
  CUTE_DEVICE static void produce_values(ForwardParams const& params, Operands const& operands,
                                         Control& control, uint32_t buffers) {
    produce_tiles(
        params, control, control.value, buffers,
        [&](auto... work_tile) { return operands.values(work_tile...); }, [](auto const&) {});
  }

  // Whether the next work tile is taken before this KV block is copied. It is taken as late as the
  // counter (1 us) and the queries of that tile allow: the consumers still have the last two blocks
  // and those in the ring to compute. If a CTA takes its next work tile earlier, others run out of
  // work while this one has a tile to spare: with a causal mask SMs were idle for 3 to 7 % of a
  // call. Packed sequences take it at the first block, because the scheduler may have to skip idle
  // work tiles, and each of them costs a round trip to the counter.
  CUTE_DEVICE static bool takes_next_before(Blocks const& range, int tile) {
    if constexpr (Config::kPacked) return tile == range.end - 1;
    if constexpr (Config::kBlockMask) return tile == range.begin;  // the one above may be empty
    return tile == min(range.begin + 1, range.end - 1);
  }

  // Copies the rows of all work tiles; rows_of(work tile, key length) returns the source.
  // `take_next` is called once for each work tile, with its slot.
  template <class RowsOf, class TakeNext>
  CUTE_DEVICE static void produce_tiles(ForwardParams const& params, Control& control,
                                        Pipeline<kStages>& ring, uint32_t buffers, RowsOf rows_of,
                                        TakeNext take_next) {
    if constexpr (kSmallPages<Config>) {
      gather_tiles(params, control, ring, buffers, rows_of, take_next);
    } else {
      load_tiles(params, control, ring, buffers, rows_of, take_next);
    }
  }

  template <class RowsOf, class TakeNext>
  CUTE_DEVICE static void load_tiles(ForwardParams const& params, Control& control,
                                     Pipeline<kStages>& ring, uint32_t buffers, RowsOf rows_of,
                                     TakeNext take_next) {
    PipelineStage<kStages> stage;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkItem const item = control.take_work_tile(slot).item;
      control.work_tile.release(slot);
      if (item.batch < 0) break;
      Mask const mask(params.mask, params.shape, item.batch);
      Blocks const range(params, mask, item);
      auto const rows = rows_of(item, mask.key_length);
      CUTE_NO_UNROLL
      for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile, 1)) {
        if (takes_next_before(range, tile)) take_next(slot);
        rows.load(tile, ring.acquire(stage, rows.kBytes),
                  buffers + stage.index * rows.kBufferBytes);
        stage.advance();
      }
      slot.advance();
    }
  }

  // The same with all lanes of a warp. A block is complete when they have waited for their copies;
  // then the entries of the next block, which were loaded meanwhile, have arrived, too.
  template <class RowsOf, class TakeNext>
  CUTE_DEVICE static void gather_tiles(ForwardParams const& params, Control& control,
                                       Pipeline<kStages>& ring, uint32_t buffers, RowsOf rows_of,
                                       TakeNext take_next) {
    bool const leader = threadIdx.x % kWarpSize == 0;
    PipelineStage<kStages> stage;
    PipelineStage<kWorkTileStages> slot;
    while (true) {
      WorkItem const item = control.take_work_tile(slot).item;
      __syncwarp();  // all lanes have read the work tile
      if (leader) control.work_tile.release(slot);
      if (item.batch < 0) break;
      Mask const mask(params.mask, params.shape, item.batch);
      Blocks const range(params, mask, item);
      auto rows = rows_of(item, mask.key_length);
      rows.load(range.end - 1);
      CUTE_NO_UNROLL
      for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile, 1)) {
        if (takes_next_before(range, tile) && leader) take_next(slot);
        if (rows.find(tile)) control.mark_missing();
        ring.acquire(stage);
        rows.copy(buffers + stage.index * rows.kBufferBytes);
        commit_copies();
        if (tile > range.begin) rows.load(range.next(tile, 1));
        wait_copies<0>();
        fence_tma_store();
        __syncwarp();
        if (leader) ring.commit(stage);
        stage.advance();
      }
      slot.advance();
    }
  }

  CUTE_DEVICE static bool broadcasts_bias(ForwardParams const& params) {
    return shares_bias<Config>(params.bias);
  }

  CUTE_DEVICE static WorkTile numbered_work_tile(ForwardParams const& params, int number) {
    WorkItem const item = Schedule::item(params.shape, number, broadcasts_bias(params));
    bool const exists = item.batch >= 0;
    return {item, exists ? Mask(params.mask, params.shape, item.batch).query_length : 0};
  }

  // Whether the tile is beyond the end of a packed sequence, and there is no gap after it to clear.
  CUTE_DEVICE static bool is_idle(ForwardParams const& params, WorkTile const& work_tile) {
    if constexpr (!Config::kPacked) return false;
    if (work_tile.item.batch < 0) return false;
    if (work_tile.item.tile * kTileQuery < work_tile.query_length) return false;
    return params.keeps_gaps ||
           Gap::of_queries<Config>(params, work_tile.item.batch, work_tile.query_length).empty();
  }

  // Each idle work tile costs a round trip to the counter, about 1 us. A call for the prompts among
  // many decode steps has hundreds of them per CTA.
  CUTE_DEVICE static void skip_empty_sequences(ForwardParams const& params,
                                               WorkTile const& work_tile, int number) {
    if constexpr (Config::kPageSize > 0) {
      if (!params.marks_empty || work_tile.query_length > 0) return;
      Scheduler::skip_to(params, Schedule::after_empty(params.shape, params.mask.query_lengths,
                                                       work_tile.item, number));
    }
  }
};

// Consumer: its steps between work tiles, and its accesses to the rings, which the main loops call.
// It is a warpgroup that owns 64 rows of a work tile, or shares them with other groups.
template <class Config, class Kernel>
struct WorkTileConsumerSm90 {
  using Params = typename Config::Params;
  using Blocks = typename Kernel::Blocks;
  using Control = typename Kernel::Control;
  using Mask = typename Kernel::Mask;
  using Operands = typename Kernel::Operands;
  using OutputWriter = typename Kernel::OutputWriter;
  using PingPong = typename Kernel::PingPong;
  using WorkTile = typename Kernel::WorkTile;
  static constexpr int kConsumerGroups = Kernel::kConsumerGroups;
  static constexpr int kQueryStages = Kernel::kQueryStages;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kTileKey = Kernel::kTileKey;
  static constexpr int kTileQuery = Kernel::kTileQuery;
  static constexpr int kWorkTileStages = Kernel::kWorkTileStages;

  // Advances to the buffer of this consumer's next KV block.
  CUTE_DEVICE static void advance(PipelineStage<kStages>& stage) {
    CUTE_UNROLL
    for (int group = 0; group < kConsumerGroups; ++group) stage.advance();
  }

  // Releases the buffers of `count` KV blocks without reading them.
  template <int kBuffers>
  CUTE_DEVICE static void skip(Pipeline<kBuffers>& ring, PipelineStage<kBuffers>& stage, int count,
                               bool leader) {
    CUTE_NO_UNROLL
    for (; count > 0; --count) {
      ring.wait(stage);  // hazard: else the arrival would count for the previous tile
      __syncwarp();      // hazard: else a lane may miss the phase that it waits for
      if (leader) ring.release(stage);
      stage.advance();
    }
  }

  // A consumer's stage in each ring.
  struct ConsumerState {
    int warpgroup;
    int group;
    int row_warpgroup;
    bool leader;  // one per warp
    PipelineStage<kQueryStages> query;
    PipelineStage<kStages> key;
    PipelineStage<kStages> value;
    PipelineStage<kWorkTileStages> slot;
  };

  // Skips the keys of `count` KV blocks, and the rounds of ping-pong that would issue their
  // products.
  CUTE_DEVICE static void skip_keys(Control& control, ConsumerState& at, int count) {
    CUTE_NO_UNROLL
    for (int i = 0; PingPong::kIsEnabled && i < count; ++i) {
      PingPong::wait(at.warpgroup);
      PingPong::pass(at.warpgroup);
    }
    skip(control.key, at.key, count, at.leader);
  }

  CUTE_DEVICE static void release_work_tile(Control& control, ConsumerState& at) {
    __syncwarp();
    if (at.leader) control.work_tile.release(at.slot);
    at.slot.advance();
  }

  // Whether a consumer owns rows of the work tile that are below the query length.
  CUTE_DEVICE static bool has_rows(WorkTile const& work_tile, int warpgroup) {
    if constexpr (kConsumerGroups > 1) return true;
    return work_tile.item.tile * kTileQuery + warpgroup * kWarpgroupRows < work_tile.query_length;
  }

  // The next work tile, with a batch of -1 if this consumer has no rows in it.
  CUTE_DEVICE static WorkItem next_work_tile(Control& control, ConsumerState const& at) {
    PipelineStage<kWorkTileStages> next = at.slot;
    next.advance();
    WorkTile const work_tile = control.take_work_tile(next);
    bool const has = work_tile.item.batch >= 0 && has_rows(work_tile, at.row_warpgroup);
    return {work_tile.item.tile, work_tile.item.head, has ? work_tile.item.batch : -1};
  }

  // Skips a work tile in which only other consumers own rows. Hazard: release keys and values
  // alternately, because a consumer that needs both would otherwise wait for the ring that lags
  // behind.
  CUTE_DEVICE static void skip_work_tile(Params const& params, Control& control,
                                         WorkItem const& item, ConsumerState& at) {
    Mask const mask(params.mask, params.shape, item.batch);
    Blocks const range(params, mask, item);
    PipelineStage<kQueryStages> query = at.query;
    skip(control.query[at.row_warpgroup], query, 1, at.leader);
    CUTE_NO_UNROLL
    for (int tile = range.end - 1; tile >= range.begin; tile = range.next(tile)) {
      skip_keys(control, at, 1);
      skip(control.value, at.value, 1, at.leader);
    }
    int const row = item.tile * kTileQuery + at.row_warpgroup * kWarpgroupRows;
    OutputWriter::write_empty(params, item, mask.query_length, row, row + kWarpgroupRows);
    clear_gap(params, item, mask.query_length);
    release_work_tile(control, at);
  }

  // Zeros the values of a work tile's first KV block that lie beyond the key length, where 0 * NaN
  // would be NaN. Each consumer zeros all of them, without a barrier between consumers: they write
  // the same zeros.
  CUTE_DEVICE static void clear_values(Control& control, Mask const& mask,
                                       ProblemShape const& shape, int tile,
                                       PipelineStage<kStages> const& stage, uint32_t tiles,
                                       int warpgroup) {
    if constexpr (Operands::kClearsValues) {
      clear_beyond(control.value, stage, mask, shape, tile, warpgroup,
                   [&](int first) { Operands::clear_values(Kernel::values(tiles, stage), first); });
    }
  }

  // Likewise for values of a KV block that come before the windows of all rows of the work tile.
  CUTE_DEVICE static void clear_unneeded_values(Control& control, Mask const& mask,
                                                WorkItem const& item, int tile,
                                                PipelineStage<kStages> const& stage, uint32_t tiles,
                                                int warpgroup) {
    if constexpr (kMayBeFreed<Config>) {
      int const end =
          unneeded_rows<Config>(mask, item.tile * kTileQuery, tile * kTileKey, kTileKey);
      if (end == 0) return;
      control.value.wait(stage);
      Operands::clear_values(Kernel::values(tiles, stage), 0, end);
      fence_tma_store();
      named_barrier_sync(Kernel::warpgroup_barrier(warpgroup), kWarpgroupSize);
    }
  }

  // If the buffer of a KV block has rows beyond the key length, calls clear(row) with the first of
  // them.
  template <class Clear>
  CUTE_DEVICE static void clear_beyond(Pipeline<kStages>& ring, PipelineStage<kStages> const& stage,
                                       Mask const& mask, ProblemShape const& shape, int tile,
                                       int warpgroup, Clear const& clear) {
    int const column = tile * kTileKey;
    if (!reads_beyond<Config>(mask.key_length, column + kTileKey, shape.key_length)) return;
    ring.wait(stage);
    clear(max(mask.key_length - column, 0));
    fence_tma_store();
    named_barrier_sync(Kernel::warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  // Clears this work tile's part of the queries that belong to no sequence.
  CUTE_DEVICE static void clear_gap(Params const& params, WorkItem const& item, int length) {
    if constexpr (Config::kPacked) {
      OutputWriter::template clear_gap<Kernel::kConsumers>(
          params, item, length,
          typename Kernel::Schedule::Grid{params.shape}.of_batch_index(item.batch));
    }
  }
};

// The consumer of a forward.
template <class Config, class Kernel>
struct ForwardConsumerSm90 : WorkTileConsumerSm90<Config, Kernel> {
  using Shared = WorkTileConsumerSm90<Config, Kernel>;
  using ConsumerGroup = typename Kernel::ConsumerGroup;
  using Control = typename Kernel::Control;
  using Linear = typename Kernel::Linear;
  using Merge = typename Kernel::Merge;
  using OutputWriter = typename Kernel::OutputWriter;
  using ConsumerState = typename Shared::ConsumerState;
  using Softmax = typename Kernel::Softmax;
  static constexpr int kConsumerGroups = Kernel::kConsumerGroups;

  // Stores output and logsumexp of this warpgroup's rows of the work tile in its slot, after
  // merging those of all consumer groups.
  template <class Output>
  CUTE_DEVICE static void finish_work_tile(ForwardParams const& params, Control& control,
                                           uint32_t tiles, ConsumerState& at, Linear const& linear,
                                           Softmax softmax, Output& output) {
    auto const [item, query_length] = control.work_tiles[at.slot.index];
    Merge::run(tiles + Kernel::kMergeOffset, softmax, output, linear.softmax_scale(params.scale));
    if constexpr (kConsumerGroups > 1)
      ConsumerGroup::sync_all();  // every group has read the staged outputs
    if (kConsumerGroups == 1 || ConsumerGroup::index() == 0) {
      int const row = item.tile * Kernel::kTileQuery + at.row_warpgroup * kWarpgroupRows;
      OutputWriter::write(params, item, query_length, linear, softmax, output);
      OutputWriter::write_empty(params, item, query_length, max(row, query_length),
                                row + kWarpgroupRows);
    }
    Shared::clear_gap(params, item, query_length);
    Shared::release_work_tile(control, at);
  }
};

}  // namespace memeff
