// The arrays that a user's function closes over.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/core/function/operations.cuh>

namespace memeff::function {

// Clamps an index as lax does. Hazard: an empty array has no valid index; tracing refuses to read
// empty arrays.
CUTE_DEVICE int clamp_index(int index, int size) {
  index = index < size ? index : size - 1;
  return index > 0 ? index : 0;
}

CUTE_DEVICE bool in_bounds(int index, int size) { return unsigned(index) < unsigned(size); }

// The type in which a function computes with elements: float for all floats, int or unsigned.
template <class Scalar, class Element>
CUTE_DEVICE Scalar load(Element const* element) {
  if constexpr (sizeof(Element) == 2 && !cute::is_integral<Element>::value) {
    return Scalar(Element::bitcast(__ldg(reinterpret_cast<unsigned short const*>(element))));
  } else {
    return Scalar(__ldg(element));
  }
}

// The captured arrays and literals of one function, for one batch index of the call. Generated code
// reads through it. `captured` has one array for each array of the function, with dims [1 or the
// size of a vmap, *dims of the user]. XLA's arrays are dense, so the innermost stride is 1.
template <class Config>
struct FunctionArrays {
  ArrayView const* captured;
  unsigned const* literals;  // bits of the run-time parameters
  int batch;                 // batch index of the call, not the function's argument

  template <int kArray, int kDim>
  CUTE_DEVICE int size() const {
    static_assert(kDim + 1 < ArrayView::kMostDims, "a captured array has too many dims");
    return int(captured[kArray].sizes[kDim + 1]);
  }

  template <int kArray, int kDim>
  CUTE_DEVICE long long stride() const {
    return captured[kArray].strides[kDim + 1];
  }

  // The first element for this batch index.
  template <int kArray, class Element>
  CUTE_DEVICE Element const* data() const {
    ArrayView const& view = captured[kArray];
    long long const first = element_of<Config>(view, batch) * view.strides[0];
    return static_cast<Element const*>(view.data) + first;
  }

  // The special function unit converts integers, and it is busy with the exponentials. A kernel
  // that has the difference of its first row and column as a float therefore redefines this
  // function and adds to that float.
  CUTE_DEVICE float difference(int key, int query) const {
    return float(wrapping_subtract(key, query));
  }

  // difference() times `slope`, a number of the head.
  CUTE_DEVICE float scaled_difference(float slope, int key, int query) const {
    return slope * difference(key, query);
  }
  CUTE_DEVICE float plus_scaled_difference(float x, float slope, int key, int query) const {
    return x + scaled_difference(slope, key, query);
  }

  // Generated code passes each value that it reads through this function. A kernel that already
  // holds read kRead in registers redefines it to ignore `value`, and the compiler drops the load.
  template <int kRead>
  CUTE_DEVICE float read(float value) const {
    return value;
  }

  template <int kIndex, class Scalar>
  CUTE_DEVICE Scalar literal() const {
    unsigned const bits = __ldg(literals + kIndex);
    return reinterpret_cast<Scalar const&>(bits);
  }
};

}  // namespace memeff::function
