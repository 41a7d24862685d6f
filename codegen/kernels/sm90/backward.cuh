// Attention backward for Hopper: TMA, wgmma and warp specialization, with the keys split over the
// grid.
//
// As in sm80/backward.cuh one CTA owns a KV block of one key head, keeps dk and dv in registers and
// adds its part of dq to f32 sums in global memory. The scores are computed transposed:
//
//   S^T = K Q^T    dP^T = V dO^T    P^T = exp2(S^T - lse)    dS^T = P^T (dP^T - delta)
//   dV += P^T dO    dQ = dS K    dK += dS^T Q
//
// Each of the two consumers owns 64 keys, so P^T and dS^T stay in its registers as operands of dV
// and dK. Only dQ, which sums over keys, reads dS from shared memory. dS has two buffers, so one
// barrier between the consumers per Q block is enough.
//
// With Config::kSplitQ several CTAs may divide the Q blocks of one KV block (schedule/split_q.cuh).
#pragma once

#include <cute/algorithm/clear.hpp>

#include <kernels/common/dq_sums.cuh>
#include <kernels/common/postprocess.cuh>
#include <kernels/common/preprocess.cuh>
#include <kernels/sm90/backward_tiles.cuh>
#include <kernels/sm90/bias.cuh>
#include <kernels/sm90/dbias.cuh>
#include <kernels/sm90/delta.cuh>
#include <memeff/arch/thread.cuh>
#include <memeff/arch/tma.cuh>
#include <memeff/collective/probability_modifiers.cuh>
#include <memeff/collective/softmax/linear_exponents.cuh>
#include <memeff/collective/softmax/online.cuh>
#include <memeff/collective/softmax/transposed.cuh>
#include <memeff/collective/warpgroup_gemm.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/warp_grid.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/backward_workspaces.cuh>
#include <memeff/layout/key_value_source.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tma_tile.cuh>
#include <memeff/mask/block_mask.cuh>
#include <memeff/mask/score_mask.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/q_blocks.cuh>
#include <memeff/schedule/split_q.cuh>
#include <memeff/score/function_gradient.cuh>
#include <memeff/score/modifiers.cuh>
#include <memeff/score/probability.cuh>
#include <memeff/score/shared_diagonals.cuh>

namespace memeff {

// The KV blocks of a CTA of the Hopper backward. Each thread asks for them by itself: an item that
// another thread handed out would not be uniform for ptxas, which then keeps all addresses of the
// main loop in vector registers and spills.

// Every CTA has the same number of KV blocks, one in each round of the grid, for masks that give
// every KV block the same work. The CTA is persistent: keys, queries and dO of its next KV block
// arrive during the last products and the epilogue of the previous one.
template <class Config>
class KvBlocksInRounds {
 public:
  // Takes the next KV block, if there is one. The numbers of CTAs and of KV blocks are computed
  // anew in each round. Otherwise ptxas spills them, because the producer has few registers.
  CUTE_DEVICE bool take(BackwardParams const& params, WorkItem& item) {
    ProblemShape const& shape = params.shape;
    unsigned key_length = shape.key_length;
    hide_value(key_length);
    unsigned const tiles = ceil_div(int(key_length), Config::kTileKey);
    unsigned const number = round_ * grid_size() + place();
    if (number >= tiles * unsigned(shape.key_heads) * unsigned(shape.batch)) return false;
    ++round_;
    item = WorkItem::of_block(number, int(tiles), shape.key_heads);
    return true;
  }

  // The buffer of keys and values of the KV block that was taken last.
  template <int kStages>
  CUTE_DEVICE PipelineStage<kStages> key_stage() const {
    static_assert(kStages <= 2);
    unsigned const last = round_ - 1;
    return {int(last % kStages), int(last / kStages % 2)};
  }

 private:
  // The CTA's place in this round. CTAs change places within groups of 16, because lengths may
  // leave some KV blocks of each head without work, and in a grid of 132 each CTA would get the
  // same one of 4 in every round. Its place is not kept, because the producer has few registers.
  CUTE_DEVICE unsigned place() const {
    constexpr unsigned kGroup = 16;
    bool const in_group = blockIdx.x < grid_size() / kGroup * kGroup;
    return in_group ? blockIdx.x ^ round_ % kGroup : blockIdx.x;
  }

  unsigned round_ = 0;
};

// Semaphores (schedule/dq_semaphore.cuh). Consumers neither poll a semaphore nor wait until their
// additions are performed; two threads of the producer's warpgroup do both.
//
// One thread polls the predecessor's semaphore before the additions; if a single thread adds, it
// polls itself. The other publishes this CTA's progress, which stalls it until the additions are
// performed. Additions to a Q block begin only after both threads have arrived, so neither falls
// behind by a phase of the barriers.

// Orders the additions to dq; RegisterDqSumsSm90 and TmaDqSumsSm90 call it.
template <class Config>
struct DqSemaphoreSm90 {
  // In shared memory.
  struct Control {
    Pipeline<1> additions;  // full: additions to a Q block may begin; empty: they are done
    int ticket;
  };

  // Called by one thread, before the first barrier of the CTA. `adders` warps or threads add, and
  // `orderers` threads call order() or publish().
  CUTE_DEVICE static void init(BackwardParams const& params, Control& control, int adders,
                               int orderers) {
    control.ticket = DqSemaphore<Config>::draw(params);
    control.additions.init(adders, orderers);
  }

  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const& control) {
    // The ticket is uniform over the warp; the shuffle makes that visible to the compiler.
    int const ticket = __shfl_sync(0xffffffffu, control.ticket, 0);
    return DqSemaphore<Config>(params, ticket).item(params);
  }

  // Called by the producer's warpgroup; `thread` counts from its first thread.
  CUTE_DEVICE static void order(BackwardParams const& params, Control& control,
                                WorkItem const& item, TileRange const& tiles, int thread) {
    if (thread == kWarpSize) wait(params, control, item, tiles);
    if (thread == 2 * kWarpSize) publish(params, control, item, tiles);
  }

  // Called around the additions of a Q block; end_additions() by whole warps. `parity` alternates
  // from one Q block to the next.
  CUTE_DEVICE static void begin_additions(Control& control, int parity) {
    control.additions.wait({0, parity});
  }
  CUTE_DEVICE static void end_additions(Control& control) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) control.additions.release({});
  }

  // Called by one thread.
  CUTE_DEVICE static void publish(BackwardParams const& params, Control& control,
                                  WorkItem const& item, TileRange const& tiles) {
    DqSemaphore<Config> semaphore(params, control.ticket);
    PipelineStage<1> stage;
    for_each_q_block<Config>(params, item, tiles, [&](int, int, int position) {
      control.additions.acquire(stage);  // the previous Q block has been added
      control.additions.commit(stage);
      semaphore.publish(position);
      stage.advance();
    });
    control.additions.acquire(stage);
    semaphore.publish(kFinished);
  }

 private:
  CUTE_DEVICE static void wait(BackwardParams const& params, Control& control, WorkItem const& item,
                               TileRange const& tiles) {
    DqSemaphore<Config> semaphore(params, control.ticket);
    PipelineStage<1> stage;
    for_each_q_block<Config>(params, item, tiles, [&](int, int, int position) {
      semaphore.wait(position);
      control.additions.acquire(stage);
      control.additions.commit(stage);
      stage.advance();
    });
  }
};

// The same interface for kernels that add in any order: their sums may differ in their last bits
// from run to run.
template <class Config>
struct NoDqSemaphoreSm90 {
  struct Control {};
  CUTE_DEVICE static void init(BackwardParams const&, Control&, int, int) {}
  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const&) {
    return work_item<Config, Heaviest::first, Config::kTileKey>(
        params.shape, params.bias, split_kv_block_index<Config>(params));
  }
  CUTE_DEVICE static void order(BackwardParams const&, Control&, WorkItem const&, TileRange const&,
                                int) {}
  CUTE_DEVICE static void publish(BackwardParams const&, Control&, WorkItem const&,
                                  TileRange const&) {}
  CUTE_DEVICE static void begin_additions(Control&, int) {}
  CUTE_DEVICE static void end_additions(Control&) {}
};

// The kernel uses one of the two.
template <class Config>
using DqOrderSm90 = cute::conditional_t<Config::kDeterministicDq, DqSemaphoreSm90<Config>,
                                        NoDqSemaphoreSm90<Config>>;

// dQ: how CTAs add it to its f32 sums in global memory. Config::kDeterministicDq makes the order of
// the additions deterministic.

// Strategy 1: each consumer adds from its registers. It issues one instruction for every 512 bytes
// and waits until the load/store unit has read the registers.
template <class Config, class Tiles>
struct RegisterDqSumsSm90 {
  using Semaphore = DqOrderSm90<Config>;
  using Control = typename Semaphore::Control;
  static_assert(!Config::kStoresFirstDq);
  static constexpr int kSharedBytes = 0;

  // Called by one thread, before the first barrier of the CTA.
  CUTE_DEVICE static void init(BackwardParams const& params, Control& control, int consumer_warps) {
    Semaphore::init(params, control, consumer_warps, 2);
  }

  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const& control) {
    return Semaphore::item(params, control);
  }

  // Called by the producer's warpgroup; `thread` counts from its first thread.
  CUTE_DEVICE static void produce(BackwardParams const& params, Control& control,
                                  WorkItem const& item, TileRange const& tiles, uint32_t,
                                  int thread, PipelineStage<1>&) {
    Semaphore::order(params, control, item, tiles, thread);
  }

  // Called by the consumers. `parity` alternates from one Q block to the next.
  template <class Accumulators>
  CUTE_DEVICE static void add(BackwardParams const& params, Control& control, int batch, int head,
                              int tile, uint32_t, int parity, Accumulators const& query_gradient) {
    Semaphore::begin_additions(control, parity);
    add_to_dq_sums<Tiles>(params, batch, head, tile, query_gradient);
    Semaphore::end_additions(control);
  }
};

// Strategy 2: the consumers write the dQ of a Q block to shared memory and move on. One thread of
// the producer's warpgroup stores it if it is the first, or adds it to the sums with a single TMA
// reduction. If the sums are deterministic, the same thread polls the predecessor's semaphore, so
// consumers never wait for another CTA. A thread of another warp publishes the CTA's progress,
// because a release takes up to half of the time of a Q block.
template <class Config, class Tiles>
struct TmaDqSumsSm90 {
  static constexpr bool kDeterministicDq = Config::kDeterministicDq;
  static_assert(Config::kStoresFirstDq);
  static constexpr int kSharedBytes = Tiles::kQueryTileFloats * int(sizeof(float));
  using Semaphore = DqOrderSm90<Config>;

  // In shared memory.
  struct Control : Semaphore::Control {
    Pipeline<1> tile;  // full: the dQ of a Q block; empty: the reduction has read it
  };

  CUTE_DEVICE static void init(BackwardParams const& params, Control& control, int consumer_warps) {
    Semaphore::init(params, control, 1, 1);
    control.tile.init(1, consumer_warps);
  }

  CUTE_DEVICE static WorkItem item(BackwardParams const& params, Control const& control) {
    return Semaphore::item(params, control);
  }

  CUTE_DEVICE static void produce(BackwardParams const& params, Control& control,
                                  WorkItem const& item, TileRange const& tiles,
                                  uint32_t shared_tile, int thread, PipelineStage<1>& stage) {
    if (thread == 2 * kWarpSize) Semaphore::publish(params, control, item, tiles);
    if (thread != kWarpSize) return;
    Order order(params, control, item);
    for_each_q_block<Config>(params, item, tiles, [&](int head, int tile, int position) {
      long long const tile_index = Tiles::tile_index(params, item.batch, head, tile);
      float* const sums = params.query_gradient_sum + tile_index * Tiles::kQueryTileFloats;
      FirstDqStore first = order.begin(position, tile_index, stage.parity);
      control.tile.wait(stage);
      if (first.stores()) {
        store_tma(sums, shared_tile, kSharedBytes);
      } else {
        reduce_add_tma(sums, shared_tile, kSharedBytes);
      }
      commit_tma_stores();
      wait_tma_stores();
      control.tile.release(stage);
      first.publish();
      order.end();
      stage.advance();
    });
    order.finish();
  }

  template <class Accumulators>
  CUTE_DEVICE static void add(BackwardParams const&, Control& control, int, int, int,
                              uint32_t shared_tile, int parity,
                              Accumulators const& query_gradient) {
    PipelineStage<1> const stage = {0, parity};
    control.tile.acquire(stage);
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(query_gradient); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(query_gradient); ++n) {
        int const block = m * int(cute::size<2>(query_gradient)) + n;
        // In the order of Tiles::Sums.
        store_shared_vector(shared_tile + threadIdx.x * 16 + block * (Tiles::kThreads * 16),
                            query_gradient(0, m, n), query_gradient(1, m, n),
                            query_gradient(2, m, n), query_gradient(3, m, n));
      }
    }
    fence_tma_store();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) control.tile.commit(stage);
  }

 private:
  // The one thread adds in a fixed order. `position` is what for_each_q_block() passes.
  struct FixedOrder {
    BackwardParams const& params;
    Control& control;
    DqSemaphore<Config> semaphore;

    CUTE_DEVICE FixedOrder(BackwardParams const& params, Control& control, WorkItem const&)
        : params(params), control(control), semaphore(params, control.ticket) {}
    CUTE_DEVICE FirstDqStore begin(int position, long long tile_index, int parity) {
      FirstDqStore first = FirstDqStore::read(params, tile_index);
      semaphore.wait(position);
      first.update();
      Semaphore::begin_additions(control, parity);
      return first;
    }
    CUTE_DEVICE void end() {
      wait_tma_stores_performed();
      control.additions.release({});
    }
    CUTE_DEVICE void finish() {}
  };
  // The same interface for additions in any order.
  struct AnyOrder {
    BackwardParams const& params;
    WorkItem const& item;

    CUTE_DEVICE AnyOrder(BackwardParams const& params, Control const&, WorkItem const& item)
        : params(params), item(item) {}
    CUTE_DEVICE FirstDqStore begin(int, long long tile_index, int) {
      return FirstDqStore::claim(params, tile_index);
    }
    CUTE_DEVICE void end() {}
    CUTE_DEVICE void finish() {
      if constexpr (Config::kCountsKvBlocks) {
        wait_tma_stores_performed();
        FinishedDq<Config>{params}.add_kv_block(item);
      }
    }
  };
  using Order = cute::conditional_t<kDeterministicDq, FixedOrder, AnyOrder>;
};

// Computes the modified P^T, and dS^T: the gradient of Q K^T before the user's scale. Rows of the
// accumulators are keys, columns are queries. Both are packed block by block, which frees the
// accumulators. Consumers call it once per Q block.
template <class Config, class Modifiers, class BiasWriter, class Grid, class Kept, class Scores,
          class Operand, class FunctionGradient, class DeltaReader>
CUTE_DEVICE void differentiate_transposed(
    BackwardParams const& params, DeltaReader const& delta_reader,
    ScoreTilePosition const& position, Kept const& kept_blocks, Scores const& scaled,
    Scores const& scores, Scores const& score_gradient, Operand& probabilities,
    Operand& left_gradient, typename BiasWriter::Sums& bias_sums,
    FunctionGradient function_gradient, typename FunctionGradient::Sums& function_sums) {
  using Element = typename Config::Element;
  BiasWriter const bias_gradient(params, position);
  // Handles sixteen queries and the sixteen keys of this warp.
  auto block = [&](int, int row_block, auto const& keep) {
    auto const deltas = delta_reader.pair(row_block);
    CUTE_UNROLL
    for (int chunk = 0; chunk < 2; ++chunk) {
      int const n = 2 * row_block + chunk;
      float chunk_gradient[4];  // of the modified scores
      float chunk_scaled[4];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float kept[2];
        float gradient[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const element = 2 * half + i;
          float const p = scores(element, 0, n);
          float const kept_gradient = keep.select(score_gradient(element, 0, n), chunk, half, i);
          gradient[i] = softmax_gradient(p, kept_gradient, probability_scale<Config>(params),
                                         deltas.of[2 * chunk + i]);
          kept[i] = keep.select(p, chunk, half, i);
        }
        bias_gradient.pair(bias_sums, n, half, gradient);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int const element = 2 * half + i;
          chunk_gradient[element] = gradient[i];
          chunk_scaled[element] = scaled(element, 0, n);
          gradient[i] = Modifiers::backward(gradient[i], chunk_scaled[element]);
        }
        probabilities.fragments[0][row_block][2 * chunk + half] = pack<Element>(kept[0], kept[1]);
        if constexpr (!Modifiers::kKeepsScores) {
          left_gradient.fragments[0][row_block][2 * chunk + half] =
              pack<Element>(gradient[0], gradient[1]);
        }
      }
      function_gradient.chunk(function_sums, 0, n, chunk_gradient, chunk_scaled);
      if constexpr (Modifiers::kKeepsScores) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          float gradient[2];
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            int const element = 2 * half + i;
            gradient[i] = Modifiers::backward(chunk_gradient[element], chunk_scaled[element]);
          }
          left_gradient.fragments[0][row_block][2 * chunk + half] =
              pack<Element>(gradient[0], gradient[1]);
        }
      }
    }
  };
  CUTE_UNROLL
  for (int n = 0; n < Grid::kColumnBlocks; ++n) block(0, n, kept_blocks.block(0, n));
}

// The work on a KV block: the Q blocks that attend to its keys, for every head of the group.
template <class Config, class Kernel>
struct KvBlockWorkSm90 {
  using Mask = typename Kernel::Mask;
  using Splits = typename Kernel::Splits;
  static constexpr int kTileQuery = Kernel::kTileQuery;
  static constexpr int kTileKey = Kernel::kTileKey;

  WorkItem item;
  int column;
  TileRange tiles;

  CUTE_DEVICE KvBlockWorkSm90(BackwardParams const& params, WorkItem const& item)
      : item(item), column(item.tile * kTileKey) {
    ProblemShape const& shape = params.shape;
    tiles = Mask(params.mask, shape, item.batch).query_tiles(column, kTileKey, kTileQuery);
    tiles = q_block_range<Config>(params, item, tiles, params.query_tiles);
    static_assert(!Config::kSplitQ || !Config::kBlockMask);  // a split may have no Q block
    tiles = Splits::query_tiles(params, tiles);
  }

  CUTE_DEVICE BlockMaskRow<Config::kBlockMask> row_of_blocks(BackwardParams const& params,
                                                             int head) const {
    return row_of_q_blocks<Config>(params, item, tiles, params.query_tiles, head);
  }

  CUTE_DEVICE auto walk(BackwardParams const& params, int head) const {
    return walk_of_q_blocks<Config>(params, item, tiles, head);
  }

  CUTE_DEVICE ScoreTilePosition position(int head, int tile) const {
    return {item.batch, head, tile * kTileQuery, column};
  }

  // The first head from `head` on that has a Q block, or the end of the group.
  CUTE_DEVICE int head_with_blocks(BackwardParams const& params, int head) const {
    if constexpr (Config::kBlockMask) {
      while (head < (item.head + 1) * params.shape.group && row_of_blocks(params, head).empty()) {
        ++head;
      }
    }
    return head;
  }
};

// Gradients of captured arrays are sums over a Q block, along diagonals or for each query. Each
// warp of the consumers first stores the terms of its 16 keys in a strip of shared memory
// (score/function_gradient.cuh). There are two ways to add the sums to global memory.

// Strategy 1: each warp of the consumers adds its own strips.
template <class Config, class Kernel>
struct ConsumersAddStrips {
  using CapturedSums = typename Kernel::CapturedSums;
  static constexpr int kRingBytes = 0;
  struct Control {};

  // Called by one thread, before the first barrier of the CTA.
  CUTE_DEVICE static void init(Control&) {}

  // Called by one warp of the producer's warpgroup.
  template <class Work>
  CUTE_DEVICE static void produce(BackwardParams const&, Control&, Work const&, uint32_t) {}

  // Called by the consumers for each Q block. `parity` alternates from one Q block to the next.
  CUTE_DEVICE static void add(CapturedSums const& sums, Control&, uint32_t, int, int) {
    sums.add_strip(0);
  }
};

// Strategy 2, for sums along diagonals: a warp of the producer's warpgroup adds up the sums of all
// consumers and of adjacent Q blocks. The consumers neither compute offsets nor issue atomics. If
// no Q block is skipped, each diagonal of a KV block takes one atomic per head.
template <class Config, class Kernel>
struct ProducerAddsStrips {
  using CapturedSums = typename Kernel::CapturedSums;
  using Ring = typename CapturedSums::Ring;
  static constexpr int kReads = CapturedSums::kDiagonalReads;
  static constexpr int kRingBytes = kReads * Ring::kBytes;
  static constexpr int kWarpgroups = Kernel::kConsumers / kWarpgroupSize;

  // In shared memory.
  struct Control {
    Pipeline<1> sums[kWarpgroups];  // full: the sums of a Q block are stored; empty: they were read
  };

  CUTE_DEVICE static void init(Control& control) {
    CUTE_UNROLL
    for (int i = 0; i < kWarpgroups; ++i) {
      control.sums[i].init(1, kWarpgroupSize / kWarpSize);
    }
  }

  template <class Work>
  CUTE_DEVICE static void produce(BackwardParams const& params, Control& control, Work const& work,
                                  uint32_t memory) {
    Ring rings[kReads];
    CUTE_UNROLL
    for (int i = 0; i < kReads; ++i) {
      rings[i].memory = memory + i * Ring::kBytes;
      rings[i].clear();
    }
    PipelineStage<1> stage;
    int const group = params.shape.group;
    CUTE_NO_UNROLL
    for (int head = work.item.head * group; head < (work.item.head + 1) * group; ++head) {
      auto const blocks = work.row_of_blocks(params, head);
      CUTE_NO_UNROLL
      for (int tile = blocks.begin; tile < blocks.end;) {
        CUTE_NO_UNROLL
        for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
          control.sums[warpgroup].wait(stage);
          CUTE_UNROLL
          for (int i = 0; i < kReads; ++i) rings[i].add(warpgroup);
          if (threadIdx.x % kWarpSize == 0) control.sums[warpgroup].release(stage);
        }
        stage.advance();
        int const next = blocks.after(tile);
        bool const follows = next == tile + 1 && next < blocks.end;
        CapturedSums const sums(params, work.position(head, tile), 0);
        CapturedSums::for_each_diagonal_read([&](auto read, auto index) {
          Ring& ring = rings[index];
          ring.take(follows ? Ring::kColumns : Ring::kDiagonals, [&](int diagonal, float sum) {
            sums.template add<decltype(read)::value>(0, Ring::kFirstDiagonal + diagonal, sum);
          });
          if (follows) ring.advance();
        });
        tile = next;
      }
    }
  }

  CUTE_DEVICE static void add(CapturedSums const& sums, Control& control, uint32_t rings,
                              int warpgroup, int parity) {
    __syncwarp();  // all lanes have stored their strips
    control.sums[warpgroup].acquire({0, parity});
    sums.store_diagonals(rings);
    __syncwarp();  // all lanes have read the strips, and stored the sums
    if (threadIdx.x % kWarpSize == 0) control.sums[warpgroup].commit({0, parity});
  }
};

template <class Config, class Kernel>
struct BackwardProducerSm90 {
  using Bias = typename Kernel::Bias;
  using Control = typename Kernel::Control;
  using Diagonals = typename Kernel::Diagonals;
  using KeyStage = typename Kernel::KeyStage;
  using KeyTile = typename Kernel::KeyTile;
  using OutTile = typename Kernel::OutTile;
  using QueryTile = typename Kernel::QueryTile;
  using Stage = typename Kernel::Stage;
  using Tiles = typename Kernel::Tiles;
  using ValueTile = typename Kernel::ValueTile;
  using Work = typename Kernel::Work;
  static constexpr auto kBiasOffset = Kernel::kBiasOffset;
  static constexpr auto kKeyStageBytes = Kernel::kKeyStageBytes;
  static constexpr auto kStatisticsBytes = Kernel::kStatisticsBytes;
  static constexpr auto kTileQuery = Kernel::kTileQuery;
  static constexpr auto kValueOffset = Kernel::kValueOffset;

  // One thread copies keys and values, then queries, statistics, dO and bias of each Q block.
  CUTE_DEVICE static void produce(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles,
                                  KeyStage const& key, Stage& stage) {
    if (work.tiles.begin >= work.tiles.end) {
      control.key.acquire(key);
      control.key.commit(key);
      return;
    }
    uint32_t const keys = tiles + key.index * kKeyStageBytes;
    uint64_t& arrived = control.key.acquire(key, kKeyStageBytes);
    auto constexpr kOnce = CacheHint::EVICT_FIRST;
    auto constexpr kAgain = CacheHint::EVICT_LAST;
    WorkItem const& item = work.item;
    int const group = params.shape.group;
    Bias const bias(tiles + kBiasOffset);
    Origin const queries = query_origin<Config>(params.shape, item.batch);
    KeyValueSource<Config> const source(params, item.batch, key_head_of<Config>(params, item.head));
    int const key_row = source.origin.row + work.column;
    load_tma_tile<KeyTile>(maps.key, arrived, keys, 0, key_row, source.head,
                           source.batch(params.key), kOnce);
    load_tma_tile<ValueTile>(maps.value, arrived, keys + kValueOffset, 0, key_row, source.head,
                             source.batch(params.value), kOnce);
    CUTE_NO_UNROLL
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
      CUTE_NO_UNROLL
      for (auto walk = work.walk(params, head); walk.more(); walk.advance()) {
        int const tile = walk.tile();
        int const row = queries.row + tile * kTileQuery;
        uint64_t& query = control.query.acquire(stage, QueryTile::kBytes + kStatisticsBytes);
        load_tma_tile<QueryTile>(maps.query, query, Kernel::query_tile_of(tiles, stage.index), 0,
                                 row, head, queries.batch, kAgain);
        load_tma(params.row_statistics +
                     Tiles::tile_index(params, item.batch, head, tile) * kTileQuery * 2,
                 query, Kernel::statistics_of(tiles, stage.index), kStatisticsBytes);
        uint64_t& out = control.out_gradient.acquire(stage, OutTile::kBytes + Bias::kTmaStageBytes);
        load_tma_tile<OutTile>(maps.out_gradient, out, Kernel::out_tile_of(tiles, stage.index), 0,
                               row, head, queries.batch, kAgain);
        bias.produce(params, maps, work, head, tile, stage.index, out);
        stage.advance();
      }
    }
  }

  // Fills the buffers of diagonals, in the order in which produce() copies queries. Called by a
  // whole warp.
  CUTE_DEVICE static void produce_diagonals(BackwardParams const& params, Work const& work,
                                            Control& control, uint32_t tiles, Stage& stage) {
    for_each_q_block<Config>(params, work.item, work.tiles, [&](int head, int tile, int) {
      control.query.acquire(stage);
      Diagonals::fill(params, work.position(head, tile), Kernel::diagonals_of(tiles, stage.index));
      __syncwarp();  // all lanes have stored
      if (threadIdx.x % kWarpSize == 0) control.query.commit(stage);
      stage.advance();
    });
  }
};

// Consumer: its steps, which its main loop calls in order.

// A consumer is a warpgroup that owns 64 of the keys. Each begin_...() starts an asynchronous
// product as a group of its own; the main loop waits for it.
template <class Config, class Kernel>
struct BackwardConsumerSm90 {
  using Bias = typename Kernel::Bias;
  using BiasSums = typename Kernel::BiasSums;
  using BiasWriter = typename Kernel::BiasWriter;
  using CapturedSums = typename Kernel::CapturedSums;
  using Control = typename Kernel::Control;
  using DqSums = typename Kernel::DqSums;
  using Element = typename Kernel::Element;
  using Exponents = typename Kernel::Exponents;
  using FunctionReads = typename Kernel::FunctionReads;
  using KeptBlocks = typename Kernel::KeptBlocks;
  using KeyColumns = typename Kernel::KeyColumns;
  using KeyRows = typename Kernel::KeyRows;
  using KeyStage = typename Kernel::KeyStage;
  using KeyTile = typename Kernel::KeyTile;
  using Mask = typename Kernel::Mask;
  using Modifiers = typename Kernel::Modifiers;
  using OutColumns = typename Kernel::OutColumns;
  using OutRows = typename Kernel::OutRows;
  using OutTile = typename Kernel::OutTile;
  using QueryColumns = typename Kernel::QueryColumns;
  using QueryRows = typename Kernel::QueryRows;
  using QueryTile = typename Kernel::QueryTile;
  using ScoreColumns = typename Kernel::ScoreColumns;
  using ScoreGrid = typename Kernel::ScoreGrid;
  using ScoreOperand = typename Kernel::ScoreOperand;
  using ScoreRows = typename Kernel::ScoreRows;
  using ScoreTile = typename Kernel::ScoreTile;
  using Stage = typename Kernel::Stage;
  using Tiles = typename Kernel::Tiles;
  using ValueRows = typename Kernel::ValueRows;
  using ValueTile = typename Kernel::ValueTile;
  using Work = typename Kernel::Work;
  static constexpr auto kBiasOffset = Kernel::kBiasOffset;
  static constexpr auto kConsumerBarrier = Kernel::kConsumerBarrier;
  static constexpr auto kConsumers = Kernel::kConsumers;
  static constexpr auto kDqOffset = Kernel::kDqOffset;
  static constexpr auto kScoreGradient = Kernel::kScoreGradient;
  static constexpr auto kSumsOffset = Kernel::kSumsOffset;
  static constexpr auto kTileKey = Kernel::kTileKey;
  static constexpr auto kTileQuery = Kernel::kTileQuery;
  static constexpr auto kValueOffset = Kernel::kValueOffset;

  BackwardParams const& params;
  Work const& work;
  Mask const& mask;
  Control& control;
  uint32_t tiles;
  uint32_t key_tile;

  // Waits for keys and values, zeros their rows beyond the key length, and clears the gradients
  // that no Q block will write.
  CUTE_DEVICE void begin(KeyStage const& key) const {
    CapturedSums::begin(tiles + kSumsOffset);
    clear_skipped<Config, kConsumers>(params, work.item, work.tiles);
    control.key.wait(key);
    if (work.tiles.begin >= work.tiles.end) return;
    int const first_head = work.head_with_blocks(params, work.item.head * params.shape.group);
    Bias(tiles + kBiasOffset)
        .load_first(params, work, mask, first_head, work.row_of_blocks(params, first_head).begin);
    if (reads_beyond<Config>(mask.key_length, work.column + kTileKey, params.shape.key_length)) {
      clear_rows<KeyTile, kConsumers>(key_tile, mask.key_length - work.column);
      clear_rows<ValueTile, kConsumers>(key_tile + kValueOffset, mask.key_length - work.column);
      fence_tma_store();
      named_barrier_sync(kConsumerBarrier, kConsumers);
    }
  }

  // Waits for the operands of a Q block and clears rows beyond the query length. Hazard: memory
  // there may hold NaN, and 0 * NaN, or a P of NaN, would reach dk and dv.
  CUTE_DEVICE void wait_for_queries(int tile, Stage const& stage, uint32_t query_tile,
                                    uint32_t out_tile) const {
    int const row = tile * kTileQuery;
    control.query.wait(stage);
    if (reads_beyond<Config>(mask.query_length, row + kTileQuery, params.shape.query_length)) {
      control.out_gradient.wait(stage);
      clear_rows<QueryTile, kConsumers>(query_tile, mask.query_length - row);
      clear_rows<OutTile, kConsumers>(out_tile, mask.query_length - row);
      Bias(tiles + kBiasOffset).clear_rows_beyond(stage.index, mask.query_length - row);
      fence_tma_store();
      named_barrier_sync(kConsumerBarrier, kConsumers);
    }
  }

  // S^T = K Q^T
  template <class Scores>
  CUTE_DEVICE void begin_scores(KeyRows const& keys, uint32_t query_tile, Scores& scores) const {
    fence_accumulators(scores);
    begin_products();
    warpgroup_gemm<Element, Config::kHeadDim / 16>(scores, keys, QueryRows(query_tile), false);
    commit_products();
  }

  // dP^T = V dO^T
  template <class Scores>
  CUTE_DEVICE void begin_score_gradient(ValueRows const& values, uint32_t out_tile,
                                        Scores& score_gradient) const {
    if constexpr (kScoreGradient) {
      fence_accumulators(score_gradient);
      begin_products();
      warpgroup_gemm<Element, Config::kValueDim / 16>(score_gradient, values, OutRows(out_tile),
                                                      false);
      commit_products();
    }
  }

  // Computes P^T from S^T, while the product dP runs.
  template <class Logsumexps, class Scores>
  CUTE_DEVICE void exponentiate(int head, int tile, bool partial, int stage,
                                Logsumexps const& logsumexps, Exponents const& exponents,
                                FunctionReads const& reads,
                                typename Mask::TransposedReads const& bits, Scores& scores,
                                Scores& scaled) const {
    Modifiers const modifiers = {{params.scale}, {params, &reads}, Bias(tiles + kBiasOffset)};
    int const row = tile * kTileQuery;
    ScoreTilePosition const at = work.position(head, tile);
    exponents.modify(
        [&] { modifiers.recompute(scores, scaled, at, params, work, head, row, stage); });
    mask.template apply_transposed<kTileQuery, kTileKey>(scores, params, at, partial, &bits);
    exponentiate_transposed(logsumexps.reader(Kernel::statistics_of(tiles, stage)),
                            exponents.softmax_scale(params.scale), scores,
                            exponents.of_tile(params, at));
    fence_accumulators(scores);
    modifiers.bias.load_next(params, work, mask, head, tile);
  }

  // Computes dS^T from P^T and dP^T, packs P^T and dS^T, and stores dS for dQ.
  template <class DeltaReader, class Scores>
  CUTE_DEVICE void differentiate(int head, int tile, DeltaReader const& deltas,
                                 KeptBlocks const& kept, Scores const& scaled, Scores const& scores,
                                 Scores const& score_gradient, uint32_t score_tile,
                                 ScoreOperand& probabilities, ScoreOperand& left_gradient,
                                 BiasSums& bias_sums,
                                 typename CapturedSums::Sums& captured_sums) const {
    differentiate_transposed<Config, Modifiers, BiasWriter, ScoreGrid>(
        params, deltas, work.position(head, tile), kept, scaled, scores, score_gradient,
        probabilities, left_gradient, bias_sums,
        CapturedSums(params, work.position(head, tile), tiles + kSumsOffset), captured_sums);
    if constexpr (Config::kQueryGradient) store_score_gradient(score_tile, left_gradient);
    if constexpr (BiasWriter::kFromTile) {
      BiasWriter::store(params, work.position(head, tile), score_tile);
    }
  }

  // Adds the sums of a Q block to the gradients of captured arrays. Call it after differentiate().
  CUTE_DEVICE void add_strips(int head, int tile, int warpgroup, int parity) const {
    CapturedSums const sums(params, work.position(head, tile), tiles + kSumsOffset);
    Kernel::Strips::add(sums, control, tiles + Kernel::kRingsOffset, warpgroup, parity);
  }

  // dV += P^T dO
  template <class Accumulators>
  CUTE_DEVICE void begin_value_gradient(ScoreOperand const& probabilities, uint32_t out_tile,
                                        Accumulators& value_gradient) const {
    if constexpr (Config::kValueGradient) {
      fence_accumulators(value_gradient);
      begin_products();
      warpgroup_gemm<Element, kTileQuery / 16>(value_gradient, probabilities, OutColumns(out_tile));
      commit_products();
    }
  }

  CUTE_DEVICE void store_score_gradient(uint32_t score_tile,
                                        ScoreOperand const& left_gradient) const {
    if constexpr (Tiles::kTransposedDq) {
      store_operand_transposed<ScoreTile, ScoreGrid>(score_tile, left_gradient);
    } else {
      store_operand<ScoreTile, ScoreGrid>(score_tile, left_gradient);
    }
  }

  // dQ = dS K, or its transpose
  template <class Accumulators>
  CUTE_DEVICE void begin_query_gradient(int warpgroup, uint32_t score_tile,
                                        Accumulators& query_gradient) const {
    if constexpr (Config::kQueryGradient) {
      fence_tma_store();
      named_barrier_sync(kConsumerBarrier, kConsumers);  // dS is complete
      fence_accumulators(query_gradient);
      begin_products();
      KeyColumns const keys(key_tile + Tiles::query_columns_offset(warpgroup));
      if constexpr (Tiles::kTransposedDq) {
        warpgroup_gemm<Element, kTileKey / 16>(query_gradient, keys, ScoreRows(score_tile), false);
      } else {
        ScoreColumns const scores(score_tile + Tiles::query_rows_offset(warpgroup));
        warpgroup_gemm<Element, kTileKey / 16>(query_gradient, scores, keys, false);
      }
      commit_products();
    }
  }

  // dK += dS^T Q
  template <class Accumulators>
  CUTE_DEVICE void begin_key_gradient(ScoreOperand const& left_gradient, uint32_t query_tile,
                                      Accumulators& key_gradient) const {
    if constexpr (Config::kKeyGradient) {
      fence_accumulators(key_gradient);
      begin_products();
      warpgroup_gemm<Element, kTileQuery / 16>(key_gradient, left_gradient,
                                               QueryColumns(query_tile));
      commit_products();
    }
  }

  template <class Accumulators>
  CUTE_DEVICE void add_query_gradient(int warpgroup, int head, int tile, int parity,
                                      Accumulators const& query_gradient) const {
    if constexpr (Config::kQueryGradient) {
      DqSums::add(params, control, work.item.batch, head, tile, tiles + kDqOffset, parity,
                  own_columns(warpgroup, query_gradient));
    }
  }

  // The columns of dQ that this consumer adds, among those that it computes: the first columns for
  // the first consumer, and the last ones for the second.
  template <class Accumulators>
  CUTE_DEVICE static auto own_columns(int warpgroup, Accumulators const& computed) {
    if constexpr (Tiles::kForeignColumns == 0) {
      return computed;
    } else {
      constexpr int kSkipped = Tiles::kForeignColumns / 8;
      auto own = Tiles::QueryGrid::make_accumulators();  // (4, 1, MMA_N)
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(own); ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          own(i, 0, n) = warpgroup == 0 ? computed(i, 0, n) : computed(i, 0, n + kSkipped);
        }
      }
      return own;
    }
  }
};

template <class Config, class Kernel>
struct BackwardEpilogueSm90 {
  using Element = typename Kernel::Element;
  using KeyGrid = typename Kernel::KeyGrid;
  using KeyTile = typename Kernel::KeyTile;
  using Splits = typename Kernel::Splits;
  using ValueGrid = typename Kernel::ValueGrid;
  using ValueTile = typename Kernel::ValueTile;
  using Work = typename Kernel::Work;
  static constexpr auto kConsumerBarrier = Kernel::kConsumerBarrier;
  static constexpr auto kConsumers = Kernel::kConsumers;
  static constexpr auto kStatisticsOffset = Kernel::kStatisticsOffset;
  static constexpr auto kTileKey = Kernel::kTileKey;
  static constexpr auto kValueOffset = Kernel::kValueOffset;

  // Scales and stores dk and dv. With split-Q it first adds up the parts of all CTAs.
  template <class KeyGradient, class ValueGradient>
  CUTE_DEVICE static void finish(BackwardParams const& params, BackwardMaps const& maps,
                                 Work const& work, int key_length, int warpgroup, uint32_t tiles,
                                 uint32_t key_tile, KeyGradient& key_gradient,
                                 ValueGradient& value_gradient) {
    if (!Splits::add_up(params, work.item, tiles + kStatisticsOffset, key_gradient,
                        value_gradient)) {
      return;
    }
    if constexpr (Config::kKeyGradient) {
      scale_accumulators(key_gradient, params.scale.gradient_scale);
    }
    if constexpr (Config::kValueGradient) {
      scale_accumulators(value_gradient, probability_scale<Config>(params));
    }
    store(params, maps, work, key_length, warpgroup, key_tile, key_gradient, value_gradient);
  }

  // Stores each consumer's rows of dk and dv through the tiles of keys and values.
  template <class KeyGradient, class ValueGradient>
  CUTE_DEVICE static void store(BackwardParams const& params, BackwardMaps const& maps,
                                Work const& work, int key_length, int warpgroup, uint32_t key_tile,
                                KeyGradient const& key_gradient,
                                ValueGradient const& value_gradient) {
    ProblemShape const& shape = params.shape;
    named_barrier_sync(kConsumerBarrier, kConsumers);  // both consumers have read the keys
    if constexpr (Config::kKeyGradient) {
      store_accumulators<Element, KeyTile, KeyGrid>(key_tile, key_gradient);
    }
    if constexpr (Config::kValueGradient) {
      store_accumulators<Element, ValueTile, ValueGrid>(key_tile + kValueOffset, value_gradient);
    }
    fence_tma_store();
    named_barrier_sync(Kernel::warpgroup_barrier(warpgroup), kWarpgroupSize);
    Origin const keys = key_origin<Config>(shape, work.item.batch);
    int const head = key_head_of<Config>(params, work.item.head);
    int const row = keys.row + work.column;
    int const tile_row = warpgroup * kWarpgroupRows;
    int const bound = (Config::kPacked ? key_length : shape.key_length) - work.column;
    if constexpr (Config::kKeyGradient) {
      store_part<Config, KeyTile>(maps.key_gradient, params.key_gradient, key_tile, tile_row, row,
                                  bound, head, keys.batch, shape.head_dim);
    }
    if constexpr (Config::kValueGradient) {
      store_part<Config, ValueTile>(maps.value_gradient, params.value_gradient,
                                    key_tile + kValueOffset, tile_row, row, bound, head, keys.batch,
                                    shape.value_dim);
    }
    wait_tma_stores();
    if constexpr (Config::kPacked) {
      GridTiles<Config, GridRows::keys, kTileKey> const grid = {shape};
      clear_key_gap<Config, kConsumers>(params, {work.item.tile, head, work.item.batch}, key_length,
                                        grid.of_batch_index(work.item.batch));
    }
  }
};

// The main kernel; codegen/kernels/sm90/backward.py chooses Config.
template <class Config>
struct FmhaBackwardSm90 {
  using Element = typename Config::Element;
  using Tiles = BackwardTilesSm90<Config>;
  using QueryTile = typename Tiles::QueryTile;
  using OutTile = typename Tiles::OutTile;
  using KeyTile = typename Tiles::KeyTile;
  using ValueTile = typename Tiles::ValueTile;
  using ScoreTile = typename Tiles::ScoreTile;
  using ScoreGrid = typename Tiles::ScoreGrid;
  using QueryProductGrid = typename Tiles::QueryProductGrid;
  using KeyGrid = typename Tiles::KeyGrid;
  using ValueGrid = typename Tiles::ValueGrid;
  static constexpr int kTileQuery = Tiles::kTileQuery;
  static constexpr int kTileKey = Tiles::kTileKey;
  static constexpr int kConsumers = Tiles::kThreads;
  static constexpr int kConsumerWarps = kConsumers / kWarpSize;
  static constexpr int kThreads = kConsumers + kWarpgroupSize;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = consumer_registers<kThreads, kProducerRegisters>();
  static constexpr int kStages = Config::kStages;
  using Stage = PipelineStage<kStages>;
  static constexpr int kKeyStages = Config::kKeyStages;
  using KeyStage = PipelineStage<kKeyStages>;
  using Mask = ScoreMask<Config, ScoreGrid>;
  using Exponents = LinearExponents<Config, ScoreGrid>;

  // dq, dk and the gradient of the bias need dS; dv alone needs only P.
  using BiasWriter = TransposedBiasGradient<Config, Tiles>;
  using BiasSums = typename BiasWriter::Sums;
  using CapturedSums = FunctionGradient<Config, ScoreGrid, true>;
  static constexpr bool kScoreGradient = Config::kQueryGradient || Config::kKeyGradient ||
                                         Config::kFunctionGradient || BiasWriter::kNeeded;

  static constexpr bool kTmaDq = Config::kTmaDq && Config::kQueryGradient;
  using DqSums =
      cute::conditional_t<kTmaDq, TmaDqSumsSm90<Config, Tiles>, RegisterDqSumsSm90<Config, Tiles>>;

  using Strips =
      cute::conditional_t<Config::kProducerAddsStrips, ProducerAddsStrips<Config, FmhaBackwardSm90>,
                          ConsumersAddStrips<Config, FmhaBackwardSm90>>;

  static constexpr bool kPersistent = Config::kPersistent;
  static_assert(!kPersistent ||
                (kTmaDq && !Config::kDeterministicDq && !Config::kSplitQ && !Config::kBlockMask));
  using KvBlocks = KvBlocksInRounds<Config>;

  // Offsets in shared memory. TMA tiles begin at multiples of 1024 bytes, so they come first.
  using Bias = QBlockBiasRing<Config, Tiles, kStages>;
  using Diagonals = SharedDiagonals<Config, ScoreGrid, kTileKey, kTileQuery, true>;
  static_assert(!(Diagonals::kIsOn || Config::kProducerAddsStrips) || !kPersistent);
  using Function = typename Diagonals::Function;
  using FunctionReads = typename Function::Reads;
  using Modifiers = ScoreModifiers<Config, Bias, Function>;
  static constexpr int kStatisticsBytes = kTileQuery * int(sizeof(float2));
  static constexpr int kValueOffset = KeyTile::kBytes;  // from the keys of the stage
  static constexpr int kKeyStageBytes = kValueOffset + ValueTile::kBytes;
  static constexpr int kQueryOffset = kKeyStages * kKeyStageBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kDqOffset = kScoreOffset + 2 * ScoreTile::kBytes;
  static constexpr int kTmaBiasOffset = kDqOffset + DqSums::kSharedBytes;
  static constexpr int kStatisticsOffset = kTmaBiasOffset + kStages * Bias::kTmaStageBytes;
  static constexpr int kDiagonalsOffset = kStatisticsOffset + kStages * kStatisticsBytes;
  static constexpr int kWarpBiasOffset = kDiagonalsOffset + kStages * Diagonals::kBytes;
  static constexpr int kBiasOffset = Bias::kTmaBias ? kTmaBiasOffset : kWarpBiasOffset;
  static constexpr int kSumsOffset = kWarpBiasOffset + Bias::kWarpBytes;
  static constexpr int kRingsOffset = kSumsOffset + CapturedSums::kSharedBytes;
  static constexpr int kControlOffset = kRingsOffset + Strips::kRingBytes;

  struct Control : DqSums::Control, Strips::Control {
    Pipeline<kStages> query;         // also covers the statistics of their rows, and diagonals
    Pipeline<kStages> out_gradient;  // also covers the bias
    Pipeline<kKeyStages> key;        // also covers the values
  };
  static constexpr int kSharedBytes = kControlOffset + int(sizeof(Control));

  // Named barriers: one for all consumers, and one for the threads of each.
  static constexpr int kConsumerBarrier = 1;
  CUTE_DEVICE static int warpgroup_barrier(int warpgroup) { return 2 + warpgroup; }

  static constexpr int kGradientFloats = kTileKey * (Config::kKeyGradient * Config::kHeadDim +
                                                     Config::kValueGradient * Config::kValueDim);
  using Splits = SplitQ<Config, kGradientFloats, kConsumers, kConsumerBarrier>;
  static_assert(!Config::kSplitQ || !BiasWriter::kNeeded);

  // Keys and values are the left operands of S and dP for every Q block. They stay in the registers
  // that dK, dV, S, dP, their packed forms and addresses leave free. Hazard: without dq or dk they
  // must stay in smem, because ptxas (CUDA 13.0) then packs P or dS into these registers, and the
  // next Q block would read that instead.
  static constexpr int kFreeRegisters =
      Config::kQueryGradient && Config::kKeyGradient
          ? kConsumerRegisters - (Config::kHeadDim + Config::kValueDim) / 2 - 3 * kTileQuery / 2 - 8
          : 0;
  static constexpr int kRegisterKeySteps = register_steps(Config::kHeadDim, kFreeRegisters);
  static constexpr int kRegisterValueSteps =
      register_steps(Config::kValueDim, kFreeRegisters - 4 * kRegisterKeySteps);
  using KeyRows = RegisterRows<KeyTile, ScoreGrid, kRegisterKeySteps>;
  using ValueRows = RegisterRows<ValueTile, ScoreGrid, kRegisterValueSteps>;

  using Work = KvBlockWorkSm90<Config, FmhaBackwardSm90>;

  CUTE_DEVICE static void run(BackwardParams const& params, BackwardMaps const& maps) {
    char* const shared = dynamic_shared();
    Control& control = *reinterpret_cast<Control*>(shared + kControlOffset);
    uint32_t const tiles = shared_address(shared);
    if (threadIdx.x == kConsumers) {
      prefetch_map(maps.query);
      prefetch_map(maps.key);
      prefetch_map(maps.value);
      prefetch_map(maps.out_gradient);
      Bias(tiles + kBiasOffset).prefetch_map(maps);
      control.query.init(kConsumerWarps, Diagonals::kIsOn ? 2 : 1);
      control.out_gradient.init(kConsumerWarps);
      control.key.init(kConsumerWarps);
      DqSums::init(params, control, kConsumerWarps);
      Strips::init(control);
      fence_barrier_init();
    }
    __syncthreads();
    int const thread = int(threadIdx.x) - kConsumers;  // of the producer's warpgroup
    if constexpr (kPersistent) {
      if (thread >= 0) {
        lower_registers<kProducerRegisters>();
        if (thread == 0) produce_in_rounds(params, maps, control, tiles);
        if (thread == kWarpSize) sum_in_rounds(params, control, tiles, thread);
      } else {
        raise_registers<kConsumerRegisters>();
        consume_in_rounds(params, maps, control, tiles);
      }
    } else {
      Work const work(params, DqSums::item(params, control));
      Stage stage;
      if (thread >= 0) {
        lower_registers<kProducerRegisters>();
        if (thread == 0) Producer::produce(params, maps, work, control, tiles, {}, stage);
        if (Diagonals::kIsOn && thread / kWarpSize == 3) {
          Producer::produce_diagonals(params, work, control, tiles, stage);
        }
        if (thread / kWarpSize == 2) {
          Strips::produce(params, control, work, tiles + kRingsOffset);
        }
        PipelineStage<1> sums;
        DqSums::produce(params, control, work.item, work.tiles, tiles + kDqOffset, thread, sums);
      } else {
        raise_registers<kConsumerRegisters>();
        int score_buffer = 0;
        consume(params, maps, work, control, tiles, {}, stage, score_buffer);
      }
    }
  }

  // The roles of a persistent CTA.
  CUTE_DEVICE static void produce_in_rounds(BackwardParams const& params, BackwardMaps const& maps,
                                            Control& control, uint32_t tiles) {
    Stage stage;
    KvBlocks kv_blocks;
    WorkItem item;
    CUTE_NO_UNROLL
    while (kv_blocks.take(params, item)) {
      Producer::produce(params, maps, Work(params, item), control, tiles,
                        kv_blocks.template key_stage<kKeyStages>(), stage);
    }
  }
  CUTE_DEVICE static void sum_in_rounds(BackwardParams const& params, Control& control,
                                        uint32_t tiles, int thread) {
    PipelineStage<1> stage;
    KvBlocks kv_blocks;
    WorkItem item;
    CUTE_NO_UNROLL
    while (kv_blocks.take(params, item)) {
      Work const work(params, item);
      DqSums::produce(params, control, item, work.tiles, tiles + kDqOffset, thread, stage);
    }
  }
  CUTE_DEVICE static void consume_in_rounds(BackwardParams const& params, BackwardMaps const& maps,
                                            Control& control, uint32_t tiles) {
    Stage stage;
    int score_buffer = 0;
    KvBlocks kv_blocks;
    WorkItem item;
    CUTE_NO_UNROLL
    while (kv_blocks.take(params, item)) {
      Work const work(params, item);
      consume(params, maps, work, control, tiles, kv_blocks.template key_stage<kKeyStages>(), stage,
              score_buffer);
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) {
        control.key.release(kv_blocks.template key_stage<kKeyStages>());
      }
    }
  }

  // The addresses of the buffers of a stage.
  CUTE_DEVICE static uint32_t query_tile_of(uint32_t tiles, int stage) {
    return tiles + kQueryOffset + stage * QueryTile::kBytes;
  }
  CUTE_DEVICE static uint32_t out_tile_of(uint32_t tiles, int stage) {
    return tiles + kOutOffset + stage * OutTile::kBytes;
  }
  CUTE_DEVICE static uint32_t statistics_of(uint32_t tiles, int stage) {
    return tiles + kStatisticsOffset + stage * kStatisticsBytes;
  }

  CUTE_DEVICE static uint32_t diagonals_of(uint32_t tiles, int stage) {
    return tiles + kDiagonalsOffset + stage * Diagonals::kBytes;
  }

  using QueryRows = DescriptorOperand<QueryTile, Contiguous::k>;
  using OutRows = DescriptorOperand<OutTile, Contiguous::k>;
  using QueryColumns = DescriptorOperand<QueryTile, Contiguous::outer>;
  using OutColumns = DescriptorOperand<OutTile, Contiguous::outer>;
  using KeyColumns = DescriptorOperand<KeyTile, Contiguous::outer>;
  using ScoreColumns = DescriptorOperand<ScoreTile, Contiguous::outer>;
  using ScoreRows = DescriptorOperand<ScoreTile, Contiguous::k>;

  using ScoreOperand = RegisterOperand<1, kTileQuery / 16, sizeof(Element)>;
  using KeptBlocks = typename ProbabilityModifiers<Config, ScoreGrid, true>::Tile;

  // ptxas sinks most exponentials below the wait for dP, where no product of this consumer runs.
  // With Config::kExponentiatesUnderDp a redundant wait keeps all of them above it, and some
  // vectors of the statistics are read ahead: logsumexps while S runs, and deltas while dP runs.
  // Products keep shared memory so busy that a read takes hundreds of cycles.
  static constexpr int kVectorsAhead = Config::kExponentiatesUnderDp ? 4 : 0;

  using Producer = BackwardProducerSm90<Config, FmhaBackwardSm90>;
  using Consumer = BackwardConsumerSm90<Config, FmhaBackwardSm90>;
  using Epilogue = BackwardEpilogueSm90<Config, FmhaBackwardSm90>;

  // The reads of a score function, which overlap S and dP. A redundant wait separates them from the
  // wgmmas: in one basic block ptxas delays the last wgmmas until the addresses have been loaded.
  CUTE_DEVICE static FunctionReads read_ahead(BackwardParams const& params, Control& control,
                                              uint32_t tiles, Stage const& stage,
                                              ScoreTilePosition const& at) {
    KeptBlocks::end_basic_block(control.out_gradient, stage);
    if constexpr (FunctionReads::kAny) control.out_gradient.wait_again(stage);
    if constexpr (Diagonals::kIsOn)
      return {diagonals_of(tiles, stage.index)};
    else
      return FunctionReads(params, at);
  }

  // The main loop: per Q block S, dP, P and dS, then dV, dQ and dK. Hazard: functions for more than
  // single steps change how ptxas assigns registers (docs/tuning/compilers.md).
  CUTE_DEVICE static void consume(BackwardParams const& params, BackwardMaps const& maps,
                                  Work const& work, Control& control, uint32_t tiles,
                                  KeyStage const& key, Stage& stage, int& score_buffer) {
    WorkItem const& item = work.item;
    int const warpgroup = warpgroup_index();
    bool const leader = threadIdx.x % kWarpSize == 0;  // one per warp
    Mask const mask(params.mask, params.shape, item.batch);
    uint32_t const key_tile = tiles + key.index * kKeyStageBytes;
    Consumer const consumer{params, work, mask, control, tiles, key_tile};

    auto key_gradient = KeyGrid::make_accumulators();      // (4, 1, MMA_N)
    auto value_gradient = ValueGrid::make_accumulators();  // (4, 1, MMA_N)
    cute::clear(key_gradient);
    cute::clear(value_gradient);
    consumer.begin(key);
    KeyRows const keys(key_tile, warpgroup * kWarpgroupRows);
    ValueRows const values(key_tile + kValueOffset, warpgroup * kWarpgroupRows);

    int const group = params.shape.group;
    CUTE_NO_UNROLL
    for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
      BiasSums bias_sums;
      typename CapturedSums::Sums captured_sums;
      Exponents const exponents(params, item.batch, head);
      CUTE_NO_UNROLL
      for (auto walk = work.walk(params, head); walk.more(); walk.advance()) {
        int const tile = walk.tile();
        uint32_t const query_tile = query_tile_of(tiles, stage.index);
        uint32_t const out_tile = out_tile_of(tiles, stage.index);
        uint32_t const score_tile = tiles + kScoreOffset + score_buffer * ScoreTile::kBytes;
        consumer.wait_for_queries(tile, stage, query_tile, out_tile);
        auto scores = ScoreGrid::make_accumulators();          // (4, 1, MMA_N)
        auto score_gradient = ScoreGrid::make_accumulators();  // (4, 1, MMA_N)
        consumer.begin_scores(keys, query_tile, scores);
        uint32_t const statistics = statistics_of(tiles, stage.index);
        Logsumexps<ScoreGrid, kVectorsAhead> const logsumexps(statistics);
        control.out_gradient.wait(stage);
        consumer.begin_score_gradient(values, out_tile, score_gradient);
        auto const reads = read_ahead(params, control, tiles, stage, work.position(head, tile));
        KeptBlocks const kept(params, item.batch, head, tile * kTileQuery, work.column);
        auto const bits = mask.template read<true>(params, work.position(head, tile));
        wait_products<kScoreGradient>();  // S
        fence_accumulators(scores);
        auto scaled = ScoreGrid::make_accumulators();  // (4, 1, MMA_N), for the soft cap
        consumer.exponentiate(head, tile, walk.partial(), stage.index, logsumexps, exponents, reads,
                              bits, scores, scaled);
        if constexpr (Config::kExponentiatesUnderDp) control.out_gradient.wait_again(stage);
        Deltas<ScoreGrid, kVectorsAhead> const deltas(statistics);
        wait_products<0>();  // dP
        fence_accumulators(score_gradient);
        ScoreOperand probabilities;  // P^T
        ScoreOperand left_gradient;  // dS^T
        consumer.differentiate(head, tile, deltas.reader(statistics), kept, scaled, scores,
                               score_gradient, score_tile, probabilities, left_gradient, bias_sums,
                               captured_sums);

        auto query_gradient = QueryProductGrid::make_accumulators();  // (4, 1, MMA_N)
        consumer.begin_value_gradient(probabilities, out_tile, value_gradient);
        consumer.begin_query_gradient(warpgroup, score_tile, query_gradient);
        consumer.add_strips(head, tile, warpgroup, score_buffer);
        wait_products<Config::kQueryGradient>();  // dV
        fence_accumulators(value_gradient);
        if (leader) control.out_gradient.release(stage);
        consumer.begin_key_gradient(left_gradient, query_tile, key_gradient);
        wait_products<Config::kKeyGradient>();  // dQ
        fence_accumulators(query_gradient);
        // The score buffer alternates by Q blocks, as the phases of dQ's barriers do.
        consumer.add_query_gradient(warpgroup, head, tile, score_buffer, query_gradient);
        wait_products<0>();  // dK
        fence_accumulators(key_gradient);
        if (leader) control.query.release(stage);
        stage.advance();
        score_buffer ^= 1;
      }
      BiasWriter::finish(params, item.batch, head, work.column, bias_sums);
      CapturedSums(params, work.position(head, 0), tiles + kSumsOffset).add_sums(captured_sums);
    }
    Epilogue::finish(params, maps, work, mask.key_length, warpgroup, tiles, key_tile, key_gradient,
                     value_gradient);
  }
};

}  // namespace memeff
