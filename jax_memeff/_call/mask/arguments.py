"""Checks the arguments of masks and brings them into canonical shapes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_memeff._call import values
from jax_memeff._call.mask.window import Window
from jax_memeff._call.values import INT32_MAX


def scores(query: Any, key: Any) -> tuple[int, int, int, int]:
    """(B, N, T, S) from the shapes of a query and a key."""
    shapes = [_shape(name, x) for name, x in (("query", query), ("key", key))]
    if len(shapes[0]) != len(shapes[1]) or len(shapes[0]) not in (3, 4):
        raise ValueError(
            "Mask.blocks: query and key must have shapes [B, T, N, H] and [B, S, K, H], or both "
            f"lack B, got {shapes[0]} and {shapes[1]}"
        )
    (*batch, rows, heads, _), (*key_batch, columns, _, _) = shapes
    if batch != key_batch:
        raise ValueError(
            f"Mask.blocks: key must have the batch size of query, {batch[0]}, got {key_batch[0]} "
            f"in shape {shapes[1]}"
        )
    return batch[0] if batch else 1, heads, rows, columns


def _shape(name: str, x: Any) -> tuple[int, ...]:
    shape = getattr(x, "shape", None)
    if not isinstance(shape, tuple):
        raise TypeError(f"Mask.blocks: {name} must be an array, got {type(x).__name__}")
    values.require_countable(f"Mask.blocks: {name}", shape)
    return shape


def not_a_mask(other: object) -> TypeError:
    """The error for a mask that is combined with something else."""
    advice = ""
    if callable(other):
        advice = ": pass jax_memeff.Mask.function(function)"
    elif hasattr(other, "dtype"):
        advice = ": pass jax_memeff.Mask.boolean(array)"
    return TypeError(f"a Mask combines with another Mask, got {type(other).__name__}{advice}")


def both(a: Window | None, b: Window | None) -> Window | None:
    """The intersection of two windows; None means no window."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def bound(name: str, value: Any) -> int | None:
    """A static bound of a window."""
    if value is None:
        return None
    return values.static_integer(
        f"window {name}",
        value,
        "a Python integer or None",
        "make it static, or a JAX scalar",
    )


def boolean(x: ArrayLike) -> Any:
    """A boolean array of rank at most 4."""
    array = values.array("boolean mask", x)
    if array.dtype != bool:
        raise TypeError(
            f"boolean mask must have dtype bool, got {array.dtype}; "
            "pass an additive mask as bias instead"
        )
    if array.ndim > 4:
        raise ValueError(f"boolean mask must have rank <= 4, got shape {array.shape}")
    return array


def integers(name: str, x: ArrayLike, ranks: tuple[int, ...]) -> Any:
    """An integer array with one of these ranks."""
    array = values.integers(name, x)
    if array.ndim not in ranks:
        expected = " or ".join(str(rank) for rank in ranks)
        advice = "" if array.ndim else "; pass one for each batch index or token, such as [x]"
        raise ValueError(f"{name} must have rank {expected}, got shape {array.shape}{advice}")
    return array


def lengths(name: str, x: ArrayLike) -> Any:
    """Lengths [B]; host values are clipped to int32."""
    array = integers(name, x, (1,))
    if values.is_host(array):
        # jax.jit would wrap 64-bit arguments around.
        array = values.clipped(array, -INT32_MAX, INT32_MAX)
    return array


def smallest(lengths: Sequence[jax.Array], batch: int, size: int) -> jax.Array | None:
    """The minimum of several lengths, int32[B] in [0, size]."""
    if not lengths:
        return None
    clamped = (broadcast(values.clipped(x, 0, size), batch) for x in lengths)
    return functools.reduce(jnp.minimum, clamped)


def broadcast(x: Any, *shape: int) -> jax.Array:
    """A device array of this shape."""
    return jnp.broadcast_to(jnp.asarray(x), shape)
