// Random changes of a call, of the kinds that an edited or forged program file has.
#pragma once

#include <random>

#include "case.h"

namespace handlers {

// Changes one to four things; sets `changed_image` if one of them is an image. Some of the changed
// calls get new digests, and some get buffers of the types that they then announce.
Case mutate(Case call, std::mt19937_64& random, bool* changed_image);

}  // namespace handlers
