// The f32 sums of dQ in global memory, to which the CTAs of all KV blocks add.
#pragma once

#include <cute/tensor_impl.hpp>

#include <memeff/params.h>

namespace memeff {

// Adds the dQ of one Q block, in the order of Tiles::Sums.
template <class Tiles, class Accumulators>
CUTE_DEVICE void add_to_dq_sums(BackwardParams const& params, int batch, int head, int tile,
                                Accumulators const& query_gradient) {
  float* const sums = params.query_gradient_sum +
                      Tiles::tile_index(params, batch, head, tile) * Tiles::kQueryTileFloats;
  CUTE_UNROLL
  for (int m = 0; m < cute::size<1>(query_gradient); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < cute::size<2>(query_gradient); ++n) {
      int const block = m * int(cute::size<2>(query_gradient)) + n;
      Tiles::Sums::add(sums, block, query_gradient(0, m, n), query_gradient(1, m, n),
                       query_gradient(2, m, n), query_gradient(3, m, n));
    }
  }
}

}  // namespace memeff
