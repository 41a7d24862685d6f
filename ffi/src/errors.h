// Errors whose messages begin with the name of the library.
#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

namespace memeff::host {

inline xla::ffi::Error failure(xla::ffi::ErrorCode code, const std::string& message) {
  return xla::ffi::Error(code, "jax_memeff: " + message);
}

// An error for attributes that this version of the library did not write.
inline xla::ffi::Error malformed(const std::string& message) {
  return failure(xla::ffi::ErrorCode::kInvalidArgument,
                 message +
                     " (the program was changed, or another version of jax_memeff exported it: "
                     "export it again with the installed version)");
}

}  // namespace memeff::host
