// The bytes of one kernel in the custom call: a description of the kernel, its code, and a digest.
//
//   magic         8 bytes
//   version       64 bits, little-endian, as the sizes
//   sizes         of the description and of the code, in bytes
//   description   text, see kernel_description.h
//   code          fatbin
//   digest        SHA-256 of everything before it
//
// The digest detects damage and accidental edits. It is not a signature: whoever writes a program
// can compute the digest, and controls the machine code anyway (docs/deployment/export.md).
#pragma once

#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace memeff::host {

struct SealedImage {
  std::string_view description;
  std::string_view code;
  std::string_view digest;

  // Checks the digest and returns views into `bytes`. `arch` names the attribute in errors.
  static xla::ffi::ErrorOr<SealedImage> open(std::string_view arch, std::string_view bytes);
};

}  // namespace memeff::host
