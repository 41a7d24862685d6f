// Runs before the backward: computes the row statistics and zeroes the dq sums. One CTA per tile of
// query rows.
//
//   delta = rowsum(dO * O) - dlse      (FlashAttention-2, algorithm 2, with the logsumexp's
//   gradient)
#pragma once

#include <memeff/arch/tf32.cuh>
#include <memeff/core/feature_arrays.cuh>
#include <memeff/core/math.cuh>
#include <memeff/core/vector.cuh>
#include <memeff/core/work_item.cuh>
#include <memeff/layout/backward_tiles.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/mask/interval.cuh>
#include <memeff/schedule/dq_semaphore.cuh>
#include <memeff/score/bias/rows.cuh>
#include <memeff/score/bias/tile.cuh>

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

  CUTE_DEVICE static void run(BackwardParams const& params) {
    if constexpr (Config::kOrdersQueries || Config::kSplitQ) {
      unsigned const words = DqSemaphore<Config>::words(params.shape, Tiles::kTileKey);
      for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < words; i += gridDim.x * kThreads) {
        params.semaphores[i] = 0;
      }
    }
    ProblemShape const& shape = params.shape;
    WorkItem const item = WorkItem::of_block(blockIdx.x, params.query_tiles, shape.query_heads);
    IntervalMask<MaskKind::none> const mask(params.mask, shape, item.batch);
    int const first_row = item.tile * Tiles::kTileQuery;
    if constexpr (Config::kVarlen) {
      if (first_row >= mask.query_length) return;  // hazard: the workspaces have no such tile
    }
    long long const tile_index = Tiles::tile_index(params, item.batch, item.head, item.tile);
    Origin const origin = query_origin<Config>(shape, item.batch);
    int const lane = threadIdx.x % kRowLanes;

    for (int i = threadIdx.x / kRowLanes; i < Tiles::kTileQuery; i += kRowsPerPass) {
      int const row = first_row + i;
      bool const valid = row < mask.query_length;
      float delta = row_dot(
          row_pointer<Element>(params.out, origin.batch, origin.row + row, item.head),
          row_pointer<Element>(params.out_gradient, origin.batch, origin.row + row, item.head),
          lane, valid ? shape.value_dim : 0);
      delta += __shfl_xor_sync(0xffffffffu, delta, 1);
      delta += __shfl_xor_sync(0xffffffffu, delta, 2);
      delta += __shfl_xor_sync(0xffffffffu, delta, 4);
      if (lane == 0) {
        long long const source = logsumexp_offset<Config>(shape, origin, item.head) + row;
        // +inf makes every probability of a row without keys, or beyond the length, exactly 0.
        float logsumexp = valid ? params.logsumexp[source] : -infinity();
        // A bias may make the logsumexp so large that the exponents lose their digits. Such a row
        // counts as empty, too.
        bool const empty = fabsf(logsumexp) >= kWholeFloats;
        if constexpr (shifts_rows<Config>()) {
          // The logsumexp contains this bias, but the scores of the main loop do not.
          if (!empty) logsumexp -= row_bias<Config>(params.bias, item.batch, item.head, row);
        }
        if (!empty && params.logsumexp_gradient != nullptr) {
          delta -= params.logsumexp_gradient[source];
        }
        if constexpr (Config::kSinks) {
          float* const deltas =
              static_cast<float*>(feature_array(params, Config::kDeltaArray).data);
          if (valid) deltas[source] = empty ? 0.0f : delta;
        }
        Tiles::Statistics::store(params.row_statistics + tile_index * (2 * Tiles::kTileQuery), i,
                                 empty ? infinity() : logsumexp * kLog2e, empty ? 0.0f : delta);
      }
    }

    if constexpr (Config::kQueryGradient) {
      float4* const sums = reinterpret_cast<float4*>(params.query_gradient_sum +
                                                     tile_index * Tiles::kQueryTileFloats);
      for (int i = threadIdx.x; i < Tiles::kQueryTileFloats / 4; i += kThreads) {
        sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }

  // This lane's part of the dot product of two rows.
  CUTE_DEVICE static float row_dot(char const* a, char const* b, int lane, int columns) {
    float sum = 0.0f;
    constexpr int kBytes = sizeof(Element);
    constexpr int kChunk = 16 / kBytes;
    // Hazard: with more than two vectors at a time, which the compiler would choose, it spills.
#pragma unroll 2
    for (int column = lane * kChunk; column < columns; column += kRowLanes * kChunk) {
      int const bytes = (columns - column) * kBytes;
      uint4 const x = load_vector<Config::kAlignment>(a + column * kBytes, bytes);
      uint4 const y = load_vector<Config::kAlignment>(b + column * kBytes, bytes);
      sum += word_dot(x.x, y.x) + word_dot(x.y, y.y) + word_dot(x.z, y.z) + word_dot(x.w, y.w);
    }
    return sum;
  }

  CUTE_DEVICE static float word_dot(uint32_t x, uint32_t y) {
    if constexpr (kIs32Bit<Element>) {
      return __uint_as_float(x) * __uint_as_float(y);
    } else {
      return unpack<Element>(x, 0) * unpack<Element>(y, 0) +
             unpack<Element>(x, 1) * unpack<Element>(y, 1);
    }
  }
};

}  // namespace memeff
