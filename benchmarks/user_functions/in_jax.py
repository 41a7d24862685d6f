"""The functions of cells in JAX, which are those of the gallery."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from programs.cells import Cell

# Like the examples, the benchmarks are scripts and not a package.
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from gallery import scores, structure, windows
from gallery.catalog import ENTRIES, Shape

PREFIX = "gallery "
"""The prefix of gallery entries in the names of functions."""


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of the paper.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


def table(cell: Cell) -> jax.Array | None:
    """The float array that the function reads, or None."""
    if cell.function == "table":
        return jax.random.normal(jax.random.key(1), (cell.heads, 2 * cell.query_length))
    return next((x for x in _example(cell) if _is_float(x)), None)


def _example(cell: Cell) -> tuple[Any, ...]:
    """The arguments of a function of the gallery; empty for other functions."""
    if cell.function is None or not cell.function.startswith(PREFIX):
        return ()
    shape = Shape(cell.batch, cell.heads, cell.key_length)
    with jax.ensure_compile_time_eval():  # they are constants of the timed program
        return ENTRIES[cell.function.removeprefix(PREFIX)].arguments(shape)


def _is_float(argument: Any) -> bool:
    return isinstance(argument, jax.Array) and jnp.issubdtype(argument.dtype, jnp.floating)


def arguments(cell: Cell, inputs: Any) -> dict[str, Any]:
    """The arguments that replace those of the plain call."""
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
