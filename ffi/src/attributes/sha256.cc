#include "attributes/sha256.h"

#include <cstdint>
#include <cstring>

namespace memeff::host {
namespace {

constexpr size_t kBlockBytes = 64;

// FIPS 180-4, section 4.2.2: the first 32 bits of the fractions of cube roots of primes.
constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

uint32_t read_big_endian(const unsigned char* bytes) {
  return uint32_t(bytes[0]) << 24 | uint32_t(bytes[1]) << 16 | uint32_t(bytes[2]) << 8 | bytes[3];
}

// Adds a block to the hash (section 6.2.2).
void add_block(const unsigned char* block, uint32_t (&hash)[8]) {
  uint32_t words[64];
  for (int t = 0; t < 16; ++t) words[t] = read_big_endian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    uint32_t const w15 = words[t - 15];
    uint32_t const w2 = words[t - 2];
    words[t] = words[t - 16] + (rotate(w15, 7) ^ rotate(w15, 18) ^ w15 >> 3) + words[t - 7] +
               (rotate(w2, 17) ^ rotate(w2, 19) ^ w2 >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = hash;
  for (int t = 0; t < 64; ++t) {
    uint32_t const t1 = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) +
                        kRounds[t] + words[t];
    uint32_t const t2 =
        (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  uint32_t const added[] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) hash[i] += added[i];
}

}  // namespace

std::string sha256(std::string_view text) {
  uint32_t hash[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  auto const* bytes = reinterpret_cast<const unsigned char*>(text.data());
  size_t rest = text.size();
  for (; rest >= kBlockBytes; rest -= kBlockBytes, bytes += kBlockBytes) add_block(bytes, hash);

  // Padding: the last bytes, a one bit, zeros, and the number of bits as 64 bits.
  unsigned char last[2 * kBlockBytes] = {};
  if (rest > 0) std::memcpy(last, bytes, rest);
  last[rest] = 0x80;
  size_t const padded = rest + 9 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes;
  uint64_t const bits = uint64_t(text.size()) * 8;
  for (int i = 0; i < 8; ++i) last[padded - 1 - i] = static_cast<unsigned char>(bits >> 8 * i);
  for (size_t begin = 0; begin < padded; begin += kBlockBytes) add_block(last + begin, hash);

  std::string digest;
  for (uint32_t word : hash) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift);
  }
  return digest;
}

}  // namespace memeff::host
