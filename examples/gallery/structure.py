"""Masks of a structure of the sequence: what they return is passed as ``mask=``."""

from __future__ import annotations

import jax

from jax_memeff import Mask


def documents(ids: jax.Array) -> Mask:
    """Rows attend to the columns of their own document.

    ``Mask.segments(ids, ids)`` is the same mask for ids that are not negative. Combine it with
    ``Mask.causal()`` for language models.

    Args:
        ids: integer [B, T]: the document of each token.
    """
    return Mask.function(lambda b, h, q, k: ids[b, q] == ids[b, k])
