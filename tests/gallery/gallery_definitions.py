"""The functions of the gallery, redefined on arrays [B, N, T, S], without scalars or traces."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Index(NamedTuple):
    """Indices that broadcast to [B, N, T, S]."""

    b: np.ndarray
    h: np.ndarray
    q: np.ndarray
    k: np.ndarray

    @staticmethod
    def of(batch: int, heads: int, rows: int, columns: int) -> Index:
        return Index(*np.ix_(*map(np.arange, (batch, heads, rows, columns))))


def _t5_bucket(relative: int, buckets: int, max_distance: int) -> int:
    """One bucket, as the paper defines it: half of the buckets are for columns after the row. Half
    of the remaining ones are exact; the others grow with the logarithm up to the largest distance.
    """
    half = buckets // 2
    start = half if relative > 0 else 0
    distance, exact = abs(relative), half // 2
    if distance < exact:
        return start + distance
    scale = math.log(distance / exact) / math.log(max_distance / exact)
    return start + min(exact + int(scale * (half - exact)), half - 1)


def _t5(scores: Any, i: Index, table: Any, length: int) -> Any:
    T, S = scores.shape[2:]
    bucket = np.array([[_t5_bucket(k - q, len(table), 128) for k in range(S)] for q in range(T)])
    return scores + jnp.moveaxis(table[bucket], 2, 0)


def _swin(scores: Any, i: Index, table: Any) -> Any:
    size = math.isqrt(scores.shape[2])
    (qy, qx), (ky, kx) = np.divmod(i.q, size), np.divmod(i.k, size)
    return scores + table[i.h, qy - ky + size - 1, qx - kx + size - 1]


SCORES: dict[str, Any] = {
    "alibi": lambda scores, i, slopes: scores + slopes[:, None, None] * (i.k - i.q),
    "relative_table": lambda scores, i, table: (
        scores + table[:, (i.q - i.k + table.shape[1] // 2)[0, 0]]
    ),
    "t5_bias": _t5,
    "swin_bias": _swin,
    "soft_cap": lambda scores, i, cap: cap * jnp.tanh(scores / cap),
}
"""Functions of scores [B, N, T, S], indices, and the arguments of the gallery's function."""


def _neighborhood(i: Index, height: int, width: int, kernel: int) -> np.ndarray:
    """The pixels that each pixel sees: the nearest square inside the image."""
    seen = np.zeros((height * width,) * 2, bool)
    for y in range(height):
        top = min(max(y - kernel // 2, 0), height - kernel)
        for x in range(width):
            left = min(max(x - kernel // 2, 0), width - kernel)
            square = np.zeros((height, width), bool)
            square[top : top + kernel, left : left + kernel] = True
            seen[y * width + x] = square.ravel()
    return seen[None, None]


def _draft_tree(i: Index, ancestors: np.ndarray, context: np.ndarray) -> np.ndarray:
    valid = np.zeros((len(context), 1, i.q.size, i.k.size), bool)
    for batch, length in enumerate(context):
        valid[batch, 0, :, :length] = True
        valid[batch, 0, :, length : length + len(ancestors)] = ancestors
    return valid


def _bigbird(i: Index, random_blocks: np.ndarray, block: int) -> np.ndarray:
    count = i.q.size // block
    blocks = abs(np.subtract.outer(np.arange(count), np.arange(count))) <= 1
    blocks[0], blocks[:, 0] = True, True
    np.put_along_axis(blocks, random_blocks, True, 1)
    return np.kron(blocks, np.ones((block, block), bool))[None, None]


def _listed_blocks(i: Index, lists: np.ndarray, block: int) -> np.ndarray:
    blocks = np.zeros((*lists.shape[:3], i.k.size // block), bool)
    np.put_along_axis(blocks, lists, True, 3)
    return np.kron(blocks, np.ones((block, block), bool))


def _listed_keys(i: Index, lists: np.ndarray) -> np.ndarray:
    valid = np.zeros((*lists.shape[:2], i.k.size), bool)
    np.put_along_axis(valid, lists, True, 2)
    return valid[:, None] & (i.k <= i.q)


MASKS: dict[str, Any] = {
    "sliding_window": lambda i, window: (i.k <= i.q) & (i.k >= i.q - window),
    "global_tokens": lambda i, window, chosen: (
        (abs(i.q - i.k) <= window) | chosen[:, None, :, None] | chosen[:, None, None, :]
    ),
    "dilated_window": lambda i, count, dilation: np.isin(
        i.q - i.k, dilation * np.arange(count + 1)
    ),
    "neighborhood": _neighborhood,
    "head_windows": lambda i, windows: (
        np.tril(np.ones((i.q.size, i.k.size), bool)) & (i.q - i.k <= windows[:, None, None])
    ),
    "look_ahead": lambda i, chunk, ahead: i.k < chunk * np.ceil((i.q + 1) / chunk) + ahead,
    "local_or_global": lambda i, window: (i.k <= i.q) & (i.k >= i.q - window),
    "prefix_lm": lambda i, prefix: (i.k <= i.q) | (i.k < prefix[i.b]),
    "documents": lambda i, ids: ids[:, None, :, None] == ids[:, None, None, :],
    "draft_tree": _draft_tree,
    "bigbird": _bigbird,
    "listed_blocks": _listed_blocks,
    "listed_keys": _listed_keys,
    "block_sparse": lambda i, blocks, block: np.kron(blocks, np.ones((block, block), bool))[None],
}
"""Functions of indices and the arguments of the gallery's function; their results, bool, broadcast
to [B, N, T, S]."""


def attention(
    name: str, arguments: Any, is_causal: bool, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Dense attention with scores of at least float32, as ``jax.nn`` computes it."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
    accumulator = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=accumulator)
    scores *= query.shape[3] ** -0.5
    index = Index.of(*scores.shape)
    valid: Any = index.k <= index.q if is_causal else True
    if name in SCORES:
        scores = SCORES[name](scores, index, *arguments)
    else:
        valid = valid & MASKS[name](index, *map(np.asarray, arguments))
    probabilities = jax.nn.softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", probabilities.astype(query.dtype), value)
