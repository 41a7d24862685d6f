// Access to the arrays of features.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// The table of a kernel's arrays. Hazard: only kernels whose spec has captured arrays are launched
// with a table; in others this reads beyond the parameters.
template <class Params>
CUTE_DEVICE ArrayTable const& feature_arrays(Params const& params) {
  return static_cast<WithArrays<Params> const&>(params).table;
}

// The array at `index`, a Config::k...Array.
template <class Params>
CUTE_DEVICE ArrayView const& feature_array(Params const& params, int index) {
  return feature_arrays(params).arrays[index];
}

}  // namespace memeff
