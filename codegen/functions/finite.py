"""Which values of a program are finite for all arrays and numbers of a call."""

from __future__ import annotations

import math
from typing import Any

from jax_memeff.codegen.functions.program import Program

_LARGEST = 2.0**100
"""Far below the overflow of float32, so that rounding errors do not matter."""


def is_finite(program: Program, value: int) -> bool:
    """Whether a float is known to be finite: integers as floats, and sums and products of them.

    Kernels multiply such a derivative by the zero gradient of a masked element without a test. Any
    other derivative may be inf or NaN there.

    >>> from jax_memeff.codegen.functions.program import Value
    >>> key = Value("key", "int32")
    >>> program = Program((key, Value("convert_element_type", "float32", (0,))), (1,), ())
    >>> is_finite(program, 1)
    True
    """
    bounds: list[float] = []
    for own in program.values[: value + 1]:
        args = [bounds[arg] for arg in own.args]
        is_float = own.dtype == "float32"
        bounds.append(_bound(own.op, dict(own.params), args) if is_float else 2.0**32)
    return bounds[value] <= _LARGEST


def _bound(op: str, params: dict[str, Any], bounds: list[float]) -> float:
    """An upper bound on the magnitude of the result; inf if unknown."""
    if op == "constant":
        number = abs(float(params["value"]))
        return number if number <= _LARGEST else math.inf
    if op in ("add", "sub"):
        return sum(bounds)
    if op == "mul":
        # The product of 0 and an unknown number may be NaN.
        return math.inf if math.inf in bounds else math.prod(bounds)
    if op in ("neg", "abs", "sign"):
        return bounds[0]
    if op == "convert_element_type":
        return bounds[0]
    if op == "select_n":
        return max(bounds[1:])
    return math.inf
