// Interval arithmetic on users' functions: the least and the largest value in a box of elements.
//
// Ranges are conservative: every element of a box lies in the range, which may be wider than
// necessary. The rules are those of jax_memeff/_call/mask/ranges. The values of a mask function are
// neither fused nor approximated (codegen/functions/operations.py), and neither are their bounds.
#pragma once

#include <memeff/core/function/arrays.cuh>
#include <memeff/core/function/operations.cuh>

namespace memeff::function::ranges {

// For bools: true in all elements, true in any element. If nothing is known about a float, both are
// NaN, which no comparison decides.
template <class Scalar>
struct Range {
  Scalar low;
  Scalar high;
};

template <class Scalar>
CUTE_DEVICE Range<Scalar> exact(Scalar value) {
  return {value, value};
}

CUTE_DEVICE Range<int> everything(int) { return {int(0x80000000u), 0x7fffffff}; }
CUTE_DEVICE Range<unsigned> everything(unsigned) { return {0u, ~0u}; }
CUTE_DEVICE Range<bool> everything(bool) { return {false, true}; }
CUTE_DEVICE Range<float> everything(float) { return exact(__uint_as_float(0x7fc00000u)); }

template <class Scalar>
CUTE_DEVICE Range<Scalar> everything() {
  return everything(Scalar());
}

// Whether the value is the same in all elements, and known.
template <class Scalar>
CUTE_DEVICE bool is_exact(Range<Scalar> x) {
  return x.low == x.high;
}
// 0 equals -0, which other operations tell apart.
CUTE_DEVICE bool is_exact(Range<float> x) {
  return x.low == x.high && __float_as_uint(x.low) == __float_as_uint(x.high);
}

template <class Scalar>
CUTE_DEVICE Scalar least(Scalar a, Scalar b) {
  return function::minimum(a, b);
}
template <class Scalar>
CUTE_DEVICE Scalar largest(Scalar a, Scalar b) {
  return function::maximum(a, b);
}
CUTE_DEVICE bool least(bool a, bool b) { return a && b; }
CUTE_DEVICE bool largest(bool a, bool b) { return a || b; }

template <class Scalar>
CUTE_DEVICE Range<Scalar> hull(Range<Scalar> a, Range<Scalar> b) {
  return {least(a.low, b.low), largest(a.high, b.high)};
}

// An int wraps around if it does not fit, and inf - inf is NaN though neither bound is.
CUTE_DEVICE Range<int> fitted(long long low, long long high) {
  Range<int> const all = everything<int>();
  return low >= all.low && high <= all.high ? Range<int>{int(low), int(high)} : all;
}
CUTE_DEVICE Range<float> fitted(float low, float high) {
  return is_finite(low) && is_finite(high) ? Range<float>{low, high} : everything<float>();
}

// Sums and products.

CUTE_DEVICE Range<int> add(Range<int> a, Range<int> b) {
  return fitted((long long)a.low + b.low, (long long)a.high + b.high);
}
CUTE_DEVICE Range<float> add(Range<float> a, Range<float> b) {
  return fitted(__fadd_rn(a.low, b.low), __fadd_rn(a.high, b.high));
}

CUTE_DEVICE Range<int> subtract(Range<int> a, Range<int> b) {
  return fitted((long long)a.low - b.high, (long long)a.high - b.low);
}
CUTE_DEVICE Range<float> subtract(Range<float> a, Range<float> b) {
  return fitted(__fsub_rn(a.low, b.high), __fsub_rn(a.high, b.low));
}

CUTE_DEVICE Range<int> negate(Range<int> a) {
  return fitted(-(long long)a.high, -(long long)a.low);
}
CUTE_DEVICE Range<float> negate(Range<float> a) { return {-a.high, -a.low}; }

CUTE_DEVICE Range<int> multiply(Range<int> a, Range<int> b) {
  long long const products[] = {(long long)a.low * b.low, (long long)a.low * b.high,
                                (long long)a.high * b.low, (long long)a.high * b.high};
  return fitted(least(least(products[0], products[1]), least(products[2], products[3])),
                largest(largest(products[0], products[1]), largest(products[2], products[3])));
}
CUTE_DEVICE Range<float> multiply(Range<float> a, Range<float> b) {
  float const products[] = {__fmul_rn(a.low, b.low), __fmul_rn(a.low, b.high),
                            __fmul_rn(a.high, b.low), __fmul_rn(a.high, b.high)};
  return fitted(least(least(products[0], products[1]), least(products[2], products[3])),
                largest(largest(products[0], products[1]), largest(products[2], products[3])));
}

CUTE_DEVICE Range<int> absolute(Range<int> a) {
  long long const low = a.low > 0 ? a.low : a.high < 0 ? -(long long)a.high : 0;
  return fitted(low, largest(-(long long)a.low, (long long)a.high));
}
CUTE_DEVICE Range<float> absolute(Range<float> a) {
  if (a.low != a.low || a.high != a.high) return everything<float>();
  return {a.low > 0 ? a.low : a.high < 0 ? -a.high : 0.0f, largest(-a.low, a.high)};
}

CUTE_DEVICE Range<int> square(Range<int> a) {
  Range<int> const size = absolute(a);
  return fitted((long long)size.low * size.low, (long long)size.high * size.high);
}
CUTE_DEVICE Range<float> square(Range<float> a) {
  Range<float> const size = absolute(a);
  return fitted(__fmul_rn(size.low, size.low), __fmul_rn(size.high, size.high));
}

// By a positive number that is the same in all elements.
CUTE_DEVICE Range<int> divide(Range<int> a, Range<int> b) {
  if (!is_exact(b) || b.low <= 0) return everything<int>();
  return {a.low / b.low, a.high / b.low};
}
CUTE_DEVICE Range<float> divide(Range<float> a, Range<float> b) {
  if (!(b.low > 0 || b.high < 0)) return everything<float>();
  float const quotients[] = {a.low / b.low, a.low / b.high, a.high / b.low, a.high / b.high};
  return fitted(least(least(quotients[0], quotients[1]), least(quotients[2], quotients[3])),
                largest(largest(quotients[0], quotients[1]), largest(quotients[2], quotients[3])));
}
CUTE_DEVICE Range<int> remainder(Range<int> a, Range<int> b) {
  if (!is_exact(b) || b.low <= 0) return everything<int>();
  if (a.low / b.low == a.high / b.low) return {a.low % b.low, a.high % b.low};
  return {a.low < 0 ? 1 - b.low : 0, a.high > 0 ? b.low - 1 : 0};
}

CUTE_DEVICE Range<int> shift_right_arithmetic(Range<int> a, Range<int> bits) {
  if (!is_exact(bits) || unsigned(bits.low) >= 32u) return everything<int>();
  return {a.low >> bits.low, a.high >> bits.low};
}
CUTE_DEVICE Range<int> shift_right_logical(Range<int> a, Range<int> bits) {
  return a.low >= 0 ? shift_right_arithmetic(a, bits) : everything<int>();
}

CUTE_DEVICE Range<float> sqrt(Range<float> a) {
  return a.low >= 0 ? Range<float>{sqrtf(a.low), sqrtf(a.high)} : everything<float>();
}

template <class Scalar>
CUTE_DEVICE Range<Scalar> maximum(Range<Scalar> a, Range<Scalar> b) {
  return {largest(a.low, b.low), largest(a.high, b.high)};
}
template <class Scalar>
CUTE_DEVICE Range<Scalar> minimum(Range<Scalar> a, Range<Scalar> b) {
  return {least(a.low, b.low), least(a.high, b.high)};
}
template <class Scalar>
CUTE_DEVICE Range<Scalar> clamp(Range<Scalar> low, Range<Scalar> x, Range<Scalar> high) {
  return minimum(maximum(low, x), high);
}

// Bools and bits.

CUTE_DEVICE Range<bool> all_of(Range<bool> a, Range<bool> b) { return minimum(a, b); }
CUTE_DEVICE Range<bool> any_of(Range<bool> a, Range<bool> b) { return maximum(a, b); }
CUTE_DEVICE Range<bool> none_of(Range<bool> a) { return {!a.high, !a.low}; }
CUTE_DEVICE Range<bool> one_of(Range<bool> a, Range<bool> b) {
  bool const is_known = is_exact(a) && is_exact(b);
  return is_known ? exact(a.low != b.low) : everything<bool>();
}

// The remainder of a power of two.
CUTE_DEVICE Range<int> low_bits(Range<int> a, Range<int> b) {
  if (!is_exact(b)) return is_exact(a) ? low_bits(b, a) : everything<int>();
  bool const is_power = b.low >= 0 && b.low < 1 << 30 && (b.low & (b.low + 1)) == 0;
  return is_power && a.low >= 0 ? remainder(a, exact(b.low + 1)) : everything<int>();
}

// Comparisons.

template <class Scalar>
CUTE_DEVICE Range<bool> equal(Range<Scalar> a, Range<Scalar> b) {
  bool const is_same = a.low == a.high && b.low == b.high && a.low == b.low;
  return {is_same, !(a.low > b.high || b.low > a.high)};
}
template <class Scalar>
CUTE_DEVICE Range<bool> less(Range<Scalar> a, Range<Scalar> b) {
  return {a.high < b.low, !(a.low >= b.high)};
}
template <class Scalar>
CUTE_DEVICE Range<bool> less_equal(Range<Scalar> a, Range<Scalar> b) {
  return {a.high <= b.low, !(a.low > b.high)};
}

template <class Scalar>
CUTE_DEVICE Range<Scalar> select(Range<bool> predicate, Range<Scalar> if_false,
                                 Range<Scalar> if_true) {
  return predicate.low ? if_true : predicate.high ? hull(if_false, if_true) : if_false;
}

// Conversions that change the order of some numbers.

CUTE_DEVICE Range<int> to_int(Range<float> a) {
  bool const fits = a.low > -0x1p30f && a.high < 0x1p30f;
  return fits ? Range<int>{function::to_int(a.low), function::to_int(a.high)} : everything<int>();
}
CUTE_DEVICE Range<int> to_int(Range<unsigned> a) {
  return a.high <= 0x7fffffffu ? Range<int>{int(a.low), int(a.high)} : everything<int>();
}
CUTE_DEVICE Range<unsigned> to_unsigned(Range<int> a) {
  return a.low >= 0 ? Range<unsigned>{unsigned(a.low), unsigned(a.high)} : everything<unsigned>();
}

// Reads.

constexpr int kMostReads = 32;

// The range of a captured array over a box of indices, which are clamped to the array. It is
// unbounded if the box has more than kMostReads elements.
template <int kArray, class Scalar, class Element, class Arrays, int kDims>
struct Read {
  Arrays const& arrays;
  Element const* data = arrays.template data<kArray, Element>();
  Range<int> box[kDims > 0 ? kDims : 1] = {};
  long long count = 1;
  bool is_inside = true;   // the box, before it was clamped
  bool is_element = true;  // the box is one element

  template <int kDim>
  CUTE_DEVICE void clamp(Range<int> index) {
    int const size = arrays.template size<kArray, kDim>();
    is_inside &= index.low >= 0 && index.high < size;
    is_element &= is_exact(index);
    box[kDim] = {clamp_index(index.low, size), clamp_index(index.high, size)};
    count *= box[kDim].high - box[kDim].low + 1;
  }

  CUTE_DEVICE Range<Scalar> range() const {
    if (count > kMostReads) return everything<Scalar>();
    bool is_first = true;
    Range<Scalar> found = everything<Scalar>();
    visit<0>(data, [&](Element const* element) {
      Range<Scalar> const own = exact(value(element));
      found = is_first ? own : hull(found, own);
      is_first = false;
    });
    return found;
  }

  // The same if elements outside of the array are `fill`.
  CUTE_DEVICE Range<Scalar> range_or(Scalar fill) const {
    if (is_inside) return range();
    return is_element ? exact(fill) : hull(range(), exact(fill));
  }

 private:
  CUTE_DEVICE static Scalar value(Element const* element) {
    if constexpr (cute::is_same_v<Scalar, bool>) {
      return load<int>(element) != 0;
    } else {
      return load<Scalar>(element);
    }
  }

  template <int kDim, class Use>
  CUTE_DEVICE void visit(Element const* first, Use const& use) const {
    if constexpr (kDim == kDims) {
      use(first);
    } else {
      CUTE_NO_UNROLL
      for (int index = box[kDim].low; index <= box[kDim].high; ++index) {
        visit<kDim + 1>(first + index * arrays.template stride<kArray, kDim>(), use);
      }
    }
  }
};

}  // namespace memeff::function::ranges
