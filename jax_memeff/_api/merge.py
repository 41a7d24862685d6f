"""Attention over all keys, merged from results over disjoint parts of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_memeff._api.arrays import require_float
from jax_memeff._call import merging, values
from jax_memeff._call.values import score_dtype


def merge_attention(
    parts: Iterable[tuple[ArrayLike, ArrayLike]],
) -> tuple[jax.Array, jax.Array]:
    """Merge results over disjoint sets of keys into attention over all of these keys.

    The weight of a part in a row is ``exp(lse_part - lse)``, where ``lse`` is the logsumexp of the
    parts' ``lse_part`` (the combine step of FlashDecoding). For example, one call lets the queries
    of all sequences attend to a shared prefix, another lets them attend to the rest of their
    sequence, and this function merges the two. Differentiable.

    Args:
        parts: Pairs of an output ``[..., N, Hv]`` and its logsumexp ``[..., N]``, as returned with
            ``return_residual=True``, all of the same shape and dtype.

    Returns:
        The output in the dtype of the parts, and the logsumexp. A row without keys in any part has
        output 0 and logsumexp -inf. Only one part may include sinks. If a part has no keys for a
        row, its logsumexp there is -inf, and its output there may hold anything.

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
    if not isinstance(parts, Iterable) or getattr(parts, "ndim", 1) == 0:
        raise TypeError(
            f"parts must be a list of pairs (out, lse), got {parts!r:.80} of type "
            f"{type(parts).__name__}"
        )
    pairs = list(map(_checked, enumerate(values.held(list(parts)))))
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
    return merging.merged(pairs)


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
    require_float(f"parts[{index}]: out", out)
    if not out.ndim:
        raise ValueError(
            f"parts[{index}]: out must have shape [..., N, Hv], got shape (); pass the arrays of "
            "return_residual=True, not numbers"
        )
    expected = score_dtype(out.dtype)
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
