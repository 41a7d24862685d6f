"""Masks of the neighbourhood of a row: what they return is passed as ``mask=``."""

from __future__ import annotations

from jax_memeff import Mask


def sliding_window(window: int) -> Mask:
    """A row attends to itself and to the ``window`` columns before it.

    ``Mask.window(window, 0)`` is the same mask, and needs no block mask.
    """
    return Mask.function(lambda b, h, q, k: (k <= q) & (q - k <= window))
