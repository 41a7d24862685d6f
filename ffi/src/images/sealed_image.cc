#include "images/sealed_image.h"

#include <cstdint>
#include <string>

#include "attributes/sha256.h"
#include "attributes/text.h"

namespace memeff::host {
namespace {

constexpr std::string_view kMagic = "\x89MEMEFF\n";
constexpr uint64_t kVersion = 1;
constexpr size_t kHeaderBytes = 32;

uint64_t read_little_endian(std::string_view bytes) {
  uint64_t number = 0;
  for (int i = 7; i >= 0; --i) number = number << 8 | static_cast<unsigned char>(bytes[i]);
  return number;
}

}  // namespace

xla::ffi::ErrorOr<SealedImage> SealedImage::open(std::string_view arch, std::string_view bytes) {
  auto const error = [&](const std::string& what) {
    return xla::ffi::Unexpected(
        malformed("the image of " + std::string(arch) + " in the attribute kernels " + what));
  };
  if (bytes.substr(0, kMagic.size()) != kMagic) return error("does not begin as an image does");
  constexpr size_t kLeast = kHeaderBytes + kDigestBytes;
  if (bytes.size() < kLeast) {
    return error("is cut off: expected at least " + std::to_string(kLeast) + " bytes, got " +
                 std::to_string(bytes.size()));
  }
  uint64_t const version = read_little_endian(bytes.substr(8, 8));
  if (version != kVersion) {
    return error("has version " + std::to_string(version) + ", expected " +
                 std::to_string(kVersion));
  }
  uint64_t const description_bytes = read_little_endian(bytes.substr(16, 8));
  uint64_t const code_bytes = read_little_endian(bytes.substr(24, 8));
  uint64_t const payload = bytes.size() - kLeast;
  if (description_bytes > payload || code_bytes != payload - description_bytes) {
    return error("is cut off: its header announces " + std::to_string(description_bytes) +
                 " bytes of description and " + std::to_string(code_bytes) + " of code, got " +
                 std::to_string(payload) + " for both");
  }
  std::string_view const sealed = bytes.substr(0, bytes.size() - kDigestBytes);
  std::string_view const digest = bytes.substr(sealed.size());
  if (sha256(sealed) != digest) return error("is damaged: its SHA-256 digest does not match");
  SealedImage image;
  image.description = sealed.substr(kHeaderBytes, description_bytes);
  image.code = sealed.substr(kHeaderBytes + description_bytes);
  image.digest = digest;
  return image;
}

}  // namespace memeff::host
