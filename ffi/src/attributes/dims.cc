#include "attributes/dims.h"

#include <algorithm>

#include "attributes/text.h"

namespace memeff::host {
namespace {

constexpr long long kMostBlocks = 1ll << 62;

// The tiles of the queries or keys of all packed sequences, for each head: at most one more for
// each sequence than its tokens fill.
std::optional<long long> tiles_of_all(bool queries, long long tile, const Dims& dims) {
  auto const batch = dims.find("B");
  auto const length = dims.find(queries ? "T" : "S");
  auto const tokens = dims.find(queries ? "query_tokens" : "key_tokens");
  if (!batch || !length || !tokens) return std::nullopt;
  return *batch == 0 || *length == 0 ? 0 : *tokens / tile + *batch;
}

// "T/128" -> 3 for T = 300
std::optional<long long> factor_of(std::string_view text, const Dims& dims) {
  size_t const slash = text.find('/');
  std::string_view const name = text.substr(0, slash);
  auto size = parse_number(name, 0, kMostBlocks);
  if (!size) size = dims.find(name);
  if (slash == std::string_view::npos) return size;
  auto const tile = parse_number(text.substr(slash + 1), 1, kMostBlocks);
  if (!tile) return std::nullopt;
  if (name == "all_queries" || name == "all_keys") {
    return tiles_of_all(name == "all_queries", *tile, dims);
  }
  return size ? std::optional(ceil_div(*size, *tile)) : std::nullopt;
}

}  // namespace

bool Dims::bind(std::string_view name, long long size) {
  if (auto const bound = find(name)) return *bound == size;
  sizes_.emplace_back(name, size);
  return true;
}

std::optional<long long> Dims::find(std::string_view name) const {
  for (auto const& [bound, size] : sizes_) {
    if (bound == name) return size;
  }
  return std::nullopt;
}

std::optional<Grid> Grid::parse(std::string_view text, int per_multiprocessor, int cluster,
                                const Dims& dims, std::string* error) {
  Grid grid;
  grid.per_multiprocessor_ = per_multiprocessor;
  grid.cluster_ = cluster;
  for (std::string_view product : split(text, '+')) {
    Term term;
    auto factors = split(product, '*');
    if (factors.empty()) factors.push_back(product);  // empty: reported as unknown below
    for (std::string_view factor : factors) {
      bool* const chosen = factor == "splits"     ? &term.splits
                           : factor == "q_splits" ? &term.q_splits
                           : factor == "combines" ? &term.combines
                                                  : nullptr;
      if (chosen != nullptr && !*chosen) {
        *chosen = true;
        continue;
      }
      auto const size = factor_of(factor, dims);
      if (!size || __builtin_mul_overflow(term.product, *size, &term.product)) {
        *error = "the grid " + quoted(text) + ", in which " + quoted(factor) +
                 (size ? " makes too many blocks" : " is unknown");
        return std::nullopt;
      }
    }
    grid.terms_.push_back(term);
  }
  if (grid.terms_.empty()) {
    *error = "an empty grid";
    return std::nullopt;
  }
  return grid;
}

long long Grid::blocks(const LaunchDims& dims, int multiprocessors) const {
  long long sum = 0;
  for (const Term& term : terms_) {
    long long product = term.product;
    if (term.combines && dims.splits <= 1) product = 0;
    if ((term.splits && __builtin_mul_overflow(product, dims.splits, &product)) ||
        (term.q_splits && __builtin_mul_overflow(product, dims.q_splits, &product)) ||
        __builtin_add_overflow(sum, product, &sum)) {
      return -1;
    }
  }
  if (per_multiprocessor_ == 0) return sum;
  long long const clusters =
      static_cast<long long>(per_multiprocessor_) * multiprocessors / cluster_;
  return std::min(sum, std::max(clusters, 1LL) * cluster_);
}

}  // namespace memeff::host
