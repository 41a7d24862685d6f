"""Checks of the user's functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._call.mask import Mask
from jax_memeff._call.scaling import Scaling
from jax_memeff._functions.trace import traced_score_function
from jax_memeff.codegen.functions.program import Program


def score_mod(
    value: Any, query_dtype: Any, scaling: Scaling, traced_scale: jax.Array | None
) -> tuple[Scaling, Program | None, tuple[jax.Array, ...]]:
    """The static scaling and the program of a call, and the arrays that it reads, [1, ...].

    The program contains the traced scale, the soft cap and the function. It is None if the scaling
    alone does the same.

    Args:
        value: the argument of ``dot_product_attention``.
        query_dtype: if it is float64, the scores are, too.
        scaling: the static scaling of the call.
        traced_scale: that of the call, or None.
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
    if value is None and traced_scale is None:
        return scaling, None, ()
    is_wide = query_dtype == np.dtype("float64")
    program, arrays = traced_score_function(
        _same_score if value is None else value,
        "float64" if is_wide else "float32",
        scaling.before_function(traced_scale),
    )
    if traced_scale is None and (same := scaling.instead_of(program)) is not None:
        return same, None, ()
    return scaling.without_cap(), program, tuple(jnp.asarray(x)[None] for x in arrays)


def _same_score(score: jax.Array, b: Any, h: Any, q: Any, k: Any) -> jax.Array:
    return score
