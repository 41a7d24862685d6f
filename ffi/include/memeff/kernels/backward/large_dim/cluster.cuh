// Shared by the producer and the consumers of fmha_bwd_large_dim_sm90.cuh: the roles of the CTAs,
// their shared memory, the score tiles of a cluster, and the messages between its CTAs.
#pragma once

#include <memeff/arch/cluster.cuh>
#include <memeff/collective/sums/column_sum.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/kernels/backward/register_statistics.cuh>
#include <memeff/layout/backward_tiles_two_kernel.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/consumer_turns.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/score/modifiers.cuh>

namespace memeff {

// The rows whose gradients a cluster owns.
enum class Owned { queries, keys };

// The base of all roles. The first CTAs of a cluster compute S, the last one computes dP. With
// kColumnCtas > 1 a cluster has as many such groups of CTAs. They divide the columns of all
// operands, and the same role of both groups adds up its scores (collective/sums/column_sum.cuh).
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
  static constexpr int kTurnBarrier = 2 + kWarpgroups;
  using SumTurns = ConsumerTurns<kDividesColumns, kWarpgroups, kTurnBarrier + kWarpgroups>;

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
    if constexpr (kDividesColumns) SumTurns::begin(warpgroup);
  }

  // Adds the scores of the other columns, whose CTA computes the same tile. The consumers call it
  // in turn.
  template <class Role, class Scores>
  CUTE_DEVICE static void add_other_columns(Links& links, uint32_t tiles, int rank, int warpgroup,
                                            Scores& scores) {
    if constexpr (kDividesColumns) {
      int const other = (1 - column_part()) * kGroupCtas + rank;
      SumTurns::take(warpgroup);
      ScoreSum::add(links, tiles + Role::kScoreSumOffset, other, warpgroup, scores);
      SumTurns::pass(warpgroup);
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

  // The same for this CTA's own tile, whose rows no other warpgroup reads before both pass the
  // barrier.
  template <class Role>
  CUTE_DEVICE static void clear_own_beyond(uint32_t tiles, int valid) {
    clear_rows<typename Role::OwnTile, kWarpgroupSize>(tiles + Role::kOwnOffset, valid);
    fence_tma_store();
    named_barrier_sync(kConsumerBarrier, kConsumers);
  }
};

}  // namespace memeff
