"""Which query rows attend to which key columns.

``mask`` has the public class, ``window`` and ``segment_ids`` two of its conditions, and ``tiles``
evaluates a mask for one tile of scores.
"""

from jax_memeff._call.mask.mask import Mask as Mask
from jax_memeff._call.mask.window import Window as Window
