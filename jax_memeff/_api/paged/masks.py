"""Masks of paged calls, whose rows are positions in a sequence.

In the user's windows and functions, a row is the position of the query's token in its sequence.
The rows of a call are only the new tokens; their positions follow from the lengths.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_memeff._call.mask import Mask, Window
from jax_memeff._call.mask.conditions import AnyMask, Conditions
from jax_memeff._call.mask.window import TracedWindow, intersection


def require_possible(mask: Conditions) -> None:
    """Raise for conditions that paged calls do not take: lengths, computed blocks, segment ids.

    They are wrong under ``|`` and ``~``, too, so those masks are also checked.

    Raises:
        ValueError: names the condition and its replacement.
    """
    if {"query_lengths", "key_lengths"} & mask.kinds():
        raise ValueError(
            "mask must not have lengths, because kv_lengths are the lengths of sequences; got "
            "Mask.lengths: pass shorter kv_lengths, or Mask.function"
        )
    if mask.block_masks:
        raise ValueError(
            "mask must not have computed blocks, because rows are positions in a sequence; got "
            "mask.blocks(query, key): pass the mask itself"
        )
    if mask.segment_ids:
        raise ValueError(
            "mask must not have segment ids, because a row of a pool belongs to no fixed sequence; "
            "got Mask.segments: pass Mask.function(lambda b, h, q, k: ids[b, q] == ids[b, k])"
        )
    for other in mask.excluded:
        require_possible(other)


def by_position(mask: AnyMask) -> AnyMask:
    """The same mask in terms of positions: the diagonal of every window starts at position 0.

    This includes windows under ``|`` and ``~``.
    """
    return dataclasses.replace(
        mask,
        top_left=intersection(mask.top_left, mask.bottom_right),
        bottom_right=None,
        traced_windows=tuple(
            TracedWindow(window.left, window.right, "top_left") for window in mask.traced_windows
        ),
        excluded=tuple(map(by_position, mask.excluded)),
    )


def by_rows(mask: Mask, longest_query: int) -> Mask:
    """A mask of :func:`by_position` without functions, in terms of the new tokens.

    The diagonal ends at the last token. A single new token is the last one of its sequence, so it
    needs no right bound.
    """
    window = mask.top_left
    if window is not None and longest_query == 1 and (window.right or 0) >= 0:
        window = Window(window.left, None)
    if window == Window(None, None):
        window = None
    return dataclasses.replace(mask, top_left=None, bottom_right=window)


def shifted(mask: Mask, batch: int, first: jax.Array, columns: int) -> Mask:
    """The mask with its boolean arrays shifted, so that row 0 is the sequence's first token.

    Lists of blocks, and arrays under ``|`` and ``~``, keep the user's rows: they become one
    function, which computes these rows from positions.

    Args:
        mask: a canonical mask.
        batch: B.
        first: int32[B], the number of rows before each sequence's first token.
        columns: the number of columns, to which arrays are padded with False.
    """

    def one(array: jax.Array) -> jax.Array:
        _, heads, rows, own = array.shape
        if rows == 1:
            return array
        array = jnp.broadcast_to(array, (batch, heads, rows, own))
        of_rows = jnp.arange(rows, dtype=jnp.int32)[None] + first[:, None]
        # Rows after the last one belong to no token.
        return jnp.take_along_axis(array, of_rows[:, None, :, None], 2, mode="clip")

    mask = _with_columns(mask, columns)
    return dataclasses.replace(mask, booleans=tuple(map(one, mask.booleans)))


def _with_columns(mask: AnyMask, columns: int) -> AnyMask:
    """The mask with its boolean arrays, those under ``~`` too, padded to so many columns."""

    def one(array: jax.Array) -> jax.Array:
        own = array.shape[3]
        if own in (1, columns):
            return array
        return jnp.pad(array, [(0, 0)] * 3 + [(0, columns - own)])

    return dataclasses.replace(
        mask,
        booleans=tuple(map(one, mask.booleans)),
        excluded=tuple(_with_columns(other, columns) for other in mask.excluded),
    )


def padded_pages(max_pages: int, page_size: int, columns: int) -> int:
    """The smallest number of pages >= ``max_pages`` whose keys are a multiple of ``columns``.

    >>> padded_pages(5, page_size=48, columns=256)
    16
    """
    multiple = math.lcm(page_size, columns) // page_size
    return -(-max_pages // multiple) * multiple
