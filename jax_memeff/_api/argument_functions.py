"""Checks of the user's functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    is_wide = query_dtype == np.dtype("float64")
    program, arrays = traced_score_function(value, "float64" if is_wide else "float32")
    return program, tuple(jnp.asarray(x)[None] for x in arrays)
