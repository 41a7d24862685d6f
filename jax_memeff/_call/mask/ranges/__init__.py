"""Interval arithmetic on the operations of programs: the minimum and maximum result in a tile.

Ranges are conservative: every element of a tile lies in the range of the tile, which may be wider
than necessary. Decisions based on the bounds of a mask function are therefore always correct. If an
operation has no rule, or could overflow, its range is unbounded.
"""

from __future__ import annotations

from typing import Any

from jax_memeff._call.mask.ranges.arithmetic import ARITHMETIC
from jax_memeff._call.mask.ranges.logic import LOGIC
from jax_memeff._call.mask.ranges.range import Range, is_float
from jax_memeff._functions.operations import apply_rounded
from jax_memeff.codegen.functions.program import Value

__all__ = ["Range", "applied"]

_RULES = ARITHMETIC | LOGIC
_ROUNDED_ALIKE = frozenset(
    {"abs", "add", "ceil", "clamp", "convert_element_type", "div", "floor", "integer_pow", "max"}
    | {"bitcast_convert_type", "min", "mul", "neg", "read", "round", "select_n", "sign", "square"}
    | {"sub"}
)
"""Operations on floats with the same bits in :func:`apply_rounded` and in the kernels. Others may
differ in the last bits, because each library has its own exponentials."""


def applied(value: Value, args: list[Range], numbers: list[Any]) -> Range:
    """The range of one operation.

    Args:
        value: the operation.
        args: the ranges of its operands.
        numbers: for each operand, its value if it is the same constant everywhere, else None.

    >>> import numpy as np
    >>> tile = Range(np.int32(64), np.int32(127), 63)  # columns
    >>> block = applied(Value("div", "int32"), [tile, Range.exact(np.int32(64))], [None, 64])
    >>> int(block.low), int(block.high), block.width
    (1, 1, 1)
    """
    if all(arg.is_exact for arg in args):
        found = Range.exact(apply_rounded(value, [arg.low for arg in args]))
    else:
        rule = _RULES.get(value.op)
        found = None if rule is None else rule(value, args, numbers)
        found = Range.everything(value.dtype) if found is None else found
    return found.widened() if is_float(value) and value.op not in _ROUNDED_ALIKE else found
