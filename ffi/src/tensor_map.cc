#include "tensor_map.h"

#include <algorithm>
#include <cstring>

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

constexpr int kElementBytes = 2;  // the kernels that use maps are those of f16 and bf16

static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
static_assert(alignof(CUtensorMap) <= alignof(TensorMap));

// What a map is of: four dims, innermost first, and the strides of all but the first, in elements.
struct MappedArray {
  void* data;
  long long sizes[4];
  long long strides[3];
};

// [dim, sequence, head, batch].
MappedArray map_tensor(TensorView const& view, const std::vector<long long>& dims) {
  return {view.data,
          {dims[3], dims[1], dims[2], dims[0]},
          {view.row_stride, view.head_stride, view.batch_stride}};
}

// [key, query, head, batch]. Dims of one element are broadcast, and have strides all the same: none
// of a map's is 0.
MappedArray map_scores(void* data, const std::vector<long long>& dims) {
  return {data,
          {dims[3], dims[2], dims[1], dims[0]},
          {dims[3], dims[2] * dims[3], dims[1] * dims[2] * dims[3]}};
}

// The rows of a box are as wide as the swizzle of its shared tile (core/shared_tile.cuh); what lies
// beyond the tensor reads as zero and is not written.
ffi::ErrorOr<TensorMap> encode(const Driver& driver, const MapBox& box, MappedArray const& array) {
  cuuint64_t sizes[4];
  cuuint64_t strides[3];
  std::copy_n(array.sizes, 4, sizes);
  std::transform(array.strides, array.strides + 3, strides,
                 [](long long stride) { return cuuint64_t(stride) * kElementBytes; });
  cuuint32_t const extents[] = {static_cast<cuuint32_t>(box.columns),
                                static_cast<cuuint32_t>(box.rows), 1, 1};
  cuuint32_t const steps[] = {1, 1, 1, 1};
  bool const wide = box.columns * kElementBytes == 128;
  CUtensorMap map;
  CUresult const result = driver.encode_tensor_map(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, array.data, sizes, strides, extents, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return ffi::Unexpected(failure(
        ffi::ErrorCode::kInternal,
        box.name + " could not be described to the copy engine: " + describe(driver, result)));
  }
  TensorMap encoded;
  std::memcpy(&encoded, &map, sizeof(map));
  return encoded;
}

}  // namespace

ffi::ErrorOr<std::vector<TensorMap>> encode_maps(const std::vector<MapBox>& boxes,
                                                 Buffers& buffers) {
  std::string error;
  const Driver* driver = open_driver(&error);
  if (driver == nullptr) {
    return ffi::Unexpected(failure(ffi::ErrorCode::kFailedPrecondition, error));
  }
  std::vector<TensorMap> maps;
  for (const MapBox& box : boxes) {
    if (!buffers.has(box.name)) {
      maps.push_back({});
      continue;
    }
    auto const dims = buffers.four_dimensions(box.name);
    if (buffers.error().failure()) return ffi::Unexpected(buffers.error());
    MappedArray const array = box.name == "bias" ? map_scores(buffers.data(box.name), dims)
                                                 : map_tensor(buffers.tensor(box.name), dims);
    if (buffers.error().failure()) return ffi::Unexpected(buffers.error());
    auto map = encode(*driver, box, array);
    if (!map.has_value()) return ffi::Unexpected(map.error());
    maps.push_back(*map);
  }
  return maps;
}

}  // namespace memeff::host
