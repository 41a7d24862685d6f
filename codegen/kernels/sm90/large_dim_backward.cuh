// Attention backward for Hopper with head dims above 256, in two kernels, each of which owns the
// gradients it writes:
//
//   FmhaBackwardLargeDimSm90Dq    clusters of three CTAs own 128 queries
//   FmhaBackwardLargeDimSm90Dkdv  clusters of two CTAs own 64 keys
//
// The accumulators of 64 rows and 512 columns take half of the registers of an SM, and 64 rows of
// an operand with its buffers take most of shared memory. So each CTA has one pair of operands,
// either queries and keys or dO and values, and computes one of the two score products. CTAs
// exchange tiles of P and dS through distributed shared memory, and nothing is computed twice
// within a kernel:
//
//   owned     | CTA 0                     | CTA 1                       | CTA 2
//   keys      | S^T = K Q^T, dK += dS^T Q | dP^T = V dO^T, dV += P^T dO |
//   queries   | S = Q K^T, dQ += dS K     | the same for 64 more rows   | dP = dO V^T for 128 rows
//
// The two consumers of a CTA divide the columns of its sum, and take turns computing the scores of
// blocks, as in the forward (sm90/large_dim_forward.cuh).
//
// Above 576 columns a cluster has all of these CTAs twice: two groups divide the columns.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/common/preprocess.cuh>
#include <kernels/sm90/backward_tiles.cuh>
#include <memeff/arch/cluster.cuh>
#include <memeff/collective/column_sum.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/ping_pong.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/probability.cuh>

namespace memeff {

// What producer and consumers share: the roles of the CTAs, their shared memory, the score tiles of
// a cluster, and the messages between its CTAs.

// The rows whose gradients a cluster owns.
enum class Owned { queries, keys };

// The base of all roles. The first CTAs of a cluster compute S, the last one computes dP. With
// kColumnCtas > 1 a cluster has as many such groups of CTAs. They divide the columns of all
// operands, and the same role of both groups adds up its scores (collective/column_sum.cuh).
template <class Config, Owned kOwned>
struct LargeDimCluster {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesTwoKernel<Config>;
  static constexpr bool kOwnsKeys = kOwned == Owned::keys;
  static constexpr int kRows = kWarpgroupRows;  // and columns of a score tile
  static_assert(Tiles::kTileKey == kRows && Tiles::kTileQuery == 2 * kRows);
  static constexpr int kScoreCtas = kOwnsKeys ? 1 : 2;  // with 64 rows each
  static constexpr int kOutRank = kScoreCtas;
  static constexpr int kGroupCtas = kScoreCtas + 1;
  static constexpr int kColumnCtas = Config::kColumnCtas;
  static constexpr bool kDividesColumns = kColumnCtas > 1;
  static_assert(kColumnCtas <= 2);
  static constexpr int kCtas = kColumnCtas * kGroupCtas;

  static constexpr int kWarpgroups = Tiles::kWarpgroups;     // consumers
  static constexpr int kWarps = kWarpgroupSize / kWarpSize;  // per consumer
  static constexpr int kConsumers = Tiles::kThreads;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();

  using ScoreGrid = WarpgroupGrid<kRows, kRows>;  // transposed if the cluster owns keys
  using Mask = ScoreMask<Config, ScoreGrid>;
  using Modifiers = ScoreModifiers<Config, NoBias, ScoreFunction<Config, ScoreGrid, kOwnsKeys>>;
  using Operand = RegisterOperand<1, kRows / 16, sizeof(Element)>;
  using ScoreSum = ColumnSum<ScoreGrid, kDividesColumns>;

  // The other rows arrive in panels of 64 columns.
  using Panel = SharedTile<kRows, 64>;
  static constexpr int kStatisticsBytes = kRows * int(sizeof(float2));
  static constexpr int kMostBlocks = Config::kStages;  // that have panels in a ring

  // A score tile on its way between two CTAs: each thread's operand, in vectors. If the modifiers
  // have a derivative that is not constant, dK needs P times the derivative and dV needs P.
  static constexpr int kTileBytes = kRows * kRows * int(sizeof(Element));
  static constexpr int kProbabilityTiles = kOwnsKeys && !Modifiers::kConstantDerivative ? 2 : 1;
  static constexpr int kProbabilityBytes = kProbabilityTiles * kTileBytes;

  // The index of this CTA's group, which is that of its part of the columns.
  CUTE_DEVICE static int column_part() { return kDividesColumns ? cluster_rank() / kGroupCtas : 0; }

  // The rank of this CTA in its group.
  CUTE_DEVICE static int group_rank() {
    return kDividesColumns ? cluster_rank() % kGroupCtas : cluster_rank();
  }

  // The rank in the cluster of a CTA of this group.
  CUTE_DEVICE static int cluster_rank_of(int rank) { return column_part() * kGroupCtas + rank; }

  // The shared memory of a role: received messages, its own rows, the ring of panels, and scores of
  // the other columns. kHeadOrValueDim columns are divided.
  template <bool kIsOut_, int kHeadOrValueDim, int kOwnTiles, int kMessageBytes, int kStages_>
  struct RoleTiles {
    static constexpr bool kIsOut = kIsOut_;
    static constexpr int kColumns = kHeadOrValueDim / kColumnCtas;
    using OwnTile = SharedTile<kRows, kColumns>;
    static constexpr int kPanels = kColumns / Panel::kColumns;
    static constexpr int kStages = kStages_;
    // The first two CTAs of a cluster that owns queries use the same panels of keys. Each copies
    // every second panel to both, and a buffer is empty when the consumers of both have released
    // it.
    static constexpr int kSharers = kIsOut ? 1 : kScoreCtas;
    static_assert(OwnTile::kPanelBytes == Panel::kBytes && OwnTile::kPanels == kPanels);
    static_assert(kStages <= kMostBlocks * kPanels);
    static constexpr int kOwnOffset = kMessageBytes;
    static constexpr int kOwnBytes = kOwnTiles * OwnTile::kBytes;
    static constexpr int kRingOffset = kOwnOffset + kOwnBytes;
    static constexpr int kScoreSumOffset = kRingOffset + kStages * Panel::kBytes;
    static constexpr int kBytes = kScoreSumOffset + ScoreSum::kBytes;

    CUTE_DEVICE static uint32_t panel(uint32_t tiles, int stage) {
      return tiles + kRingOffset + stage * Panel::kBytes;
    }
  };
  static constexpr int kScoreStages = kOwnsKeys ? Config::kKeyStages : Config::kQueryStages;
  static constexpr int kOutStages = kOwnsKeys ? Config::kKeyStages : Config::kQueryOutStages;
  using ScoreTiles = RoleTiles<false, Config::kHeadDim, 1, kTileBytes, kScoreStages>;
  using OutTiles =
      RoleTiles<true, Config::kValueDim, kScoreCtas, kScoreCtas * kProbabilityBytes, kOutStages>;
  static constexpr int kMostStages = cute::max(kScoreStages, kOutStages);

  // The barriers that have the same addresses in all roles. Index `link` is the rank of the CTA
  // that computes S.
  struct Links : ScoreSum::Barriers {
    uint64_t own;                    // the CTA's own rows
    uint64_t received[kScoreCtas];   // a message has arrived here
    uint64_t delivered[kScoreCtas];  // the receiver has read the message from here
  };
  static constexpr int kStatisticsOffset = cute::max(ScoreTiles::kBytes, OutTiles::kBytes);
  static constexpr int kControlOffset =
      kStatisticsOffset + (kOwnsKeys ? kMostBlocks * kStatisticsBytes : 0);
  template <int kStages>
  struct Control : Links {
    Pipeline<kStages> panels;
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control<kMostStages>));

  // Named barriers: one for the threads of each consumer, one for both, one for the turn of each
  // consumer, and one for its turn to add up scores.
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 1 + warpgroup; }
  static constexpr int kConsumerBarrier = 1 + kWarpgroups;
  static constexpr int kPingPongBarrier = 2 + kWarpgroups;
  using SumPingPong = PingPongBarrier<kDividesColumns, kWarpgroups, kPingPongBarrier + kWarpgroups>;

  CUTE_DEVICE static uint32_t statistics(uint32_t tiles, int block) {
    return tiles + kStatisticsOffset + block % kMostBlocks * kStatisticsBytes;
  }

  // The work of a cluster: blocks of 64 rows that attend to its keys, of every head of the group,
  // or blocks of keys to which its rows attend.
  struct Work {
    WorkItem item;
    int own_row;     // the first
    int tile;        // of the first block
    int head_tiles;  // of one head
    int count;
    int query_length;
    int key_length;

    CUTE_DEVICE explicit Work(BackwardParams const& params) {
      ProblemShape const& shape = params.shape;
      unsigned const cluster = blockIdx.x / kCtas;
      if constexpr (kOwnsKeys) {
        item = work_item<Config, Heaviest::first, kRows>(shape, params.bias, cluster);
      } else {
        item = work_item<Config, Heaviest::last, Tiles::kTileQuery>(shape, params.bias, cluster);
      }
      Mask const mask(params.mask, shape, item.batch);
      own_row = item.tile * (kOwnsKeys ? kRows : Tiles::kTileQuery);
      TileRange const range = kOwnsKeys ? mask.query_tiles(own_row, kRows, kRows)
                                        : mask.key_tiles(own_row, Tiles::kTileQuery, kRows);
      tile = range.begin;
      head_tiles = max(range.end - range.begin, 0);
      count = head_tiles * (kOwnsKeys ? shape.group : 1);
      query_length = mask.query_length;
      key_length = mask.key_length;
    }

    // The tile of scores of a block and of this CTA's rows, which begin `own` rows after the first.
    CUTE_DEVICE ScoreTilePosition position(ProblemShape const& shape, int block, int own) const {
      if constexpr (!kOwnsKeys) {
        return {item.batch, item.head, own_row + own, (tile + block) * kRows};
      }
      int const head_index = shape.group == 1 ? 0 : block / head_tiles;
      int const row = (tile + block - head_index * head_tiles) * kRows;
      return {item.batch, item.head * shape.group + head_index, row, own_row};
    }
  };

  // The number of valid rows of a block if the ring also holds rows beyond them, which may be NaN;
  // otherwise the number of all its rows.
  CUTE_DEVICE static int valid_rows(ProblemShape const& shape, Work const& work,
                                    ScoreTilePosition const& at) {
    int const row = kOwnsKeys ? at.row : at.column;
    int const length = kOwnsKeys ? work.query_length : work.key_length;
    int const rows = kOwnsKeys ? shape.query_length : shape.key_length;
    return reads_beyond<Config>(length, row + kRows, rows) ? max(length - row, 0) : kRows;
  }

  template <class Role>
  CUTE_DEVICE static void init(Control<Role::kStages>& control, int rank) {
    control.panels.init(kWarps * kWarpgroups * Role::kSharers);
    init_barrier(control.own, 1);
    // Both consumers of the receiver read a message. The exception is the last CTA of a cluster
    // with two links, where each consumer reads one link.
    int const readers = kOwnsKeys || rank == kOutRank ? kWarpgroups : 1;
    CUTE_UNROLL
    for (int link = 0; link < kScoreCtas; ++link) {
      init_barrier(control.received[link], kWarps);
      init_barrier(control.delivered[link], kWarps * readers);
    }
    ScoreSum::init(control);
    fence_barrier_init();
  }

  // Each consumer calls this once, before add_other_columns().
  CUTE_DEVICE static void begin_score_sums(int warpgroup) {
    if constexpr (kDividesColumns) SumPingPong::begin(warpgroup);
  }

  // Adds the scores of the other columns, whose CTA computes the same tile. The consumers call it
  // in turn.
  template <class Role, class Scores>
  CUTE_DEVICE static void add_other_columns(Links& links, uint32_t tiles, int rank, int warpgroup,
                                            Scores& scores) {
    if constexpr (kDividesColumns) {
      int const other = (1 - column_part()) * kGroupCtas + rank;
      SumPingPong::wait(warpgroup);
      ScoreSum::add(links, tiles + Role::kScoreSumOffset, other, warpgroup, scores);
      SumPingPong::pass(warpgroup);
    }
  }

  // Releases kPanels panels from `stage` on, in all CTAs that share them. All lanes of a warp call
  // it.
  template <class Role, int kPanels>
  CUTE_DEVICE static void release_panels(Control<Role::kStages>& control,
                                         PipelineStage<Role::kStages> stage) {
    int const lane = threadIdx.x % kWarpSize;
    if (lane < kPanels * Role::kSharers) {
      stage.advance(lane % kPanels);
      uint64_t& empty = control.panels.empty[stage.index];
      if constexpr (Role::kSharers == 1) {
        arrive_barrier(empty);
      } else {
        arrive_cluster_barrier(empty, cluster_rank_of(lane / kPanels));
      }
    }
    random_sleep();
  }

  // Waits until the receiver has read the previous message. `parity` is that of the new message.
  CUTE_DEVICE static void acquire_message(Links& links, int link, int parity) {
    wait_barrier(links.delivered[link], parity ^ 1);
    random_sleep();
  }

  // Sends a message of kTiles tiles to the same thread of a warpgroup of another CTA of this group;
  // `offset` is its byte offset in that CTA's shared memory. All threads of a warpgroup call it
  // after acquire_message().
  template <int kTiles>
  CUTE_DEVICE static void send_message(Links& links, uint32_t tiles, int link, int group_rank,
                                       int offset, Operand const (&operands)[kTiles]) {
    constexpr int kSteps = kRows / 16;
    constexpr int kVectorBytes = 16;
    int const thread = thread_index() % kWarpgroupSize;
    int const rank = cluster_rank_of(group_rank);
    if (thread % kWarpSize == 0) {
      arrive_cluster_and_expect(links.received[link], rank, kTiles * kTileBytes / kWarps);
    }
    uint32_t const target = cluster_address(tiles, rank) + offset + thread * kVectorBytes;
    uint32_t const barrier = cluster_address(shared_address(&links.received[link]), rank);
    CUTE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        store_cluster_vector(target + tile * kTileBytes + step * kWarpgroupSize * kVectorBytes,
                             barrier, operands[tile].fragments[0][step]);
      }
    }
  }

  CUTE_DEVICE static void wait_message(Links& links, int link, int parity) {
    wait_barrier(links.received[link], parity);
    random_sleep();
  }

  // This thread's part of a tile of a message that has arrived at byte `offset`.
  CUTE_DEVICE static Operand load_message(uint32_t tiles, int offset) {
    Operand operand;
    uint32_t const source = tiles + offset + thread_index() % kWarpgroupSize * 16;
    CUTE_UNROLL
    for (int step = 0; step < kRows / 16; ++step) {
      uint4 const words = load_shared_vector(source + step * kWarpgroupSize * 16);
      operand.fragments[0][step][0] = words.x;
      operand.fragments[0][step][1] = words.y;
      operand.fragments[0][step][2] = words.z;
      operand.fragments[0][step][3] = words.w;
    }
    return operand;
  }

  // Hazard: the values loaded from the message must have been used already, because an arrival
  // overtakes pending loads.
  CUTE_DEVICE static void release_message(Links& links, int link, int rank) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      arrive_cluster_barrier(links.delivered[link], cluster_rank_of(rank));
    }
    random_sleep();
  }

  // The logsumexp and delta of this thread's two rows, from row `row` of the sequence on.
  CUTE_DEVICE static RegisterStatistics<ScoreGrid> load_statistics(BackwardParams const& params,
                                                                   Work const& work, int row) {
    float const* const source = Tiles::statistics(params, work.item.batch, work.item.head, row);
    RegisterStatistics<ScoreGrid> statistics;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      statistics.rows[half] = QuadStatistics::load(source, ScoreGrid::element_row(2 * half, 0));
    }
    return statistics;
  }

  template <Contiguous kOrder>
  CUTE_DEVICE static DescriptorOperand<Panel, kOrder> operand(uint32_t panel) {
    return DescriptorOperand<Panel, kOrder>(descriptor_address(panel));
  }

  // Waits for the panels of a block, and zeros their rows from `valid` on, where 0 * NaN would be
  // NaN. All threads of a warpgroup call it.
  template <class Role>
  CUTE_DEVICE static void clear_beyond(Control<Role::kStages>& control, uint32_t tiles,
                                       int warpgroup, PipelineStage<Role::kStages> stage,
                                       int valid) {
    if (valid >= kRows) return;
    CUTE_NO_UNROLL
    for (int panel = 0; panel < Role::kPanels; ++panel) {
      control.panels.wait(stage);
      clear_rows<Panel, kWarpgroupSize>(Role::panel(tiles, stage.index), valid);
      stage.advance();
    }
    fence_tma_store();
    named_barrier_sync(warpgroup_barrier(warpgroup), kWarpgroupSize);
  }

  // The same for a block that both consumers read: the first one zeros its rows. All threads of
  // both call it.
  template <class Role>
  CUTE_DEVICE static void clear_for_both(Control<Role::kStages>& control, uint32_t tiles,
                                         int warpgroup, PipelineStage<Role::kStages> stage,
                                         int valid) {
    if (valid >= kRows) return;
    if (warpgroup == 0) clear_beyond<Role>(control, tiles, warpgroup, stage, valid);
    named_barrier_sync(kConsumerBarrier, kConsumers);
  }

  // The same for this CTA's own tile, whose rows no other warpgroup reads before both pass the
  // barrier.
  template <class Role>
  CUTE_DEVICE static void clear_own_beyond(uint32_t tiles, int valid) {
    clear_rows<typename Role::OwnTile, kWarpgroupSize>(tiles + Role::kOwnOffset, valid);
    fence_tma_store();
    named_barrier_sync(kConsumerBarrier, kConsumers);
  }
};

template <class Config, Owned kOwned>
struct LargeDimBackwardProducer : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Base::kOwnsKeys;
  using Base::kRows;
  using Base::kStatisticsBytes;
  using typename Base::Panel;
  using typename Base::Tiles;
  using typename Base::Work;

  // A tensor, and where the rows of a batch index begin in it.
  struct Source {
    TensorMap const& map;
    int batch;
    int row;
  };

  // Copies the CTA's own rows once, then the panels of each block and the statistics of its rows.
  template <class Role>
  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps,
                              Work const& work,
                              typename Base::template Control<Role::kStages>& control,
                              uint32_t tiles, int rank) {
    if (work.count == 0) return;
    WorkItem const& item = work.item;
    ProblemShape const& shape = params.shape;
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const key_head = kOwnsKeys ? item.head : item.head / shape.group;
    KeyValueSource<Config> const source(params, item.batch, key_head);
    Source const queries = {Role::kIsOut ? maps.out_gradient : maps.query, origin.batch,
                            origin.row};
    Source const keys = {Role::kIsOut ? maps.value : maps.key,
                         source.batch(Role::kIsOut ? params.value : params.key), source.origin.row};
    Source const& own = kOwnsKeys ? keys : queries;
    Source const& others = kOwnsKeys ? queries : keys;
    int const first_column = Base::column_part() * Role::kColumns;

    arrive_and_expect(control.own, Role::kOwnBytes);
    CUTE_NO_UNROLL
    for (int i = 0; i < Role::kOwnBytes / Panel::kBytes; ++i) {
      int const row = work.own_row + (Role::kIsOut ? i / Role::kPanels : rank) * kRows;
      load_box(own.map, control.own, tiles + Role::kOwnOffset + i * Panel::kBytes,
               first_column + i % Role::kPanels * Panel::kColumns, own.row + row, item.head,
               own.batch, CacheHint::EVICT_FIRST);
    }
    PipelineStage<Role::kStages> stage;
    int turn = 0;
    CUTE_NO_UNROLL
    for (int block = 0; block < work.count; ++block) {
      ScoreTilePosition const at = work.position(shape, block, 0);
      int const row = others.row + (kOwnsKeys ? at.row : at.column);
      CUTE_NO_UNROLL
      for (int panel = 0; panel < Role::kPanels; ++panel) {
        bool const has_statistics = kOwnsKeys && panel == 0;
        uint64_t& arrived =
            control.panels.acquire(stage, Panel::kBytes + (has_statistics ? kStatisticsBytes : 0));
        if (turn == rank || Role::kSharers == 1) {
          load_panel<Role::kSharers>(others.map, arrived, Role::panel(tiles, stage.index),
                                     first_column + panel * Panel::kColumns, row,
                                     kOwnsKeys ? at.head : key_head, others.batch);
        }
        if (has_statistics) {
          load_tma(Tiles::statistics(params, at.batch, at.head, at.row), arrived,
                   Base::statistics(tiles, block), kStatisticsBytes);
        }
        stage.advance();
        turn ^= 1;
      }
    }
  }

 private:
  // Copies a panel to the first kSharers CTAs of the group, or to this one.
  template <int kSharers>
  CUTE_DEVICE static void load_panel(TensorMap const& map, uint64_t& arrived, uint32_t target,
                                     int column, int row, int head, int batch) {
    if constexpr (kSharers == 1) {
      load_box(map, arrived, target, column, row, head, batch, CacheHint::EVICT_LAST);
    } else {
      static_assert(kSharers == 2);  // they take turns
      load_cluster_box<kSharers>(map, arrived, target, column, row, head, batch,
                                 CacheHint::EVICT_LAST, Base::cluster_rank_of(0));
    }
  }
};

// The consumers of a CTA that sums a gradient.

// Each consumer computes every second score tile, and half of the columns of the gradient: the even
// or the odd panels, plus half of the last panel if their number is odd.
//
//   consumer 0 | S(0) P(0)        sum(0)  S(2) sum(1) P(2)  sum(2) ...
//   consumer 1 |      S(1) sum(0) P(1)  sum(1)  S(3) sum(2) P(3) ...
//
// Role defines the score product and what is computed from the scores. The left operand of sum(b)
// comes from another CTA. It depends on P(b), which leaves this CTA while the other consumer
// computes its scores.
template <class Config, Owned kOwned, template <class, Owned> class Role_>
struct LargeDimSummingConsumer : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Role = Role_<Config, kOwned>;
  using RoleTiles = typename Role::Tiles;
  using Base::kConsumerBarrier;
  using Base::kConsumers;
  using Base::kOwnsKeys;
  using Base::kRows;
  using Base::kWarpgroups;
  using typename Base::Element;
  using typename Base::Operand;
  using typename Base::Panel;
  using typename Base::ScoreGrid;
  using typename Base::Work;
  using Control = typename Base::template Control<RoleTiles::kStages>;
  using Stage = PipelineStage<RoleTiles::kStages>;
  static constexpr int kPanels = RoleTiles::kPanels;
  static constexpr int kSteps = kRows / 16;
  static_assert(RoleTiles::kStages >= 2 * kPanels);  // consumer 1 computes scores ahead of sums

  using PanelGrid = WarpgroupGrid<kRows, Panel::kColumns>;
  using HalfGrid = WarpGrid<kRows, Panel::kColumns, kConsumers / kWarpSize, 16>;
  static constexpr int kWholePanels = kPanels / kWarpgroups;  // per consumer
  static constexpr bool kHasHalf = kPanels % kWarpgroups != 0;
  static constexpr int kParts = kWholePanels + kHasHalf;

  struct Sums {
    decltype(PanelGrid::make_accumulators()) panels[kWholePanels];  // (4, 1, MMA_N)
    decltype(HalfGrid::make_accumulators()) half;                   // (4, 1, MMA_N)

    // Calls use(part, index) for every part. Hazard: the indices must be constants, or ptxas keeps
    // the sums in local memory.
    template <class Use>
    CUTE_DEVICE void for_each(Use use) {
      cute::for_each(cute::make_seq<kWholePanels>{}, [&](auto part) { use(panels[part], part); });
      if constexpr (kHasHalf) use(half, cute::Int<kWholePanels>{});
    }

    CUTE_DEVICE void fence() {
      for_each([](auto& part, auto) { fence_accumulators(part); });
    }
  };

  // Places in the ring and in the sequence of messages.
  struct ConsumerState {
    int warpgroup;
    Stage scores;   // the first panel of the next tile of scores
    Stage sum;      // the first panel of the next sum
    int block = 0;  // of the next sum
  };

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps,
                              Work const& work, Control& control, uint32_t tiles, int rank) {
    ConsumerState at;
    at.warpgroup = warpgroup_index();
    Role const role(params, work, control, tiles, rank);
    Sums sums;
    sums.for_each([](auto& part, auto) { cute::clear(part); });
    if (work.count > 0) {
      wait_barrier(control.own, 0);
      random_sleep();
      if constexpr (kOwnsKeys) {
        int const valid = work.key_length - work.own_row;
        if (reads_beyond<Config>(work.key_length, work.own_row + kRows, params.shape.key_length)) {
          Base::template clear_own_beyond<RoleTiles>(tiles, valid);
        }
      }
      compute(role, work, control, tiles, at, sums);
    }
    // This CTA's barriers must stay alive until the last message has been acknowledged.
    arrive_cluster();
    store(role, params, maps, work, tiles, at.warpgroup, sums);
    wait_cluster();
  }

 private:
  CUTE_DEVICE static void compute(Role const& role, Work const& work, Control& control,
                                  uint32_t tiles, ConsumerState& at, Sums& sums) {
    Base::begin_score_sums(at.warpgroup);
    // Both consumers add up each block. The first one must therefore be clear for both; the others
    // are, because the message of a block comes after the release of the one before, and its owner
    // releases that after it has cleared the block.
    Base::template clear_for_both<RoleTiles>(control, tiles, at.warpgroup, at.scores,
                                             role.valid_rows(0));
    int block = at.warpgroup;
    if (block == 0) {
      add_own_block<false>(role, control, tiles, at, block, sums);
      add_sum(role, control, tiles, at, sums);
      block += kWarpgroups;
    } else {
      at.scores.advance(kPanels);
    }
    CUTE_NO_UNROLL
    for (; block < work.count; block += kWarpgroups) {
      Base::template clear_beyond<RoleTiles>(control, tiles, at.warpgroup, at.scores,
                                             role.valid_rows(block));
      add_own_block<true>(role, control, tiles, at, block, sums);
      add_sum(role, control, tiles, at, sums);
    }
    if (at.block < work.count) add_sum(role, control, tiles, at, sums);
  }

  // Computes the scores of a block, and what follows from them. With kFollows the sum of the
  // previous block runs in the meantime.
  //
  // Hazard: kFollows must be a compile-time constant, because ptxas serializes products if a branch
  // separates them from the wait for other products.
  template <bool kFollows>
  CUTE_DEVICE static void add_own_block(Role const& role, Control& control, uint32_t tiles,
                                        ConsumerState& at, int block, Sums& sums) {
    auto scores = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
    multiply_scores(control, tiles, at.scores, scores);
    at.scores.advance(kPanels);
    at.scores.advance(kPanels);  // skips those of the other consumer
    if constexpr (kFollows) begin_sum(role, control, tiles, at, sums);
    Base::template add_other_columns<RoleTiles>(control, tiles, role.rank, at.warpgroup, scores);
    role.exchange(block, scores);
    if constexpr (kFollows) end_sum(control, at, sums);
  }

  CUTE_DEVICE static void add_sum(Role const& role, Control& control, uint32_t tiles,
                                  ConsumerState& at, Sums& sums) {
    begin_sum(role, control, tiles, at, sums);
    end_sum(control, at, sums);
  }

  // Computes the product of this CTA's own rows and a block, panel by panel as they arrive.
  template <class Scores>
  CUTE_DEVICE static void multiply_scores(Control& control, uint32_t tiles, Stage stage,
                                          Scores& scores) {
    fence_accumulators(scores);
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      control.panels.wait(stage);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      warpgroup_gemm<Element, Panel::kColumns / 16>(
          scores,
          Base::template operand<Contiguous::k>(tiles + RoleTiles::kOwnOffset +
                                                panel * Panel::kBytes),
          Base::template operand<Contiguous::k>(RoleTiles::panel(tiles, stage.index)), panel > 0);
      stage.advance();
    }
    commit_products();
    wait_products<0>();
    fence_accumulators(scores);
  }

  // Starts the sum of the next block: each panel is a group of products, so that panels are
  // released one after the other.
  CUTE_DEVICE static void begin_sum(Role const& role, Control& control, uint32_t tiles,
                                    ConsumerState& at, Sums& sums) {
    Base::wait_message(control, Role::link(role.rank), at.block & 1);
    Operand const left = Base::load_message(tiles, 0);
    uint32_t rights[kParts];
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      bool const is_half = part == kWholePanels;
      Stage stage = at.sum;
      stage.advance(kWarpgroups * part + (is_half ? 0 : at.warpgroup));
      control.panels.wait(stage);
      rights[part] = RoleTiles::panel(tiles, stage.index) +
                     (is_half ? at.warpgroup * Panel::kRowBytes / kWarpgroups : 0);
    }
    sums.fence();
    begin_products();
    sums.for_each([&](auto& part, auto index) {
      warpgroup_gemm<Element, kSteps>(part, left,
                                      Base::template operand<Contiguous::outer>(rights[index]));
      commit_products();
    });
    Base::release_message(control, Role::link(role.rank), Role::peer(role.rank));
  }

  // Waits for the sum, and releases the panels of the block. Both consumers release every panel,
  // including those of the other one, as their own panels finish.
  CUTE_DEVICE static void end_sum(Control& control, ConsumerState& at, Sums& sums) {
    cute::for_each(cute::make_seq<kParts>{}, [&](auto part) {
      wait_products<kParts - 1 - part>();
      constexpr int kCount = part < kWholePanels ? kWarpgroups : 1;
      Stage stage = at.sum;
      stage.advance(kWarpgroups * part);
      Base::template release_panels<RoleTiles, kCount>(control, stage);
    });
    sums.fence();
    at.sum.advance(kPanels);
    ++at.block;
  }

  // Stores the gradient through the buffer of the CTA's own rows, which no product reads any more.
  CUTE_DEVICE static void store(Role const& role, BackwardParams const& params,
                                BackwardMaps const& maps, Work const& work, uint32_t tiles,
                                int warpgroup, Sums& sums) {
    if constexpr (Role::kStores) {
      int const bound = role.row_bound();
      float const scale = role.sum_scale();
      sums.for_each([&](auto& part, auto) {
        CUTE_UNROLL
        for (int i = 0; i < cute::size(part); ++i) {
          bool const beyond = !kOwnsKeys && PanelGrid::element_row(i % 4, 0) >= bound;
          part(i) = beyond ? 0.0f : part(i) * scale;
        }
      });
      uint32_t const own = tiles + RoleTiles::kOwnOffset;
      named_barrier_sync(kConsumerBarrier, kConsumers);
      sums.for_each([&](auto const& part, auto index) {
        constexpr bool kIsHalf = index == kWholePanels;
        using Grid = cute::conditional_t<kIsHalf, HalfGrid, PanelGrid>;
        int const panel = kWarpgroups * index + (kIsHalf ? 0 : warpgroup);
        store_accumulators<Element, Panel, Grid>(own + panel * Panel::kBytes, part);
      });
      fence_tma_store();
      named_barrier_sync(kConsumerBarrier, kConsumers);
      if (warpgroup == 0) role.store(maps, own);
    }
    role.clear_gap();
  }
};

// A role of LargeDimSummingConsumer: the CTAs that compute S. They send P to the last CTA of the
// cluster and receive dS for their sum: dq = dS K, or dk = dS^T Q.
template <class Config, Owned kOwned>
struct LargeDimScoreRole : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Base::kConsumers;
  using Base::kOutRank;
  using Base::kOwnsKeys;
  using Base::kProbabilityTiles;
  using Base::kRows;
  using typename Base::Element;
  using typename Base::Links;
  using typename Base::Mask;
  using typename Base::Modifiers;
  using typename Base::Operand;
  using typename Base::ScoreGrid;
  using typename Base::Work;
  using BackwardTiles = typename Base::Tiles;
  using Tiles = typename Base::ScoreTiles;
  using Statistics = RegisterStatistics<ScoreGrid>;
  static constexpr bool kStores = kOwnsKeys ? Config::kKeyGradient : Config::kQueryGradient;

  BackwardParams const& params;
  Work const& work;
  Links& links;
  uint32_t tiles;
  int rank;
  Mask mask;
  Statistics statistics;  // of this CTA's own rows, if they are queries

  CUTE_DEVICE LargeDimScoreRole(BackwardParams const& params, Work const& work, Links& links,
                                uint32_t tiles, int rank)
      : params(params),
        work(work),
        links(links),
        tiles(tiles),
        rank(rank),
        mask(params.mask, params.shape, work.item.batch) {
    if constexpr (!kOwnsKeys) {
      if (work.count > 0) statistics = Base::load_statistics(params, work, own_row());
    }
  }

  CUTE_DEVICE static int link(int rank) { return rank; }
  CUTE_DEVICE static int peer(int) { return kOutRank; }

  // The first of this CTA's own rows, which are consecutive over the CTAs of a cluster.
  CUTE_DEVICE int own_row() const { return work.own_row + rank * kRows; }

  CUTE_DEVICE ScoreTilePosition position(int block) const {
    return work.position(params.shape, block, rank * kRows);
  }
  CUTE_DEVICE int valid_rows(int block) const {
    return Base::valid_rows(params.shape, work, position(block));
  }

  // Computes P from S and sends it.
  template <class Scores>
  CUTE_DEVICE void exchange(int block, Scores& scores) const {
    Modifiers const modifiers = {{params.scale}, {params}, {}};
    ScoreTilePosition const at = position(block);
    auto scaled = ScoreGrid::make_accumulators();  // (4, 1, MMA_N), for the soft cap
    modifiers.recompute(scores, scaled, at);
    float const softmax_scale = params.scale.softmax_scale;
    Operand messages[kProbabilityTiles];
    if constexpr (kOwnsKeys) {
      mask.template apply_transposed<kRows, kRows>(scores, params, at);
      exponentiate_transposed(block, softmax_scale, scaled, scores, messages);
    } else {
      mask.template apply<kRows, kRows>(scores, params, at);
      statistics.template exponentiate_and_differentiate<Modifiers>(softmax_scale, scaled, scores);
      messages[0] = as_left_operand<Element>(scores);
    }
    Base::acquire_message(links, rank, block & 1);
    Base::send_message(links, tiles, rank, kOutRank, rank * Base::kProbabilityBytes, messages);
  }

  CUTE_DEVICE float sum_scale() const { return params.scale.gradient_scale; }

  // The number of this CTA's rows of the gradient that exist; for queries, those within the length.
  // Others get 0.
  CUTE_DEVICE int row_bound() const { return work.query_length - own_row(); }

  // Stores the gradient from a tile in shared memory. One warpgroup calls it.
  CUTE_DEVICE void store(BackwardMaps const& maps, uint32_t tile) const {
    ProblemShape const& shape = params.shape;
    int const length = kOwnsKeys ? (Config::kPacked ? work.key_length : shape.key_length)
                                 : (Config::kPacked ? work.query_length : shape.query_length);
    Origin const origin = kOwnsKeys ? key_origin<Config>(shape, work.item.batch)
                                    : query_origin<Config>(shape, work.item.batch);
    store_part<Config, typename Tiles::OwnTile>(
        kOwnsKeys ? maps.key_gradient : maps.query_gradient,
        kOwnsKeys ? params.key_gradient : params.query_gradient, tile, 0, origin.row + own_row(),
        length - own_row(), work.item.head, origin.batch, shape.head_dim,
        Base::column_part() * Tiles::kColumns);
    wait_tma_stores();
  }

  // Writes zeros to the gradients of tokens that belong to no sequence.
  CUTE_DEVICE void clear_gap() const {
    if constexpr (Config::kPacked) {
      ProblemShape const& shape = params.shape;
      if (Base::column_part() > 0) return;
      if constexpr (kOwnsKeys) {
        GridTiles<Config, GridRows::keys, kRows> const grid = {shape};
        clear_key_gap<Config, kConsumers>(params, work.item, work.key_length,
                                          grid.of_batch_index(work.item.batch));
      } else if (rank == 0) {
        GridTiles<Config, GridRows::queries, Config::kTileQuery> const grid = {shape};
        clear_query_gap<Config, kConsumers>(params, work.item, work.query_length,
                                            grid.of_batch_index(work.item.batch));
      }
    }
  }

 private:
  // P^T from S^T, and P^T times the derivative of the modifiers, if it is not constant.
  template <class Scores>
  CUTE_DEVICE void exponentiate_transposed(int block, float softmax_scale, Scores const& scaled,
                                           Scores const& scores,
                                           Operand (&messages)[kProbabilityTiles]) const {
    int const thread = thread_index();
    uint32_t const statistics = Base::statistics(tiles, block);
    CUTE_UNROLL
    for (int pair = 0; pair < kRows / 16; ++pair) {
      auto const logsumexps = QuadStatistics::load_logsumexps<ScoreGrid>(statistics, pair, thread);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const n = 2 * pair + i / 2;
        float p[2];
        float differentiated[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          int const element = i % 2 * 2 + j;
          float const score = scores(element, 0, n);
          p[j] = probability(score, softmax_scale, logsumexps.of[i / 2 * 2 + j]);
          differentiated[j] = Modifiers::backward(
              p[j], Modifiers::input_of_derivative(score, scaled(element, 0, n)));
        }
        messages[0].fragments[0][pair][i] = pack<Element>(p[0], p[1]);
        if constexpr (kProbabilityTiles == 2) {
          messages[1].fragments[0][pair][i] = pack<Element>(differentiated[0], differentiated[1]);
        }
      }
    }
  }
};

// The last CTA of a cluster computes dP, receives P, and sends dS. If the cluster owns keys it also
// sums dv = P^T dO: then this is the role of LargeDimSummingConsumer.
template <class Config, Owned kOwned>
struct LargeDimOutRole : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Base::kOwnsKeys;
  using Base::kProbabilityTiles;
  using Base::kRows;
  using Base::kTileBytes;
  using typename Base::Element;
  using typename Base::Links;
  using typename Base::Operand;
  using typename Base::ScoreGrid;
  using typename Base::Work;
  using Tiles = typename Base::OutTiles;
  static_assert(kOwnsKeys);
  static constexpr bool kStores = Config::kValueGradient;

  BackwardParams const& params;
  Work const& work;
  Links& links;
  uint32_t tiles;
  int rank;

  CUTE_DEVICE LargeDimOutRole(BackwardParams const& params, Work const& work, Links& links,
                              uint32_t tiles, int rank)
      : params(params), work(work), links(links), tiles(tiles), rank(rank) {}

  CUTE_DEVICE static int link(int) { return 0; }
  CUTE_DEVICE static int peer(int) { return 0; }

  CUTE_DEVICE int valid_rows(int block) const {
    return Base::valid_rows(params.shape, work, work.position(params.shape, block, 0));
  }

  // Computes dS^T from P^T and dP^T and sends it.
  template <class Scores>
  CUTE_DEVICE void exchange(int block, Scores& score_gradient) const {
    Base::wait_message(links, 0, block & 1);
    Operand const probabilities = Base::load_message(tiles, (kProbabilityTiles - 1) * kTileBytes);
    uint32_t const statistics = Base::statistics(tiles, block);
    int const thread = thread_index();
    Operand message[1];
    CUTE_UNROLL
    for (int pair = 0; pair < kRows / 16; ++pair) {
      auto const deltas = QuadStatistics::load_deltas<ScoreGrid>(statistics, pair, thread);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float gradient[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          float const p = unpack<Element>(probabilities.fragments[0][pair][i], j);
          gradient[j] =
              softmax_gradient(p, score_gradient(i % 2 * 2 + j, 0, 2 * pair + i / 2),
                               probability_scale<Config>(params), deltas.of[i / 2 * 2 + j]);
        }
        message[0].fragments[0][pair][i] = pack<Element>(gradient[0], gradient[1]);
      }
    }
    Base::acquire_message(links, 0, block & 1);
    Base::send_message(links, tiles, 0, 0, 0, message);
  }

  CUTE_DEVICE float sum_scale() const { return probability_scale<Config>(params); }
  CUTE_DEVICE int row_bound() const { return kRows; }

  CUTE_DEVICE void store(BackwardMaps const& maps, uint32_t tile) const {
    ProblemShape const& shape = params.shape;
    int const length = Config::kPacked ? work.key_length : shape.key_length;
    Origin const origin = key_origin<Config>(shape, work.item.batch);
    store_part<Config, typename Tiles::OwnTile>(maps.value_gradient, params.value_gradient, tile, 0,
                                                origin.row + work.own_row, length - work.own_row,
                                                work.item.head, origin.batch, shape.value_dim,
                                                Base::column_part() * Tiles::kColumns);
    wait_tma_stores();
  }

  CUTE_DEVICE void clear_gap() const {}
};

// The consumers of this CTA if the cluster owns queries: each computes dS of the rows of one of the
// other CTAs, and sums nothing. So its rows of dO fit in registers, which halves the reads of
// shared memory. The consumers multiply in turn: one computes dS while the other keeps the tensor
// cores busy.
template <class Config>
struct LargeDimOutConsumer : LargeDimCluster<Config, Owned::queries> {
  using Base = LargeDimCluster<Config, Owned::queries>;
  using Base::kOutRank;
  using Base::kPingPongBarrier;
  using Base::kProbabilityBytes;
  using Base::kRows;
  using Base::kWarpgroups;
  using typename Base::Element;
  using typename Base::Operand;
  using typename Base::OutTiles;
  using typename Base::Panel;
  using typename Base::ScoreGrid;
  using typename Base::Work;
  using Control = typename Base::template Control<OutTiles::kStages>;
  using Statistics = RegisterStatistics<ScoreGrid>;
  using PingPong = PingPongBarrier<true, kWarpgroups, kPingPongBarrier>;
  static constexpr int kPanels = OutTiles::kPanels;
  static constexpr int kPanelSteps = Panel::kColumns / 16;
  using OutRows = RegisterOperand<1, kPanels * kPanelSteps, sizeof(Element)>;

  CUTE_DEVICE static void run(BackwardParams const& params, Work const& work, Control& control,
                              uint32_t tiles) {
    int const warpgroup = warpgroup_index();
    if (work.count > 0) {
      Statistics const statistics =
          Base::load_statistics(params, work, work.own_row + warpgroup * kRows);
      wait_barrier(control.own, 0);
      random_sleep();
      OutRows const rows = load_operand<typename OutTiles::OwnTile, ScoreGrid>(
          tiles + OutTiles::kOwnOffset + warpgroup * OutTiles::OwnTile::kBytes);
      PingPong::begin(warpgroup);
      Base::begin_score_sums(warpgroup);
      PipelineStage<OutTiles::kStages> stage;
      CUTE_NO_UNROLL
      for (int block = 0; block < work.count; ++block) {
        Base::template clear_for_both<OutTiles>(
            control, tiles, warpgroup, stage,
            Base::valid_rows(params.shape, work, work.position(params.shape, block, 0)));
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        multiply(control, tiles, warpgroup, rows, stage, score_gradient);
        Base::template add_other_columns<OutTiles>(control, tiles, kOutRank, warpgroup,
                                                   score_gradient);
        exchange(params, control, tiles, warpgroup, block, statistics, score_gradient);
      }
    }
    // This CTA's barriers must stay alive until the last message has been acknowledged.
    arrive_cluster();
    wait_cluster();
  }

 private:
  // dP = dO V^T, panel by panel. Each panel is released once its product is done, while that of the
  // next one runs.
  template <class Scores>
  CUTE_DEVICE static void multiply(Control& control, uint32_t tiles, int warpgroup,
                                   OutRows const& rows, PipelineStage<OutTiles::kStages>& stage,
                                   Scores& scores) {
    PingPong::wait(warpgroup);
    fence_accumulators(scores);
    auto before = stage;
    CUTE_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      control.panels.wait(stage);
      begin_products();  // after each wait, else ptxas (CUDA 13.0) injects it (C7519)
      auto const right = Base::template operand<Contiguous::k>(OutTiles::panel(tiles, stage.index));
      CUTE_UNROLL
      for (int step = 0; step < kPanelSteps; ++step) {
        wgmma<Element, decltype(right)::kMajor>(scores,
                                                rows.fragments[0][panel * kPanelSteps + step],
                                                right.at(step), panel > 0 || step > 0);
      }
      commit_products();
      if (panel > 0) {
        wait_products<1>();
        Base::template release_panels<OutTiles, 1>(control, before);
        before.advance();
      }
      stage.advance();
    }
    PingPong::pass(warpgroup);
    wait_products<0>();
    fence_accumulators(scores);
    Base::template release_panels<OutTiles, 1>(control, before);
  }

  // Computes dS from P, which contains the derivative of the modifiers, and from dP, and sends it.
  template <class Scores>
  CUTE_DEVICE static void exchange(BackwardParams const& params, Control& control, uint32_t tiles,
                                   int link, int block, Statistics const& statistics,
                                   Scores const& score_gradient) {
    Base::wait_message(control, link, block & 1);
    Operand const probabilities = Base::load_message(tiles, link * kProbabilityBytes);
    Operand message[1];
    CUTE_UNROLL
    for (int pair = 0; pair < kRows / 16; ++pair) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float gradient[2];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          float const p = unpack<Element>(probabilities.fragments[0][pair][i], j);
          gradient[j] =
              softmax_gradient(p, score_gradient(i % 2 * 2 + j, 0, 2 * pair + i / 2),
                               probability_scale<Config>(params), statistics.delta(i % 2));
        }
        message[0].fragments[0][pair][i] = pack<Element>(gradient[0], gradient[1]);
      }
    }
    Base::acquire_message(control, link, block & 1);
    Base::send_message(control, tiles, link, link, 0, message);
    Base::release_message(control, link, link);
  }
};

// Computes the statistics of the rows; there are no sums to zero.
template <class Config>
struct FmhaBackwardLargeDimSm90Preprocess
    : FmhaBackwardPreprocess<WithoutQueryGradient<Config>, BackwardTilesTwoKernel<Config>> {};

// The common part of both kernels.
template <class Config, Owned kOwned>
struct LargeDimBackwardKernel : LargeDimCluster<Config, kOwned> {
  using Base = LargeDimCluster<Config, kOwned>;
  using Base::kConsumerRegisters;
  using Base::kConsumers;
  using Base::kControlOffset;
  using Base::kOutRank;
  using Base::kOwnsKeys;
  using Base::kProducerRegisters;
  using typename Base::OutTiles;
  using typename Base::ScoreTiles;
  using typename Base::Work;

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    int const rank = Base::group_rank();
    if (rank == kOutRank) {
      run<OutTiles>(params, maps, rank);
    } else {
      run<ScoreTiles>(params, maps, rank);
    }
  }

 private:
  template <class Role>
  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps, int rank) {
    using Control = typename Base::template Control<Role::kStages>;
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) Base::template init<Role>(control, rank);
    // Makes the barriers of each CTA visible to the threads of all of them.
    arrive_cluster();
    wait_cluster();
    Work const work(params);
    if (threadIdx.x >= kConsumers) {
      lower_registers<kProducerRegisters>();
      if (threadIdx.x == kConsumers) {
        LargeDimBackwardProducer<Config, kOwned>::template run<Role>(params, maps, work, control,
                                                                     tiles, rank);
      }
      return;
    }
    raise_registers<kConsumerRegisters>();
    if constexpr (!Role::kIsOut) {
      LargeDimSummingConsumer<Config, kOwned, LargeDimScoreRole>::run(params, maps, work, control,
                                                                      tiles, rank);
    } else if constexpr (kOwnsKeys) {
      LargeDimSummingConsumer<Config, kOwned, LargeDimOutRole>::run(params, maps, work, control,
                                                                    tiles, rank);
    } else {
      LargeDimOutConsumer<Config>::run(params, work, control, tiles);
    }
  }
};

// The entry points that the generated source instantiates.
template <class Config>
struct FmhaBackwardLargeDimSm90Dq : LargeDimBackwardKernel<Config, Owned::queries> {};

template <class Config>
struct FmhaBackwardLargeDimSm90Dkdv : LargeDimBackwardKernel<Config, Owned::keys> {};

}  // namespace memeff
