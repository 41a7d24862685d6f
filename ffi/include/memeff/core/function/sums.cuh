// How the gradient of a captured array is summed, chosen for each read by
// codegen/functions/sums.py.
#pragma once

namespace memeff::function {

// What the index of a read depends on, beside the batch index and the head. `none`: the array needs
// no gradient.
enum class ReadSum { none, head, query, key, diagonal, element };

}  // namespace memeff::function
