// A product with more columns than fit in accumulators, one column chunk at a time.
//
//   sum[rows, columns] += left[rows, k] right[k, columns]
//
// `left` is in shared memory and `right` streams through a StepRing. Between iterations the f32 sum
// stays in global memory, in accumulator order: each thread reads only what it wrote itself, so the
// sum needs no synchronization and is deterministic. The kernels for large head dims use it for O,
// dQ, dK and dV.
#pragma once

#include <cute/algorithm/clear.hpp>

#include <memeff/arch/barrier.cuh>
#include <memeff/arch/copy.cuh>
#include <memeff/collective/copies/load_tile.cuh>
#include <memeff/collective/warp_gemm.cuh>
#include <memeff/core/warp_grid.cuh>

namespace memeff {

// Two buffers in shared memory through which operands stream, one step of a product at a time.

// While the tensor cores read one buffer, the copies of the next step fill the other. A phase is a
// product of several steps. The first copies of a phase start during the last step of the previous
// one, so the ring never drains.
class StepRing {
 public:
  CUTE_DEVICE StepRing(uint32_t buffers, int bytes)
      : current_(buffers), both_(buffers + (buffers + bytes)) {}

  // Starts the copies of the very first step: load(buffer).
  template <class Load>
  CUTE_DEVICE void start(Load load) {
    load(current_);
    commit_copies();
  }

  // Calls use(step, buffer) for each step, after load(step, buffer) of the next step, or in the
  // last step after load_next(buffer) for the next phase. All threads of the CTA synchronize once
  // per step, before use.
  template <class Load, class Use, class LoadNext>
  CUTE_DEVICE void run(int steps, Load load, Use use, LoadNext load_next) {
    CUTE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      wait_copies<0>();
      sync_threads();
      uint32_t const buffer = current_;
      current_ = both_ - current_;
      if (step + 1 < steps) {
        load(step + 1, current_);
      } else {
        load_next(current_);
      }
      commit_copies();
      use(step, buffer);
    }
  }

 private:
  uint32_t current_;  // of the next step to be used
  uint32_t both_;     // the sum of both addresses
};

// The address in global memory of four accumulators of a thread. Those of a warp are contiguous.
template <int kThreads, class Accumulators>
CUTE_DEVICE float4* waiting_sum(Accumulators const& accumulators, float* sums, int m, int n) {
  int const block = m * int(cute::size<2>(accumulators)) + n;
  return reinterpret_cast<float4*>(sums) + block * kThreads + thread_index();
}

// The number of columns of the operands, or of rows of the right one, that a buffer holds: 128
// bytes, a row of a panel.
template <class Element>
constexpr int kStreamStep = 128 / int(sizeof(Element));

// The last iteration writes the rounded result here: rows below row_bound, columns below
// `columns`.
struct ChunkedTarget {
  char* rows;
  long long row_bytes;
  int row_bound;
  int columns;
};

// The product of one KV or Q block. kOrder is the contiguous dimension of `left` in LeftTile, as
// for LeftOperand.
template <class Config, class LeftTile, Contiguous kOrder>
struct ChunkedProduct {
  using Element = typename Config::Element;
  static constexpr bool kByK = kOrder == Contiguous::k;
  static constexpr int kRows = kByK ? LeftTile::kRows : LeftTile::kColumns;
  static constexpr int kDepth = kByK ? LeftTile::kColumns : LeftTile::kRows;
  static constexpr int kChunk = Config::kValueDim;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kStep = kStreamStep<Element>;  // of the summed dimension
  static_assert(kDepth % kStep == 0);
  using Grid = WarpGrid<kRows, kChunk, Config::kWarps>;
  using StepTile = SharedTile<kStep, kChunk, sizeof(Element)>;
  static constexpr int kChunkFloats = kRows * kChunk;

  char const* right;
  long long right_row_bytes;
  int right_bound;  // rows of the right operand; rows beyond count as zero
  int columns;
  // For paged keys: `right` is row 0 of the pool, and the right operand begins at this key.
  PageTable<Config> const* pages = nullptr;
  int first_key = 0;

  CUTE_DEVICE int depth_steps() const { return ceil_div(min(kDepth, right_bound), kStep); }

  // Starts the copies of step `step`: kStep rows of one column chunk of the right operand.
  CUTE_DEVICE void load(int step, uint32_t buffer) const {
    int const chunk = step / depth_steps();
    int const row = step % depth_steps() * kStep;
    using Loader = TileLoader<StepTile, kThreads, Config::kAlignment>;
    char const* const chunk_rows = right + chunk * (kChunk * int(sizeof(Element)));
    if constexpr (PageTable<Config>::kPaged) {
      Loader::copy_pages(buffer, chunk_rows, right_row_bytes, *pages, first_key + row,
                         first_key + right_bound, columns - chunk * kChunk);
    } else {
      Loader::copy(buffer, chunk_rows + row * right_row_bytes, right_row_bytes, right_bound - row,
                   columns - chunk * kChunk);
    }
  }

  // Adds the product of this iteration. The first iteration starts from zero and the last one
  // writes the target; in between, `sums` holds the sums of this tile of rows. The earlier sums are
  // multiplied by rescale(row), the result by finish(row).
  template <class Rescale, class Finish, class LoadNext>
  CUTE_DEVICE void run(StepRing& ring, uint32_t left, float* sums, bool first, bool last,
                       ChunkedTarget const& target, Rescale rescale, Finish finish,
                       LoadNext load_next) const {
    int const row_steps = depth_steps();
    auto accumulators = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
    ring.run(
        row_steps * ceil_div(columns, kChunk),
        [&](int step, uint32_t buffer) { load(step, buffer); },
        [&](int step, uint32_t buffer) {
          int const chunk = step / row_steps;
          int const depth = step % row_steps;
          float* const chunk_sums = sums + chunk * (long long)kChunkFloats;
          if (depth == 0) {
            if (first) {
              cute::clear(accumulators);
            } else {
              read(accumulators, chunk_sums);
              multiply_rows(accumulators, rescale);
            }
          }
          warp_gemm<Element, kStep / kStepElements<Element>>(
              accumulators,
              LeftOperand<LeftTile, kOrder, Grid::kRowBlocks>(
                  left + depth * (kByK ? kStep / LeftTile::kPanelColumns * LeftTile::kPanelBytes
                                       : kStep * LeftTile::kRowBytes),
                  Grid::row()),
              RightOperand<StepTile, Contiguous::outer, Grid::kColumnBlocks>(buffer,
                                                                             Grid::column()));
          if (depth == row_steps - 1) {
            if (last) {
              multiply_rows(accumulators, finish);
              store(accumulators, target, chunk * kChunk);
            } else {
              write(accumulators, chunk_sums);
            }
          }
        },
        load_next);
  }

  // Writes zeros to the target of a CTA without iterations.
  CUTE_DEVICE static void store_zeros(ChunkedTarget const& target) {
    auto zeros = Grid::make_accumulators();  // (4, MMA_M, MMA_N)
    cute::clear(zeros);
    for (int column = 0; column < target.columns; column += kChunk) store(zeros, target, column);
  }

 private:
  // Loads this thread's sums of the previous iterations.
  template <class Accumulators>
  CUTE_DEVICE static void read(Accumulators& accumulators, float* sums) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(accumulators); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(accumulators); ++n) {
        float4 const sum = *waiting_sum<kThreads>(accumulators, sums, m, n);
        accumulators(0, m, n) = sum.x;
        accumulators(1, m, n) = sum.y;
        accumulators(2, m, n) = sum.z;
        accumulators(3, m, n) = sum.w;
      }
    }
  }

  // Stores this thread's sums for the next iteration.
  template <class Accumulators>
  CUTE_DEVICE static void write(Accumulators const& accumulators, float* sums) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(accumulators); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size<2>(accumulators); ++n) {
        *waiting_sum<kThreads>(accumulators, sums, m, n) =
            make_float4(accumulators(0, m, n), accumulators(1, m, n), accumulators(2, m, n),
                        accumulators(3, m, n));
      }
    }
  }

  template <class Accumulators, class Factor>
  CUTE_DEVICE static void multiply_rows(Accumulators& accumulators, Factor factor) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(accumulators); ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float const scale = factor(Grid::element_row(2 * half, m));
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(accumulators); ++n) {
          accumulators(2 * half, m, n) *= scale;
          accumulators(2 * half + 1, m, n) *= scale;
        }
      }
    }
  }

  // Stores pairs of adjacent columns, so a quad writes 16 or 32 contiguous bytes of a row.
  template <class Accumulators>
  CUTE_DEVICE static void store(Accumulators const& accumulators, ChunkedTarget const& target,
                                int column) {
    CUTE_UNROLL
    for (int m = 0; m < cute::size<1>(accumulators); ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const row = Grid::element_row(2 * half, m);
        if (row >= target.row_bound) continue;
        Element* const out = reinterpret_cast<Element*>(target.rows + row * target.row_bytes);
        CUTE_UNROLL
        for (int n = 0; n < cute::size<2>(accumulators); ++n) {
          int const first = column + Grid::element_column(0, n);
          float const x = accumulators(2 * half, m, n);
          float const y = accumulators(2 * half + 1, m, n);
          if constexpr (Config::kAlignment >= 2 * int(sizeof(Element))) {
            if (first < target.columns) store_pair(out + first, x, y);
          } else {
            if (first < target.columns) out[first] = Element(x);
            if (first + 1 < target.columns) out[first + 1] = Element(y);
          }
        }
      }
    }
  }

  CUTE_DEVICE static void store_pair(Element* out, float first, float second) {
    if constexpr (kIs32Bit<Element>) {
      *reinterpret_cast<float2*>(out) = make_float2(first, second);
    } else {
      *reinterpret_cast<uint32_t*>(out) = pack<Element>(first, second);
    }
  }
};

}  // namespace memeff
