"""Functions of scores and masks as users write them, each as a function of its arrays.

``SCORE_FUNCTIONS[name]`` is a pair: a maker of a score function from arrays, and the arrays, whose
floats are differentiated. Positions go up to ``ROWS`` and ``COLUMNS``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import normal

BATCH, HEADS, ROWS, COLUMNS = 2, 3, 7, 9
DISTANCES = ROWS + COLUMNS


def integers(seed: int, most: int, *shape: int, dtype: Any = np.int32) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).integers(0, most, shape).astype(dtype))


def alibi(slopes):
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


def learned_distances(table):
    return lambda s, b, h, q, k: s + table[h, q - k + COLUMNS]


def t5_buckets(table):
    def function(score, b, h, q, k):
        distance = q - k
        bucket = jnp.where(distance < 0, 8, 0)
        distance = jnp.abs(distance)
        log_ratio = jnp.log(jnp.maximum(distance, 1) / 4) / jnp.log(16 / 4)
        far = jnp.minimum(4 + (log_ratio * 4).astype(jnp.int32), 7)
        return score + table[bucket + jnp.where(distance < 4, distance, far), h]

    return function


def swin(table):
    def function(score, b, h, q, k):
        rows = q // 3 - k // 3 + 2
        columns = q % 3 - k % 3 + 2
        return score + table[rows, columns, h]

    return function


def soft_cap():
    return lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)


def temperature(scales):
    return lambda s, b, h, q, k: s * jax.nn.softplus(scales)[b, h]


def distance(positions, weight):
    def function(score, b, h, q, k):
        difference = positions[b, q] - positions[b, k]
        return score - jnp.exp(weight) * jnp.sqrt(jnp.sum(difference**2) + 1e-3)

    return function


def gates(rows, columns):
    return lambda s, b, h, q, k: s * jax.nn.sigmoid(rows[b, q] + columns[h, k]) + jax.nn.relu(s)


def relative_features(features, projection):
    def function(score, b, h, q, k):
        near = jnp.stack([jnp.sin(0.1 * (q - k)), jnp.cos(0.1 * (q - k)), jnp.tanh(score)])
        return score + jnp.max(near @ projection) + jnp.dot(features[h], near)

    return function


def through_integers(buckets, table):
    return lambda s, b, h, q, k: jnp.where(q >= k, s + table[h, buckets[b, q + k]], s * 0.5 - 1)


def branches(table):
    def function(score, b, h, q, k):
        near = jax.lax.cond(q > k, lambda: score + table[h, q], lambda: score * 0.25)
        return jax.lax.switch(h, [lambda x: x, jnp.sin, lambda x: x**3 / 100], near)

    return function


def taken(table, vector):
    def function(score, b, h, q, k):
        row = jax.lax.dynamic_index_in_dim(table, q, keepdims=False)
        pair = jax.lax.dynamic_slice(vector, (k,), (2,))
        return score * jnp.take(vector, h) + row[1] * pair[0] - pair[1] * row.mean()

    return function


def composed(table):
    @jax.jit
    def inner(x, h):
        return jax.checkpoint(lambda x: jnp.logaddexp(x, table[h]))(x)

    return lambda s, b, h, q, k: inner(s, h) + jax.lax.stop_gradient(s) * 2 + jax.nn.gelu(s)


SCORE_FUNCTIONS = {
    "alibi": (alibi, (normal(1, HEADS),)),
    "learned_distances": (learned_distances, (normal(2, HEADS, DISTANCES + 1),)),
    "t5_buckets": (t5_buckets, (normal(3, 16, HEADS),)),
    "swin": (swin, (normal(4, 5, 5, HEADS),)),
    "soft_cap": (soft_cap, ()),
    "temperature": (temperature, (normal(5, BATCH, HEADS),)),
    "distance": (distance, (normal(6, BATCH, COLUMNS, 3), normal(7))),
    "gates": (gates, (normal(8, BATCH, ROWS), normal(9, HEADS, COLUMNS))),
    "relative_features": (relative_features, (normal(10, HEADS, 3), normal(11, 3, 4))),
    "through_integers": (
        through_integers,
        (integers(12, 5, BATCH, DISTANCES, dtype=np.uint8), normal(13, HEADS, 5)),
    ),
    "branches": (branches, (normal(14, HEADS, ROWS),)),
    "taken": (taken, (normal(15, ROWS, 4), normal(16, COLUMNS + 1))),
    "composed": (composed, (normal(17, HEADS),)),
}


def causal():
    return lambda b, h, q, k: q >= k


def documents(ids):
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q - k < 5)


def prefix(lengths):
    return lambda b, h, q, k: (k <= q) | (k < lengths[b])


def windows_of_heads(widths):
    return lambda b, h, q, k: jnp.abs(q - k) < widths[h]


def dilated():
    return lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0)


def neighbourhood():
    return lambda b, h, q, k: (jnp.abs(q // 3 - k // 3) <= 1) & (jnp.abs(q % 3 - k % 3) <= 1)


def tree(parents):
    return lambda b, h, q, k: parents[q % 4, k % 4]


def global_tokens():
    return lambda b, h, q, k: jnp.logical_or(k < 2, jnp.logical_and(q - k < 4, q >= k))


MASK_FUNCTIONS = {
    "causal": (causal, ()),
    "documents": (documents, (integers(20, 3, BATCH, COLUMNS),)),
    "prefix": (prefix, (integers(21, COLUMNS, BATCH, dtype=np.int16),)),
    "windows_of_heads": (windows_of_heads, (integers(22, 6, HEADS, dtype=np.uint32),)),
    "dilated": (dilated, ()),
    "neighbourhood": (neighbourhood, ()),
    "tree": (tree, (integers(23, 2, 4, 4, dtype=np.bool_),)),
    "global_tokens": (global_tokens, ()),
}


def positions() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The batch, head, query and key of each score, in shapes that broadcast."""
    counts = (BATCH, HEADS, ROWS, COLUMNS)
    return tuple(
        jax.device_put(np.arange(count, dtype=np.int32).reshape(np.roll((count, 1, 1, 1), axis)))
        for axis, count in enumerate(counts)
    )


def everywhere(function, *arguments):
    """Applies the user's function to each score, by ``vmap``."""
    broadcast = jnp.broadcast_arrays(*arguments)
    flat = jax.vmap(function)(*(x.reshape(-1) for x in broadcast))
    return flat.reshape(broadcast[0].shape)
