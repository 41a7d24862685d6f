// The arrays that a user's function closes over.
#pragma once

#include <memeff/core/common.cuh>
#include <memeff/core/function/integers.cuh>

namespace memeff::function {

// A valid index: lax clamps those out of bounds. Hazard: without elements there is no valid one;
// tracing refuses to read empty arrays.
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

// Captured arrays and literals as one batch index of the call sees them. `captured` has an array of
// dims [1 or the size of a vmap, *dims of the user] for each of the function. XLA's arrays are
// dense, so the innermost stride is 1.
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

  // The special function unit converts integers, and is busy with the exponentials. So a kernel
  // hides this if it has the difference of its first row and column as a float, and adds to that.
  CUTE_DEVICE float difference(int key, int query) const {
    return float(wrapping_subtract(key, query));
  }

  // The same times `slope`, a number of the head.
  CUTE_DEVICE float scaled_difference(float slope, int key, int query) const {
    return slope * difference(key, query);
  }
  CUTE_DEVICE float plus_scaled_difference(float x, float slope, int key, int query) const {
    return x + scaled_difference(slope, key, query);
  }

  // The function computes with the result after it read `value`, one per element. A kernel that has
  // staged read kRead of its tile hides this with a function that ignores `value`.
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
