"""Evaluates a mask function on tiles: whether none, some or all elements of a tile are valid.

Each input is a range per tile. An element is a tile of one row and one column, so the same code
evaluates elements, with exact ranges.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_memeff._call.mask.ranges import Range, applied
from jax_memeff.codegen.functions.program import INPUTS, Program, Value

_FEW = 4
"""Up to this many indices along one dim are read one by one."""
_MOST_CANDIDATES = 8
"""A tile reads at most this many runs of an array along one dim."""


class Captured(NamedTuple):
    """An array that a mask function reads, with an internal first dim."""

    array: jax.Array
    index: jax.Array | None
    """int32: the index into the first dim for each batch index, in a shape that broadcasts with the
    inputs; None if every batch index reads index 0."""


class _Axis(NamedTuple):
    """How the tiles read one dim of an array."""

    pool: int
    """The length of the runs of elements whose minimum and maximum are known."""
    candidates: tuple[Any, ...]
    """Indices of runs, which together cover the elements that a tile reads."""


def evaluate(program: Program, inputs: Mapping[str, Range], captured: Sequence[Captured]) -> Range:
    """The bounds of a mask function: whether all elements of a tile are valid, and whether any
    may be.

    Args:
        program: a mask function.
        inputs: the ranges of ``"batch"``, ``"head"``, ``"query"`` and ``"key"``, int32, of shapes
            that broadcast.
        captured: the arrays of the program.
    """
    return of_values(program, inputs, captured)[program.results[0]]


def of_values(
    program: Program, inputs: Mapping[str, Range], captured: Sequence[Captured]
) -> list[Range]:
    """The bounds of every value of a program, for the arguments of :func:`evaluate`."""
    found: list[Range] = []
    for value in program.values:
        if value.op in INPUTS:
            found.append(inputs[value.op])
        elif (number := _number(program, value, captured)) is not None:
            found.append(Range.exact(jnp.asarray(number, value.dtype)))
        elif value.op == "read":
            own = captured[value.param("array")]
            found.append(_read(value, [found[arg] for arg in value.args], own))
        else:
            numbers = [_number(program, program.values[arg], captured) for arg in value.args]
            found.append(applied(value, [found[arg] for arg in value.args], numbers))
    return found


def _number(program: Program, value: Value, captured: Sequence[Captured]) -> Any:
    """The constant that a value equals in every element, or None."""
    if value.op == "constant":
        return value.param("value")
    if value.op == "literal":
        return program.literals[value.param("index")]
    if value.op == "size":
        return captured[value.param("array")].array.shape[1 + value.param("dim")]
    return None


def _read(value: Value, indices: list[Range], captured: Captured) -> Range:
    array = captured.array
    sizes = array.shape[1:]
    if 0 in sizes:
        return Range.everything(value.dtype)
    if value.dtype != "bool":
        array = array.astype(value.dtype)
    is_inside = jnp.asarray(True)
    known = jnp.asarray(True)
    axes = []
    for index, size in zip(indices, sizes, strict=True):
        is_inside &= (index.low >= 0) & (index.high < size)
        low, high = (jnp.clip(bound, 0, size - 1) for bound in (index.low, index.high))
        if index.is_exact:
            axes.append(_Axis(1, (low,)))
            continue
        axis, is_covered = _axis(Range(low, high, index.width), size)
        axes.append(axis)
        known &= is_covered
    is_exact = all(index.is_exact for index in indices)
    pools = [axis.pool for axis in axes]
    least, largest = (array, array) if is_exact else (_pooled(array, pools, end) for end in (0, 1))
    own = 0 if captured.index is None else captured.index
    lows, highs = [], []
    for place in itertools.product(*(axis.candidates for axis in axes)):
        at = tuple(jnp.broadcast_arrays(own, *place))
        lows.append(least[at])
        highs.append(least[at] if is_exact else largest[at])
    found = Range(lows[0], lows[0] if is_exact else highs[0])
    for low, high in zip(lows[1:], highs[1:], strict=True):
        found = Range(jnp.minimum(found.low, low), jnp.maximum(found.high, high))
    if value.param("mode") == "fill":
        found = _filled(found, value, is_inside)
    return found if is_exact else found.where(known, value.dtype)


def _filled(found: Range, value: Value, is_inside: jax.Array) -> Range:
    """The bounds of a read that returns a fill value outside of the array."""
    fill = jnp.asarray(value.param("fill_value"), value.dtype)
    if found.is_exact:
        return Range.exact(jnp.where(is_inside, found.low, fill))
    return Range(
        jnp.where(is_inside, found.low, jnp.minimum(found.low, fill)),
        jnp.where(is_inside, found.high, jnp.maximum(found.high, fill)),
    )


def _axis(index: Range, size: int) -> tuple[_Axis, jax.Array]:
    """Runs that cover a range of indices, and for which tiles they do."""
    if index.width is None or index.width >= size:
        return _Axis(size, (jnp.int32(0),)), jnp.asarray(True)
    pool = _pool(index.width)
    first, last = index.low // pool, index.high // pool
    count = (index.width + pool - 1) // pool + 1
    candidates = tuple(jnp.minimum(first + offset, last) for offset in range(count))
    # The range of a sum that overflows is larger than its width.
    return _Axis(pool, candidates), last - first < count


def _pool(width: int) -> int:
    """The length of the runs that make up ``width + 1`` indices.

    Tiles begin at multiples of their size, so a run whose length divides the size belongs to one
    tile. A few indices are read one by one, because they are often block indices.

    >>> _pool(127), _pool(95), _pool(1), _pool(126)
    (128, 32, 1, 32)
    """
    count = width + 1
    pool = count & -count if count > _FEW else 1
    while (width + pool - 1) // pool + 1 > _MOST_CANDIDATES:
        pool *= 2
    return pool


def _pooled(array: jax.Array, pools: Sequence[int], largest: int) -> jax.Array:
    """The minimum or the maximum of each run, along every dim but the first."""
    reduce = jnp.max if largest else jnp.min
    for axis, pool in enumerate(pools, 1):
        if pool == 1:
            continue
        size = array.shape[axis]
        count = -(-size // pool)
        padding = [(0, 0)] * array.ndim
        padding[axis] = (0, count * pool - size)
        shape = *array.shape[:axis], count, pool, *array.shape[axis + 1 :]
        array = reduce(jnp.pad(array, padding, mode="edge").reshape(shape), axis + 1)
    return array
