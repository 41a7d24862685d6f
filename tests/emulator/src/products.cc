// Instructions that a warp executes as one: shuffles, matrix loads and matrix products.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "machine.h"

namespace emulator {
namespace {

constexpr int kRows = 16;
constexpr int kSteps = 16;  // k of a 16-bit product
constexpr int kMostColumns = 256;
constexpr int kVector = 4;  // columns that are computed at a time

float to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

float half_to_float(uint16_t bits) {
  uint32_t const sign = uint32_t(bits & 0x8000) << 16;
  int const exponent = bits >> 10 & 31;
  int const mantissa = bits & 1023;
  if (exponent == 31) return to_float(sign | 0x7f800000 | uint32_t(mantissa) << 13);
  float const magnitude = exponent == 0 ? std::ldexp(float(mantissa), -24)
                                        : std::ldexp(float(mantissa + 1024), exponent - 25);
  return sign != 0 ? -magnitude : magnitude;
}

std::vector<float> const halves = [] {
  std::vector<float> values;
  for (int i = 0; i < 1 << 16; ++i) values.push_back(half_to_float(uint16_t(i)));
  return values;
}();

// The sum rounded towards zero, as tensor cores do. The number of the next smaller magnitude has
// the bits before; compilers vectorize that, but not a call of std::nextafter.
float truncated_sum(float a, float b) {
  double const exact = double(a) + double(b);
  float const rounded = float(exact);
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  bool const is_too_large = std::fabs(double(rounded)) > std::fabs(exact);
  bits -= is_too_large && std::fabs(rounded) <= std::numeric_limits<float>::max();
  return to_float(bits);
}

float decode(Format format, uint16_t bits) {
  return format == Format::f16 ? halves[bits] : to_float(uint32_t(bits) << 16);
}

// Tensor cores ignore the low bits.
float decode_tf32(uint32_t bits) { return to_float(bits & ~0x1fffu); }

// Unpacks the one or two numbers in 32 bits of a fragment.
void unpack(Format format, uint32_t bits, float* values) {
  if (format == Format::tf32) {
    values[0] = decode_tf32(bits);
  } else {
    values[0] = decode(format, uint16_t(bits));
    values[1] = decode(format, uint16_t(bits >> 16));
  }
}

// Unpacks a left operand of 16 rows from fragments: rows g and g + 8 of the lower half of k, then
// of the upper half.
template <class Fragment>
void unpack_left(Format format, Fragment const& fragment, float (&left)[kRows][kSteps]) {
  int const numbers = format == Format::tf32 ? 1 : 2;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      unpack(format, fragment(lane, i),
             &left[lane / 4 + i % 2 * 8][(i / 2 * 4 + lane % 4) * numbers]);
    }
  }
}

uint32_t field(uint64_t descriptor, int first, int bits) {
  return uint32_t(descriptor >> first & ((uint64_t(1) << bits) - 1));
}

// Calls use(outer, k, eight elements) for the part [first, first + count) of an operand in shared
// memory.
template <class Use>
void for_each_chunk(Block& block, Operand const& operand, int first, int count, Use use) {
  uint64_t const descriptor = operand.descriptor;
  uint32_t const start = field(descriptor, 0, 14) * 16;
  uint32_t const leading = field(descriptor, 16, 14) * 16;
  uint32_t const stride = field(descriptor, 32, 14) * 16;
  uint32_t const swizzle = field(descriptor, 62, 2);
  if (swizzle != 1 && swizzle != 2) fail("a matrix descriptor of swizzle %u", swizzle);
  if (field(descriptor, 49, 3) != 0) fail("a matrix descriptor with a base offset");
  uint32_t const row_bytes = swizzle == 1 ? 128 : 64;
  auto chunk = [&](uint32_t address, int outer, int k) {
    address ^= (address >> 3) & (row_bytes - 16);
    use(outer, k, async_read(block, address, 16, "wgmma"));
  };
  if (operand.contiguous_k) {
    for (int outer = first; outer < first + count; ++outer) {
      uint32_t const row = start + uint32_t(outer / 8) * stride + uint32_t(outer % 8) * row_bytes;
      for (int k = 0; k < kSteps; k += 8) chunk(row + uint32_t(k) * 2, outer, k);
    }
    return;
  }
  int const panel = int(row_bytes) / 2;
  for (int k = 0; k < kSteps; ++k) {
    uint32_t const row = start + uint32_t(k / 8) * stride + uint32_t(k % 8) * row_bytes;
    for (int outer = first; outer < first + count; outer += 8) {
      chunk(row + uint32_t(outer / panel) * leading + uint32_t(outer % panel) * 2, outer, k);
    }
  }
}

// Calls store(outer, k, value) for each element of an operand.
template <class Store>
void read_operand(Block& block, Format format, Operand const& operand, int first, int count,
                  Store store) {
  for_each_chunk(block, operand, first, count, [&](int outer, int k, char const* bytes) {
    for (int i = 0; i < 8; ++i) {
      uint16_t bits;
      std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
      float const value = decode(format, bits);
      if (operand.contiguous_k) {
        store(outer, k + i, value);
      } else {
        store(outer + i, k, value);
      }
    }
  });
}

// Columns [first, first + kVector) of a row of the product, whose sums stay in registers.
void multiply(float const (&left)[kSteps], float const (&right)[kSteps][kMostColumns], int first,
              float (&row)[kMostColumns]) {
  using Vector [[gnu::vector_size(kVector * sizeof(float))]] = float;
  Vector sums = {};
  for (int k = 0; k < kSteps; ++k) {
    Vector columns;
    std::memcpy(&columns, &right[k][first], sizeof(columns));
    sums += left[k] * columns;
  }
  std::memcpy(&row[first], &sums, sizeof(sums));
}

void compute(Block& block, int warp, Product& product) {
  static float left[kRows][kSteps];
  static float right[kSteps][kMostColumns];
  static float sums[kRows][kMostColumns];
  int const columns = 2 * product.elements;
  if (product.left_in_registers) {
    unpack_left(product.format, [&](int lane, int i) { return product.a[lane][i]; }, left);
  } else {
    int const first = warp % 4 * kRows;
    read_operand(block, product.format, product.left, first, kRows,
                 [&](int row, int k, float value) { left[row - first][k] = value; });
  }
  read_operand(block, product.format, product.right, 0, columns,
               [&](int column, int k, float value) { right[k][column] = value; });
  for (int row = 0; row < kRows; ++row) {
    for (int first = 0; first < columns; first += kVector)
      multiply(left[row], right, first, sums[row]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    float* const c = product.c[lane];
    std::copy(product.before[lane].begin(), product.before[lane].end(), c);
    for (int i = 0; i < product.elements; ++i) {
      float const sum = sums[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
      c[i] = product.accumulate ? truncated_sum(c[i], sum) : sum;
    }
  }
}

void finish_first(Block& block, int warp_index) {
  Warp& warp = block.warps[size_t(warp_index)];
  compute(block, warp_index, warp.products.front());
  warp.products.pop_front();
  ++warp.finished_products;
}

// Finishes the products of the first `groups` groups.
void finish(Block& block, int warp_index, uint64_t groups) {
  auto const& products = block.warps[size_t(warp_index)].products;
  while (!products.empty() && products.front().group < groups) {
    int const lanes = products.front().lanes;
    if (lanes != kLanes) fail("a wgmma that %d lanes of a warp have started", lanes);
    finish_first(block, warp_index);
  }
}

bool is_pending(Warp const& warp, uint64_t before, int lane, float const* c) {
  for (uint64_t i = 0; i + warp.finished_products < before; ++i) {
    if (warp.products[i].c[lane] == c) return true;
  }
  return false;
}

}  // namespace

uint32_t shuffle(uint32_t value, int lane) {
  return meet("shfl", &value, 1, [](Exchange&) {}).in[lane][0];
}

uint32_t ballot(bool predicate) {
  uint32_t const mine = predicate;
  Exchange const& exchange = meet("vote", &mine, 1, [](Exchange&) {});
  uint32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) lanes |= exchange.in[lane][0] << lane;
  return lanes;
}

void load_matrix(uint32_t (&fragment)[4], uint32_t address, bool transpose) {
  Exchange& exchange = meet("ldmatrix", &address, 1, [&](Exchange& lanes) {
    uint16_t rows[kLanes][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(rows[lane], read_shared(lanes.in[lane][0], 16), 16);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      int const g = lane / 4;
      int const q = lane % 4 * 2;
      for (int matrix = 0; matrix < 4; ++matrix) {
        auto const* const m = &rows[8 * matrix];
        uint16_t const low = transpose ? m[q][g] : m[g][q];
        uint16_t const high = transpose ? m[q + 1][g] : m[g][q + 1];
        lanes.out[lane][matrix] = low | uint32_t(high) << 16;
      }
    }
  });
  std::copy_n(exchange.out[this_lane()], 4, fragment);
}

void store_matrix(uint32_t address, uint32_t const (&fragment)[4], bool transpose) {
  Exchange& exchange = meet("stmatrix", fragment, 4, [transpose](Exchange& lanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      int const matrix = lane / 8;
      int const row = lane % 8;
      auto element = [&](int r, int c) { return lanes.in[r * 4 + c / 2][matrix] >> c % 2 * 16; };
      for (int q = 0; q < 4; ++q) {
        uint32_t const low = transpose ? element(2 * q, row) : element(row, 2 * q);
        uint32_t const high = transpose ? element(2 * q + 1, row) : element(row, 2 * q + 1);
        lanes.out[lane][q] = (low & 0xffff) | high << 16;
      }
    }
  });
  std::memcpy(write_shared(address, 16), exchange.out[this_lane()], 16);
}

void mma(Format format, float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  uint32_t const words[] = {a[0], a[1], a[2], a[3], b0, b1};
  Exchange& exchange = meet("mma", words, 6, [format](Exchange& lanes) {
    int const numbers = format == Format::tf32 ? 1 : 2;
    float left[kRows][kSteps];
    float right[8][kSteps];
    unpack_left(format, [&](int lane, int i) { return lanes.in[lane][i]; }, left);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 2; ++i) {
        unpack(format, lanes.in[lane][4 + i], &right[lane / 4][(i * 4 + lane % 4) * numbers]);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < 8 * numbers; ++k) {
          sum += left[lane / 4 + i / 2 * 8][k] * right[lane % 4 * 2 + i % 2][k];
        }
        std::memcpy(&lanes.out[lane][i], &sum, sizeof(sum));
      }
    }
  });
  for (int i = 0; i < 4; ++i) c[i] = truncated_sum(c[i], to_float(exchange.out[this_lane()][i]));
}

void wgmma(Format format, float* c, int elements, uint32_t const* a, Operand left, Operand right,
           bool accumulate) {
  Fiber& fiber = this_fiber();
  Warp& warp = this_warp();
  int const lane = this_lane();
  uint64_t const index = fiber.products++;
  if (index - warp.finished_products == warp.products.size()) {
    Product product = {};
    product.format = format;
    product.left = left;
    product.right = right;
    product.left_in_registers = a != nullptr;
    product.accumulate = accumulate;
    product.elements = elements;
    product.group = fiber.product_groups;
    if (product.group != warp.newest_group) {
      warp.newest_group = product.group;
      warp.newest_at_once = at_once();
    }
    product.at_once = warp.newest_at_once;
    warp.products.push_back(std::move(product));
  }
  Product& product = warp.products[index - warp.finished_products];
  product.c[lane] = c;
  if (a != nullptr) std::copy_n(a, 4, product.a[lane]);
  if (!is_pending(warp, index, lane, c)) {
    product.before[lane].assign(c, c + elements);
    std::fill_n(c, elements, std::numeric_limits<float>::quiet_NaN());
  }
  if (++product.lanes == kLanes && product.at_once) {
    while (warp.finished_products <= index) finish_first(this_block(), fiber.thread / kLanes);
  }
}

void commit_products() { ++this_fiber().product_groups; }

void wait_products(int pending) {
  Fiber const& fiber = this_fiber();
  uint64_t const groups = fiber.product_groups;
  meet("wgmma.wait_group", nullptr, 0, [&](Exchange&) {
    if (groups > uint64_t(pending)) {
      finish(this_block(), fiber.thread / kLanes, groups - uint64_t(pending));
    }
  });
}

}  // namespace emulator
