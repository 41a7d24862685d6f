"""How a backward sums the gradient of each read of a program.

Terms of a tile of scores that belong to the same element of an array are summed first, then added
to global memory once: see ``codegen/memeff/score/function_gradient.cuh``.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from jax_memeff.codegen.functions.program import Program
from jax_memeff.codegen.functions.regions import diagonal_reads

MOST_STRIPS = 2
"""The largest number of reads whose sums pass through shared memory; each takes 11 to 23 KB."""

FIXED_POINT_WORDS = 4
"""The 32-bit words of a fixed-point sum: two integers of 64 bits."""

FIXED_POINT_BITS = 35
"""One unit of the second integer is 2**35 units of the first."""


class Sum(enum.Enum):
    """``memeff::function::ReadSum``: the arguments on which the index of a read depends."""

    NONE = "none"
    HEAD = "head"
    QUERY = "query"
    KEY = "key"
    DIAGONAL = "diagonal"
    ELEMENT = "element"


def read_sums(
    program: Program, arrays: Collection[int], most_strips: int = MOST_STRIPS
) -> tuple[Sum, ...]:
    """How the gradient of each of ``program.float_reads`` is summed.

    Args:
        arrays: the captured arrays whose gradients are needed.
        most_strips: how many sums may pass through shared memory; the rest are added element by
            element.

    >>> from jax_memeff.codegen.functions.program import CapturedType, Value
    >>> read = Value("read", "float32", (0,), (("array", 0), ("mode", "clip")))
    >>> program = Program((Value("key", "int32"), read), (1,), (CapturedType("float32", 1),))
    >>> read_sums(program, {0})
    (<Sum.KEY: 'key'>,)
    """
    along = diagonal_reads(program)
    found: list[Sum] = []
    for read in program.float_reads:
        own = Sum.DIAGONAL if read in along else _dependence(program, read)
        if program.values[read].param("array") not in arrays:
            own = Sum.NONE
        elif sum(other in _IN_STRIPS for other in found) == most_strips and own in _IN_STRIPS:
            own = Sum.ELEMENT
        found.append(own)
    return tuple(found)


_IN_STRIPS = (Sum.QUERY, Sum.KEY, Sum.DIAGONAL)


def _dependence(program: Program, read: int) -> Sum:
    depends = program.dependence(read) & {"query", "key"}
    if not depends:
        return Sum.HEAD
    return Sum(next(iter(depends))) if len(depends) == 1 else Sum.ELEMENT


def strips(sums: Collection[Sum], columns: Sum) -> int:
    """How many of ``sums`` pass through shared memory. ``columns`` is the dim along the columns of
    the accumulators: ``Sum.KEY`` or ``Sum.QUERY``.
    """
    return sum(own in (columns, Sum.DIAGONAL) for own in sums)
