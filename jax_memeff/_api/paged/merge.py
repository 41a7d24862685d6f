"""Attention over all keys from results over parts of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_memeff._api import argument_arrays
from jax_memeff._call import values


def merge_attention(
    parts: Iterable[tuple[ArrayLike, ArrayLike]],
) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp of attention over the keys of all parts, which have none in common.

    The weight of a part in a row is ``exp(lse_part - lse)``, where ``lse`` is the logarithm of the
    sum of the parts' exponentials (the combine step of FlashDecoding). So a prefix that many
    sequences share is computed once, for all of their queries together, and merged with the keys of
    each sequence. Differentiable.

    Args:
        parts: Pairs of an output ``[..., N, Hv]`` and its logsumexp ``[..., N]``, as
            ``return_residual=True`` gives them, all of one shape and dtype.

    Returns:
        The output in the dtype of the parts, and the logsumexp. A row that has keys in no part is 0
        and -inf. Sinks may be in one of the parts only.

    Raises:
        ValueError: There are no parts, or shapes differ.
        TypeError: A dtype is wrong.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))
    >>> attention = jax_memeff.dot_product_attention
    >>> parts = [
    ...     attention(query, key[:, own], value[:, own], return_residual=True)
    ...     for own in (slice(0, 3), slice(3, 8))
    ... ]
    >>> out, lse = jax_memeff.merge_attention(parts)
    >>> bool(jnp.allclose(out, attention(query, key, value), atol=1e-5))
    True
    """
    pairs = list(map(_checked, enumerate(parts)))
    if not pairs:
        raise ValueError("parts must have at least one pair (out, lse), got none")
    (out, lse), *others = pairs
    for index, pair in enumerate(others, 1):
        for name, x, first in zip(("out", "lse"), pair, (out, lse), strict=True):
            if x.shape != first.shape:
                raise ValueError(
                    f"parts[{index}]: {name} must have the shape of parts[0], {first.shape}, got "
                    f"{x.shape}"
                )
            if x.dtype != first.dtype:
                raise TypeError(
                    f"parts[{index}]: {name} must have the dtype of parts[0], {first.dtype}, got "
                    f"{x.dtype}"
                )
    largest = functools.reduce(jnp.maximum, (lse for _, lse in pairs))
    # A row without keys subtracts 0: -inf - -inf would be NaN. Results do not depend on it.
    subtracted = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    total = functools.reduce(jnp.add, (jnp.exp(lse - subtracted) for _, lse in pairs))
    has_keys = total != 0  # NaN, too, which must reach the results
    divisor = jnp.where(has_keys, total, 1)
    terms = (
        (jnp.exp(lse - subtracted) / divisor)[..., None] * out.astype(lse.dtype)
        for out, lse in pairs
    )
    merged = functools.reduce(jnp.add, terms).astype(out.dtype)
    return merged, jnp.where(has_keys, subtracted + jnp.log(divisor), -jnp.inf)


def _checked(part: tuple[int, Any]) -> tuple[jax.Array, jax.Array]:
    index, pair = part
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"parts[{index}] must be a pair (out, lse), got {type(pair).__name__}; pass "
            "return_residual=True to the attention function"
        )
    out, lse = (
        jnp.asarray(values.array(f"parts[{index}]: {name}", x))
        for name, x in zip(("out", "lse"), pair, strict=True)
    )
    argument_arrays.float_dtype(f"parts[{index}]: out", out)
    expected = jnp.promote_types(out.dtype, jnp.float32)
    if lse.dtype != expected:
        raise TypeError(
            f"parts[{index}]: lse must be {expected} for out in {out.dtype}, got {lse.dtype}"
        )
    if out.shape[:-1] != lse.shape:
        raise ValueError(
            f"parts[{index}]: lse must have the shape of out without its last dim, "
            f"{out.shape[:-1]}, got {lse.shape}"
        )
    return out, lse
