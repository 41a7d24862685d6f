"""One program for mask functions, lists of blocks, and the results of ``|`` and ``~``.

Windows, lengths, segment ids and boolean arrays under ``|`` or ``~`` are element tests, written
here in JAX and traced together with the user's functions. Lists of blocks always become
functions: their bounds settle every tile that lies inside one block.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_memeff._call.mask.conditions import AnyMask, BlockTable, Conditions
from jax_memeff._call.offsets import Index, Offsets, Position
from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.trace import traced_mask_function


class Element(NamedTuple):
    """The user's indices of one element of the scores, int32 each."""

    batch: jax.Array
    head: jax.Array
    query: jax.Array
    key: jax.Array


class Frame(NamedTuple):
    """The place of a call's arrays, from which the local indices of an element follow.

    A mask function gets global indices; lengths, segment ids, boolean arrays and lists of blocks
    use local ones.
    """

    query_lengths: jax.Array | int
    """int32[B], or T."""
    key_lengths: jax.Array | int
    """int32[B], or S."""
    batch: Index = 0
    head: Index = 0
    position: Position | None = None
    query_starts: jax.Array | None = None
    """int32[B + 1]: the first token of each packed sequence; segment ids then belong to tokens."""
    key_starts: jax.Array | None = None

    @classmethod
    def of(cls, mask: Conditions, sizes: tuple[int, int], offsets: Offsets | None = None) -> Frame:
        """The frame of a call with sizes (T, S), this canonical mask and these offsets."""
        queries, keys = (
            size if lengths is None else lengths
            for lengths, size in zip((mask.query_lengths, mask.key_lengths), sizes, strict=True)
        )
        if offsets is None:
            return cls(queries, keys)
        return cls(queries, keys, offsets.batch, offsets.head, offsets.position())

    def local(self, element: Element) -> Element:
        """The indices of an element in the arrays of this call."""
        batch = element.batch - _int32(self.batch)
        row, column = element.query, element.key
        if self.position is not None:
            row = row - _at(self.position.query, batch)
            column = column - _at(self.position.key, batch)
        return Element(batch, element.head - _int32(self.head), row, column)


def compiled(mask: AnyMask, frame: Frame) -> AnyMask:
    """A canonical mask with no ``~`` and at most one function, whose arrays are ``[1, ...]``.

    Args:
        mask: canonical, except for its functions.
        frame: the place of the call; its lengths are those of the whole mask.
    """
    if not (mask.functions or mask.excluded or mask.block_lists):
        return mask
    if len(mask.functions) == 1 and not (mask.excluded or mask.block_lists):
        program, arrays = mask.functions[0], mask.captured
    else:
        # The other conditions of the mask itself bound loads, and do not change.
        combined = type(mask)(
            functions=mask.functions,
            captured=mask.captured,
            excluded=mask.excluded,
            block_lists=mask.block_lists,
        )

        def function(*element: jax.Array) -> jax.Array:
            return holds(combined, Element(*element), frame)

        program, arrays = traced_mask_function(function)
    captured = tuple(jnp.asarray(x)[None] for x in arrays)
    return dataclasses.replace(
        mask, functions=(program,), captured=captured, excluded=(), block_lists=()
    )


def with_rows_from(mask: AnyMask, first: jax.Array, B: int, T: int, S: int) -> AnyMask:
    """The same mask, with row 0 of its functions and of windows under ``~`` at row ``first``.

    As in a cache, the last row is then at the position of the last column.

    Args:
        mask: not canonical.
        first: int32[].
        B, T, S: the sizes of the call.
    """
    if "function" not in mask.kinds():
        return mask
    with_functions = type(mask)(
        functions=mask.functions, captured=mask.captured, excluded=mask.excluded
    )
    with_functions = with_functions.canonical(B, T, S)
    frame = Frame(0, 0, position=Position(first, jnp.int32(0)))

    def function(b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        return holds(with_functions, Element(b, h, q + first, k), frame)

    program, captured = traced_mask_function(function)
    mask = mask.without_block_masks()
    return dataclasses.replace(mask, functions=(program,), captured=captured, excluded=())


def holds(mask: Conditions, element: Element, frame: Frame) -> jax.Array:
    """Whether one element is valid, bool[]."""
    place = frame.local(element)
    conditions = [jnp.bool_(True), *_windows(mask, element, place, frame)]
    for lengths, index in ((mask.query_lengths, place.query), (mask.key_lengths, place.key)):
        if lengths is not None:
            conditions.append(index < _read(lengths, place.batch))
    for query_ids, key_ids in mask.segment_ids:
        query_id = _id(query_ids, place.batch, place.query, frame.query_starts)
        key_id = _id(key_ids, place.batch, place.key, frame.key_starts)
        conditions.append((query_id == key_id) & (query_id >= 0))
    for array in mask.booleans:
        indices = (0 if size == 1 else x for size, x in zip(array.shape, place, strict=True))
        conditions.append(_read(array, *indices))
    for table in mask.block_lists:
        assert isinstance(table, BlockTable), "masks are canonical here"
        conditions.append(table.holds(*place))
    first = 0
    for program in mask.functions:
        # ``jax_memeff.check`` passes NumPy arrays, which tracers cannot index.
        arrays = [jnp.asarray(x) for x in mask.captured[first : first + len(program.arrays)]]
        first += len(program.arrays)
        conditions.append(evaluate(program, None, *element, arrays))
    conditions += [~holds(key_id, element, frame) for key_id in mask.excluded]
    valid = conditions[0]
    for condition in conditions[1:]:
        valid = valid & condition
    return valid


def _windows(mask: Conditions, element: Element, place: Element, frame: Frame) -> list[jax.Array]:
    """Windows count from global positions; the lengths of a bottom-right one are local."""
    conditions = []
    windows: list[tuple[Any, str]] = [
        (mask.top_left, "top_left"),
        (mask.bottom_right, "bottom_right"),
        *((window, window.alignment) for window in mask.traced_windows),
    ]
    for window, alignment in windows:
        if window is None:
            continue
        from_diagonal = element.key - element.query
        if alignment == "bottom_right":
            lengths = (_at(x, place.batch) for x in (frame.key_lengths, frame.query_lengths))
            from_diagonal = from_diagonal - operator.sub(*lengths)
        if window.left is not None:
            conditions.append(from_diagonal >= -window.left)
        if window.right is not None:
            conditions.append(from_diagonal <= window.right)
    return conditions


def _id(ids: jax.Array, batch: jax.Array, index: jax.Array, starts: jax.Array | None) -> jax.Array:
    """The id of a row or column, from ids [B, positions], or [1, tokens] for packed sequences."""
    if starts is None:
        return _read(ids, batch, index)
    return _read(ids, 0, _read(starts, batch) + index)


def _at(x: Any, batch: jax.Array) -> Any:
    """The entry of a batch index; a scalar holds for all of them."""
    return _read(jnp.asarray(x), batch) if getattr(x, "ndim", 0) else _int32(x)


def _read(array: jax.Array, *index: Any) -> jax.Array:
    """One element of an array. JAX cannot index an empty one, which no element of a call reads."""
    return array[index] if array.size else jnp.zeros((), array.dtype)


def _int32(x: Any) -> Any:
    return x if isinstance(x, int) else jnp.asarray(x).astype(jnp.int32)
