// Errors end a stage of a handler, which returns them to XLA (handlers.cc). Their messages begin
// with the name of the library.
#pragma once

#include <string>

#include "driver.h"
#include "xla/ffi/api/ffi.h"

namespace memeff::host {

struct Failure {
  xla::ffi::ErrorCode code;
  std::string message;
};

[[noreturn]] inline void fail(const std::string& message,
                              xla::ffi::ErrorCode code = xla::ffi::ErrorCode::kInvalidArgument) {
  throw Failure{code, "jax_memeff: " + message};
}

[[noreturn]] inline void fail(const Driver& driver, CUresult result, const std::string& message) {
  fail(message + ": " + describe(driver, result), xla::ffi::ErrorCode::kInternal);
}

// For attributes that this version of the library did not write.
[[noreturn]] inline void fail_malformed(const std::string& message) {
  fail(message +
       " (the program was changed, or another version of jax_memeff exported it: "
       "export it again with the installed version)");
}

}  // namespace memeff::host
