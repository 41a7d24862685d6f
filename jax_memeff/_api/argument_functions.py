"""Checks of the user's functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._call.mask import Mask
from jax_memeff._functions.trace import traced_score_function
from jax_memeff.codegen.functions.program import Program


def score_mod(
    value: Any, query_dtype: Any, scale: jax.Array | None, soft_cap: float | None
) -> tuple[Program | None, tuple[jax.Array, ...]]:
    """The program of scale, soft cap and function, and the arrays that it reads, [1, ...].

    Args:
        value: the argument of ``dot_product_attention``.
        query_dtype: if it is float64, the scores are, too.
        scale: the traced scale, or None. With neither a scale nor a function there is no program.
        soft_cap: as in ``dot_product_attention``.
    """
    if isinstance(value, Mask):
        raise TypeError(
            "score_mod must be a function of (score, b, h, q, k), got a Mask; pass mask="
        )
    if value is not None and not callable(value):
        raise TypeError(
            "score_mod must be a function of (score, b, h, q, k), for example "
            f"lambda s, b, h, q, k: s + slopes[h] * (k - q), got {value!r:.80}; an array to add is "
            "bias"
        )
    if value is None and scale is None:
        return None, ()
    is_wide = query_dtype == np.dtype("float64")
    program, arrays = traced_score_function(
        _same_score if value is None else value,
        "float64" if is_wide else "float32",
        scale=scale,
        soft_cap=soft_cap,
    )
    return program, tuple(jnp.asarray(x)[None] for x in arrays)


def _same_score(score: jax.Array, b: Any, h: Any, q: Any, k: Any) -> jax.Array:
    return score
