"""Each function returns a function of scores; pass the result as ``score_mod=``."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

ScoreFunction = Callable[..., jax.Array]
"""Maps the scalars score, batch index, query head, row and column to a new score."""


def alibi(slopes: jax.Array) -> ScoreFunction:
    """A penalty proportional to the distance, with one slope per head.

    Press, Smith and Lewis, "Train Short, Test Long", 2022; use it with a causal mask. The paper
    fixes the slopes at ``2 ** (-8 * (h + 1) / N)``; here they have a gradient.

    Args:
        slopes: float [N].
    """

    def score_mod(score, b, h, q, k):
        return score + slopes[h] * (k - q)

    return score_mod


def relative_table(table: jax.Array) -> ScoreFunction:
    """A learned bias for each head and each distance.

    Args:
        table: float [N, 2 L], for distances q - k from -L to L - 1; column L is distance 0.
    """
    middle = table.shape[1] // 2

    def score_mod(score, b, h, q, k):
        return score + table[h, q - k + middle]

    return score_mod


def t5_bias(table: jax.Array, length: int, max_distance: int = 128) -> ScoreFunction:
    """T5's learned bias. Several distances share a bucket, and buckets widen with the distance.

    Raffel et al., "Exploring the Limits of Transfer Learning", 2020, the bidirectional form. The
    bucket of each distance is a table lookup. A kernel that computed it could round the logarithm
    to the wrong side of a bucket's border.

    Args:
        table: float [buckets, N].
        length: an upper bound on the number of rows and of columns.
        max_distance: distances of at least this share the last bucket.
    """
    half = table.shape[0] // 2  # of the buckets, for columns before the row; the others after it
    exact = half // 2
    distance = np.arange(-length, length)
    far = np.log(np.maximum(abs(distance), 1) / exact) / math.log(max_distance / exact)
    wide = np.minimum(exact + (far * (half - exact)).astype(int), half - 1)
    bucket = np.where(abs(distance) < exact, abs(distance), wide) + half * (distance > 0)
    buckets = jnp.asarray(bucket, jnp.int32)

    def score_mod(score, b, h, q, k):
        return score + table[buckets[k - q + length], h]

    return score_mod


def swin_bias(table: jax.Array) -> ScoreFunction:
    """A learned bias for each two-dimensional distance between tokens of a window.

    Liu et al., "Swin Transformer", 2021. The sequence is the M * M tokens of a window, row by row.

    Args:
        table: float [N, 2 M - 1, 2 M - 1].
    """
    size = (table.shape[1] + 1) // 2

    def score_mod(score, b, h, q, k):
        down = q // size - k // size + size - 1
        right = q % size - k % size + size - 1
        return score + table[h, down, right]

    return score_mod


def soft_cap(cap: float) -> ScoreFunction:
    """Limits scores to the range from ``-cap`` to ``cap``, as in Gemma 2.

    The argument ``logits_soft_cap=cap`` does the same.
    """

    def score_mod(score, b, h, q, k):
        return cap * jnp.tanh(score / cap)

    return score_mod
