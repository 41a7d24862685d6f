"""Lists of keys for each row, and the indexer that chooses them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_memeff import Mask, dot_product_attention, merge_attention


def listed_keys(lists: jax.Array) -> Mask:
    """The keys that an indexer has chosen for each row; a causal mask drops those after the row.

    DeepSeek-AI, "DeepSeek-V3.2", 2025.

    Args:
        lists: integer [B, T, n]: distinct keys, from :func:`lightning_indexer`.
    """
    return Mask.keys(lists[:, None], unique_indices=True) & Mask.causal()


def lightning_indexer(
    query: jax.Array, key: jax.Array, weights: jax.Array, count: int
) -> jax.Array:
    """The keys with the highest index scores in each row, integer [B, T, count].

    The score is the sum over heads of ``weights * relu(query . key)``, for 64 rows at a time.

    Args:
        query, key, weights: [B, T, heads, dim], [B, S, dim] and [B, T, heads], of the indexer.
        count: the length of a list.
    """

    def of_row(row: tuple[jax.Array, ...]) -> jax.Array:
        position, query, weights = row
        products = jax.nn.relu(jnp.einsum("bjd,bsd->bjs", query, key))
        scores = jnp.einsum("bjs,bj->bs", products, weights)
        scores = jnp.where(jnp.arange(key.shape[1]) <= position, scores, -jnp.inf)
        return jax.lax.top_k(scores, count)[1]

    rows = jnp.arange(query.shape[1]), jnp.moveaxis(query, 1, 0), jnp.moveaxis(weights, 1, 0)
    return jnp.moveaxis(jax.lax.map(of_row, rows, batch_size=64), 0, 1)


def window_and_compressed(
    query: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    compressed: tuple[jax.Array, jax.Array],
    lists: jax.Array,
    window: int,
) -> jax.Array:
    """One softmax over a window of keys and over listed compressed keys, as in DeepSeek-V4.

    Args:
        query: [B, T, N, H].
        keys, compressed: keys and values, [B, T, K, H] each, and those of runs of tokens.
        lists: integer [B, T, n]: the compressed keys of each row; -1 is none.
        window: the number of keys before a row.
    """
    masks = Mask.window(window, 0), Mask.keys(lists[:, None], unique_indices=True)
    parts = (
        dot_product_attention(query, *own, mask=mask, return_residual=True)
        for own, mask in zip((keys, compressed), masks, strict=True)
    )
    return merge_attention(parts)[0]
