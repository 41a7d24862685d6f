"""Sequences whose keys and values are in a pool of pages, and attention by its definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_memeff

paged_attention: Any = jax_memeff.paged_attention
append_to_pages: Any = jax_memeff.append_to_pages
"""Untyped, because tests unpack their arguments."""


@dataclasses.dataclass(frozen=True)
class Paging:
    """Sequences in a pool. Memory that must not be read is NaN; unused table entries are
    garbage.
    """

    query: np.ndarray
    """[tokens, N, H]; NaN in tokens of no sequence"""
    counts: np.ndarray
    """The number of queries of each sequence; queries are its last tokens."""
    starts: np.ndarray
    """[B + 1]"""
    keys: list[np.ndarray]
    """[length, K, H] of each sequence"""
    values: list[np.ndarray]
    key_pages: np.ndarray
    """[pages, page_size, K, H]"""
    value_pages: np.ndarray
    table: np.ndarray
    """[B, max_pages]"""
    lengths: np.ndarray
    is_latent: bool = False
    """Whether values are the first columns of the keys, without a pool of their own."""
    scales: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """The scales of a float8 pool, by the names of the arguments."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        values = None if self.is_latent else self.value_pages
        return self.query, self.key_pages, values, self.table, self.lengths


GARBAGE = np.array([-1, -(2**31), 2**31 - 1, 0, 3, 10**6], np.int64)


def paging(
    rng: np.random.Generator,
    lengths: Any,
    counts: Any,
    *,
    page_size: int = 16,
    max_pages: int | None = None,
    pages: int | None = None,
    spare_pages: int = 2,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    gap: int = 0,
    dtype: Any = np.float32,
    is_latent: bool = False,
) -> Paging:
    """Random sequences with shuffled pages; ``gap`` tokens at the end belong to no sequence."""
    (n, k), (h, hv) = heads, dims
    lengths_, counts_ = np.array(lengths, np.int32), np.array(counts, np.int32)
    needed = -(-lengths_ // page_size)
    max_pages = max_pages or max(int(needed.max(initial=0)), 1)
    pages = pages or int(needed.sum()) + spare_pages
    starts = np.concatenate([[0], np.cumsum(counts_)]).astype(np.int32)
    query = rng.standard_normal((int(starts[-1]) + gap, n, h)).astype(dtype)
    query[starts[-1] :] = np.nan
    key_pages = np.full((pages, page_size, k, h), np.nan, dtype)
    value_pages = np.full((pages, page_size, k, hv), np.nan, dtype)
    table = rng.choice(GARBAGE, (len(lengths_), max_pages)).astype(np.int32)
    free = list(rng.permutation(pages))
    keys, values = [], []
    for b, length in enumerate(lengths_):
        keys.append(rng.standard_normal((length, k, h)).astype(dtype))
        values.append(rng.standard_normal((length, k, hv)).astype(dtype))
        for place in range(needed[b]):
            table[b, place] = page = free.pop()
            part = slice(place * page_size, (place + 1) * page_size)
            rows = len(keys[b][part])
            key_pages[page, :rows], value_pages[page, :rows] = keys[b][part], values[b][part]
        # Queries in front of the first token belong to no token.
        query[starts[b] : starts[b] + max(counts_[b] - length, 0)] = np.nan
    if is_latent:
        values = [own[..., :hv] for own in keys]
    return Paging(
        query, counts_, starts, keys, values, key_pages, value_pages, table, lengths_, is_latent
    )


def quantized(case: Paging, layouts: tuple[str, str], rng: np.random.Generator) -> Paging:
    """The case with pools of float8. Its keys and values are the numbers in the pools.

    Args:
        case: the sequences. layouts: of the scales of keys and of values: ``"none"``, ``"heads"``
        or ``"pages"``; latent values have that of the keys. rng: draws the scales, which differ by
        factors of up to 2**8.
    """
    pages, size, heads, _ = case.key_pages.shape
    is_used = np.zeros(pages, bool)
    for row, length in zip(case.table, case.lengths, strict=True):
        is_used[row[: -(-length // size)]] = True
    made, scales = {}, {}
    for name, layout in zip(("key", "value"), layouts, strict=True):
        scale = np.ones((pages, heads), np.float32)
        if layout != "none":
            scale[:] = np.exp2(rng.uniform(-6, 2, heads if layout == "heads" else scale.shape))
            scales[f"{name}_scale"] = scale[0] if layout == "heads" else scale
        of_rows = scale[:, None, :, None].copy()
        pool = getattr(case, f"{name}_pages").astype(np.float32) / of_rows
        # NaN in unused rows stays NaN in float8.
        made[f"{name}_pages"] = pool = np.array(jnp.asarray(pool, jnp.float8_e4m3fn))
        held = pool.astype(np.float32) * of_rows
        made[f"{name}s"] = [
            held[row[: -(-length // size)]].reshape(-1, *held.shape[2:])[:length]
            for row, length in zip(case.table, case.lengths, strict=True)
        ]
        if layout == "pages":
            scale[~is_used] = np.nan
    if case.is_latent:
        made["values"] = [own[..., : case.value_pages.shape[3]] for own in made["keys"]]
        scales.pop("value_scale", None)
    return dataclasses.replace(case, **made, scales=scales)


def answer(
    case: Paging,
    scale: float | None = None,
    modified: Callable[..., np.ndarray] | None = None,
    valid: Callable[..., np.ndarray] = lambda b, h, q, k: k <= q,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and logsumexp of each token in float64; 0 and -inf for tokens of no sequence.

    Args:
        case: the sequences.
        scale: of the scores.
        modified: of the scores, and the batch index, head, position of the query and of the key.
        valid: of these indices; causal by default.
        sinks: [N]
    """
    tokens, n, h = case.query.shape
    factor = h**-0.5 if scale is None else scale
    out = np.zeros((tokens, n, case.value_pages.shape[3]))
    lse = np.full((tokens, n), -np.inf)
    for b, length in enumerate(case.lengths):
        own = min(int(case.counts[b]), int(length))
        if not own:
            continue
        rows = slice(case.starts[b + 1] - own, case.starts[b + 1])
        key, value = (x[b].astype(np.float64).swapaxes(0, 1) for x in (case.keys, case.values))
        query = case.query[rows].astype(np.float64).reshape(own, len(key), -1, h)
        # One product for all query heads of a key head: NumPy multiplies single rows without BLAS.
        query = query.transpose(1, 2, 0, 3).reshape(len(key), -1, h)  # [K, N // K * own, H]
        scores = factor * (query @ key.swapaxes(1, 2)).reshape(n, own, length)
        indices = np.ix_(np.arange(n), np.arange(length - own, length), np.arange(length))
        if modified is not None:
            scores = modified(scores, b, *indices)
        scores = np.where(valid(b, *indices), scores, -np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            largest = scores.max(-1, keepdims=True)
            largest = np.where(np.isfinite(largest), largest, 0)
            exps = np.exp(scores - largest)
            total = exps.sum(-1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(sinks[:, None, None] - largest)
            weights = np.where(total > 0, exps / total, 0).reshape(len(key), -1, length)
            found = (weights @ value).reshape(n, own, -1).swapaxes(0, 1)
            out[rows], lse[rows] = found, (largest + np.log(total))[..., 0].T
    return out, lse
