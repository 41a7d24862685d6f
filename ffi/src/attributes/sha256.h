// SHA-256 (FIPS 180-4).
#pragma once

#include <string>
#include <string_view>

namespace memeff::host {

constexpr size_t kDigestBytes = 32;

// The digest of a text, as 32 bytes.
std::string sha256(std::string_view text);

}  // namespace memeff::host
