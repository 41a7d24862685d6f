// Headers of others that every kernel includes, read by g++ once and not once a kernel. Those of
// memeff do not belong here, because they change.
#pragma once

#include "emulator/cuda_builtins.h"

// Behind the built-in names, which CuTe needs.
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/algorithm/clear.hpp>
#include <cute/tensor_impl.hpp>
