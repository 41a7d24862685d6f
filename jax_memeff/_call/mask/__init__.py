"""Which query rows attend to which key columns.

``conditions`` are the data of a mask, to which all other modules refer. ``arguments`` checks what a
mask is made of, ``checks`` whether it fits a call. ``expression`` combines the conditions that need
a function into one, and ``tiles`` evaluates a mask for a tile of scores. ``block_mask`` computes
whether none, some or all elements of each tile are valid, for functions by means of ``bounds`` and
``ranges``. ``pictures`` draw a mask. ``mask`` defines the public class.
"""

from jax_memeff._call.mask.conditions import Window as Window
from jax_memeff._call.mask.mask import Mask as Mask
