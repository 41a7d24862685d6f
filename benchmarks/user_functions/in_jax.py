"""The functions of cells in JAX, which are those of the gallery."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from cells import Cell

# The benchmarks are scripts and not a package, as the examples are.
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from gallery import scores, structure, windows


def alibi_slopes(heads: int) -> list[float]:
    """Those of the paper.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


def arguments(cell: Cell, inputs: Any) -> dict[str, Any]:
    """What a call with the function has in place of what the plain call has."""
    return _ARGUMENTS[cell.function or ""](cell, inputs)


_ARGUMENTS: dict[str, Callable[[Cell, Any], dict[str, Any]]] = {
    "identity": lambda cell, inputs: {"score_mod": lambda score, b, h, q, k: score},
    "alibi": lambda cell, inputs: {
        "score_mod": scores.alibi(jnp.array(alibi_slopes(cell.heads), jnp.float32))
    },
    "soft cap": lambda cell, inputs: {
        "score_mod": scores.soft_cap(cell.soft_cap or 0.0),
        "logits_soft_cap": None,
    },
    "table": lambda cell, inputs: {"score_mod": scores.relative_table(inputs.table)},
    "documents": lambda cell, inputs: {"mask": structure.documents(inputs.segment_ids)},
    "window": lambda cell, inputs: {
        "mask": windows.sliding_window(cell.window or 0),
        "is_causal": False,
        "local_window_size": None,
    },
}
