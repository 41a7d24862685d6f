// Copies the queries of a row tile in kernels/fmha_fwd_latent_sm90.cuh.
#pragma once

#include <memeff/arch/copy.cuh>
#include <memeff/layout/packed_rows.cuh>
#include <memeff/layout/sequences.cuh>
#include <memeff/layout/tensor_rows.cuh>
#include <memeff/schedule/balanced_keys.cuh>

namespace memeff {

// The threads of both consumers call load(). A single warp would take 15000 cycles: rows of several
// heads and tokens have no common stride, so there is an address for each row and an instruction
// for each 16 bytes.
template <class Config, class Kernel>
struct LatentQueriesSm90 {
  using Element = typename Config::Element;
  using Tile = typename Kernel::QueryTile;
  static constexpr int kWarps = Kernel::kConsumers / kWarpSize;
  static constexpr int kRows = Kernel::kTileQuery / kWarps;  // of a warp
  static_assert(kRows * kWarps == Kernel::kTileQuery && kRows <= kWarpSize);

  // Starts the copies of this warp's rows; rows and columns beyond the bounds become zero. Each
  // lane finds the address of one row, so a warp divides by the number of heads only once.
  CUTE_DEVICE static void load(ForwardParams const& params, KeyPart const& part, int query_length,
                               uint32_t tile) {
    constexpr int kRowChunks = Config::kHeadDim / 8;
    int const lane = int(threadIdx.x) % kWarpSize;
    int const begin = int(threadIdx.x) / kWarpSize * kRows;
    int const first = part.tile * Kernel::kTileQuery + begin;
    Row const own(params, part, min(first + lane % kRows, query_length - 1));
#pragma unroll 4  // overlaps the shuffles
    for (int row = 0; row < kRows; ++row) {
      char const* const source = own.of_lane(row);
      CUTE_UNROLL
      for (int chunk = lane; chunk < kRowChunks; chunk += kWarpSize) {
        copy_async(tile + Tile::byte_offset(begin + row, chunk), source + chunk * 16,
                   first + row < query_length && chunk * 8 < params.shape.head_dim);
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

}  // namespace memeff
