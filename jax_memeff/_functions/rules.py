"""Primitives of lax on scalars, in the types of programs, and on small arrays of scalars.

``MOVES`` work on arrays of anything: numbers, or indices of values in the graph. Other rules write
out sums, products and selections of elements.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_memeff._functions.graph import Graph
from jax_memeff._functions.operations import SCALAR_TYPES, bits_of_small
from jax_memeff._functions.views import NotScalarError, Scalars
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
    parameters: dict[str, Any] = {}
    if name == "integer_pow":
        parameters = {"y": int(params["y"])}
    elif name == "round":
        parameters = {"rounding_method": int(params["rounding_method"])}
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
    value = graph.add(name, dtype, args, parameters)
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


Params = dict[str, Any]


def _broadcast_in_dim(params: Params, x: np.ndarray) -> np.ndarray:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    aligned = [1] * len(shape)
    for dim, size in zip(dims, x.shape, strict=True):
        aligned[dim] = size
    return np.broadcast_to(x.reshape(aligned), shape)


def _slice(params: Params, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _split(params: Params, x: np.ndarray) -> list[np.ndarray]:
    ends = list(itertools.accumulate(params["sizes"]))[:-1]
    return np.split(x, ends, axis=params["axis"])


def _pad(params: Params, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    config = params["padding_config"]
    sizes = [
        low + high + size + max(size - 1, 0) * inside
        for size, (low, high, inside) in zip(x.shape, config, strict=True)
    ]
    padded = np.full(sizes, value, x.dtype)
    for position in np.ndindex(x.shape):
        target = tuple(
            low + index * (1 + inside)
            for index, (low, _, inside) in zip(position, config, strict=True)
        )
        if all(0 <= index < size for index, size in zip(target, sizes, strict=True)):
            padded[target] = x[position]
    return padded


MOVES: dict[str, Callable[..., np.ndarray | list[np.ndarray]]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda params, *xs: np.concatenate(xs, axis=params["dimension"]),
    "copy": lambda params, x: x,
    "pad": _pad,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "slice": _slice,
    "split": _split,
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "tile": lambda params, x: np.tile(x, params["reps"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
}
"""A function from the parameters and the operands to the result, or to the list of results."""


_REDUCTIONS = {
    "reduce_and": "and",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_prod": "mul",
    "reduce_sum": "add",
    "reduce_xor": "xor",
}
_CUMULATIVE = {"cummax": "max", "cummin": "min", "cumprod": "mul", "cumsum": "add"}
_NEUTRAL = {"add": 0, "or": 0, "xor": 0, "mul": 1, "and": -1}


def _neutral(op: str, dtype: np.dtype) -> Any:
    """The result of a reduction of no elements."""
    if op in _NEUTRAL:
        return _NEUTRAL[op]
    largest = op == "min"
    if dtype == np.bool_:
        return largest
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf if largest else -np.inf
    limits = np.iinfo(dtype)
    return limits.max if largest else limits.min


def _pair(graph: Graph, op: str, dtype: np.dtype, first: int, second: int) -> int:
    return lower(graph, op, {}, dtype, (dtype, dtype), (first, second))


def _reduce(graph: Graph, name: str, params: Params, result: np.dtype, x: Scalars) -> np.ndarray:
    op, axes = _REDUCTIONS[name], tuple(params["axes"])
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    shape = [x.shape[axis] for axis in kept]
    count = math.prod(x.shape[axis] for axis in axes)
    rows = np.transpose(x.elements, (*kept, *axes)).reshape(*shape, count)
    reduced = np.empty(shape, int)
    for position in np.ndindex(*shape):
        row = [int(element) for element in rows[position]]
        if not row:
            row = [graph.number(_neutral(op, result), scalar_type(result))]
        reduced[position] = functools.reduce(functools.partial(_pair, graph, op, result), row)
    return reduced


def _cumulate(graph: Graph, name: str, params: Params, result: np.dtype, x: Scalars) -> np.ndarray:
    op = _CUMULATIVE[name]
    moved = np.moveaxis(x.elements, params["axis"], -1)
    moved = np.flip(moved, -1) if params["reverse"] else moved
    sums = np.empty_like(moved)
    for position in np.ndindex(moved.shape[:-1]):
        row = [int(element) for element in moved[position]]
        pair = functools.partial(_pair, graph, op, result)
        sums[position] = list(itertools.accumulate(row, pair))
    sums = np.flip(sums, -1) if params["reverse"] else sums
    return np.moveaxis(sums, -1, params["axis"])


def _arg_extremum(
    graph: Graph, name: str, params: Params, result: np.dtype, x: Scalars
) -> np.ndarray:
    (axis,) = params["axes"]
    op = "gt" if name == "argmax" else "lt"
    rows = np.moveaxis(x.elements, axis, -1)
    found = np.empty(rows.shape[:-1], int)
    for position in np.ndindex(found.shape):
        best, *others = (int(element) for element in rows[position])
        index = graph.number(0, scalar_type(result))
        for number, other in enumerate(others, 1):
            better = graph.add(op, "bool", (other, best))
            if x.dtype.kind not in "iub":  # the first NaN wins
                other_nan = graph.add("ne", "bool", (other, other))
                best_number = graph.add("eq", "bool", (best, best))
                first_nan = graph.add("and", "bool", (other_nan, best_number))
                better = graph.add("or", "bool", (better, first_nan))
            best = graph.add("select_n", graph.dtype(best), (better, best, other))
            now = graph.number(number, scalar_type(result), structural=True)
            index = graph.add("select_n", scalar_type(result), (better, index, now))
        found[position] = index
    return found


def _dot(
    graph: Graph, name: str, params: Params, result: np.dtype, x: Scalars, y: Scalars
) -> np.ndarray:
    (x_summed, y_summed), (x_batch, y_batch) = params["dimension_numbers"]
    x_free = [axis for axis in range(len(x.shape)) if axis not in (*x_summed, *x_batch)]
    y_free = [axis for axis in range(len(y.shape)) if axis not in (*y_summed, *y_batch)]
    batch = [x.shape[axis] for axis in x_batch]
    rows = [x.shape[axis] for axis in x_free]
    columns = [y.shape[axis] for axis in y_free]
    left = _converted(graph, x, result, (*x_batch, *x_free, *x_summed)).reshape(*batch, *rows, -1)
    right = _converted(graph, y, result, (*y_batch, *y_free, *y_summed))
    right = right.reshape(*batch, *columns, -1)
    out = np.empty((*batch, *rows, *columns), int)
    for position in np.ndindex(out.shape):
        outer, row = position[: len(batch)], position[len(batch) : len(batch) + len(rows)]
        column = position[len(batch) + len(rows) :]
        pairs = zip(left[(*outer, *row)], right[(*outer, *column)], strict=True)
        products = [_pair(graph, "mul", result, int(a), int(b)) for a, b in pairs]
        products = products or [graph.number(0, scalar_type(result))]
        out[position] = functools.reduce(functools.partial(_pair, graph, "add", result), products)
    return out


def _converted(graph: Graph, x: Scalars, dtype: np.dtype, axes: tuple[int, ...]) -> np.ndarray:
    target = scalar_type(dtype)
    convert = np.vectorize(
        lambda element: graph.add("convert_element_type", target, (int(element),)), otypes=[int]
    )
    return np.transpose(convert(x.elements) if x.elements.size else x.elements, axes)


COMBINATIONS: dict[str, Callable[..., np.ndarray]] = {
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(_CUMULATIVE, _cumulate),
    "argmax": _arg_extremum,
    "argmin": _arg_extremum,
    "dot_general": _dot,
}
"""A function from the graph, the primitive's name and parameters, the dtype of the result and the
operands to the elements of the result."""
