// The arrays of a user's function.
#pragma once

#include <memeff/core/feature_arrays.cuh>

namespace memeff {

// What a function reads beside a score and its position, for one batch index of the call.
template <class Config>
class FunctionArrays {
 public:
  CUTE_DEVICE FunctionArrays(ArrayTable const& table, int batch) : table_(table), batch_(batch) {}

 private:
  ArrayTable const& table_;
  int batch_;
};

}  // namespace memeff
