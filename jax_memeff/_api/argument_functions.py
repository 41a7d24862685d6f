"""Checks of the user's functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_memeff._functions.trace import traced_score_function
from jax_memeff.codegen.functions.program import Program


def score_mod(value: Any, query_dtype: Any) -> tuple[Program | None, tuple[jax.Array, ...]]:
    """The program of the function, and the arrays that it reads, [1, ...]."""
    if value is None:
        return None, ()
    if not callable(value):
        raise TypeError(
            "score_mod must be a function of (score, b, h, q, k), for example "
            f"lambda s, b, h, q, k: s + slopes[h] * (k - q), got {value!r:.80}; an array to add is "
            "bias"
        )
    accumulator = jnp.promote_types(query_dtype, jnp.float32).name
    program, arrays = traced_score_function(value, accumulator)
    return program, tuple(jnp.asarray(x)[None] for x in arrays)
