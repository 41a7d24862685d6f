"""Score functions that are replaced by a kernel's own feature, which is faster."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from jax_memeff.codegen.functions.program import Program, Value

_CAPS = 2.0**-10, 2.0**20
"""Soft caps in this range are safe in the arithmetic of every dtype."""


_SCORES = (-40.0, -3.0, -0.5, 0.0, 0.1, 1.0, 7.0)
"""The scores, in units of the cap, at which a derivative is compared with that of a soft cap."""

_FLOAT_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "tanh": math.tanh,
    "square": lambda x: x * x,
    "one_minus_square": lambda x: 1 - x * x,
}


def is_identity(program: Program) -> bool:
    """Whether the function returns its score and has derivative 1, unlike ``stop_gradient`` of a
    score.

    >>> one = Value("constant", "float32", (), (("value", 1.0),))
    >>> is_identity(Program((Value("score", "float32"), one), (0, 1), ()))
    True
    """
    value, derivative = (program.values[index] for index in program.results[:2])
    is_one = derivative.op == "constant" and derivative.param("value") == 1
    return value.op == "score" and is_one


def soft_cap(program: Program) -> float | None:
    """The cap c of a function ``c * tanh(score / c)`` with JAX's derivative; None for others."""
    cap = _cap_of_value(program)
    if cap is None:
        return None
    for ratio in _SCORES:
        slope = _number_at(program, program.results[1], cap * ratio)
        if slope is None or abs(slope - (1 - math.tanh(ratio) ** 2)) > 1e-6:
            return None
    return cap


def _number_at(program: Program, index: int, score: float) -> float | None:
    """The value at a given score; None if it depends on anything else, or is a quotient by 0."""
    value = program.values[index]
    if value.op == "score":
        return score
    if (number := _number(program, index)) is not None:
        return number
    if value.op not in _FLOAT_OPERATIONS:
        return None
    args = [_number_at(program, arg, score) for arg in value.args]
    if None in args or (value.op == "div" and args[1] == 0):
        return None
    return _FLOAT_OPERATIONS[value.op](*args)


def _cap_of_value(program: Program) -> float | None:
    """The same as :func:`soft_cap`, judging by the value alone."""
    product = program.values[program.results[0]]
    if product.op != "mul":
        return None
    for tanh, factor in (product.args, product.args[::-1]):
        quotient = _arg(program, program.values[tanh], "tanh")
        if quotient is None or quotient.op != "div":
            continue
        score, divisor = quotient.args
        cap, other = _number(program, divisor), _number(program, factor)
        if program.values[score].op != "score" or cap is None or cap != other:
            continue
        if _CAPS[0] <= cap <= _CAPS[1]:
            return cap
    return None


def _arg(program: Program, value: Value, op: str) -> Value | None:
    """The argument of a value of this operation; None if the value has another operation."""
    return program.values[value.args[0]] if value.op == op else None


def _number(program: Program, index: int) -> float | None:
    """The number of a constant or literal value; None if the value is computed."""
    value = program.values[index]
    if value.op == "constant":
        return float(value.param("value"))
    return float(program.literals[value.param("index")]) if value.op == "literal" else None
