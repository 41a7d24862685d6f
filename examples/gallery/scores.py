"""Functions of scores: what they return is passed as ``score_mod=``."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

ScoreFunction = Callable[..., jax.Array]
"""Of score, batch index, query head, row and column, all of them scalars, to a score."""


def alibi(slopes: jax.Array) -> ScoreFunction:
    """A penalty that grows with the distance, at a slope for each head.

    Press, Smith and Lewis, "Train Short, Test Long", 2022, with a causal mask. The paper fixes the
    slopes at ``2 ** (-8 * (h + 1) / N)``; here they have a gradient.

    Args:
        slopes: float [N].
    """

    def score_mod(score, b, h, q, k):
        return score + slopes[h] * (k - q)

    return score_mod


def relative_table(table: jax.Array) -> ScoreFunction:
    """A learned number for each head and each distance.

    Args:
        table: float [N, 2 L] for distances from -L to L - 1; column L is for distance 0.
    """
    middle = table.shape[1] // 2

    def score_mod(score, b, h, q, k):
        return score + table[h, q - k + middle]

    return score_mod


def soft_cap(cap: float) -> ScoreFunction:
    """Scores between ``-cap`` and ``cap``, as in Gemma 2.

    The argument ``logits_soft_cap=cap`` does the same.
    """

    def score_mod(score, b, h, q, k):
        return cap * jnp.tanh(score / cap)

    return score_mod
