// Integer operations of users' functions, as lax defines them. C++ leaves overflow, division by
// zero and wide shifts undefined; here every input has a result.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff::function {

CUTE_DEVICE int wrapping_add(int a, int b) { return int(unsigned(a) + unsigned(b)); }
CUTE_DEVICE int wrapping_subtract(int a, int b) { return int(unsigned(a) - unsigned(b)); }
CUTE_DEVICE int wrapping_multiply(int a, int b) { return int(unsigned(a) * unsigned(b)); }
CUTE_DEVICE int wrapping_negate(int a) { return int(0u - unsigned(a)); }
CUTE_DEVICE int absolute(int a) { return a < 0 ? wrapping_negate(a) : a; }

// Rounds towards zero. x / 0 is -1, all bits set, and the smallest int divided by -1 is itself.
CUTE_DEVICE int divide(int a, int b) {
  if (b == 0) return -1;
  return b == -1 ? wrapping_negate(a) : a / b;
}
CUTE_DEVICE unsigned divide(unsigned a, unsigned b) { return b == 0 ? ~0u : a / b; }

// The remainder has the sign of a. The remainder of a division by zero is a.
CUTE_DEVICE int remainder(int a, int b) {
  if (b == 0) return a;
  return b == -1 ? 0 : a % b;
}
CUTE_DEVICE unsigned remainder(unsigned a, unsigned b) { return b == 0 ? a : a % b; }

// Shifts by 32 or more move all bits out. So do shifts by negative amounts.
CUTE_DEVICE unsigned shift_left(unsigned a, unsigned bits) { return bits < 32 ? a << bits : 0; }
CUTE_DEVICE unsigned shift_right_logical(unsigned a, unsigned bits) {
  return bits < 32 ? a >> bits : 0;
}
CUTE_DEVICE int shift_right_arithmetic(int a, unsigned bits) {
  return a >> (bits < 32 ? bits : 31);
}

CUTE_DEVICE int sign(int a) { return (a > 0) - (a < 0); }

template <class Integer>
CUTE_DEVICE Integer maximum(Integer a, Integer b) {
  return a > b ? a : b;
}

template <class Integer>
CUTE_DEVICE Integer minimum(Integer a, Integer b) {
  return a < b ? a : b;
}

}  // namespace memeff::function
