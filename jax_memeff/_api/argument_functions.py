"""Checks of the user's functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._call.functions import ScoreFunction
from jax_memeff._functions.trace import traced_score_function
from jax_memeff.codegen.functions.program import Program


def score_mod(
    value: Any, query_dtype: Any, scale: jax.Array | None, soft_cap: float | None
) -> tuple[Program | None, tuple[jax.Array, ...]]:
    """The program of the function, and the arrays that it reads, [1, ...].

    Args:
        value: as of ``dot_product_attention``.
        query_dtype: the scores are float64 if it is.
        scale: a traced one, which is part of the program, and so is then the soft cap.
        soft_cap: as of ``dot_product_attention``.
    """
    if value is not None and not callable(value):
        raise TypeError(
            "score_mod must be a function of (score, b, h, q, k), for example "
            f"lambda s, b, h, q, k: s + slopes[h] * (k - q), got {value!r:.80}; an array to add is "
            "bias"
        )
    function = value if scale is None else _after_scale(value, scale, soft_cap)
    if function is None:
        return None, ()
    is_wide = query_dtype == np.dtype("float64")
    program, arrays = traced_score_function(function, "float64" if is_wide else "float32")
    return program, tuple(jnp.asarray(x)[None] for x in arrays)


def _after_scale(
    function: ScoreFunction | None, scale: jax.Array, soft_cap: float | None
) -> ScoreFunction:
    """Scale, soft cap and the function, in this order."""

    def scaled(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        score = score * scale
        if soft_cap is not None:
            score = soft_cap * jnp.tanh(score / soft_cap)
        return score if function is None else function(score, b, h, q, k)

    return scaled
