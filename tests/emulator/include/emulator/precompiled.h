// What g++ reads once and not once a kernel, before the headers of the kernels themselves.
#pragma once

#include "emulator/cuda_builtins.h"

// Behind the built-in names, which CuTe needs.
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>
