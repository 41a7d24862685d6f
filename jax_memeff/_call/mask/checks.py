"""Whether a mask fits a call: the shapes of its arrays, and the values that the host can read."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax import dtypes

from jax_memeff._call import values
from jax_memeff._call.mask.block_mask import BLOCK
from jax_memeff._call.mask.conditions import (
    AnyMask,
    BlockTable,
    Conditions,
    KeyLists,
    KvBlocks,
    TracedWindow,
)

ScoresShape = tuple[int, int, int, int]
"""B, N, T and S of a call."""


def checked(
    mask: AnyMask,
    scores_shape: ScoresShape,
    tokens: tuple[int, int] | None = None,
    *,
    clamps: bool = False,
    key_heads: int | None = None,
) -> AnyMask:
    """The mask with lengths in arrays, each of its arrays checked against the scores.

    Args:
        mask: not canonical, or canonical.
        scores_shape: those of the call.
        tokens: the numbers of query and key tokens if sequences are packed; each token has a
            segment id, and each query token a list of keys.
        clamps: whether lengths out of range are allowed, because they are clamped.
        key_heads: K of the call; if None, lists of keys may have any number that divides N.

    Raises:
        ValueError: a shape does not fit, or a length in a NumPy array is out of range.
        TypeError: a field does not have the type that the constructors of masks give it.
    """
    _fields(mask)
    mask = dataclasses.replace(
        mask,
        excluded=tuple(
            checked(other, scores_shape, tokens, clamps=clamps) for other in mask.excluded
        ),
    )
    batch, _, rows, columns = scores_shape
    longest = {"query lengths": None, "key lengths": None}
    if not clamps:
        longest = {"query lengths": rows, "key lengths": columns}
    first, *more = (
        tuple(
            None if value is None else lengths(name, value, batch, most)
            for (name, most), value in zip(longest.items(), pair, strict=True)
        )
        for pair in ((mask.query_lengths, mask.key_lengths), *mask.more_lengths)
    )
    mask = dataclasses.replace(
        mask, query_lengths=first[0], key_lengths=first[1], more_lengths=tuple(more)
    )
    if tokens is not None:
        batch, (rows, columns) = 1, tokens
    for query_ids, key_ids in mask.segment_ids:
        _segment_ids("query segment ids", query_ids, batch, rows)
        _segment_ids("key segment ids", key_ids, batch, columns)
    for array in mask.booleans:
        boolean(array, scores_shape)
    _captured(mask)
    for window in mask.traced_windows:
        _traced_window(window, scores_shape[0])
    for lists in mask.block_lists:
        _block_lists(lists, scores_shape)
    for lists in mask.key_lists:
        _key_lists(lists, scores_shape, None if tokens is None else tokens[0], key_heads)
    for levels in mask.block_masks:
        _block_mask(levels, scores_shape)
    return mask


def lengths(name: str, value: Any, batch: int, longest: int | None, *, batched: bool = True) -> Any:
    """Lengths [B] in [0, longest], unbounded if that is None; only host values can be checked.

    A call that is not ``batched`` may also have one number.
    """
    if getattr(value, "dtype", None) == np.bool_:
        raise TypeError(
            f"{name} must be integers, got dtype bool; if it marks valid keys [B, S], pass it as "
            "mask, of shape [B, 1, 1, S]"
        )
    array = values.integers(name, value)
    if not batched and array.ndim == 0:
        array = array.reshape(1)
    if array.shape != (batch,):
        raise ValueError(
            f"{name} must have shape [B] = [{batch}], got shape {tuple(array.shape)}"
            f"{_as_lengths(array.shape, batch)}"
        )
    if values.is_host(array) and longest is not None:
        wrong = np.flatnonzero((array < 0) | (array > longest))
        if wrong.size:
            index = int(wrong[0])
            raise ValueError(
                f"{name} must be in [0, {longest}], got {array[index]} at index {index}"
            )
    return array


def _as_lengths(shape: tuple[int, ...], batch: int) -> str:
    """The end of a message about lengths of another shape: how to pass them."""
    if shape == ():
        return f"; pass jnp.full({batch}, length)"
    if shape == (batch + 1,):
        return "; starts of packed sequences are arguments of varlen_attention and paged_attention"
    return f"; reshape it to [{batch}]" if math.prod(shape) == batch else ""


def boolean(value: Any, scores_shape: ScoresShape) -> Any:
    """A boolean array that broadcasts to the scores."""
    array = values.array("mask", value)
    if array.dtype != np.bool_:
        raise TypeError(
            f"mask must be a boolean array (True = attend) or a jax_memeff.Mask, got dtype "
            f"{array.dtype}; pass mask != 0, or an additive mask as bias"
        )
    values.broadcasts_to_scores("mask", array, scores_shape)
    batch, heads = scores_shape[:2]
    # Left-padding means N, as for a bias, but masks of three dims are mostly [B, T, S].
    if array.ndim == 3 and array.shape[0] == batch == heads != 1:
        raise ValueError(
            f"mask must have four dims if the first of three may be B or N, which are both {heads} "
            f"here, got shape {tuple(array.shape)} for [B, N, T, S] = {list(scores_shape)}; pass "
            "mask[:, None] if it is B, mask[None] if it is N"
        )
    return array


def _segment_ids(name: str, value: Any, batch: int, length: int) -> None:
    array = values.integers(name, value)
    if array.shape not in ((batch, length), (length,)):
        raise ValueError(
            f"{name} must have shape [{batch}, {length}] or [{length}], got {tuple(array.shape)}"
        )


def _captured(mask: Conditions) -> None:
    """Check that the arrays of functions are those that were traced.

    Hazard: a kernel reads memory as the traced dtype. ``jax.tree.map`` over a mask can cast it.
    """
    expected = [array for program in mask.functions for array in program.arrays]
    if len(expected) != len(mask.captured):
        raise TypeError(
            f"Mask.captured must be the {len(expected)} arrays that the functions of the mask read,"
            f" got {len(mask.captured)}; use Mask.function"
        )
    for traced, value in zip(expected, mask.captured, strict=True):
        array = values.array("an array that a mask function reads", value)
        dtype_names = (array.dtype.name, dtypes.canonicalize_dtype(array.dtype).name)
        # In a canonical mask these arrays have a batch dim of 1.
        is_ranked = array.ndim == traced.ndim or array.shape[: array.ndim - traced.ndim] == (1,)
        if traced.dtype not in dtype_names or not is_ranked:
            raise TypeError(
                f"an array that a mask function reads must be {traced.dtype} of rank {traced.ndim},"
                f" as it was in Mask.function, got {array.dtype} of shape {tuple(array.shape)}: do"
                " not cast or reshape the arrays of a Mask (jax.tree.map), or call Mask.function"
                " again"
            )


def _traced_window(window: TracedWindow, batch: int) -> None:
    for side in ("left", "right"):
        if (bound := getattr(window, side)) is None:
            continue
        array = values.integers(f"window {side}", bound)
        if array.shape not in ((), (1,), (batch,)):
            raise ValueError(
                f"window {side} must be one integer, got an array of shape {tuple(array.shape)}"
            )


def _block_mask(levels: Any, scores_shape: ScoresShape) -> None:
    """Check that a block mask was computed for the sizes of a call."""
    batch, heads, *sizes = scores_shape
    expected = tuple(-(-size // BLOCK) for size in sizes)
    shape = tuple(levels.shape)
    if shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == expected:
        return
    raise ValueError(
        f"mask: Mask.blocks computed a block mask of shape {shape} for arrays of other sizes; this "
        f"call of batch {batch}, {heads} heads, {sizes[0]} rows and {sizes[1]} columns needs "
        f"[{_or_1(batch)}, {_or_1(heads)}, {expected[0]}, {expected[1]}]: call Mask.blocks with "
        "its query and key"
    )


def _or_1(size: int) -> str:
    """The sizes that a dim may have, for a message."""
    return "1" if size == 1 else f"{size} or 1"


def _block_lists(lists: KvBlocks | BlockTable, scores_shape: ScoresShape) -> None:
    """Check that lists of KV blocks have the batch, the heads and the Q blocks of a call."""
    batch, heads, rows, _ = scores_shape
    if isinstance(lists, KvBlocks):
        lists = KvBlocks.of(lists.indices, lists.counts, lists.block_size)
    list_shape = lists.shape if isinstance(lists, KvBlocks) else lists.listed.shape
    first, second, blocks, _ = list_shape
    expected = -(-rows // lists.block_size[0])
    if first in (1, batch) and second in (1, heads) and blocks == expected:
        return
    shape = lists.indices.shape if isinstance(lists, KvBlocks) else list_shape
    raise ValueError(
        f"KV block indices must have shape [{_or_1(batch)}, {_or_1(heads)}, {expected}, n], where "
        f"{expected} Q blocks of {lists.block_size[0]} rows cover {rows} rows, got shape "
        f"{tuple(shape)}; with grouped heads repeat the lists of key heads"
    )


def _key_lists(
    lists: KeyLists, scores_shape: ScoresShape, tokens: int | None, key_heads: int | None
) -> None:
    """Check that lists of keys have the batch, the key heads and the rows of a call."""
    lists = KeyLists.of(lists.indices, lists.is_unique)
    batch, heads, rows, _ = scores_shape
    shape = tuple(lists.indices.shape)
    if tokens is None:
        leading = lists.shape[:3]
        own_heads, expected = leading[1], f"[{_or_1(batch)}, {{}}, {rows}, n]"
        fits = leading[0] in (1, batch) and leading[2] == rows
    else:
        own_heads, expected = shape[-2], f"[{tokens}, {{}}, n], a list for each token"
        fits = len(shape) == 3 and shape[0] == tokens
    if key_heads is None:
        fits = fits and own_heads != 0 and heads % own_heads == 0
    if fits and (key_heads is None or own_heads in (1, key_heads)):
        return
    expected = expected.format("K" if key_heads is None else _or_1(key_heads))
    advice = ""
    if key_heads is not None and own_heads == heads:
        advice = "; lists belong to key heads, so repeat these if each query head has its own list"
    raise ValueError(f"key indices must have shape {expected}, got shape {shape}{advice}")


def _fields(mask: Conditions) -> None:
    """Check that the fields of a mask could come from its constructors."""

    def expect(name: str, is_right: bool, expected: str, remedy: str) -> None:
        if not is_right:
            raise TypeError(
                f"Mask.{name} must be {expected}, got {getattr(mask, name)!r:.80}; use {remedy}"
            )

    def is_pairs(pairs: Any) -> bool:
        return isinstance(pairs, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in pairs)

    expect("more_lengths", is_pairs(mask.more_lengths), "a tuple of pairs", "Mask.lengths and &")
    expect("segment_ids", is_pairs(mask.segment_ids), "a tuple of pairs", "Mask.segments")
    expect("booleans", isinstance(mask.booleans, tuple), "a tuple of arrays", "Mask.boolean")
    are_lists = isinstance(mask.block_lists, tuple) and all(
        isinstance(lists, KvBlocks | BlockTable) for lists in mask.block_lists
    )
    expect("block_lists", are_lists, "a tuple of lists", "Mask.kv_blocks")
    are_lists = isinstance(mask.key_lists, tuple) and all(
        isinstance(lists, KeyLists) for lists in mask.key_lists
    )
    expect("key_lists", are_lists, "a tuple of lists", "Mask.keys")
    are_ranked = isinstance(mask.block_masks, tuple) and all(
        getattr(levels, "ndim", 0) == 4 and levels.dtype == np.uint8 for levels in mask.block_masks
    )
    expect("block_masks", are_ranked, "a tuple of uint8 arrays of rank 4", "Mask.blocks")
