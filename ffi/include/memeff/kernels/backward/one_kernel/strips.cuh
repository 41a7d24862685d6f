// Two strategies of kernels/fmha_bwd_sm90.cuh to add sums over a Q block, along diagonals or for
// each query, to the gradients of captured arrays in global memory. Each warp of the consumers
// first stores the terms of its 16 keys in a strip of shared memory
// (score/captured/strip_sums.cuh).
#pragma once

#include <memeff/arch/thread.cuh>
#include <memeff/core/pipeline.cuh>
#include <memeff/core/work_item.cuh>

namespace memeff {

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

}  // namespace memeff
