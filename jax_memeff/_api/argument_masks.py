"""Checks of the arguments that select elements: lengths, masks and the starts of sequences.

The values of device and traced arrays are not readable here. The semantics define what values out
of range mean, and ``jax_memeff.check`` looks at them eagerly.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import export

from jax_memeff._call import values
from jax_memeff._call.mask import Mask, checks


def padded_lengths(
    arguments: Mapping[str, Any], batch: int, longest: tuple[int, int], batched: bool
) -> Mask:
    """The mask of ``query_seq_lengths`` and ``key_value_seq_lengths``, [B] each.

    One number is enough without a batch dim.
    """

    def checked(name: str, longest: int) -> Any:
        value = arguments[name]
        if value is None:
            return None
        return checks.lengths(name, value, batch, longest, batched=batched)

    return Mask.lengths(
        query=checked("query_seq_lengths", longest[0]),
        key=checked("key_value_seq_lengths", longest[1]),
    )


def mask(
    value: Any, scores: tuple[int, int, int, int], tokens: tuple[int, int] | None = None
) -> Mask:
    """The mask as a ``Mask``, each of its arrays checked against the scores [B, N, T, S].

    Packed sequences have a segment id for each of their ``tokens``.
    """
    if value is None:
        return Mask()
    require_no_text_or_function(value)
    if not isinstance(value, Mask):
        return Mask.boolean(checks.boolean(value, scores))
    return checks.of_mask(value, scores, tokens)


def require_no_text_or_function(value: Any) -> None:
    """Raise ``TypeError`` for a name, or a function, that other libraries take as a mask."""
    if isinstance(value, str):
        raise TypeError(
            f"mask must be a boolean array or a jax_memeff.Mask, got {value!r}; pass "
            "is_causal=True, or mask=jax_memeff.Mask.causal()"
        )
    if not callable(value):
        return
    if value is Mask:
        got, remedy = "the class Mask", "jax_memeff.Mask.causal(), for example"
    elif (name := _method_of_mask(value)) is not None:
        got, remedy = f"Mask.{name}, which was not called", f"jax_memeff.Mask.{name}(...)"
    else:
        got, remedy = "a function", "jax_memeff.Mask.function(function)"
    raise TypeError(
        f"mask must be a boolean array or a jax_memeff.Mask, got {got}; pass mask={remedy}"
    )


def _method_of_mask(value: Any) -> str | None:
    """The name of a method of ``Mask``, such as ``Mask.causal``; None for other functions."""
    name = getattr(value, "__name__", "")
    function = getattr(value, "__func__", value)
    return name if name and getattr(Mask, name, None) is function else None


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
    most = values.INT32_MAX if export.is_symbolic_dim(total) else total
    for index, number in enumerate(numbers):
        if not 0 <= number <= most:
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
