"""Rotary position embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_memeff._call import values
from jax_memeff._call.values import score_dtype


@values.takes_objects
def rotary_embedding(x: jax.Array, positions: ArrayLike, base: float = 10_000.0) -> jax.Array:
    """Rotate pairs of features by angles that grow with the position.

    Pair ``i`` consists of the features ``i`` and ``i + H / 2`` and is rotated by
    ``position * base**(-2 i / H)`` (Su et al., "RoFormer", https://arxiv.org/abs/2104.09864,
    section 3.2.2). The product of a rotated query and a rotated key depends only on the difference
    of their positions.

    Args:
        x: ``[..., T, heads, H]`` with an even H, any float dtype.
        positions: numbers that broadcast to ``[..., T]``.
        base: a number > 0; the longest wavelength is almost ``2 pi base`` positions.

    Returns:
        ``x``'s shape and dtype; computed in float32 (float64 for float64 inputs).

    Raises:
        ValueError: H is odd, ``base`` is not > 0, or a shape or the dtype of ``x`` is wrong.
        TypeError: ``x`` or ``positions`` are not arrays of real numbers, or ``base`` is not a
            number.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> out = rotary_embedding(x, jnp.arange(3))
    >>> out.shape, bool(jnp.array_equal(out[:, 0], x[:, 0]))  # position 0 is not rotated
    ((1, 3, 2, 4), True)
    """
    x = jnp.asarray(values.array("x", x))
    if x.ndim < 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x must be floats of shape [..., T, heads, H], got {x.dtype} of shape {x.shape}"
        )
    at = values.array("positions", positions)
    if not any(jnp.issubdtype(at.dtype, kind) for kind in (jnp.integer, jnp.floating, jnp.bool_)):
        raise TypeError(f"positions must be real numbers, got dtype {at.dtype}")
    if not _broadcasts(at.shape, x.shape[:-2]):
        raise ValueError(
            f"positions must broadcast to [..., T] = {list(x.shape[:-2])}, got shape {at.shape}"
        )
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"a rotary embedding needs an even head dim, got {head_dim}")
    if not isinstance(base, Tracer):
        base = values.static_number("base", base, "pass a Python number")
        if base <= 0:
            raise ValueError(f"base must be > 0, got {base}; layers take it as rotary_base")
    dtype = score_dtype(x.dtype)
    half = head_dim // 2
    frequency = base ** (-jnp.arange(half, dtype=dtype) / half)
    # All operands get the rank of x, for users who forbid rank promotion.
    at = jnp.expand_dims(jnp.asarray(at, dtype), (*range(x.ndim - 2 - at.ndim), -2, -1))
    angle = at * jnp.expand_dims(frequency, range(x.ndim - 1))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return jnp.broadcast_shapes(shape, target) == target
    except ValueError:
        return False
