#include "images/description_reader.h"

#include "attributes/text.h"

namespace memeff::host {

DescriptionReader::DescriptionReader(std::string_view text, std::string_view arch) : arch_(arch) {
  for (std::string_view line : split(text, '\n')) {
    if (!line.empty()) lines_.push_back(split(line, ' '));
  }
}

void DescriptionReader::fail(const std::string& what) {
  if (error_.empty()) error_ = "the kernel of " + std::string(arch_) + " has " + what;
}

void DescriptionReader::fail_array(std::string_view name, const std::string& what) {
  if (error_.empty()) {
    error_ = "array " + quoted(name) + " of the kernel of " + std::string(arch_) + ": " + what;
  }
}

bool DescriptionReader::next_is(std::string_view key) const {
  return !failed() && next_ < lines_.size() && lines_[next_][0] == key;
}

Words DescriptionReader::take(std::string_view key, size_t count, bool or_more) {
  Words words(count);
  if (failed()) return words;
  if (next_ == lines_.size()) {
    fail("no line '" + std::string(key) + "' in its description");
  } else if (lines_[next_][0] != key) {
    fail("the line " + quoted(lines_[next_][0]) + " in its description, expected '" +
         std::string(key) + "'");
  } else if (lines_[next_].size() < count || (!or_more && lines_[next_].size() > count)) {
    fail("a line '" + std::string(key) + "' of " + std::to_string(lines_[next_].size()) +
         " words in its description, expected " + std::to_string(count));
  } else {
    words = lines_[next_++];
  }
  return words;
}

int DescriptionReader::number(std::string_view what, std::string_view word, long long least,
                              long long most) {
  if (failed()) return 0;
  auto const found = parse_number(word, least, most);
  if (!found) {
    fail(std::string(what) + " = " + quoted(word) + ", expected " + std::to_string(least) + " to " +
         std::to_string(most));
    return 0;
  }
  return static_cast<int>(*found);
}

int DescriptionReader::alignment(std::string_view word) {
  int const bytes = number("alignment", word, 1, 16);
  if (!failed() && (bytes & (bytes - 1)) != 0) {
    fail("alignment = " + quoted(word) + ", expected a power of two up to 16");
  }
  return bytes;
}

void DescriptionReader::finish() {
  if (failed() || next_ == lines_.size()) return;
  fail("the line " + quoted(lines_[next_][0]) + ", expected no more lines");
}

}  // namespace memeff::host
