// Defines CUDA's qualifiers of functions and variables as nothing. The headers of the CUDA runtime
// include a file of this name, which comes with nvcc. If that is installed beside them, they find
// it first; its include guard keeps it empty.
#pragma once

#define __HOST_DEFINES_H__

#define __annotate__(a) __attribute__((a))
#define __location__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __no_return__ __attribute__((noreturn))
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
