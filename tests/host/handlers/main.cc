// Calls the handlers of the host library without XLA and without a GPU, under sanitizers.
//
//   handlers run FILE               the error of each call, after its number of bytes
//   handlers fuzz FILE COUNT SEED   COUNT random changes of the calls; the numbers of outcomes
#include <cstdio>
#include <cstdlib>

#include "case.h"
#include "mutate.h"

namespace {

std::string run_on_device(const handlers::Case& call) {
  bool const is_float32 = !call.operands.empty() && call.operands[0].dtype == XLA_FFI_DataType_F32;
  handlers::set_device(call.capability, is_float32 ? 4 : 2, handlers::direction_of(call.target));
  return handlers::run(call);
}

int run_all(const char* path) {
  for (const handlers::Case& call : handlers::read_cases(path)) {
    std::string const error = run_on_device(call);
    long long const blocks = handlers::take_launched_blocks();
    std::printf("%zu %lld\n%s\n", error.size(), blocks, error.c_str());
  }
  return 0;
}

int fuzz(const char* path, long count, unsigned long seed) {
  std::vector<handlers::Case> const cases = handlers::read_cases(path);
  std::mt19937_64 random(seed);
  long refused = 0;
  long launched = 0;
  for (long i = 0; i < count; ++i) {
    refused += !run_on_device(handlers::mutate(cases[random() % cases.size()], random)).empty();
    launched += handlers::take_launched_blocks() > 0;
  }
  std::printf("%ld changed calls: %ld refused, %ld launched\n", count, refused, launched);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  std::string const command = count > 2 ? arguments[1] : "";
  if (command == "run") return run_all(arguments[2]);
  if (command == "fuzz" && count == 5) {
    return fuzz(arguments[2], std::atol(arguments[3]), std::strtoul(arguments[4], nullptr, 10));
  }
  std::fprintf(stderr, "expected run FILE or fuzz FILE COUNT SEED\n");
  return 2;
}
