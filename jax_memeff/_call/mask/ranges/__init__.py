"""Interval arithmetic on the operations of programs: the minimum and maximum result in a tile.

Ranges are conservative: every element of a tile lies in the range of the tile, which may be wider
than necessary. Decisions based on the bounds of a mask function are therefore always correct. If an
operation has no rule, or could overflow, its range is unbounded.
"""

from __future__ import annotations

import math
from typing import Any

from jax_memeff._call.mask.ranges.arithmetic import ARITHMETIC
from jax_memeff._call.mask.ranges.logic import LOGIC
from jax_memeff._call.mask.ranges.range import Range, is_float
from jax_memeff._functions.operations import apply
from jax_memeff.codegen.functions.program import Value

__all__ = ["Range", "applied"]

_RULES = ARITHMETIC | LOGIC
_PRODUCTS = frozenset({"integer_pow", "mul", "square"})
"""Operations whose result may reach a sum unrounded: XLA contracts ``a * b + c`` to an FMA."""
_ROUNDED_ALIKE = frozenset(
    {"abs", "add", "ceil", "clamp", "convert_element_type", "floor", "max", "min", "mul", "neg"}
    | {"bitcast_convert_type", "read", "round", "select_n", "sign", "square", "sub"}
)
"""Operations on floats with the same bits in XLA and in the kernels, if no FMA takes part. Others
differ in the last bits: XLA replaces division by a constant with multiplication by its reciprocal,
and each library has its own exponentials."""


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
    is_sum = is_float(value) and value.op in ("add", "sub")
    if all(arg.is_exact and not (is_sum and arg.is_product) for arg in args):
        found = Range.exact(apply(value, [arg.low for arg in args]))
    else:
        rule = _RULES.get(value.op)
        found = None if rule is None else rule(value, args, numbers)
        found = Range.everything(value.dtype) if found is None else found
    if not is_float(value):
        return found
    factors = {"mul": numbers, "div": numbers[1:]}.get(value.op, ())
    is_scaled = any(map(_is_power_of_two, factors))
    if value.op not in _ROUNDED_ALIKE and not is_scaled:
        found = found.widened()
    is_negated_product = value.op == "neg" and args[0].is_product
    is_product = (value.op in _PRODUCTS and not is_scaled) or is_negated_product
    return found._replace(is_product=is_product)


def _is_power_of_two(number: Any) -> bool:
    """Whether products with this number, and divisions by it, are exact."""
    return number is not None and abs(math.frexp(number)[0]) == 0.5
