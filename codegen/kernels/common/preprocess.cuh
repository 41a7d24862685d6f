// Runs before the backward: computes the row statistics and zeroes the dq sums, or marks them as
// absent. One CTA per tile of query rows.
//
//   delta = rowsum(dO * O) - dlse      (FlashAttention-2, algorithm 2, with the logsumexp's
//   gradient)
#pragma once

#include <kernels/common/dq_sums.cuh>
#include <memeff/arch/tf32.cuh>
#include <memeff/core/common.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/vector.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/schedule/grid.cuh>
#include <memeff/schedule/split_q.cuh>
#include <memeff/score/bias/tile.cuh>
#include <memeff/score/row_modifiers.cuh>

namespace memeff {

// For main kernels that sum no dq in global memory: there is nothing to zero.
template <class Config>
struct WithoutQueryGradient : Config {
  static constexpr bool kQueryGradient = false;
};

// The entry point of all backwards. Tiles defines the layout of the statistics.
template <class Config, class Tiles = BackwardTiles<Config>>
struct FmhaBackwardPreprocess {
  using Element = typename Config::Element;
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kBlocksPerSm = 4;  // 64 registers; without a bound ptxas spills at 48
  static constexpr int kRowLanes = 8;     // lanes of one row
  static constexpr int kRowsPerPass = kThreads / kRowLanes;
  static constexpr int kChunk = 16 / int(sizeof(Element));
  // The rows of a lane whose vectors are loaded together. With eight ptxas spills.
  static constexpr int kRowsAtOnce = cute::min(ceil_div(Tiles::kTileQuery, kRowsPerPass), 4);

  CUTE_DEVICE static void run(BackwardParams const& params) {
    if constexpr (Config::kDeterministicDq || Config::kSplitQ || Config::kCountsKvBlocks) {
      unsigned const words = semaphore_words(params);
      for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < words; i += gridDim.x * kThreads) {
        params.semaphores[i] = 0;
      }
    }
    ProblemShape const& shape = params.shape;
    WorkItem const item =
        GridTiles<Config, GridRows::queries, Tiles::kTileQuery>{shape}.of_block(blockIdx.x);
    IntervalMask<MaskKind::none> const mask(params.mask, shape, item.batch);
    int const first_row = item.tile * Tiles::kTileQuery;
    if constexpr (Config::kPacked) {
      if (first_row >= mask.query_length) return;  // hazard: the workspaces have no such tile
    }
    long long const tile_index = Tiles::tile_index(params, item.batch, item.head, item.tile);
    if constexpr (Config::kStoresFirstDq) {
      if (threadIdx.x == 0) {
        params.query_gradient_states[tile_index] = FirstDqStore::kAbsent;
      }
    } else if constexpr (Config::kQueryGradient) {
      float4* const sums = reinterpret_cast<float4*>(params.query_gradient_sum +
                                                     tile_index * Tiles::kQueryTileFloats);
      CUTE_UNROLL
      for (int i = threadIdx.x; i < Tiles::kQueryTileFloats / 4; i += kThreads) {
        sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const lane = threadIdx.x % kRowLanes;
    CUTE_NO_UNROLL
    for (int i = threadIdx.x / kRowLanes; i < Tiles::kTileQuery; i += kRowsAtOnce * kRowsPerPass) {
      float deltas[kRowsAtOnce] = {};
      add_dots(params, origin, item.head, first_row + i,
               min(mask.query_length, first_row + Tiles::kTileQuery), lane, deltas);
      // After the reductions all lanes of a row have its delta; each lane stores that of a
      // different row.
      float delta = 0.0f;
      CUTE_UNROLL
      for (int row = 0; row < kRowsAtOnce; ++row) {
        deltas[row] += __shfl_xor_sync(0xffffffffu, deltas[row], 1);
        deltas[row] += __shfl_xor_sync(0xffffffffu, deltas[row], 2);
        deltas[row] += __shfl_xor_sync(0xffffffffu, deltas[row], 4);
        if (lane == row) delta = deltas[row];
      }
      int const own = i + lane * kRowsPerPass;
      if (lane < kRowsAtOnce && own < Tiles::kTileQuery) {
        store_statistics(params, mask, origin, item, tile_index, own, delta);
      }
    }
  }

  CUTE_DEVICE static unsigned semaphore_words(BackwardParams const& params) {
    if constexpr (Config::kCountsKvBlocks) return FinishedDq<Config>{params}.words();
    return SplitCounters<Config>::offset(params) + SplitCounters<Config>::words(params);
  }

  // Adds this lane's part of the dot products of dO and out. `row` is the first of its rows.
  CUTE_DEVICE static void add_dots(BackwardParams const& params, Origin const& origin, int head,
                                   int row, int row_bound, int lane, float (&sums)[kRowsAtOnce]) {
    int const columns = params.shape.value_dim;
    CUTE_NO_UNROLL
    for (int column = lane * kChunk; column < columns; column += kRowLanes * kChunk) {
      int const bytes = (columns - column) * int(sizeof(Element));
      auto load = [&](TensorView const& tensor, int i) {
        int const source = row + i * kRowsPerPass;
        if (source >= row_bound) return make_uint4(0, 0, 0, 0);
        char const* const address =
            row_pointer<Element>(tensor, origin.batch, origin.row + source, head);
        return load_vector<Config::kAlignment>(address + column * sizeof(Element), bytes);
      };
      uint4 out[kRowsAtOnce];
      uint4 gradient[kRowsAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        out[i] = load(params.out, i);
        gradient[i] = load(params.out_gradient, i);
      }
      CUTE_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        sums[i] += vector_dot<Element>(out[i], gradient[i]);
      }
    }
  }

  // Stores the statistics of row `i` of the tile.
  CUTE_DEVICE static void store_statistics(BackwardParams const& params,
                                           IntervalMask<MaskKind::none> const& mask,
                                           Origin const& origin, WorkItem const& item,
                                           long long tile_index, int i, float delta) {
    int const row = item.tile * Tiles::kTileQuery + i;
    bool const valid = row < mask.query_length;
    long long const source = logsumexp_offset<Config>(params.shape, origin, item.head) + row;
    // +inf makes every probability of a row without keys, or beyond the length, exactly 0.
    float logsumexp = valid ? params.logsumexp[source] : -infinity();
    // A bias may make the logsumexp so large that the exponents lose all precision. Such a row
    // counts as empty, too.
    bool const empty = fabsf(logsumexp) >= kWholeFloats;
    if constexpr (shifts_rows<Config>()) {
      // The logsumexp contains this bias, but the scores of the main loop do not.
      if (!empty) logsumexp -= row_bias<Config>(params.bias, item.batch, item.head, row);
    }
    if (valid && params.logsumexp_gradient != nullptr) {
      delta -= params.logsumexp_gradient[source];
    }
    if constexpr (Config::kSinks) {
      float* const deltas = static_cast<float*>(feature_array(params, Config::kDeltaArray).data);
      if (valid) deltas[source] = delta;  // of an empty row, too: its sink may be 1e9 or inf
    }
    Tiles::Statistics::store(params.row_statistics + tile_index * (2 * Tiles::kTileQuery), i,
                             empty ? infinity() : logsumexp * kLog2e, empty ? 0.0f : delta);
  }
};

// The statistics of all rows of a head.
template <class Tiles>
CUTE_DEVICE float* row_statistics(BackwardParams const& params, int batch, int head) {
  return params.row_statistics +
         Tiles::tile_index(params, batch, head, 0) * (2 * Tiles::kTileQuery);
}

// Replaces the delta of a row with keys by `dot` - dlse, for the kernels that sum the dot product
// from the scores: it has more digits than that of dO and out.
template <class Config, class Tiles>
CUTE_DEVICE void replace_delta(BackwardParams const& params, int batch, int head, int row,
                               float logsumexp, float dot) {
  if (logsumexp == infinity()) return;
  Origin const origin = query_origin<Config>(params.shape, batch);
  long long const place = logsumexp_offset<Config>(params.shape, origin, head) + row;
  float delta = dot;
  if (params.logsumexp_gradient != nullptr) delta -= params.logsumexp_gradient[place];
  if constexpr (Config::kSinks) {
    static_cast<float*>(feature_array(params, Config::kDeltaArray).data)[place] = delta;
  }
  Tiles::Statistics::store(row_statistics<Tiles>(params, batch, head), row, logsumexp, delta);
}

}  // namespace memeff
