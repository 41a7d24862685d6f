#include "tensor_map.h"

#include <cstring>

namespace memeff::host {
namespace {

namespace ffi = xla::ffi;

constexpr int kElementBytes = 2;  // the kernels that use maps are those of f16 and bf16

static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
static_assert(alignof(CUtensorMap) <= alignof(TensorMap));

// A map of [dim, sequence, head, batch], innermost first. The rows of a box are as wide as the
// swizzle of its shared tile (core/shared_tile.cuh); what lies beyond the tensor reads as zero and
// is not written.
ffi::ErrorOr<TensorMap> encode(const Driver& driver, const MapBox& box, TensorView const& view,
                               const std::vector<long long>& dims) {
  cuuint64_t const sizes[] = {static_cast<cuuint64_t>(dims[3]), static_cast<cuuint64_t>(dims[1]),
                              static_cast<cuuint64_t>(dims[2]), static_cast<cuuint64_t>(dims[0])};
  cuuint64_t const strides[] = {static_cast<cuuint64_t>(view.row_stride * kElementBytes),
                                static_cast<cuuint64_t>(view.head_stride * kElementBytes),
                                static_cast<cuuint64_t>(view.batch_stride * kElementBytes)};
  cuuint32_t const extents[] = {static_cast<cuuint32_t>(box.columns),
                                static_cast<cuuint32_t>(box.rows), 1, 1};
  cuuint32_t const steps[] = {1, 1, 1, 1};
  bool const wide = box.columns * kElementBytes == 128;
  CUtensorMap map;
  CUresult const result = driver.encode_tensor_map(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, view.data, sizes, strides, extents, steps,
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
    TensorView const view = buffers.tensor(box.name);
    if (buffers.error().failure()) return ffi::Unexpected(buffers.error());
    auto map = encode(*driver, box, view, buffers.dimensions(box.name));
    if (!map.has_value()) return ffi::Unexpected(map.error());
    maps.push_back(*map);
  }
  return maps;
}

}  // namespace memeff::host
