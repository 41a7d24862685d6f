// Counter-based random numbers: they need no state and do not depend on the order of evaluation.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, SC'11): four random words from a counter
// and a key.
CUTE_DEVICE uint4 philox4x32_7(uint4 counter, uint2 key) {
  CUTE_UNROLL
  for (int round = 0; round < 7; ++round) {
    unsigned long long const first = 0xD2511F53ull * counter.x;
    unsigned long long const second = 0xCD9E8D57ull * counter.z;
    counter = make_uint4(uint32_t(second >> 32) ^ counter.y ^ key.x, uint32_t(second),
                         uint32_t(first >> 32) ^ counter.w ^ key.y, uint32_t(first));
    key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
  }
  return counter;
}

}  // namespace memeff
