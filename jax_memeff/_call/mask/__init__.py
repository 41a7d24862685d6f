"""Which query rows attend to which key columns.

``mask`` has the public class; ``window``, ``segment_ids`` and ``kv_blocks`` are conditions of it,
and ``expression`` makes one function of those that need one. ``tiles`` evaluates a mask for a tile
of scores. ``block_mask`` says of every tile whether none, some or all elements are valid, with
``bounds`` and ``ranges`` for functions; ``computed_blocks`` keeps that for many calls.
"""

from jax_memeff._call.mask.mask import Mask as Mask
from jax_memeff._call.mask.window import Window as Window
