// Latent attention backward for Hopper: the values are the first columns of the keys, and each
// sequence reads its own keys, row by row, from a pool that all sequences share. A list of keys
// (Mask.keys) is such a sequence, with the query heads of one query as its rows.
//
// A CTA owns 64 rows and passes over their keys in KV blocks of 64. One warpgroup computes S, the
// other dP, and both need both results:
//
//   warpgroup 0 | S = Q K^T     P -> shared memory  |            | dQ, even panels of dKV
//   warpgroup 1 | dP = dO V^T                       | dS -> too  | dQ, odd panels of dKV
//
// As the values are columns of the keys, so are their gradients: a row of the pool has one gradient
// dS^T Q + P^T dO, whose last columns lack the second term. dQ stays in registers, which leaves
// room for one panel of 64 columns of dKV at a time.
//
// Other CTAs have some of the same keys, so dKV is added up in global memory, in float32. These
// additions take as long as all products: 64 keys are 147 KB, and their order varies from run to
// run.
//
// Q, dO and a KV block take 208 KB, so there is one buffer of keys. The next block arrives in it
// while dKV is computed, which reads no keys.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/copies/gathered_rows.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/page_table.cuh>
#include <memeff/core/shared_tile.cuh>
#include <memeff/core/vector.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/layout/gqa_rows.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// The rows and keys of a CTA. All sequences have as many rows.
struct LatentBackwardWork {
  WorkItem item;  // of a key head
  Origin origin;
  GqaRows<true> rows;
  int first_row;
  int row_count;  // of a sequence
  int key_length;

  template <class Config>
  CUTE_DEVICE static LatentBackwardWork of(BackwardParams const& params) {
    ProblemShape const& shape = params.shape;
    GqaRows<true> const rows(shape);
    int const tiles = ceil_div(rows.count(shape.query_length), Config::kTileQuery);
    WorkItem const item = WorkItem::of_block(blockIdx.x, tiles, shape.key_heads);
    IntervalMask<MaskKind::none> const mask(params.mask, shape, item.batch);
    return {item,
            query_origin<Config>(shape, item.batch),
            rows,
            item.tile * Config::kTileQuery,
            rows.count(shape.query_length),
            mask.key_length};
  }

  CUTE_DEVICE int query(int row) const { return rows.query(first_row + row); }
  CUTE_DEVICE int head(int row) const { return rows.query_head(item.head, first_row + row); }
  CUTE_DEVICE bool has_row(int row) const { return first_row + row < row_count; }

  // The row of a tensor of queries for a row of the tile.
  template <class Element>
  CUTE_DEVICE char* address(TensorView const& tensor, int row) const {
    int const own = has_row(row) ? row : 0;
    return row_pointer<Element>(tensor, origin.batch, origin.row + query(own), head(own));
  }
};

// The sums of dKV: float32[rows of the pool, key heads, kColumns]. A lane of a quad has two of each
// eight columns of an accumulator. Its 16 numbers of a panel of 64 columns are stored as vectors of
// four, those of a quad next to each other, so that a reduction covers 64 contiguous bytes.
template <int kColumns>
struct KeyGradientSums {
  static constexpr int kVectorColumns = 16;  // of the four vectors of a quad

  CUTE_DEVICE static float* row(BackwardParams const& params, int row, int head) {
    return params.key_gradient_sum + ((long long)row * params.shape.key_heads + head) * kColumns;
  }

  // Adds row r of the accumulators (a lane has elements of two). `sums` points to the columns of
  // accumulator column 0.
  template <class Accumulators>
  CUTE_DEVICE static void add(float* sums, int r, Accumulators const& accumulators) {
    float* const own = sums + threadIdx.x % 4 * 4;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(accumulators); n += 2) {
      reduce_add(own + n / 2 * kVectorColumns, accumulators(2 * r, 0, n),
                 accumulators(2 * r + 1, 0, n), accumulators(2 * r, 0, n + 1),
                 accumulators(2 * r + 1, 0, n + 1));
    }
  }

  // 16 columns from a multiple of 16 on, in their order.
  CUTE_DEVICE static void load(float const* sums, float (&columns)[kVectorColumns]) {
    CUTE_UNROLL
    for (int lane = 0; lane < 4; ++lane) {
      float4 const own = reinterpret_cast<float4 const*>(sums)[lane];
      columns[2 * lane] = own.x;
      columns[2 * lane + 1] = own.y;
      columns[8 + 2 * lane] = own.z;
      columns[8 + 2 * lane + 1] = own.w;
    }
  }
};

// Producer: the warps copy each panel of a KV block together, row by row.
template <class Config, class Kernel>
struct LatentBackwardProducer {
  using Element = typename Config::Element;
  using Control = typename Kernel::Control;
  using Panel = typename Kernel::Panel;
  static constexpr int kTileKey = Kernel::kTileKey;
  using Rows = DividedRows<Config, Panel, Kernel::kProducerWarps>;

  CUTE_DEVICE static void run(BackwardParams const& params, LatentBackwardWork const& work,
                              Control& control, uint32_t tiles, int warp) {
    KeyValueSource<Config> const source(params, work.item.batch, work.item.head);
    char const* const pool = source.row(params.key);
    unsigned const row_bytes = unsigned(memeff::row_bytes<Element>(params.key));
    Rows next;
    next.load(source.pages, warp, 0, work.key_length);
    CUTE_NO_UNROLL
    for (int block = 0; block * kTileKey < work.key_length; ++block) {
      int const first = block * kTileKey;
      Rows rows = next;
      rows.find(source.pages, warp, first, work.key_length);
      // Loaded before the copies, because loads arrive in order.
      next.load(source.pages, warp, first + kTileKey, work.key_length);
      wait_barrier(control.empty, (block & 1) ^ 1);
      random_sleep();
      if (threadIdx.x % Panel::kChunks == 0) {
        CUTE_UNROLL
        for (int i = 0; i < Rows::kOwn; ++i) {
          control.rows[block % 2][Rows::key(warp, i)] = rows.rows[i];
        }
      }
      CUTE_UNROLL
      for (int group = 0; group < Kernel::kPanelGroups; ++group) {
        rows.template copy<Kernel::kGroupPanels>(tiles + Kernel::kKeyOffset, warp, pool, row_bytes,
                                                 params.shape.head_dim,
                                                 group * Kernel::kGroupPanels, control.full[group]);
      }
    }
  }
};

// The entry point that the generated source instantiates.
template <class Config>
struct FmhaBackwardLatentSm90 {
  using Element = typename Config::Element;
  using Work = LatentBackwardWork;
  static constexpr int kTileQuery = Config::kTileQuery;
  static constexpr int kTileKey = Config::kTileKey;
  static_assert(kTileQuery == kWarpgroupRows && kTileKey == kWarpgroupRows);
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kConsumers = kWarpgroups * kWarpgroupSize;
  static constexpr int kProducerWarps = kWarpgroupSize / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kProducerRegisters = 88;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static constexpr int kWarps = kConsumers / kWarpSize;
  static constexpr int kRowsPerWarp = kTileQuery / kWarps;  // that a warp copies
  static constexpr int kSteps = kTileKey / 16;

  using QueryTile = SharedTile<kTileQuery, Config::kHeadDim>;  // also dQ
  using OutTile = SharedTile<kTileQuery, Config::kValueDim>;   // dO
  using KeyTile = SharedTile<kTileKey, Config::kHeadDim>;
  using Panel = SharedTile<kTileKey, 64>;  // of each of these tiles
  using ScoreTile = SharedTile<kTileQuery, kTileKey>;
  using ScoreGrid = WarpgroupGrid<kTileQuery, kTileKey>;
  static constexpr int kPanels = KeyTile::kPanels;
  static constexpr int kValuePanels = OutTile::kPanels;
  static_assert(KeyTile::kPanelBytes == Panel::kBytes && OutTile::kPanelBytes == Panel::kBytes);
  static_assert(kPanels == kValuePanels + 1 && kValuePanels % kWarpgroups == 0,
                "the warpgroups share the last panel");

  // Panels arrive in groups.
  static constexpr int kPanelGroups = 3;
  static constexpr int kGroupPanels = kPanels / kPanelGroups;
  static_assert(kGroupPanels * kPanelGroups == kPanels);

  // The columns of dQ that a warpgroup owns: neighbouring panels, and half of the last one.
  static constexpr int kOwnPanels = kValuePanels / kWarpgroups;
  using OwnTile = SharedTile<kTileKey, kOwnPanels * Panel::kColumns>;
  using OwnGrid = WarpgroupGrid<kTileQuery, OwnTile::kColumns>;
  using PanelGrid = WarpgroupGrid<kTileKey, Panel::kColumns>;
  using HalfGrid = WarpGrid<kTileQuery, Panel::kColumns, kWarps, 16>;
  static constexpr int kHalfBytes = Panel::kRowBytes / kWarpgroups;
  using Sums = KeyGradientSums<Config::kHeadDim>;

  // Everything in shared memory except the tiles.
  struct Control {
    float2 statistics[kTileQuery];  // logsumexp in base 2, +inf in a row without keys; and delta
    int rows[2][kTileKey];          // of the pool, -1 if a key does not exist; blocks alternate
    uint64_t full[kPanelGroups];
    uint64_t empty;
  };
  static constexpr int kQueryOffset = 0;
  static constexpr int kOutOffset = kQueryOffset + QueryTile::kBytes;
  static constexpr int kKeyOffset = kOutOffset + OutTile::kBytes;
  static constexpr int kProbabilityOffset = kKeyOffset + KeyTile::kBytes;
  static constexpr int kScoreGradientOffset = kProbabilityOffset + ScoreTile::kBytes;
  static constexpr int kControlOffset = kScoreGradientOffset + ScoreTile::kBytes;
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  static constexpr int kConsumerBarrier = 1;  // a named barrier of both consumers

  CUTE_DEVICE static void run(BackwardParams const& params) {
    using Producer = LatentBackwardProducer<Config, FmhaBackwardLatentSm90>;
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    Work const work = Work::template of<Config>(params);
    if (threadIdx.x == 0) {
      CUTE_UNROLL
      for (uint64_t& barrier : control.full) init_barrier(barrier, Producer::Rows::kArrivals);
      init_barrier(control.empty, kWarps);
      fence_barrier_init();
    }
    __syncthreads();
    int const warp = int(threadIdx.x) / kWarpSize;
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      Producer::run(params, work, control, tiles, warp - kWarps);
      return;
    }
    raise_registers<kConsumerRegisters>();
    copy_rows<QueryTile>(params.query, work, params.shape.head_dim, tiles + kQueryOffset);
    copy_rows<OutTile>(params.out_gradient, work, params.shape.value_dim, tiles + kOutOffset);
    commit_copies();
    compute_statistics(params, work, control);
    wait_copies<0>();
    fence_tma_store();
    synchronize();
    // The shuffle makes visible to the compiler that the index is uniform over the warp.
    if (__shfl_sync(0xffffffffu, warp, 0) < kWarps / kWarpgroups) {
      consume<0>(params, work, control, tiles);
    } else {
      consume<1>(params, work, control, tiles);
    }
  }

 private:
  template <class Tile, Contiguous kOrder>
  using Operand = DescriptorOperand<Tile, kOrder>;

  template <class Tile, Contiguous kOrder>
  CUTE_DEVICE static Operand<Tile, kOrder> operand(uint32_t tile) {
    return Operand<Tile, kOrder>(descriptor_address(tile));
  }

  CUTE_DEVICE static void synchronize() { named_barrier_sync(kConsumerBarrier, kConsumers); }

  // Starts the copies of this warp's rows of a tile. Those that do not exist become zero, and so do
  // columns beyond the bound.
  template <class Tile>
  CUTE_DEVICE static void copy_rows(TensorView const& tensor, Work const& work, int columns,
                                    uint32_t tile) {
    int const lane = int(threadIdx.x) % kWarpSize;
    CUTE_NO_UNROLL
    for (int i = 0; i < kRowsPerWarp; ++i) {
      int const row = int(threadIdx.x) / kWarpSize * kRowsPerWarp + i;
      char const* const source = work.template address<Element>(tensor, row);
      CUTE_UNROLL
      for (int chunk = lane; chunk < Tile::kColumns / 8; chunk += kWarpSize) {
        copy_async(tile + Tile::byte_offset(row, chunk), source + chunk * 16,
                   work.has_row(row) && chunk * 8 < columns);
      }
    }
  }

  // The logsumexp and delta = rowsum(dO * O) - dlse of each row (FlashAttention-2, algorithm 2,
  // with the logsumexp's gradient). Four lanes compute a row.
  CUTE_DEVICE static void compute_statistics(BackwardParams const& params, Work const& work,
                                             Control& control) {
    int const row = int(threadIdx.x) / 4;
    char const* const out = work.template address<Element>(params.out, row);
    char const* const gradient = work.template address<Element>(params.out_gradient, row);
    float delta = 0.0f;
    CUTE_NO_UNROLL
    for (int chunk = int(threadIdx.x) % 4; chunk * 8 < params.shape.value_dim; chunk += 4) {
      delta += vector_dot<Element>(load_vector<16>(out + chunk * 16, 16),
                                   load_vector<16>(gradient + chunk * 16, 16));
    }
    delta += __shfl_xor_sync(0xffffffffu, delta, 1);
    delta += __shfl_xor_sync(0xffffffffu, delta, 2);
    if (threadIdx.x % 4 != 0) return;
    float2 statistics = make_float2(infinity(), 0.0f);
    if (work.has_row(row)) {
      long long const place =
          logsumexp_offset<Config>(params.shape, work.origin, work.head(row)) + work.query(row);
      float const logsumexp = params.logsumexp[place];
      if (params.logsumexp_gradient != nullptr) delta -= params.logsumexp_gradient[place];
      // +inf makes every probability of a row without keys exactly 0.
      if (fabsf(logsumexp) < kWholeFloats) statistics = make_float2(logsumexp * kLog2e, delta);
    }
    control.statistics[row] = statistics;
  }

  template <int kWarpgroup>
  CUTE_DEVICE static void consume(BackwardParams const& params, Work const& work, Control& control,
                                  uint32_t tiles) {
    // The logsumexps or the deltas of this thread's two rows.
    float statistics[2];
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float2 const both = control.statistics[ScoreGrid::element_row(2 * half, 0)];
      statistics[half] = kWarpgroup == 0 ? both.x : both.y;
    }
    auto own = OwnGrid::make_accumulators();    // (4, 1, MMA_N), of dQ
    auto half = HalfGrid::make_accumulators();  // (4, 1, MMA_N), of dQ
    cute::clear(own);
    cute::clear(half);
    CUTE_NO_UNROLL
    for (int block = 0; block * kTileKey < work.key_length; ++block) {
      auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N): S or dP
      multiply_scores<kWarpgroup>(control, tiles, block & 1, scores);
      if constexpr (kWarpgroup == 0) {
        exponentiate(params, control.rows[block % 2], statistics, scores);
        synchronize();  // the tiles of the KV block before have been read
        store_operand<ScoreTile, ScoreGrid>(tiles + kProbabilityOffset,
                                            as_left_operand<Element>(scores));
        fence_tma_store();
        synchronize();
      } else {
        synchronize();
        synchronize();
        store_operand<ScoreTile, ScoreGrid>(
            tiles + kScoreGradientOffset,
            differentiate(params, tiles + kProbabilityOffset, statistics, scores));
        fence_tma_store();
      }
      synchronize();
      if constexpr (Config::kQueryGradient) add_query_gradient<kWarpgroup>(tiles, own, half);
      if constexpr (Config::kKeyGradient) {
        add_key_gradient<kWarpgroup>(params, work, control, tiles, block, own, half);
      } else {
        release_keys<0>(control, own, half);
      }
    }
    store<kWarpgroup>(params, work, tiles, own, half);
  }

  CUTE_DEVICE static void wait_group(Control& control, int group, int parity) {
    wait_barrier(control.full[group], parity);
    fence_tma_store();  // see arrive_when_copied()
    random_sleep();
  }

  // Computes S or dP of a KV block, panel by panel as they arrive.
  template <int kWarpgroup, class Scores>
  CUTE_DEVICE static void multiply_scores(Control& control, uint32_t tiles, int parity,
                                          Scores& scores) {
    constexpr int kOwn = kWarpgroup == 0 ? kPanels : kValuePanels;
    uint32_t const left = tiles + (kWarpgroup == 0 ? kQueryOffset : kOutOffset);
    fence_accumulators(scores);
    CUTE_UNROLL
    for (int panel = 0; panel < kOwn; ++panel) {
      if (panel % kGroupPanels == 0) wait_group(control, panel / kGroupPanels, parity);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      warpgroup_gemm<Element, kSteps>(
          scores, operand<Panel, Contiguous::k>(left + panel * Panel::kBytes),
          operand<Panel, Contiguous::k>(tiles + kKeyOffset + panel * Panel::kBytes), panel > 0);
    }
    commit_products();
    wait_products<0>();
    fence_accumulators(scores);
  }

  // Computes P from S. Keys that do not exist have no probability, although their rows are zero.
  template <class Scores>
  CUTE_DEVICE static void exponentiate(BackwardParams const& params, int const (&rows)[kTileKey],
                                       float const (&logsumexps)[2], Scores& scores) {
    float const prescale = params.scale.prescale;
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(scores); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        bool const exists = rows[ScoreGrid::element_column(i, n)] >= 0;
        float const p =
            probability(scores(i, 0, n) * prescale, params.scale.softmax_scale, logsumexps[i / 2]);
        scores(i, 0, n) = exists ? p : 0.0f;
      }
    }
  }

  // dS = scale * P * (dP - delta), as a left operand, from dP and the tile of P.
  template <class Scores>
  CUTE_DEVICE static auto differentiate(BackwardParams const& params, uint32_t probabilities,
                                        float const (&deltas)[2], Scores const& gradient) {
    auto operand = load_operand<ScoreTile, ScoreGrid>(probabilities);
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float both[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          float const p = unpack<Element>(operand.fragments[0][step][i], j);
          both[j] = softmax_gradient(p, gradient(i % 2 * 2 + j, 0, 2 * step + i / 2), 1.0f,
                                     deltas[i % 2]) *
                    params.scale.gradient_scale;
        }
        operand.fragments[0][step][i] = pack<Element>(both[0], both[1]);
      }
    }
    return operand;
  }

  // Starts dQ += dS K.
  template <int kWarpgroup, class Own, class Half>
  CUTE_DEVICE static void add_query_gradient(uint32_t tiles, Own& own, Half& half) {
    auto const left = operand<ScoreTile, Contiguous::k>(tiles + kScoreGradientOffset);
    uint32_t const keys = tiles + kKeyOffset;
    fence_accumulators(own);
    fence_accumulators(half);
    begin_products();
    warpgroup_gemm<Element, kSteps>(
        own, left,
        operand<OwnTile, Contiguous::outer>(keys + kWarpgroup * kOwnPanels * Panel::kBytes), true);
    warpgroup_gemm<Element, kSteps>(
        half, left,
        operand<Panel, Contiguous::outer>(keys + (kPanels - 1) * Panel::kBytes +
                                          kWarpgroup * kHalfBytes),
        true);
    commit_products();
  }

  // Waits for dQ, after which kPending groups of products were started, and releases the keys.
  template <int kPending, class Own, class Half>
  CUTE_DEVICE static void release_keys(Control& control, Own& own, Half& half) {
    wait_products<kPending>();
    fence_accumulators(own);
    fence_accumulators(half);
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive_barrier(control.empty);
    random_sleep();
  }

  // Adds this warpgroup's panels of dKV to the sums, and releases the keys when dQ is done.
  template <int kWarpgroup, class Own, class Half>
  CUTE_DEVICE static void add_key_gradient(BackwardParams const& params, Work const& work,
                                           Control& control, uint32_t tiles, int block, Own& own,
                                           Half& half) {
    auto const probabilities = operand<ScoreTile, Contiguous::outer>(tiles + kProbabilityOffset);
    auto const gradient = operand<ScoreTile, Contiguous::outer>(tiles + kScoreGradientOffset);
    int rows[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) rows[r] = control.rows[block % 2][PanelGrid::element_row(2 * r, 0)];
    auto add = [&](int column, auto const& accumulators) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (rows[r] < 0) continue;
        Sums::add(Sums::row(params, rows[r], work.item.head) + column, r, accumulators);
      }
    };
    CUTE_UNROLL
    for (int i = 0; i < kOwnPanels; ++i) {
      int const panel = i * kWarpgroups + kWarpgroup;
      auto sum = PanelGrid::make_accumulators();  // (4, 1, MMA_N)
      fence_accumulators(sum);
      begin_products();
      warpgroup_gemm<Element, kSteps>(
          sum, probabilities,
          operand<Panel, Contiguous::outer>(tiles + kOutOffset + panel * Panel::kBytes), false);
      warpgroup_gemm<Element, kSteps>(
          sum, gradient,
          operand<Panel, Contiguous::outer>(tiles + kQueryOffset + panel * Panel::kBytes), true);
      commit_products();
      if (i == 0) release_keys<1>(control, own, half);
      wait_products<0>();
      fence_accumulators(sum);
      add(panel * Panel::kColumns, sum);
    }
    auto sum = HalfGrid::make_accumulators();  // (4, 1, MMA_N)
    fence_accumulators(sum);
    begin_products();
    warpgroup_gemm<Element, kSteps>(
        sum, gradient,
        operand<Panel, Contiguous::outer>(tiles + kQueryOffset + (kPanels - 1) * Panel::kBytes +
                                          kWarpgroup * kHalfBytes),
        false);
    commit_products();
    wait_products<0>();
    fence_accumulators(sum);
    add((kPanels - 1) * Panel::kColumns + kWarpgroup * Panel::kColumns / kWarpgroups, sum);
  }

  // Stores dQ through the tile of the queries.
  template <int kWarpgroup, class Own, class Half>
  CUTE_DEVICE static void store(BackwardParams const& params, Work const& work, uint32_t tiles,
                                Own const& own, Half const& half) {
    if constexpr (!Config::kQueryGradient) return;
    uint32_t const target = tiles + kQueryOffset;
    synchronize();  // the queries have been read
    store_accumulators<Element, OwnTile, OwnGrid>(target + kWarpgroup * kOwnPanels * Panel::kBytes,
                                                  own);
    store_accumulators<Element, Panel, HalfGrid>(target + (kPanels - 1) * Panel::kBytes, half);
    synchronize();
    int const lane = int(threadIdx.x) % kWarpSize;
    CUTE_NO_UNROLL
    for (int i = 0; i < kRowsPerWarp; ++i) {
      int const row = int(threadIdx.x) / kWarpSize * kRowsPerWarp + i;
      if (!work.has_row(row)) break;
      char* const out = work.template address<Element>(params.query_gradient, row);
      for (int chunk = lane; chunk * 8 < params.shape.head_dim; chunk += kWarpSize) {
        store_vector<16>(out + chunk * 16,
                         load_shared_vector(target + QueryTile::byte_offset(row, chunk)), 16);
      }
    }
  }
};

// Rounds the sums of dKV. A thread has 16 columns of a row.
template <class Config>
struct FmhaBackwardLatentSm90Postprocess {
  using Element = typename Config::Element;
  using Sums = KeyGradientSums<Config::kHeadDim>;
  static constexpr int kThreads = 256;
  static constexpr int kBlocksPerSm = 4;

  CUTE_DEVICE static void run(BackwardParams const& params) {
    constexpr int kRowThreads = Config::kHeadDim / Sums::kVectorColumns;
    ProblemShape const& shape = params.shape;
    long long const index = (long long)blockIdx.x * kThreads + threadIdx.x;
    long long const row = index / kRowThreads;  // of all key heads
    int const column = int(index % kRowThreads) * Sums::kVectorColumns;
    if (row >= (long long)shape.key_tokens * shape.key_heads) return;
    float columns[Sums::kVectorColumns];
    Sums::load(params.key_gradient_sum + row * Config::kHeadDim + column, columns);
    char* const target = row_pointer<Element>(params.key_gradient, 0, int(row / shape.key_heads),
                                              int(row % shape.key_heads)) +
                         column * int(sizeof(Element));
    CUTE_UNROLL
    for (int i = 0; i < Sums::kVectorColumns; i += 8) {
      if (column + i >= shape.head_dim) return;
      store_vector<16>(target + i * int(sizeof(Element)),
                       make_uint4(pack<Element>(columns[i], columns[i + 1]),
                                  pack<Element>(columns[i + 2], columns[i + 3]),
                                  pack<Element>(columns[i + 4], columns[i + 5]),
                                  pack<Element>(columns[i + 6], columns[i + 7])),
                       16);
    }
  }
};

}  // namespace memeff
