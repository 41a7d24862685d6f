// Random changes of a call, like those in an edited or forged program file.
#pragma once

#include <random>

#include "case.h"

namespace handlers {

// Makes one to four changes; sets `changed_image` if one of them changes an image. Some calls get
// new digests, and some get buffers of the types that they then announce.
Case mutate(Case call, std::mt19937_64& random, bool* changed_image);

}  // namespace handlers
