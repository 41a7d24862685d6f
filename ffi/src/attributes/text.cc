#include "attributes/text.h"

#include <charconv>

namespace memeff::host {
namespace {

std::string printable(std::string_view text) {
  std::string result;
  for (char character : text) result += character >= ' ' && character <= '~' ? character : '?';
  return result;
}

}  // namespace

xla::ffi::Error failure(xla::ffi::ErrorCode code, const std::string& message) {
  return xla::ffi::Error(code, "jax_memeff: " + printable(message));
}

xla::ffi::Error malformed(const std::string& message) {
  constexpr size_t kMost = 2000;
  return failure(xla::ffi::ErrorCode::kInvalidArgument,
                 message.substr(0, kMost) + (message.size() > kMost ? "..." : "") +
                     " (the program was changed, or another version of jax_memeff exported it: "
                     "export it again with the installed version)");
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  if (text.empty()) return parts;
  for (size_t begin = 0;;) {
    size_t const end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::optional<long long> parse_number(std::string_view text, long long least, long long most) {
  long long number = 0;
  const char* const end = text.data() + text.size();
  auto const [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end || text.empty()) return std::nullopt;
  if (number < least || number > most) return std::nullopt;
  return number;
}

std::string quoted(std::string_view text) {
  constexpr size_t kMost = 60;
  return "'" + printable(text.substr(0, kMost)) + (text.size() > kMost ? "...'" : "'");
}

}  // namespace memeff::host
