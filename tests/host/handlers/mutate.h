// Random changes of a call, like those in a damaged or edited program file.
#pragma once

#include <random>

#include "case.h"

namespace handlers {

// Makes up to three changes of attributes and buffers. Nothing adapts the checksum.
Case mutate(Case call, std::mt19937_64& random);

}  // namespace handlers
