// The bytes of one kernel in the custom call: a description of the kernel, its code, and a digest.
//
//   magic         8 bytes
//   version       64 bits, little-endian, as the sizes
//   sizes         of the description and of the code, in bytes
//   description   text, see kernel_description.h
//   code          fatbin
//   digest        SHA-256 of everything before it
//
// The digest finds damage and edits by mistake. It is no signature: whoever writes a program can
// compute it, and writes the machine code, too (docs/deployment/export.md).
#pragma once

#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace memeff::host {

struct SealedImage {
  std::string_view description;
  std::string_view code;
  std::string_view digest;

  // Views into `bytes`. `arch` names the attribute in errors.
  static xla::ffi::ErrorOr<SealedImage> open(std::string_view arch, std::string_view bytes);
};

}  // namespace memeff::host
