"""Which query rows attend to which key columns.

``mask`` defines the public class, and ``window``, ``segment_ids`` and ``kv_blocks`` its conditions.
``expression`` combines the conditions that need a function into one. ``tiles`` evaluates a mask for
a tile of scores. ``block_mask`` computes whether none, some or all elements of each tile are valid,
for functions by means of ``bounds`` and ``ranges``; ``computed_blocks`` reuses the result across
calls.
"""

from jax_memeff._call.mask.mask import Mask as Mask
from jax_memeff._call.mask.window import Window as Window
