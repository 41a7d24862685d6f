// Where a kernel finds the arrays that features bring.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// The array at `index` of the table, which Config::k...Array is. Only kernels whose spec has
// captured arrays are launched with a table: elsewhere this reads beyond the parameters.
template <class Params>
CUTE_DEVICE ArrayView const& feature_array(Params const& params, int index) {
  return static_cast<WithArrays<Params> const&>(params).table.arrays[index];
}

}  // namespace memeff
