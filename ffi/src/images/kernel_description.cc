#include "images/kernel_description.h"

#include <algorithm>
#include <climits>
#include <cstdint>
#include <optional>

#include "attributes/text.h"

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

constexpr long long kMostHeadDim = 1 << 16;
constexpr size_t kMostMaps = 16;  // the size of MapTable
constexpr size_t kMostEntryPoints = 8;
constexpr size_t kMostFields = 64;

// The size of the first parameter of a kernel, without the table of arrays.
size_t params_bytes(Direction direction) {
  switch (direction) {
    case Direction::kForward:
      return sizeof(ForwardParams);
    case Direction::kBackward:
      return sizeof(BackwardParams);
    case Direction::kTangent:
      return sizeof(TangentParams);
  }
  return 0;
}

class Parser : public DescriptionReader {
 public:
  Parser(std::string_view text, std::string_view arch, const std::vector<Array>& arrays)
      : DescriptionReader(text, arch), arch_(arch), arrays_(arrays), dims_(arrays, this) {}

  KernelDescription parse(Direction direction, long long longest_query, long long longest_key,
                          size_t numbers) {
    KernelDescription kernel;
    parse_kernel(direction, &kernel);
    std::vector<Words> entries;
    while (next_is("entry")) entries.push_back(take("entry", 9));
    while (next_is("map")) parse_map(&kernel);
    std::vector<Words> const rows = parse_arrays();
    while (next_is("captured")) parse_captured(&kernel);
    while (next_is("field")) parse_field(direction, numbers, &kernel);
    finish();
    check_names(rows);
    if (failed()) return kernel;

    dims_.bind(rows, longest_query, longest_key);
    kernel.shape = dims_.shape(padded_head_dim_, padded_value_dim_);
    for (const Words& row : rows) dims_.check(row);
    check_dtype();
    for (const char* name :
         {"query", "key", "value", "out", "query_gradient", "key_gradient", "value_gradient",
          "out_gradient", "query_tangent", "key_tangent", "value_tangent", "out_tangent"}) {
      check_rows(name, kernel.alignment);
    }
    for (const Words& entry : entries) parse_entry(entry, &kernel);
    if (!failed() && (entries.empty() || entries.size() > kMostEntryPoints)) {
      fail("the number of entry points " + std::to_string(entries.size()) + ", expected 1 to " +
           std::to_string(kMostEntryPoints));
    }
    check_maps(kernel);
    return kernel;
  }

 private:
  void parse_kernel(Direction direction, KernelDescription* kernel) {
    if (Words const words = take("arch", 2); !failed() && words[1] != arch_) {
      fail("a description of " + quoted(words[1]));
    }
    std::string_view const expected = name_of(direction);
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

  // Reads the lines of arrays. Each must name a different array of the call.
  std::vector<Words> parse_arrays() {
    std::vector<Words> rows;
    while (next_is("array")) {
      Words const words = take("array", 3, true);
      if (failed()) break;
      for (const Words& other : rows) {
        if (other[1] == words[1]) fail("two lines of the array " + quoted(words[1]));
      }
      if (find(arrays_, words[1]) == nullptr) {
        fail("an array " + quoted(words[1]) + " that is not among the operands " +
             "and results of the call");
      }
      rows.push_back(words);
    }
    return rows;
  }

  // Checks that every array of the call has a line.
  void check_names(const std::vector<Words>& rows) {
    for (const Array& array : arrays_) {
      bool const known = std::any_of(rows.begin(), rows.end(),
                                     [&](const Words& row) { return row[1] == array.name; });
      if (!known) fail("no line for the array " + quoted(array.name) + " of the call");
    }
  }

  void parse_captured(KernelDescription* kernel) {
    Words const words = take("captured", 4);
    if (failed()) return;
    CapturedArray const captured{std::string(words[1]), alignment(words[2]), words[3] == "zeroed"};
    const Array* const array = find(arrays_, words[1]);
    if (!captured.zeroed && words[3] != "-") fail("a captured array marked " + quoted(words[3]));
    if (array == nullptr) {
      fail("a captured array " + quoted(words[1]) + " that the call does not have");
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

  void parse_field(Direction direction, size_t numbers, KernelDescription* kernel) {
    Words const words = take("field", 3);
    if (failed()) return;
    ParamsField field = {};
    bool const is_number = words[2].substr(0, 1) == "#";
    size_t const bytes = is_number ? sizeof(int32_t) : sizeof(void*);
    size_t const most = params_bytes(direction) - bytes;
    field.offset = number("a field's offset", words[1], 0, static_cast<long long>(most));
    if (is_number) {
      field.number =
          number("a field's number", words[2].substr(1), 0, static_cast<long long>(numbers) - 1);
    } else {
      field.array = words[2];
      if (find(arrays_, field.array) == nullptr) {
        fail("a field with the array " + quoted(field.array) + " that the call does not have");
      }
    }
    if (!failed() && field.offset % bytes != 0) {
      fail("a field's offset = " + quoted(words[1]) + ", expected a multiple of " +
           std::to_string(bytes));
    }
    kernel->fields.push_back(std::move(field));
    if (kernel->fields.size() > kMostFields) {
      fail("more than " + std::to_string(kMostFields) + " fields");
    }
  }

  void check_dtype() {
    const Array* const query = find(arrays_, "query");
    if (failed() || query == nullptr || query->type.dtype == dtype_) return;
    fail_array("query", "expected the dtype of the kernel, got " + to_string(query->type));
  }

  // Checks that the rows of an array are multiples of the alignment, as its buffer is.
  void check_rows(std::string_view name, int alignment) {
    const Array* const array = find(arrays_, name);
    if (failed() || array == nullptr) return;
    if (array->type.rank != 4) {
      fail_array(name, "expected rank 4, got " + to_string(array->type));
      return;
    }
    long long const bytes =
        array->type.sizes[3] * static_cast<long long>(ffi::ByteWidth(array->type.dtype));
    if (bytes % alignment != 0) {
      fail_array(name, "expected rows that are a multiple of " + std::to_string(alignment) +
                           " bytes long, got " + to_string(array->type));
    }
  }

  void parse_entry(const Words& words, KernelDescription* kernel) {
    if (failed()) return;
    EntryPoint entry;
    entry.name = words[1];
    entry.threads = number("threads", words[2], 32, 1024);
    entry.shared_bytes = number("shared bytes", words[3], 0, 1 << 20);
    int const per_multiprocessor = number("a limit of blocks", words[5], 0, 1 << 10);
    int const cluster = number("blocks of a cluster", words[6], 1, 16);
    if (failed()) return;
    if (entry.threads % 32 != 0) fail("threads = " + quoted(words[2]) + ", expected whole warps");
    std::string error;
    auto grid = Grid::parse(words[4], per_multiprocessor, cluster, dims_.dims(), &error);
    if (!grid) {
      fail(error);
      return;
    }
    entry.grid = std::move(*grid);
    if (words[7] != "-") entry.block_mask = words[7];
    entry.takes_maps = words[8] == "maps";
    if (!entry.takes_maps && words[8] != "-") fail("the unknown parameters " + quoted(words[8]));
    check_block_mask(entry.block_mask);
    kernel->entry_points.push_back(std::move(entry));
  }

  void check_block_mask(std::string_view name) {
    if (failed() || name.empty()) return;
    const Array* const array = find(arrays_, name);
    if (array == nullptr || array->type.rank != 4) {
      fail("the block mask " + quoted(name) + ", expected an array of rank 4");
    } else if (array->type.sizes[1] > INT_MAX ||
               array->type.sizes[1] * array->type.sizes[2] > INT_MAX) {
      fail_array(name, "expected at most 2147483647 rows for each batch index, got " +
                           to_string(array->type));
    }
  }

  void check_maps(const KernelDescription& kernel) {
    for (const MapBox& box : kernel.maps) {
      const Array* const array = find(arrays_, box.name);
      if (failed() || array == nullptr)
        continue;  // a gradient that is not asked for, or a tangent that is zero
      if (array->type.rank != 4 || ffi::ByteWidth(array->type.dtype) != 2) {
        fail_array(box.name, "expected 16-bit elements and rank 4, because TMA copies it, got " +
                                 to_string(array->type));
      }
    }
    bool const takes_maps = std::any_of(kernel.entry_points.begin(), kernel.entry_points.end(),
                                        [](const EntryPoint& entry) { return entry.takes_maps; });
    if (!failed() && takes_maps == kernel.maps.empty()) {
      fail(takes_maps ? "an entry point with tensor maps, but no line 'map'"
                      : "lines 'map', but no entry point with tensor maps");
    }
  }

  std::string_view arch_;
  const std::vector<Array>& arrays_;
  ArrayDims dims_;
  ffi::DataType dtype_ = ffi::DataType::INVALID;
  long long padded_head_dim_ = 0;
  long long padded_value_dim_ = 0;
};

}  // namespace

std::string_view name_of(Direction direction) {
  switch (direction) {
    case Direction::kForward:
      return "forward";
    case Direction::kBackward:
      return "backward";
    case Direction::kTangent:
      return "tangent";
  }
  return "";
}

ffi::ErrorOr<KernelDescription> KernelDescription::parse(std::string_view text,
                                                         std::string_view arch, Direction direction,
                                                         const std::vector<Array>& arrays,
                                                         long long longest_query,
                                                         long long longest_key, size_t numbers) {
  Parser parser(text, arch, arrays);
  KernelDescription kernel = parser.parse(direction, longest_query, longest_key, numbers);
  if (parser.failed()) return ffi::Unexpected(malformed(parser.error()));
  return kernel;
}

}  // namespace memeff::host
