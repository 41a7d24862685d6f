// The headers that g++ precompiles, so that it does not read them for every kernel.
#pragma once

#include "emulator/cuda_builtins.h"

// CuTe needs the built-in names above.
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>
