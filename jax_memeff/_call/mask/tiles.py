"""The validity of the elements of one tile of scores, from a canonical mask.

Tiles are evaluated one at a time, so the whole mask ``[B, N, T, S]`` is never formed. Windows count
from global positions (``Position``); lengths, segment ids and boolean arrays from local ones.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._call.mask.conditions import Conditions, TracedWindow, Window
from jax_memeff._call.offsets import Position


def valid_elements(
    mask: Conditions,
    sizes: tuple[int, int],
    start: tuple[int | jax.Array, int | jax.Array],
    shape: tuple[int, int],
    position: Position | None,
) -> jax.Array | None:
    """Whether each element of one tile is valid.

    Args:
        mask: canonical.
        sizes: (T, S).
        start: local row and column of the tile's first element.
        shape: rows and columns of the tile, which lies inside the score matrix.
        position: global index of local row 0 and column 0; None is 0, 0.

    Returns:
        bool, broadcasts to [B, N, *shape]; None if the mask has no conditions.
    """
    row = (start[0] + lax.iota(jnp.int32, shape[0]))[None, None, :, None]
    col = (start[1] + lax.iota(jnp.int32, shape[1]))[None, None, None, :]
    conditions = _of_windows_and_lengths(mask, sizes, row, col, position)
    for query_ids, key_ids in mask.segment_ids:
        query_tile = slice_axis(query_ids, start[0], shape[0], 1)
        key_tile = slice_axis(key_ids, start[1], shape[1], 1)
        query_tile, key_tile = query_tile[:, None, :, None], key_tile[:, None, None, :]
        conditions.append((query_tile == key_tile) & (query_tile >= 0))
    conditions += [slice_tile(array, start, shape) for array in mask.booleans]
    valid = None
    for condition in conditions:
        valid = condition if valid is None else valid & condition
    return valid


def listed_elements(
    mask: Conditions,
    sizes: tuple[int, int],
    rows: jax.Array,
    columns: jax.Array,
    position: Position | None,
) -> jax.Array:
    """Whether each listed element is valid, judging by windows and lengths.

    Args:
        mask: canonical.
        sizes: (T, S).
        rows: int32[1|B, 1, rows, 1], the local row of each element.
        columns: int32[1|B, 1|K, rows, n], the local column of each element; one that is no column
            is not valid.
        position: as in :func:`valid_elements`.

    Returns:
        bool[1|B, 1|K, rows, n]
    """
    valid = (columns >= 0) & (columns < sizes[1])
    for condition in _of_windows_and_lengths(mask, sizes, rows, columns, position):
        valid = valid & condition
    return valid


def _of_windows_and_lengths(
    mask: Conditions,
    sizes: tuple[int, int],
    row: jax.Array,
    col: jax.Array,
    position: Position | None,
) -> list[jax.Array]:
    """Whether windows and lengths let the elements in these local rows and columns be valid."""
    conditions = []
    for window, distance in _windows(mask, sizes, position):
        from_diagonal = (col - row) - distance
        if window.left is not None:
            conditions.append(from_diagonal >= -window.left)
        if window.right is not None:
            conditions.append(from_diagonal <= window.right)
    if mask.query_lengths is not None:
        conditions.append(row < mask.query_lengths[:, None, None, None])
    if mask.key_lengths is not None:
        conditions.append(col < mask.key_lengths[:, None, None, None])
    return conditions


def reached_columns(
    mask: Conditions,
    sizes: tuple[int, int],
    start: tuple[int | jax.Array, int | jax.Array],
    columns: int,
    position: Position | None,
) -> jax.Array | None:
    """Whether each column of a tile is at or after the windows' first columns in the tile's first
    row. Columns before those are in no window of the tile's rows.

    Takes the arguments of :func:`valid_elements`.

    Returns:
        bool[1|B, columns]; None if no window has a left bound.
    """
    column = (start[1] + lax.iota(jnp.int32, columns))[None, None, None, :]
    reached = None
    for window, distance in _windows(mask, sizes, position):
        if window.left is not None:
            in_window = (column - start[0]) - distance >= -window.left
            reached = in_window if reached is None else reached & in_window
    return None if reached is None else reached[:, 0, 0]


def may_attend(
    mask: Conditions,
    sizes: tuple[int, int],
    start: tuple[int | jax.Array, int | jax.Array],
    shape: tuple[int, int],
    position: Position | None,
) -> jax.Array | None:
    """Whether a tile can have valid elements, judging each condition on its own: windows, lengths
    and segment ids by the tile's edges.

    Takes the arguments of :func:`valid_elements`.

    Returns:
        bool[]: false only if no element is valid for any batch index. None if the mask has no
        condition that could rule out a tile.
    """
    last_row, last_col = start[0] + shape[0] - 1, start[1] + shape[1] - 1
    # Each condition is [1] or [B].
    conditions = []
    for window, distance in _windows(mask, sizes, position):
        left, right, distance = (_by_batch(x) for x in (window.left, window.right, distance))
        if left is not None:
            conditions.append((last_col - start[0]) - distance >= -left)
        if right is not None:
            conditions.append((start[1] - last_row) - distance <= right)
    if mask.query_lengths is not None:
        conditions.append(start[0] < mask.query_lengths)
    if mask.key_lengths is not None:
        conditions.append(start[1] < mask.key_lengths)
    for query_ids, key_ids in mask.segment_ids:
        query_tile = slice_axis(query_ids, start[0], shape[0], 1)
        key_tile = slice_axis(key_ids, start[1], shape[1], 1)
        conditions.append(
            (jnp.max(query_tile, 1) >= jnp.maximum(jnp.min(key_tile, 1), 0))
            & (jnp.max(key_tile, 1) >= jnp.min(query_tile, 1))
        )
    for array in mask.booleans:
        # First over the rows, so that a vmap over columns does it once.
        rows = array if array.shape[2] == 1 else slice_axis(array, start[0], shape[0], 2)
        columns = jnp.any(rows, (0, 1, 2))
        if columns.shape[0] != 1:
            columns = slice_axis(columns, start[1], shape[1], 0)
        conditions.append(jnp.any(columns, keepdims=True))
    if not conditions:
        return None
    possible = conditions[0]
    for condition in conditions[1:]:
        possible = possible & condition
    return jnp.any(possible)


def _windows(
    mask: Conditions, sizes: tuple[int, int], position: Position | None
) -> list[tuple[Window | TracedWindow, jax.Array]]:
    """The windows, each with the local ``col - row`` of its diagonal, int32[1|B, 1, 1, 1].

    Traced bounds have this shape, too.
    """
    shift = jnp.zeros((), jnp.int32)
    if position is not None:
        shift = (position.query - position.key).astype(jnp.int32)
    top_left, bottom_right = (
        [fixed, *(_as_column(traced) for traced in mask.traced_windows if traced.alignment == name)]
        for name, fixed in (("top_left", mask.top_left), ("bottom_right", mask.bottom_right))
    )
    windows = [(window, shift.reshape(-1, 1, 1, 1)) for window in top_left if window is not None]
    if any(window is not None for window in bottom_right):
        query_lengths, key_lengths = mask.query_lengths, mask.key_lengths
        query_lengths = (
            jnp.full((1,), sizes[0], jnp.int32) if query_lengths is None else query_lengths
        )
        key_lengths = jnp.full((1,), sizes[1], jnp.int32) if key_lengths is None else key_lengths
        distance = shift + (key_lengths - query_lengths)
        distance = distance.reshape(-1, 1, 1, 1)
        windows += [(window, distance) for window in bottom_right if window is not None]
    return windows


def _as_column(window: TracedWindow) -> TracedWindow:
    """Bounds of shape [1|B, 1, 1, 1]."""
    return jax.tree.map(lambda bound: bound.reshape(-1, 1, 1, 1), window)


def _by_batch(x: Any) -> Any:
    """[1|B] of an array [1|B, 1, 1, 1]; numbers and None are unchanged."""
    return x.reshape(-1) if hasattr(x, "ndim") else x


def slice_tile(
    array: jax.Array, start: tuple[int | jax.Array, int | jax.Array], shape: tuple[int, int]
) -> jax.Array:
    """The tile of an array [b, n, t, s] whose last two dimensions are full or 1 (broadcast)."""
    for axis, first, size in zip((2, 3), start, shape, strict=True):
        if array.shape[axis] != 1:
            array = slice_axis(array, first, size, axis)
    return array


def slice_axis(x: jax.Array, start: int | jax.Array, size: int, axis: int) -> jax.Array:
    """Part of an axis, which lies inside it."""
    if size == x.shape[axis]:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)
