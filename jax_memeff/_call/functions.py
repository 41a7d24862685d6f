"""The user's functions in a call: their coordinates, and how precise a backward must be for them.

A backward computes ``dS = P (dP - delta)``, where ``delta = rowsum(dO * O)``. A row of dS sums to 0
only if delta is exact. From an output that is rounded to 16 bits, delta has a relative error of
about 2**-9 (bfloat16), and each element of the row has an error of P times that. Sums over a few
elements of each row hide it. In a sum over whole rows the true terms cancel, while these errors add
up. ``sum(P * dP)`` over the row is the same number in the precision of the scores, but takes the
products of the scores and of dP once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_memeff._call.offsets import Index, Offsets
from jax_memeff._call.operands import FunctionState
from jax_memeff._call.options import Options
from jax_memeff._call.values import score_dtype
from jax_memeff._compat import InconclusiveDimensionOperation
from jax_memeff.codegen.functions.program import Program
from jax_memeff.codegen.functions.regions import indices_of_columns

ScoreFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array | float]
"""Maps the score, batch index, head, row and column, all scalars, to a new score."""


def state(batch: int, heads: int, offsets: Offsets | None = None) -> FunctionState:
    """The user's indices of a call's batch indices and query heads.

    Args:
        batch: B, the batch size of this call, or the number of its packed sequences.
        heads: N, the number of query heads of this call.
        offsets: the global index of this call's first batch index and head; None is 0 for both.

    >>> state(2, 3, Offsets(head=4)).head_index
    Array([4, 5, 6], dtype=int32)
    """
    offsets = Offsets() if offsets is None else offsets

    def indices(first: Index, size: int) -> jax.Array:
        return jnp.asarray(first).astype(jnp.int32) + lax.iota(jnp.int32, size)

    return FunctionState(indices(offsets.batch, batch), indices(offsets.head, heads))


def needs_delta_from_scores(operands: Any, options: Options, needed: Sequence[bool]) -> bool:
    """Whether a backward must take delta from the scores, because the output has too few digits.

    Args:
        operands: separate; arrays or types.
        options: those of the call. A product of a ring has a part of each row, whose sum is not
            delta.
        needed: the captured arrays that need a gradient. Other gradients never add up whole rows:
            that of a bias with one column follows from the logsumexp's gradient.
    """
    program = options.score_function
    is_rounded = operands.query.dtype != score_dtype(operands.query.dtype)
    if program is None or not (is_rounded and options.has_whole_rows):
        return False
    shapes = [x.shape[1:] for x in operands.captured]
    return adds_columns(program, shapes, needed, operands.scores_shape[3])


def adds_columns(
    program: Program, shapes: Sequence[Sequence[Any]], needed: Sequence[bool], columns: Any
) -> bool:
    """Whether several columns of a row add to one element of the gradient of a captured array.

    Args:
        program: the score function.
        shapes: those of its arrays, as the user sees them.
        needed: the arrays that need a gradient.
        columns: the number of columns of a row.
    """
    for read in program.float_reads:
        array = program.values[read].param("array")
        dims = indices_of_columns(program, read)
        if needed[array] and not any(_has(shapes[array][dim], columns) for dim in dims):
            return True
    return False


def _has(size: Any, columns: Any) -> bool:
    """Whether a dim has an element for each column. Indices beyond the end of a shorter one all
    read its last element.
    """
    try:
        return bool(size >= columns)
    except InconclusiveDimensionOperation:
        return False
