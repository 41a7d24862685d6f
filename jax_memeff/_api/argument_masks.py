"""Checks of the arguments that select and place elements: lengths, ids, starts and offsets.

The values of device and traced arrays are not readable here. The semantics define what values out
of range mean, and ``jax_memeff.check`` looks at them eagerly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_memeff._api import argument_arrays
from jax_memeff._call import values
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.computed_blocks import BLOCK
from jax_memeff._call.mask.kv_blocks import KvBlocks
from jax_memeff._call.offsets import MOST_POSITION, Offsets


def padded_lengths(
    arguments: Mapping[str, Any], batch: int, longest: tuple[int, int], batched: bool
) -> Mask:
    """The mask of ``query_seq_lengths`` and ``key_value_seq_lengths``, [B] each.

    One number is enough without a batch dim.
    """

    def checked(name: str, longest: int) -> Any:
        if arguments[name] is None:
            return None
        array = values.array(name, arguments[name])
        if array.ndim == 0 and not batched:
            array = array.reshape(1)
        return lengths(name, array, batch, longest)

    return Mask.lengths(
        query=checked("query_seq_lengths", longest[0]),
        key=checked("key_value_seq_lengths", longest[1]),
    )


def lengths(name: str, value: Any, batch: int, longest: int) -> Any:
    """Lengths [B] in [0, longest]; only host values can be compared."""
    array = values.integers(name, value)
    if array.shape != (batch,):
        raise ValueError(f"{name} must have shape [B] = [{batch}], got shape {tuple(array.shape)}")
    if values.is_host(array):
        wrong = np.flatnonzero((array < 0) | (array > longest))
        if wrong.size:
            index = int(wrong[0])
            raise ValueError(
                f"{name} must be in [0, {longest}], got {array[index]} at index {index}"
            )
    return array


def segment_ids(name: str, value: Any, batch: int, length: int) -> None:
    array = values.integers(name, value)
    if array.shape not in ((batch, length), (length,)):
        raise ValueError(
            f"{name} must have shape [{batch}, {length}] or [{length}], got {tuple(array.shape)}"
        )


def mask(
    value: Any, scores: tuple[int, int, int, int], tokens: tuple[int, int] | None = None
) -> Mask:
    """The mask as a ``Mask``, each of its arrays checked against the scores [B, N, T, S].

    Packed sequences have a segment id for each of their ``tokens``.
    """
    if value is None:
        return Mask()
    if isinstance(value, str):
        raise TypeError(
            f"mask must be a boolean array or a jax_memeff.Mask, got {value!r}; pass "
            "is_causal=True, or mask=jax_memeff.Mask.causal()"
        )
    if callable(value):
        raise TypeError(
            "mask must be a boolean array or a jax_memeff.Mask, got a function; pass "
            "mask=jax_memeff.Mask.function(function)"
        )
    if not isinstance(value, Mask):
        return Mask.boolean(argument_arrays.boolean_mask(value, scores))
    _fields_of_mask(value)
    value = dataclasses.replace(
        value, excluded=tuple(mask(other, scores, tokens) for other in value.excluded)
    )
    batch, _, rows, columns = scores
    first, *more = (
        (
            None if of_queries is None else lengths("query lengths", of_queries, batch, rows),
            None if of_keys is None else lengths("key lengths", of_keys, batch, columns),
        )
        for of_queries, of_keys in (
            (value.query_lengths, value.key_lengths),
            *value.more_lengths,
        )
    )
    value = dataclasses.replace(
        value, query_lengths=first[0], key_lengths=first[1], more_lengths=tuple(more)
    )
    if tokens is not None:
        batch, (rows, columns) = 1, tokens
    for query_ids, key_ids in value.segment_ids:
        segment_ids("query segment ids", query_ids, batch, rows)
        segment_ids("key segment ids", key_ids, batch, columns)
    for boolean in value.booleans:
        argument_arrays.boolean_mask(boolean, scores)
    for lists in value.block_lists:
        _block_lists(lists, scores)
    for levels in value.block_masks:
        _block_mask(levels, scores)
    return value


def _block_mask(levels: Any, scores: tuple[int, int, int, int]) -> None:
    """Check that a block mask was computed for the sizes of a call."""
    batch, heads, *sizes = scores
    expected = tuple(-(-size // BLOCK) for size in sizes)
    shape = tuple(levels.shape)
    if shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == expected:
        return
    raise ValueError(
        f"mask: Mask.blocks computed a block mask of shape {shape} for arrays of other sizes; this "
        f"call of batch {batch}, {heads} heads, {sizes[0]} rows and {sizes[1]} columns needs "
        f"[{batch} or 1, {heads} or 1, {expected[0]}, {expected[1]}]: call Mask.blocks with its "
        "query and key"
    )


def _block_lists(lists: Any, scores: tuple[int, int, int, int]) -> None:
    """Check that lists of KV blocks have the batch, the heads and the Q blocks of a call."""
    batch, heads, rows, _ = scores
    first, second, blocks, _ = lists.shape
    expected = -(-rows // lists.block_size[0])
    if first in (1, batch) and second in (1, heads) and blocks == expected:
        return
    raise ValueError(
        f"KV block indices must have shape [{batch} or 1, {heads} or 1, {expected}, n], where "
        f"{expected} Q blocks of {lists.block_size[0]} rows cover {rows} rows, got shape "
        f"{tuple(lists.indices.shape)}; with grouped heads repeat the lists of key heads"
    )


def _fields_of_mask(value: Mask) -> None:
    """Check that the fields of a mask could come from its constructors."""

    def expect(name: str, is_right: bool, expected: str, remedy: str) -> None:
        if not is_right:
            raise TypeError(
                f"Mask.{name} must be {expected}, got {getattr(value, name)!r:.80}; use {remedy}"
            )

    def is_pairs(pairs: Any) -> bool:
        return isinstance(pairs, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in pairs)

    expect("more_lengths", is_pairs(value.more_lengths), "a tuple of pairs", "Mask.lengths and &")
    expect("segment_ids", is_pairs(value.segment_ids), "a tuple of pairs", "Mask.segments")
    expect("booleans", isinstance(value.booleans, tuple), "a tuple of arrays", "Mask.boolean")
    are_lists = isinstance(value.block_lists, tuple) and all(
        isinstance(lists, KvBlocks) for lists in value.block_lists
    )
    expect("block_lists", are_lists, "a tuple of lists", "Mask.kv_blocks")
    are_ranked = isinstance(value.block_masks, tuple) and all(
        getattr(levels, "ndim", 0) == 4 for levels in value.block_masks
    )
    expect("block_masks", are_ranked, "a tuple of arrays of rank 4", "Mask.blocks")


def offsets(value: Any, batch: int, heads: int) -> Offsets | None:
    """``Offsets`` of integers in range, for a call with batch size B and N heads; or None.

    The offsets of query and key are scalars, or have one entry for each batch index. The others are
    scalars.
    """
    if value is None:
        return None
    if not isinstance(value, Offsets):
        raise TypeError(f"offsets must be jax_memeff.Offsets or None, got {type(value).__name__}")
    known: dict[str, int] = {}
    for field in dataclasses.fields(value):
        name, number = field.name, getattr(value, field.name)
        if name == "num_heads" and number is None:
            known[name] = heads
            continue
        scalar = values.array(f"offsets.{name}", number)
        is_position = name in ("query", "key")
        shapes = [(), (batch,)] if is_position else [()]
        if scalar.shape not in shapes or not jnp.issubdtype(scalar.dtype, jnp.integer):
            raise TypeError(
                f"offsets.{name} must be an int or an integer array of shape "
                f"{' or '.join(map(str, shapes))}, got dtype "
                f"{scalar.dtype}, shape {tuple(scalar.shape)}"
            )
        if values.is_host(scalar) and scalar.size:
            known[name], least = int(scalar.max()), int(scalar.min())
            most = MOST_POSITION if is_position else values.INT32_MAX
            if least < 0:
                raise ValueError(f"offsets.{name} must be >= 0, got {least}")
            if known[name] > most:
                raise ValueError(f"offsets.{name} must be in [0, {most}], got {known[name]}")
    _heads_fit(known, batch, heads)
    return value


def _heads_fit(known: dict[str, int], batch: int, heads: int) -> None:
    """Check that the call's heads are among the global ones, and that uint32 can number these."""
    if "num_heads" not in known:
        return
    first = known.get("head", 0)
    if first + heads > known["num_heads"]:
        raise ValueError(
            f"offsets.num_heads must be at least offsets.head and the query heads of the call "
            f"together, {first} + {heads}, got {known['num_heads']}; pass the number of query "
            "heads of the whole problem"
        )
    pairs = (known.get("batch", 0) + batch) * known["num_heads"]
    if pairs > 2**32:
        raise ValueError(
            "offsets.batch and the batch of the call together, times offsets.num_heads, must be at "
            f"most {2**32}, got {pairs}: random bits number them in 32 bits"
        )


def cu_seqlens(
    query: Any, key: Any, totals: tuple[int, int], longest: tuple[int, int]
) -> tuple[Any, Any]:
    """Both arrays of sequence starts; only host values can be checked."""
    named = {
        name: values.integers(name, value)
        for name, value in (("cu_seqlens_q", query), ("cu_seqlens_k", key))
    }
    for name, value in named.items():
        if value.ndim != 1 or value.shape[0] == 0:
            raise ValueError(
                f"{name} must have shape [B + 1], one more than there are sequences, got shape "
                f"{tuple(value.shape)}"
            )
    query, key = named.values()
    if query.shape != key.shape:
        raise ValueError(
            f"cu_seqlens_k must have the length of cu_seqlens_q, {query.shape[0]}, got "
            f"{key.shape[0]}"
        )
    for (name, value), total, limit in zip(named.items(), totals, longest, strict=True):
        if values.is_host(value):
            _cu_seqlens_in_range(name, value, total, limit)
    return query, key


def _cu_seqlens_in_range(name: str, value: np.ndarray, total: int, longest: int) -> None:
    """From 0 to the number of tokens, never decreasing, no sequence too long."""
    numbers = [int(x) for x in value]
    for index, number in enumerate(numbers):
        if not 0 <= number <= total:
            raise ValueError(
                f"{name} must be in [0, {total}], the number of tokens, got {number} at index "
                f"{index}"
            )
    for index, (start, end) in enumerate(itertools.pairwise(numbers)):
        if end < start:
            raise ValueError(
                f"{name} must not decrease, got {end} after {start} at index {index + 1}"
            )
        if end - start > longest:
            raise ValueError(
                f"{name.replace('cu_', 'max_').replace('seqlens', 'seqlen')} must be at least the "
                f"length of every sequence, got {longest}, and sequence {index} has {end - start}"
            )
