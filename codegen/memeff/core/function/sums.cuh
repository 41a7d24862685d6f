// How the gradient of a captured array is summed, chosen for each read by
// codegen/functions/sums.py.
#pragma once

namespace memeff::function {

// The arguments on which the index of a read depends, besides batch index and head. `none`: the
// array needs no gradient.
enum class ReadSum { none, head, query, key, diagonal, element };

}  // namespace memeff::function
