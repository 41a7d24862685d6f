// Reads the text in attributes. All of it may come from a file that anybody could have changed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace memeff::host {

// An error of the library, with its name in front.
xla::ffi::Error failure(xla::ffi::ErrorCode code, const std::string& message);

// The same for an attribute that is not what the library writes.
xla::ffi::Error malformed(const std::string& message);

// The parts between separators; an empty text has none.
std::vector<std::string_view> split(std::string_view text, char separator);

// A whole decimal number from `least` to `most`, else none.
std::optional<long long> parse_number(std::string_view text, long long least, long long most);

// Text for an error message: at most 60 characters, and none that a terminal would act on.
std::string quoted(std::string_view text);

}  // namespace memeff::host
