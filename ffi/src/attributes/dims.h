// Sizes by name (B, T, S and so on in the description of a kernel), and the grids that are products
// of them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace memeff::host {

// The names are B, T, S, N, K, H and Hv as in the documentation, query_tokens and key_tokens of
// packed sequences, and any other name in the description of an array.
class Dims {
 public:
  // Gives the name its size. Returns false if it has a different size already.
  bool bind(std::string_view name, long long size);
  std::optional<long long> find(std::string_view name) const;

 private:
  std::vector<std::pair<std::string, long long>> sizes_;
};

// Sizes that a launcher chooses for the device; all others are known when a call is decoded.
struct LaunchDims {
  long long splits = 1;    // of the keys in a forward
  long long q_splits = 1;  // CTAs for each tile of keys in a backward
};

// The number of CTAs of an entry point: a sum of products of dims and tiles, such as "B*N*T/128" or
// "B*N*T/64+2*B*K*S/64". "/" rounds up and binds most tightly. all_queries/128 and all_keys/128 are
// the tiles of all packed sequences (layout/query_tiles.cuh). "bias_gradient.2" is a dim of an
// array; group_rows is T*N/K; T_or_1 and S_or_1 are T and S, or 1 instead of 0; splits and q_splits
// are LaunchDims. `combines` is 1 if the keys are split, else 0: an empty grid is not launched.
class Grid {
 public:
  // Multiplies the factors that `dims` has. If `per_multiprocessor` is not 0, it bounds the number
  // of blocks per multiprocessor; the bound is a multiple of `cluster`. On failure returns none and
  // sets `error`.
  static std::optional<Grid> parse(std::string_view text, int per_multiprocessor, int cluster,
                                   const Dims& dims, std::string* error);

  // The number of blocks; negative if it does not fit 63 bits.
  long long blocks(const LaunchDims& dims, int multiprocessors) const;

 private:
  struct Term {
    long long product = 1;
    bool splits = false;
    bool q_splits = false;
    bool combines = false;
  };

  std::vector<Term> terms_;
  int per_multiprocessor_ = 0;
  int cluster_ = 1;
};

inline long long ceil_div(long long a, long long b) { return a / b + (a % b > 0); }

}  // namespace memeff::host
