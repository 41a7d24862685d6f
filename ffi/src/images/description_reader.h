// Reads the lines of a kernel's description; kernel_description.h has the format.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace memeff::host {

using Words = std::vector<std::string_view>;

// Keeps the first failure. After it every line has empty words and every number is 0, so a caller
// checks once, at the end.
class DescriptionReader {
 public:
  DescriptionReader(std::string_view text, std::string_view arch);

  bool failed() const { return !error_.empty(); }
  const std::string& error() const { return error_; }

  // "the kernel of sm_90a has <what>"
  void fail(const std::string& what);

  // "array 'key' of the kernel of sm_90a: <what>"
  void fail_array(std::string_view name, const std::string& what);

  bool next_is(std::string_view key) const;

  // The words of the next line. It must have this key and this number of words, or with `or_more`
  // at least as many.
  Words take(std::string_view key, size_t count, bool or_more = false);

  // Fails if lines are left.
  void finish();

  int number(std::string_view what, std::string_view word, long long least, long long most);

  // An alignment in bytes: a power of two up to 16.
  int alignment(std::string_view word);

 private:
  std::string_view arch_;
  std::vector<Words> lines_;
  size_t next_ = 0;
  std::string error_;
};

}  // namespace memeff::host
