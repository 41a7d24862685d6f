"""Checks of what packed sequences and packed projections have beside other calls."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_memeff._api import validate


def projections(qkv: Any) -> None:
    if qkv.ndim not in (4, 5) or qkv.shape[-3] != 3:
        raise ValueError(
            "qkv must have shape [B, T, 3, N, H], or [T, 3, N, H] without the batch dim, got shape "
            f"{qkv.shape}"
        )
    validate.float_dtype("qkv", qkv)


def tokens(query: Any, key: Any, value: Any) -> None:
    """Query, key and value of packed sequences."""
    layouts = ("query [total_q, N, H]", "key [total_k, K, H]", "value [total_k, K, Hv]")
    for layout, operand in zip(layouts, (query, key, value), strict=True):
        if operand.ndim != 3:
            raise ValueError(
                f"{layout} must have rank 3, because the sequences stand one after the other, got "
                f"shape {operand.shape}"
            )
    validate.query_key_value(query, key, value)


def max_seqlen(name: str, value: Any) -> int:
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} must be a static integer, got a traced value; pass a Python number that no "
            "sequence is longer than (jax.jit's static_argnames helps)"
        )
    try:
        longest = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a Python integer, got {value!r} of type {type(value).__name__}"
        ) from None
    if longest < 0:
        raise ValueError(f"{name} must be >= 0, got {longest}")
    return longest


def cu_seqlens(query: Any, key: Any, totals: tuple[int, int], longest: tuple[int, int]) -> None:
    """Both arrays of where sequences begin; only host values can be looked at."""
    named = {"cu_seqlens_q": query, "cu_seqlens_k": key}
    for name, value in named.items():
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(
                f"{name} must be integers, got dtype {value.dtype}; pass .astype('int32')"
            )
        if value.ndim != 1 or value.shape[0] == 0:
            raise ValueError(
                f"{name} must have shape [B + 1], one more than there are sequences, got shape "
                f"{tuple(value.shape)}"
            )
    if query.shape != key.shape:
        raise ValueError(
            f"cu_seqlens_k must have the length of cu_seqlens_q, {query.shape[0]}, got "
            f"{key.shape[0]}"
        )
    for (name, value), total, limit in zip(named.items(), totals, longest, strict=True):
        if validate.is_host(value):
            cu_seqlens_in_range(name, value, total, limit)


def cu_seqlens_in_range(name: str, value: np.ndarray, total: int, longest: int) -> None:
    """The values: from 0 to the number of tokens, never falling, no sequence too long."""
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
