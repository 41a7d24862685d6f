// A driver that replaces ffi/src/driver.cc. Its kernel touches the first and last element of every
// array of the call except workspaces, at the addresses in the parameters. An access outside of a
// buffer ends the process.
#include "driver.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "case.h"
#include "memeff/params.h"

namespace handlers {
namespace {

struct Device {
  int capability = 80;
  int element_bytes = 2;
  memeff::host::Direction direction = memeff::host::Direction::kForward;
};

Device device;
long long launched_blocks = 0;
volatile char sink = 0;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "a launch with %s\n", what);
  std::abort();
}

void touch(const void* data, long long offset, long long bytes) {
  if (data == nullptr) return;
  auto const* const element = static_cast<const char*>(data) + offset * bytes;
  sink = sink + element[0] + element[bytes - 1];
}

void touch_ends(const void* data, long long count, long long bytes) {
  if (count == 0) return;
  touch(data, 0, bytes);
  touch(data, count - 1, bytes);
}

void touch(memeff::TensorView const& view, long long rows, long long heads, long long dims,
           bool is_packed) {
  auto const elements = is_packed ? 1 : static_cast<long long>(view.share.elements);
  if (elements * rows * heads * dims == 0) return;
  touch(view.data, 0, device.element_bytes);
  touch(view.data,
        (elements - 1) * view.batch_stride + (rows - 1) * view.row_stride +
            (heads - 1) * view.head_stride + dims - 1,
        device.element_bytes);
}

void touch(memeff::ScoreView const& view, memeff::ProblemShape const& shape, long long bytes) {
  auto const elements = static_cast<long long>(view.share.elements);
  if (view.data == nullptr || shape.batch == 0 || shape.query_heads == 0 ||
      shape.query_length == 0 || shape.key_length == 0) {
    return;
  }
  touch(view.data, 0, bytes);
  touch(view.data,
        (elements - 1) * view.batch_stride + (shape.query_heads - 1) * view.head_stride +
            (shape.query_length - 1) * view.row_stride +
            (shape.key_length - 1) * view.column_stride,
        bytes);
}

void touch(memeff::BitView const& view, memeff::ProblemShape const& shape) {
  auto const elements = static_cast<long long>(view.share.elements);
  long long const rows = view.rows_are_tokens ? shape.query_tokens : shape.query_length;
  if (view.words == nullptr || shape.batch == 0 || shape.query_heads == 0 || rows == 0 ||
      shape.key_length == 0) {
    return;
  }
  touch(view.words, 0, 4);
  touch(view.words,
        (elements - 1) * view.batch_stride + (shape.query_heads - 1) * view.head_stride +
            (rows - 1) * view.row_stride + (shape.key_length - 1) / 32,
        4);
}

void touch(memeff::MaskParams const& mask, memeff::ProblemShape const& shape) {
  long long const batch = shape.query_starts ? 1 : shape.batch;
  long long const rows = shape.query_starts ? shape.query_tokens : shape.query_length;
  long long const columns = shape.query_starts ? shape.key_tokens : shape.key_length;
  touch_ends(mask.query_lengths, shape.batch, 4);
  touch_ends(mask.key_lengths, shape.batch, 4);
  touch_ends(mask.query_position, shape.batch, 4);
  touch_ends(mask.key_position, shape.batch, 4);
  touch_ends(mask.query_segments, batch * mask.segment_pairs * rows, 4);
  touch_ends(mask.key_segments, batch * mask.segment_pairs * columns, 4);
  touch(mask.boolean, shape);
}

// The key heads of the arrays. A backward may describe a multiple of them to its kernels.
template <class Params>
int key_heads_of(Params const& params) {
  if constexpr (std::is_same_v<Params, memeff::BackwardParams>) {
    require(params.head_splits > 0 && params.shape.key_heads % params.head_splits == 0,
            "parts of key heads");
    return params.shape.key_heads / params.head_splits;
  }
  return params.shape.key_heads;
}

template <class Params>
void touch_common(Params const& params) {
  memeff::ProblemShape const& shape = params.shape;
  int const key_heads = key_heads_of(params);
  require(shape.query_heads == 0 || shape.key_heads == 0 ||
              (long long)shape.key_heads * shape.group == shape.query_heads,
          "a wrong group");
  bool const packed = shape.query_starts != nullptr;
  long long const rows = packed ? shape.query_tokens : shape.query_length;
  long long const columns = packed ? shape.key_tokens : shape.key_length;
  touch_ends(shape.query_starts, packed ? shape.batch + 1ll : 0, 4);
  touch_ends(shape.key_starts, packed ? shape.batch + 1ll : 0, 4);
  touch(params.mask, shape);
  touch_ends(params.dropout.key_words, 2ll * shape.batch, 4);
  touch_ends(params.dropout.batch_base, shape.batch, 4);
  touch_ends(params.dropout.head_index, shape.query_heads, 4);
  touch(params.query, rows, shape.query_heads, shape.head_dim, packed);
  touch(params.key, columns, key_heads, shape.head_dim, packed);
  touch(params.value, columns, key_heads, shape.value_dim, packed);
  touch(params.out, rows, shape.query_heads, shape.value_dim, packed);
  touch(params.bias, shape, 2);
  long long const statistics = (packed ? 1 : shape.batch) * rows * shape.query_heads;
  touch_ends(params.logsumexp, statistics, 4);
  if constexpr (std::is_same_v<Params, memeff::BackwardParams>) {
    touch_ends(params.logsumexp_gradient, statistics, 4);
    touch(params.out_gradient, rows, shape.query_heads, shape.value_dim, packed);
    touch(params.query_gradient, rows, shape.query_heads, shape.head_dim, packed);
    touch(params.key_gradient, columns, key_heads, shape.head_dim, packed);
    touch(params.value_gradient, columns, key_heads, shape.value_dim, packed);
    touch(params.bias_gradient, shape, 2);
  }
  if constexpr (std::is_same_v<Params, memeff::TangentParams>) {
    touch_ends(params.logsumexp_tangent, statistics, 4);
    touch(params.out_tangent, rows, shape.query_heads, shape.value_dim, packed);
    touch(params.query_tangent, rows, shape.query_heads, shape.head_dim, packed);
    touch(params.key_tangent, columns, key_heads, shape.head_dim, packed);
    touch(params.value_tangent, columns, key_heads, shape.value_dim, packed);
  }
}

CUresult launch(const CUlaunchConfig* config, CUfunction, void** parameters, void**) {
  require(config->gridDimX > 0 && config->gridDimX <= 2147483647u, "a grid that is none");
  require(config->blockDimX > 0 && config->blockDimX <= 1024, "too many threads");
  require(config->sharedMemBytes <= 1 << 20, "too much shared memory");
  launched_blocks += config->gridDimX;
  switch (device.direction) {
    case memeff::host::Direction::kForward:
      touch_common(*static_cast<memeff::ForwardParams const*>(parameters[0]));
      break;
    case memeff::host::Direction::kBackward:
      touch_common(*static_cast<memeff::BackwardParams const*>(parameters[0]));
      break;
    case memeff::host::Direction::kTangent:
      touch_common(*static_cast<memeff::TangentParams const*>(parameters[0]));
      break;
  }
  return CUDA_SUCCESS;
}

template <class... Arguments>
CUresult succeed(Arguments...) {
  return CUDA_SUCCESS;
}

memeff::host::Driver make_driver() {
  memeff::host::Driver driver = {};
  driver.get_error_name = [](CUresult, const char** name) {
    *name = "a refusal";
    return CUDA_SUCCESS;
  };
  driver.device_count = [](int* count) {
    *count = 1;
    return CUDA_SUCCESS;
  };
  driver.device_attribute = [](int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? device.capability / 10
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? device.capability % 10
                                                                         : 132;
    return CUDA_SUCCESS;
  };
  driver.current_device = [](CUdevice* current) {
    *current = 0;
    return CUDA_SUCCESS;
  };
  driver.library_load = succeed;
  driver.library_kernel = succeed;
  driver.kernel_set_attribute = succeed;
  driver.kernel_function = succeed;
  driver.load_function = succeed;
  driver.launch = launch;
  driver.memset_async = [](CUdeviceptr data, unsigned char, size_t bytes, CUstream) {
    touch_ends(reinterpret_cast<const void*>(data), static_cast<long long>(bytes), 1);
    return CUDA_SUCCESS;
  };
  driver.encode_tensor_map = succeed;
  return driver;
}

}  // namespace

void set_device(int capability, int element_bytes, memeff::host::Direction direction) {
  device = {capability, element_bytes, direction};
}

long long take_launched_blocks() { return std::exchange(launched_blocks, 0); }

}  // namespace handlers

namespace memeff::host {

const Driver* open_driver(std::string*) {
  static Driver const driver = handlers::make_driver();
  return &driver;
}

std::string describe(const Driver&, CUresult result) { return std::to_string(int(result)); }

}  // namespace memeff::host
