"""Elementwise primitives of lax, one element at a time, in the types in which programs compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_memeff._functions.graph import Graph
from jax_memeff._functions.operations import SCALAR_TYPES, bits_of_small
from jax_memeff._functions.views import NotScalarError
from jax_memeff.codegen.functions.operations import is_supported
from jax_memeff.codegen.functions.program import ScalarType

STRUCTURAL_OPERAND: dict[str, int] = dict.fromkeys(
    ("div", "rem", "shift_left", "shift_right_arithmetic", "shift_right_logical"), 1
)
"""The operand whose number belongs to the structure: compilers make divisions by a constant fast,
and shifts by a constant need no test of its range."""

_OVERFLOWS = frozenset(
    {"abs", "add", "div", "integer_pow", "mul", "neg", "not", "shift_left"}
    | {"shift_right_logical", "square", "sub"}
)


def scalar_type(dtype: Any) -> ScalarType:
    """The type in which a program computes with a dtype; :class:`NotScalarError` without one."""
    name = getattr(dtype, "name", str(dtype))  # keys of jax.random have dtypes of their own
    if name not in SCALAR_TYPES:
        raise NotScalarError(
            f"{name} has no scalar form: real floats of 16 to 64 bits, integers of 8 to 64 bits "
            "and bool have one"
        )
    return SCALAR_TYPES[name]


_TOTAL_ORDER = {"eq_to": "eq", "le_to": "le", "lt_to": "lt"}
"""Comparisons in the total order of floats, which ``jnp.searchsorted`` uses for all dtypes."""


_COMPOSITE = ("log2", "one_minus_square", "polynomial")
"""Primitives that JAX has had since 0.11 or 0.12, which :func:`_composite` expands."""


def is_elementwise(name: str) -> bool:
    return name in _COMPOSITE or is_supported(name) or name == "add_any" or name in _TOTAL_ORDER


def lower(
    graph: Graph,
    name: str,
    params: dict[str, Any],
    result: np.dtype,
    operands: Sequence[np.dtype],
    args: tuple[int, ...],
) -> int:
    """The value of one element.

    Args:
        result: the dtype in JAX; ``operands`` likewise.
        args: values of the graph, one for each operand.
    """
    dtype = scalar_type(result)
    if name == "select_n":
        return _select(graph, dtype, args)
    if name == "convert_element_type":
        return graph.converted(args[0], operands[0], result)
    if name in _COMPOSITE:
        return _composite(graph, name, dtype, args)
    if name == "add_any":
        name = "add"
    if name in _TOTAL_ORDER:
        name = _TOTAL_ORDER[name]
        args = tuple(_in_total_order(graph, arg) for arg in args)
    kept: dict[str, Any] = {}
    if name == "integer_pow":
        kept = {"y": int(params["y"])}
    elif name == "round":
        kept = {"rounding_method": int(params["rounding_method"])}
    elif name == "pow" and graph.dtype(args[1]) != dtype:
        args = (args[0], graph.add("convert_element_type", dtype, (args[1],)))
    elif name == "bitcast_convert_type":
        _check_bitcast(operands[0], result)
    small = bits_of_small(operands[0])
    if small and name in ("shift_right_logical", "clz", "population_count"):
        mask = graph.number((1 << small) - 1, "int32", structural=True)
        args = (graph.add("and", "int32", (args[0], mask)), *args[1:])
    overflows = name in _OVERFLOWS
    if small and name == "shift_right_arithmetic" and operands[0].kind == "u":
        # The shift takes the highest bit as the sign, even of an unsigned integer.
        args = (graph.wrapped(args[0], np.dtype(f"int{small}")), *args[1:])
        overflows = True
    value = graph.add(name, dtype, args, kept)
    if small and name == "clz":
        excess = graph.number(32 - small, "int32", structural=True)
        value = graph.add("sub", "int32", (value, excess))
    return graph.wrapped(value, result) if overflows else value


def _in_total_order(graph: Graph, value: int) -> int:
    """An integer in the total order of a float, with -0 below 0 and NaN above infinity."""
    if not graph.dtype(value).startswith("float"):
        return value
    bits, dtype = (32, "int32") if graph.dtype(value) == "float32" else (64, "int64")
    pattern = graph.add("bitcast_convert_type", dtype, (value,))
    shift = graph.number(bits - 1, dtype, structural=True)
    magnitude = graph.number((1 << (bits - 1)) - 1, dtype, structural=True)
    sign = graph.add("shift_right_arithmetic", dtype, (pattern, shift))
    flipped = graph.add("and", dtype, (sign, magnitude))
    return graph.add("xor", dtype, (pattern, flipped))


def _composite(graph: Graph, name: str, dtype: ScalarType, args: tuple[int, ...]) -> int:
    """``log2(x)``, ``(1 + x) (1 - x)``, or Horner's rule for x and coefficients, lowest first."""
    x, *coefficients = args
    if name == "log2":
        divisor = graph.number(math.log(2), dtype, structural=True)
        return graph.add("div", dtype, (graph.add("log", dtype, (x,)), divisor))
    if name == "one_minus_square":
        one = graph.number(1, dtype, structural=True)
        factors = (graph.add(sign, dtype, (one, x)) for sign in ("add", "sub"))
        return graph.add("mul", dtype, tuple(factors))
    *others, result = coefficients
    for coefficient in reversed(others):
        product = graph.add("mul", dtype, (result, x))
        result = graph.add("add", dtype, (product, coefficient))
    return result


def _select(graph: Graph, dtype: ScalarType, args: tuple[int, ...]) -> int:
    which, *cases = args
    if graph.dtype(which) == "bool":
        return graph.add("select_n", dtype, (which, *cases))
    return choice(graph, which, cases)


def choice(graph: Graph, which: int, cases: Sequence[int]) -> int:
    """Select one of several values by an integer index, which is clamped to their number."""
    chosen = cases[0]
    for number, case in enumerate(cases[1:], 1):
        bound = graph.number(number, graph.dtype(which), structural=True)
        reached = graph.add("ge", "bool", (which, bound))
        chosen = graph.add("select_n", graph.dtype(chosen), (reached, chosen, case))
    return chosen


def _check_bitcast(source: np.dtype, result: np.dtype) -> None:
    if source.itemsize != result.itemsize or result.itemsize < 4:
        raise NotScalarError(
            f"bitcast_convert_type from {source.name} to {result.name} has no scalar form, because "
            "functions are computed in types of 32 bits or more"
        )
