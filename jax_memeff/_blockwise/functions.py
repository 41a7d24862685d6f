"""The user's functions, evaluated on one tile of scores.

Arrays have a first dim that the user does not see: 1, or one for each batch index. The derivative
of a function is set to 0 in masked elements by a select, never by multiplying with 0, because it
may be infinite or NaN there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_memeff._functions.evaluate import evaluate
from jax_memeff.codegen.functions.program import Program

MASKED_SCORE = -1e37
"""A result of a score function, or a bias, below this masks its element, as -inf does."""


class Coordinates(NamedTuple):
    """The user's indices of the elements of a tile: int32, broadcast to [B, K, G, rows, cols]."""

    batch: jax.Array
    """[B, 1, 1, 1, 1]"""
    head: jax.Array
    """[1, K, G, 1, 1]"""
    query: jax.Array
    """[1|B, 1, 1, rows, 1]"""
    key: jax.Array
    """[1|B, 1, 1, 1, cols]"""


def is_masked(scores: jax.Array) -> jax.Array:
    """Whether a bias, or the result of a score function, masks its element."""
    return scores < MASKED_SCORE


def modified(
    program: Program,
    scores: jax.Array,
    coordinates: Coordinates,
    arrays: Sequence[jax.Array],
    valid: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The score function of each element, differentiable in scores and float arrays.

    Args:
        program: its first result is the function.
        scores: [B, K, G, rows, cols].
        coordinates: of the elements.
        arrays: those of the program, [1|B, ...].
        valid: bool, broadcasts to the scores; None is true.

    Returns:
        The function, and ``valid`` without the elements that the function masks. Derivatives are 0
        in elements that are not valid.
    """
    valid = jnp.ones((1,) * scores.ndim, bool) if valid is None else valid

    def function(scores: jax.Array, *args: Any) -> tuple[jax.Array, jax.Array]:
        b, h, q, k, valid, read = args
        # XLA evaluates the function once.
        masked = is_masked(evaluate(program, scores, b, h, q, k, read))
        valid = valid & jnp.logical_not(masked)
        return evaluate(program, scores, b, h, q, k, read, valid), valid

    return _each_batch_index(function, (scores, *coordinates, valid), arrays)


def holds(program: Program, coordinates: Coordinates, arrays: Sequence[jax.Array]) -> jax.Array:
    """The mask function of each element; it broadcasts to [B, K, G, rows, cols].

    Args:
        program: its first result is bool.
        coordinates: of the elements.
        arrays: those of the program, [1|B, ...].
    """
    return _each_batch_index(functools.partial(evaluate, program, None), coordinates, arrays)


def _each_batch_index(
    function: Callable[..., Any], elements: tuple[jax.Array, ...], arrays: Sequence[jax.Array]
) -> Any:
    """``function(*elements, arrays)`` with arrays of the user's shapes."""
    if all(x.shape[0] == 1 for x in arrays):
        return function(*elements, tuple(x[0] for x in arrays))
    leaves = (*elements, *arrays)
    axes = tuple(None if x.shape[0] == 1 else 0 for x in leaves)

    def one(*leaves: jax.Array) -> jax.Array:
        return function(*leaves[: len(elements)], leaves[len(elements) :])

    own = (x[0] if axis is None else x for x, axis in zip(leaves, axes, strict=True))
    return jax.vmap(one, in_axes=axes)(*own)
