"""Score functions that are replaced by a kernel's own feature, which is faster."""

from __future__ import annotations

from jax_memeff.codegen.functions.program import Program, Value

_CAPS = 2.0**-10, 2.0**20
"""Soft caps in this range are safe in the arithmetic of every dtype."""


def is_identity(program: Program) -> bool:
    """Whether the function returns its score.

    >>> is_identity(Program((Value("score", "float32"),), (0,), ()))
    True
    """
    return program.values[program.results[0]].op == "score"


def soft_cap(program: Program) -> float | None:
    """The cap c of a function ``c * tanh(score / c)``; None for any other function.

    >>> score, cap = Value("score", "float32"), Value("constant", "float32", (), (("value", 30.0),))
    >>> tanh = Value("div", "float32", (0, 1)), Value("tanh", "float32", (2,))
    >>> literal = Value("literal", "float32", (), (("index", 0),))
    >>> values = (score, cap, *tanh, literal, Value("mul", "float32", (3, 4)))
    >>> soft_cap(Program(values, (5,), (), (30.0,)))
    30.0
    >>> soft_cap(Program(values, (5,), (), (20.0,)))
    """
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
    """The argument of a value of this operation; None if it is another."""
    return program.values[value.args[0]] if value.op == op else None


def _number(program: Program, index: int) -> float | None:
    """The number of a constant or literal value; None if the value is computed."""
    value = program.values[index]
    if value.op == "constant":
        return float(value.param("value"))
    return float(program.literals[value.param("index")]) if value.op == "literal" else None
