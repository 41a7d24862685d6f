#include "images/kernel_description.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <optional>

#include "attributes/text.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;
using Words = std::vector<std::string_view>;

constexpr long long kMostHeadDim = 1 << 16;
constexpr size_t kMostMaps = 16;  // of MapTable
constexpr size_t kMostEntryPoints = 8;

// Reads one description; the first failure is kept.
class Parser {
 public:
  Parser(std::string_view text, std::string_view arch, const std::vector<Array>& arrays)
      : arch_(arch), arrays_(arrays) {
    for (std::string_view line : split(text, '\n')) {
      if (!line.empty()) lines_.push_back(split(line, ' '));
    }
  }

  KernelDescription parse(Direction direction, long long longest_query, long long longest_key) {
    KernelDescription kernel;
    parse_kernel(direction, &kernel);
    std::vector<Words> entries;
    while (next_is("entry")) entries.push_back(take("entry", 8));
    while (next_is("map")) parse_map(&kernel);
    std::vector<Words> const rows = parse_arrays();
    while (next_is("captured")) parse_captured(&kernel);
    if (!failed() && next_ < lines_.size()) {
      fail("the line " + quoted(lines_[next_][0]) + ", expected no more lines");
    }
    if (failed()) return kernel;

    bind_dims(rows, longest_query, longest_key);
    kernel.shape = parse_shape();
    for (const Words& row : rows) check_array(row);
    for (const char* name : {"query", "key", "value", "out", "query_gradient", "key_gradient",
                             "value_gradient", "out_gradient"}) {
      check_rows(name, kernel.alignment);
    }
    for (const Words& entry : entries) parse_entry(entry, &kernel);
    if (!failed() && (entries.empty() || entries.size() > kMostEntryPoints)) {
      fail("as many entry points as " + std::to_string(entries.size()) + ", expected 1 to " +
           std::to_string(kMostEntryPoints));
    }
    check_maps(kernel);
    return kernel;
  }

  bool failed() const { return !error_.empty(); }
  ffi::Error error() const { return malformed(error_); }

 private:
  // "the kernel of sm_90a has <what>"
  void fail(const std::string& what) {
    if (error_.empty()) error_ = "the kernel of " + std::string(arch_) + " has " + what;
  }

  void fail_array(std::string_view name, const std::string& what) {
    if (error_.empty()) {
      error_ = "array " + quoted(name) + " of the kernel of " + std::string(arch_) + ": " + what;
    }
  }

  bool next_is(std::string_view key) const {
    return !failed() && next_ < lines_.size() && lines_[next_][0] == key;
  }

  // The words of the next line, which has this key and at least so many words; else fails, and the
  // words are empty.
  Words take(std::string_view key, size_t count, bool or_more = false) {
    Words words(count);
    if (failed()) return words;
    if (next_ == lines_.size()) {
      fail("no line '" + std::string(key) + "' in its description");
    } else if (lines_[next_][0] != key) {
      fail("the line " + quoted(lines_[next_][0]) + " in its description, expected '" +
           std::string(key) + "'");
    } else if (lines_[next_].size() < count || (!or_more && lines_[next_].size() > count)) {
      fail("a line '" + std::string(key) + "' of " + std::to_string(lines_[next_].size()) +
           " words in its description, expected " + std::to_string(count));
    } else {
      words = lines_[next_++];
    }
    return words;
  }

  int number(std::string_view what, std::string_view word, long long least, long long most) {
    if (failed()) return 0;
    auto const found = parse_number(word, least, most);
    if (!found) {
      fail(std::string(what) + " = " + quoted(word) + ", expected " + std::to_string(least) +
           " to " + std::to_string(most));
      return 0;
    }
    return static_cast<int>(*found);
  }

  int alignment(std::string_view word) {
    int const bytes = number("alignment", word, 1, 16);
    if (!failed() && (bytes & (bytes - 1)) != 0) {
      fail("alignment = " + quoted(word) + ", expected a power of two up to 16");
    }
    return bytes;
  }

  void parse_kernel(Direction direction, KernelDescription* kernel) {
    if (Words const words = take("arch", 2); !failed() && words[1] != arch_) {
      fail("a description of " + quoted(words[1]));
    }
    std::string_view const expected = direction == Direction::kForward ? "forward" : "backward";
    if (Words const words = take("direction", 2); !failed() && words[1] != expected) {
      fail("direction " + quoted(words[1]) + ", expected '" + std::string(expected) + "'");
    }
    if (Words const words = take("dtype", 2); !failed()) {
      auto const dtype = parse_dtype(words[1]);
      if (!dtype) fail("the unknown dtype " + quoted(words[1]));
      if (dtype) dtype_ = *dtype;
    }
    Words words = take("padded_dims", 3);
    padded_head_dim_ = number("padded_dims", words[1], 1, kMostHeadDim);
    padded_value_dim_ = number("padded_dims", words[2], 1, kMostHeadDim);
    words = take("tile", 3);
    kernel->tile_query = number("tile", words[1], 1, kMostHeadDim);
    kernel->tile_key = number("tile", words[2], 1, kMostHeadDim);
    kernel->alignment = alignment(take("alignment", 2)[1]);
    kernel->blocks_per_sm = number("blocks_per_sm", take("blocks_per_sm", 2)[1], 1, 32);
  }

  void parse_map(KernelDescription* kernel) {
    Words const words = take("map", 5);
    MapBox box;
    box.name = words[1];
    box.rows = number("map rows", words[2], 1, 256);
    box.columns = number("map columns", words[3], 1, 256);
    box.row_dim = number("map row dim", words[4], 1, 2);
    if (!failed() && box.columns != 32 && box.columns != 64) {
      fail("map columns = " + quoted(words[3]) + ", expected 32 or 64, the widths of swizzles");
    }
    kernel->maps.push_back(box);
    if (kernel->maps.size() > kMostMaps) fail("more than " + std::to_string(kMostMaps) + " maps");
  }

  // The lines of arrays, each of another array of the call, and all of those.
  std::vector<Words> parse_arrays() {
    std::vector<Words> rows;
    while (next_is("array")) {
      Words const words = take("array", 3, true);
      if (failed()) break;
      for (const Words& other : rows) {
        if (other[1] == words[1]) fail("two lines of the array " + quoted(words[1]));
      }
      if (find(arrays_, words[1]) == nullptr) {
        fail("an array " + quoted(words[1]) + ", which the call has not among its operands " +
             "and results");
      }
      rows.push_back(words);
    }
    for (const Array& array : arrays_) {
      bool const known = std::any_of(rows.begin(), rows.end(),
                                     [&](const Words& row) { return row[1] == array.name; });
      if (!known) fail("no array " + quoted(array.name) + ", which the call has");
    }
    return rows;
  }

  void parse_captured(KernelDescription* kernel) {
    Words const words = take("captured", 4);
    if (failed()) return;
    CapturedArray const captured{std::string(words[1]), alignment(words[2]), words[3] == "zeroed"};
    const Array* const array = find(arrays_, words[1]);
    if (!captured.zeroed && words[3] != "-") fail("a captured array that is " + quoted(words[3]));
    if (array == nullptr) {
      fail("a captured array " + quoted(words[1]) + ", which the call has not");
    } else if (array->type.rank > ArrayView::kMostDims || array->slots > 1) {
      fail_array(words[1], "expected a buffer of its own of at most " +
                               std::to_string(ArrayView::kMostDims) + " dims, got " +
                               to_string(array->type));
    } else if (captured.zeroed && !array->is_result) {
      fail_array(words[1], "expected a result, because it is zeroed");
    }
    kernel->captured.push_back(captured);
    if (kernel->captured.size() > kMostArrays) {
      fail("more than " + std::to_string(kMostArrays) + " captured arrays");
    }
  }

  void bind(std::string_view name, long long size) {
    if (!dims_.bind(name, size)) {
      fail("two sizes of " + quoted(name) + ": " + std::to_string(*dims_.find(name)) + " and " +
           std::to_string(size));
    }
  }

  // Plain names take the size of the first array that has them; check_array compares the others.
  void bind_dims(const std::vector<Words>& rows, long long longest_query, long long longest_key) {
    if (longest_query > 0) {
      bind("T", longest_query);
      bind("S", longest_key);
    }
    for (const Words& row : rows) {
      const ArrayType& type = find(arrays_, row[1])->type;
      for (int dim = 0; dim < type.rank; ++dim) {
        bind(std::string(row[1]) + "." + std::to_string(dim), type.sizes[dim]);
      }
      if (row.size() != static_cast<size_t>(type.rank) + 3) continue;  // an error, or "..."
      for (int dim = 0; dim < type.rank; ++dim) {
        std::string_view const pattern = row[dim + 3];
        long long const size = type.sizes[dim];
        if (pattern.find_first_not_of(kNameCharacters) == std::string_view::npos &&
            !parse_number(pattern, 0, LLONG_MAX) && !dims_.find(pattern)) {
          bind(pattern, size);
        } else if (pattern == "B+1" && size > 0 && !dims_.find("B")) {
          bind("B", size - 1);
        }
      }
    }
  }

  // The size of a dim that kernels count in 32 bits.
  int size_of(std::string_view name, long long most) {
    if (failed()) return 0;
    auto const size = dims_.find(name);
    if (!size) fail("no array with the dim " + quoted(name));
    if (size && *size > most) {
      fail(std::string(name) + " = " + std::to_string(*size) + ", expected at most " +
           std::to_string(most));
    }
    return failed() ? 0 : static_cast<int>(*size);
  }

  ProblemShape parse_shape() {
    ProblemShape shape = {};
    shape.batch = size_of("B", INT_MAX - 1);
    shape.query_length = size_of("T", kMaxLength);
    shape.key_length = size_of("S", kMaxLength);
    shape.query_heads = size_of("N", INT_MAX);
    shape.key_heads = size_of("K", INT_MAX);
    shape.head_dim = size_of("H", padded_head_dim_);
    shape.value_dim = size_of("Hv", padded_value_dim_);
    if (dims_.find("query_tokens")) {
      shape.query_tokens = size_of("query_tokens", INT_MAX);
      shape.key_tokens = size_of("key_tokens", INT_MAX);
    }
    if (failed()) return shape;
    bool const divides = shape.key_heads == 0 ? shape.query_heads == 0
                                              : shape.query_heads % shape.key_heads == 0;
    if (!divides) {
      fail("N = " + std::to_string(shape.query_heads) + " query heads, expected a multiple of K = " +
           std::to_string(shape.key_heads) + " key heads");
      return shape;
    }
    shape.group = shape.key_heads == 0 ? 0 : shape.query_heads / shape.key_heads;
    bind("group_rows", static_cast<long long>(shape.query_length) * shape.group);
    bind("T_or_1", std::max(shape.query_length, 1));
    bind("S_or_1", std::max(shape.key_length, 1));
    return shape;
  }

  bool dim_fits(std::string_view pattern, long long size) const {
    if (pattern == "*") return true;
    if (auto const exact = parse_number(pattern, 0, LLONG_MAX)) return size == *exact;
    char const last = pattern.empty() ? ' ' : pattern.back();
    std::string_view const name = pattern.substr(0, pattern.size() - (pattern.empty() ? 0 : 1));
    if (last == '?') return size == 1 || dims_.find(name) == size;
    // Elements of its own for each batch index, if there is one.
    if (last == '~') return dims_.find(name) && (size > 0 || dims_.find(name) == 0);
    if (size_t const plus = pattern.find('+'); plus != std::string_view::npos) {
      auto const base = dims_.find(pattern.substr(0, plus));
      return base && pattern.substr(plus) == "+1" && size == *base + 1;
    }
    if (size_t const slash = pattern.find('/'); slash != std::string_view::npos) {
      auto const base = dims_.find(pattern.substr(0, slash));
      auto const tile = parse_number(pattern.substr(slash + 1), 1, LLONG_MAX);
      return base && tile && size == ceil_div(*base, *tile);
    }
    return dims_.find(pattern) == size;
  }

  void check_array(const Words& row) {
    if (failed()) return;
    const Array& array = *find(arrays_, row[1]);
    auto const dtype = parse_dtype(row[2]);
    std::string expected = std::string(row[2]) + "[";
    for (size_t i = 3; i < row.size(); ++i) expected += (i > 3 ? "," : "") + std::string(row[i]);
    expected += "]";
    bool fits = dtype && array.type.dtype == *dtype;
    if (row.size() != 4 || row[3] != "...") {
      fits = fits && row.size() == static_cast<size_t>(array.type.rank) + 3;
      for (int dim = 0; fits && dim < array.type.rank; ++dim) {
        fits = dim_fits(row[dim + 3], array.type.sizes[dim]);
      }
    }
    if (!fits) {
      fail_array(row[1], "expected " + expected + " with" + sizes_text() + ", got " +
                             to_string(array.type));
    }
    if (array.name == "query" && array.type.dtype != dtype_) {
      fail_array(row[1], "expected the dtype of the kernel, got " + to_string(array.type));
    }
    // (batch index / divisor) % elements is computed with a fraction of 64 bits.
    long long period = 0;
    if (array.type.rank > 0 &&
        (__builtin_mul_overflow(array.divisor, array.type.sizes[0], &period) || period > INT_MAX)) {
      fail_array(row[1], "expected at most 2147483647 as the product of its divisor " +
                             std::to_string(array.divisor) + " and its elements, got " +
                             to_string(array.type));
    }
  }

  std::string sizes_text() const {
    std::string text;
    for (const char* name : {"B", "T", "S", "N", "K", "H", "Hv"}) {
      if (auto const size = dims_.find(name)) text += std::string(" ") + name + "=" + std::to_string(*size);
    }
    return text;
  }

  // Rows of these arrays start at multiples of the alignment, because their buffers do.
  void check_rows(std::string_view name, int alignment) {
    const Array* const array = find(arrays_, name);
    if (failed() || array == nullptr) return;
    if (array->type.rank != 4) {
      fail_array(name, "expected rank 4, got " + to_string(array->type));
      return;
    }
    long long const bytes = array->type.sizes[3] * static_cast<long long>(ffi::ByteWidth(array->type.dtype));
    if (bytes % alignment != 0) {
      fail_array(name, "expected rows of a multiple of " + std::to_string(alignment) +
                           " bytes, got " + to_string(array->type));
    }
  }

  void parse_entry(const Words& words, KernelDescription* kernel) {
    if (failed()) return;
    EntryPoint entry;
    entry.name = words[1];
    entry.threads = number("threads", words[2], 32, 1024);
    entry.shared_bytes = number("shared bytes", words[3], 0, 1 << 20);
    int const per_multiprocessor = number("a limit of blocks", words[5], 0, 1 << 10);
    if (failed()) return;
    if (entry.threads % 32 != 0) fail("threads = " + quoted(words[2]) + ", expected whole warps");
    std::string error;
    auto grid = Grid::parse(words[4], per_multiprocessor, dims_, &error);
    if (!grid) {
      fail(error);
      return;
    }
    entry.grid = std::move(*grid);
    if (words[6] != "-") entry.block_mask = words[6];
    entry.takes_maps = words[7] == "maps" || words[7] == "maps,arrays";
    entry.takes_arrays = words[7] == "arrays" || words[7] == "maps,arrays";
    if (!entry.takes_maps && !entry.takes_arrays && words[7] != "-") {
      fail("the unknown parameters " + quoted(words[7]));
    }
    check_block_mask(entry.block_mask);
    kernel->entry_points.push_back(std::move(entry));
  }

  void check_block_mask(std::string_view name) {
    if (failed() || name.empty()) return;
    const Array* const array = find(arrays_, name);
    if (array == nullptr || array->type.rank != 4) {
      fail("the block mask " + quoted(name) + ", which is no array of rank 4");
    } else if (array->type.sizes[1] > INT_MAX ||
               array->type.sizes[1] * array->type.sizes[2] > INT_MAX) {
      fail_array(name, "expected at most 2147483647 rows for each batch index, got " +
                           to_string(array->type));
    }
  }

  void check_maps(const KernelDescription& kernel) {
    for (const MapBox& box : kernel.maps) {
      const Array* const array = find(arrays_, box.name);
      if (failed() || array == nullptr) continue;  // a gradient that nobody asked for
      if (array->type.rank != 4 || ffi::ByteWidth(array->type.dtype) != 2) {
        fail_array(box.name, "expected 16-bit elements and rank 4, because TMA brings it, got " +
                                 to_string(array->type));
      }
    }
    bool const takes_maps = std::any_of(kernel.entry_points.begin(), kernel.entry_points.end(),
                                        [](const EntryPoint& entry) { return entry.takes_maps; });
    if (!failed() && takes_maps == kernel.maps.empty()) {
      fail(takes_maps ? "an entry point that takes maps, and none" : "maps that nothing takes");
    }
  }

  static constexpr std::string_view kNameCharacters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789";

  std::string_view arch_;
  const std::vector<Array>& arrays_;
  std::vector<Words> lines_;
  size_t next_ = 0;
  std::string error_;
  Dims dims_;
  ffi::DataType dtype_ = ffi::DataType::INVALID;
  long long padded_head_dim_ = 0;
  long long padded_value_dim_ = 0;
};

}  // namespace

const Array* find(const std::vector<Array>& arrays, std::string_view name) {
  for (const Array& array : arrays) {
    if (array.name == name) return &array;
  }
  return nullptr;
}

ffi::ErrorOr<KernelDescription> KernelDescription::parse(std::string_view text,
                                                         std::string_view arch,
                                                         Direction direction,
                                                         const std::vector<Array>& arrays,
                                                         long long longest_query,
                                                         long long longest_key) {
  Parser parser(text, arch, arrays);
  KernelDescription kernel = parser.parse(direction, longest_query, longest_key);
  if (parser.failed()) return ffi::Unexpected(parser.error());
  return kernel;
}

}  // namespace memeff::host
