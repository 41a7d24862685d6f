// Calls the handlers of the host library without XLA and without a GPU, under sanitizers.
//
//   handlers run FILE               the error of each call, after its number of bytes
//   handlers fuzz FILE COUNT SEED   COUNT random changes of the calls; the numbers of outcomes
//   handlers sha256 FILE            the digest of a file
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "attributes/sha256.h"
#include "case.h"
#include "mutate.h"

namespace {

std::string run(const handlers::Case& call, bool touches_arrays) {
  bool const is_float32 = !call.operands.empty() && call.operands[0].dtype == XLA_FFI_DataType_F32;
  handlers::set_device(call.capability, is_float32 ? 4 : 2, handlers::direction_of(call.target),
                       touches_arrays);
  return handlers::run(call);
}

int run_all(const char* path) {
  for (const handlers::Case& call : handlers::read_cases(path)) {
    std::string const error = run(call, true);
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
    bool changed_image = false;
    auto const call = handlers::mutate(cases[random() % cases.size()], random, &changed_image);
    // A forged description may announce arrays that the kernel does not have.
    refused += !run(call, !changed_image).empty();
    launched += handlers::take_launched_blocks() > 0;
  }
  std::printf("%ld changed calls: %ld refused, %ld launched\n", count, refused, launched);
  return 0;
}

int digest(const char* path) {
  std::ifstream stream(path, std::ios::binary);
  std::string const text{std::istreambuf_iterator<char>(stream), {}};
  for (unsigned char byte : memeff::host::sha256(text)) std::printf("%02x", byte);
  std::printf("\n");
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  std::string const command = count > 2 ? arguments[1] : "";
  if (command == "run") return run_all(arguments[2]);
  if (command == "sha256") return digest(arguments[2]);
  if (command == "fuzz" && count == 5) {
    return fuzz(arguments[2], std::atol(arguments[3]), std::strtoul(arguments[4], nullptr, 10));
  }
  std::fprintf(stderr, "expected run FILE, fuzz FILE COUNT SEED or sha256 FILE\n");
  return 2;
}
