"""The results of attention over all keys from those over disjoint parts of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merged(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp of a call from those of its parts (the combine step of FlashDecoding).

    Rows without keys have output 0 and logsumexp -inf.

    Args:
        pairs: of outputs [..., Hv] and logsumexps [...], of one shape and dtype each. If a part has
            no keys for a row, its output there may hold anything.
    """
    largest = functools.reduce(jnp.maximum, (lse for _, lse in pairs))
    # Only a sink of inf gives a logsumexp of inf. The part with that sink gets the whole row.
    is_whole = largest == jnp.inf
    # The number cancels in the results. It is 0 for rows without keys: -inf - -inf would be NaN.
    subtracted = jax.lax.stop_gradient(jnp.where(jnp.isinf(largest), 0, largest))
    exponents = (
        jnp.where(is_whole, jnp.where(lse == jnp.inf, 0, -jnp.inf), lse - subtracted)
        for _, lse in pairs
    )
    weights = list(map(jnp.exp, exponents))
    total = functools.reduce(jnp.add, weights)
    has_keys = total != 0  # NaN, too, which must reach the results
    divisor = jnp.where(has_keys, total, 1)
    terms = (
        # The output of a part that has no keys for a row may hold anything there.
        (weight / divisor)[..., None]
        * jnp.where((lse == -jnp.inf)[..., None], 0, out).astype(lse.dtype)
        for (out, lse), weight in zip(pairs, weights, strict=True)
    )
    out = functools.reduce(jnp.add, terms).astype(pairs[0][0].dtype)
    lse = jnp.where(has_keys, subtracted + jnp.log(divisor), -jnp.inf)
    return out, jnp.where(is_whole, jnp.inf, lse)
