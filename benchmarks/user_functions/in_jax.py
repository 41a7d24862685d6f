"""The functions of cells in JAX, which are those of the gallery."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from cells import Cell

# The benchmarks are scripts and not a package, as the examples are.
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from gallery import scores, structure, windows
from gallery.catalog import ENTRIES, Shape

PREFIX = "gallery "
"""Before the names of entries of the gallery, in a cell."""


def alibi_slopes(heads: int) -> list[float]:
    """Those of the paper.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


def table(cell: Cell) -> jax.Array | None:
    """The float array that the function reads; None without one."""
    if cell.function == "table":
        return jax.random.normal(jax.random.key(1), (cell.heads, 2 * cell.query_length))
    return next((x for x in _example(cell) if _is_float(x)), None)


def _example(cell: Cell) -> tuple[Any, ...]:
    """The arguments of a function of the gallery; nothing for another one."""
    if cell.function is None or not cell.function.startswith(PREFIX):
        return ()
    shape = Shape(cell.batch, cell.heads, cell.key_length)
    with jax.ensure_compile_time_eval():  # the program that is timed has them as constants
        return ENTRIES[cell.function.removeprefix(PREFIX)].arguments(shape)


def _is_float(argument: Any) -> bool:
    return isinstance(argument, jax.Array) and jnp.issubdtype(argument.dtype, jnp.floating)


def arguments(cell: Cell, inputs: Any) -> dict[str, Any]:
    """What a call with the function has in place of what the plain call has."""
    if example := _example(cell):
        entry = ENTRIES[str(cell.function).removeprefix(PREFIX)]
        return entry.call(*(inputs.table if _is_float(x) else x for x in example))
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
