"""The coordinates at which the user's functions are evaluated."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._call.offsets import Index, Offsets
from jax_memeff._call.operands.arrays import FunctionState

ScoreFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array | float]
"""Maps the score, batch index, head, row and column, all scalars, to a new score."""


def state(batch: int, heads: int, offsets: Offsets | None = None) -> FunctionState:
    """The user's indices of a call's batch indices and query heads.

    Args:
        batch: B, the batch size of this call, or the number of its packed sequences.
        heads: N, the number of query heads of this call.
        offsets: the global index of this call's first batch index and head; None is 0 for both.

    >>> state(2, 3, Offsets(head=4)).head_index
    Array([4, 5, 6], dtype=int32)
    """
    offsets = Offsets() if offsets is None else offsets

    def indices(first: Index, size: int) -> jax.Array:
        return jnp.asarray(first).astype(jnp.int32) + lax.iota(jnp.int32, size)

    return FunctionState(indices(offsets.batch, batch), indices(offsets.head, heads))
