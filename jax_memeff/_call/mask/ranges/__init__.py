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
from jax_memeff._functions.operations import apply
from jax_memeff.codegen.functions.program import Value

__all__ = ["Range", "applied"]

_RULES = ARITHMETIC | LOGIC
_PRODUCTS = frozenset({"div", "integer_pow", "mul", "square"})
"""Operations whose result may reach a sum unrounded: XLA contracts ``a * b + c`` to an FMA, and
replaces division by a constant with multiplication by its reciprocal."""


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
        found = Range.exact(apply(value, [arg.low for arg in args]))
    else:
        rule = _RULES.get(value.op)
        found = None if rule is None else rule(value, args, numbers)
        found = Range.everything(value.dtype) if found is None else found
    is_negated_product = value.op == "neg" and args[0].is_product
    is_product = is_float(value) and (value.op in _PRODUCTS or is_negated_product)
    return found._replace(is_product=is_product)
