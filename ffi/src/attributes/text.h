// Reads the text in attributes. Hazard: it may come from a file that anybody could have changed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace memeff::host {

// An error whose message begins with the name of the library. Characters that a terminal would act
// on, and those that are not ASCII, become question marks: Python refuses text that is not UTF-8.
xla::ffi::Error failure(xla::ffi::ErrorCode code, const std::string& message);

// An error for an attribute that this version of the library did not write; the message advises to
// export again.
xla::ffi::Error malformed(const std::string& message);

// The parts between separators; an empty text has no parts.
std::vector<std::string_view> split(std::string_view text, char separator);

// The decimal number that the whole text spells, if it is from `least` to `most`; else none.
std::optional<long long> parse_number(std::string_view text, long long least, long long most);

// Text for an error message: at most 60 characters, and none that a terminal would act on.
std::string quoted(std::string_view text);

}  // namespace memeff::host
