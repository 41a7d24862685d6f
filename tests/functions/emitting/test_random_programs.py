"""Random programs, compiled by g++: every value is what jax.lax gives for its operands."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import compiled_programs
import jax
import numpy as np
import pytest
from compiled_programs import BATCH_INDEX, Case, Evaluated
from jax import lax
from random_programs import EVERY, captured_arrays, dims_of, programs

from jax_memeff.codegen.functions.operations import OPERATIONS
from jax_memeff.codegen.functions.program import INPUTS, Program, Value

COUNT = int(os.environ.get("JAX_MEMEFF_PROGRAMS", "100"))
BATCH = 250
POINTS = 20
TINY = float(np.finfo("f4").tiny)

LAX_NAMES = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}
# For these IEEE 754 or the definition allows only one result.
EXACT = {
    *("add", "sub", "mul", "div", "neg", "abs", "sign", "square", "max", "min", "clamp", "rem"),
    *("floor", "ceil", "round", "nextafter", "sqrt", "select_n"),
    *("convert_element_type", "bitcast_convert_type"),
}


def lax_function(value: Value) -> Any:
    """The lax primitive of a value, as a function of arrays."""
    params = dict(value.params)
    if value.op == "round":
        method = lax.RoundingMethod(params["rounding_method"])
        return lambda x: lax.round(x, method)
    if value.op == "integer_pow":
        return lambda x: lax.integer_pow(x, params["y"])
    if value.op == "convert_element_type":
        dtype = "float64" if value.dtype == "float32" else value.dtype
        return lambda x: lax.convert_element_type(x, dtype)
    if value.op == "bitcast_convert_type":
        return lambda x: lax.bitcast_convert_type(x, value.dtype)
    return getattr(lax, LAX_NAMES.get(value.op, value.op))


def in_float64(value: Value, operands: list[np.ndarray]) -> list[np.ndarray]:
    """The operands in float64, in which the rounding errors of lax do not matter."""
    if value.op in ("nextafter", "bitcast_convert_type"):
        return operands
    if value.op == "pow":  # lax converts an integer exponent to the type of the base
        operands = [x.astype("f4") for x in operands]
    return [x.astype("f8") if x.dtype == np.float32 else x for x in operands]


def expected(calls: list[tuple[Value, list[np.ndarray]]]) -> list[np.ndarray]:
    """The results of lax for the operands of many values, computed by one program of JAX."""
    with jax.enable_x64(True):
        operands = [in_float64(value, found) for value, found in calls]
        functions = [lax_function(value) for value, _ in calls]
        run = jax.jit(lambda operands: [f(*x) for f, x in zip(functions, operands, strict=True)])
        return [np.asarray(result) for result in run(operands)]


def is_approximated(value: Value, precise: bool) -> bool:
    """Whether a value may use the approximate form of its operation."""
    if value.op == "integer_pow":
        return value.param("y") < 0 and not precise  # a division
    return value.op in OPERATIONS and bool(OPERATIONS[value.op].approximate) and not precise


def beyond_approximations(value: Value, operands: list[np.ndarray]) -> np.ndarray:
    """Whether approximations have no bound: for subnormal numbers, which count as zero, and
    divisors from 2^126 on.
    """
    numbers = [np.abs(x.astype("f8")) for x in operands]
    if value.op == "integer_pow":
        numbers = [numbers[0] ** -value.param("y")]
    found = np.any([(x > 0) & (x < TINY) for x in numbers], axis=0)
    if value.op in ("div", "integer_pow"):
        found |= np.isfinite(numbers[-1]) & (numbers[-1] >= 2.0**126)
    return found


def tolerance(value: Value, operands: list[np.ndarray], approximated: bool) -> tuple[Any, float]:
    """The largest error of a float operation, in units of the last place and absolute."""
    size = np.abs(np.nan_to_num(operands[0], posinf=0, neginf=0)).astype("f8")
    if value.op == "integer_pow":
        return 0.5 * abs(value.param("y")) + 2, TINY if approximated else 0
    if approximated:
        known = {"tanh": 2.0**13, "exp": 4 + 2 * size, "logistic": 8 + 2 * size}
        return known.get(value.op, 4), 2 * TINY
    if value.op == "logistic":
        return 2, TINY  # the exponential overflows before the result is 0
    if value.op == "erfc":
        return 4, 0  # the bound of CUDA's erfcf; that of glibc, which runs here, is 3
    return (0 if value.op in EXACT else 2), 0


def differs(
    value: Value, operands: list[np.ndarray], got: np.ndarray, want: np.ndarray, precise: bool
) -> np.ndarray:
    """Which elements are wrong."""
    if got.dtype != np.float32:
        return got != want.astype(got.dtype)
    with np.errstate(all="ignore"):
        approximated = is_approximated(value, precise)
        ulp, absolute = tolerance(value, operands, approximated)
        rounded = want.astype("f4")
        spacing = np.spacing(np.minimum(np.abs(rounded), np.float32(3e38))).astype("f8")
        close = np.abs(got.astype("f8") - want) <= np.maximum(ulp * spacing, absolute)
        # Infinity counts as the neighbour of the largest float.
        close |= np.isinf(got) & (np.abs(want) >= 3.4e38) & (ulp > 0) & (got * want > 0)
        close |= (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        if value.op == "integer_pow" and value.param("y") < 0:
            # lax divides 1 by a power of float32, which may overflow.
            power = np.abs(operands[0].astype("f8")) ** -value.param("y")
            close |= (got == 0) & (power >= 3.4e38)
        if value.op == "nextafter":  # in float32, where XLA takes subnormal numbers for zero
            close |= np.any([np.abs(x) < TINY for x in operands], axis=0)
        return ~close & ~(approximated & beyond_approximations(value, operands))


def decoded(program: Program, found: Evaluated, index: int) -> np.ndarray:
    """A value at all points, in its type."""
    bits = np.ascontiguousarray(found.values[:, index])
    dtype = program.values[index].dtype
    return bits.astype(bool) if dtype == "bool" else bits.view(dtype)


def read_elements(case: Case, value: Value, indices: list[np.ndarray]):
    """The value of a read, and its offset, or -1 if it is out of bounds."""
    params = dict(value.params)
    array = case.arrays[params["array"]][BATCH_INDEX]
    inside = np.ones(POINTS, bool)
    clipped = []
    for index, size in zip(indices, array.shape, strict=True):
        inside &= (index >= 0) & (index < size)
        clipped.append(np.clip(index, 0, size - 1))
    elements = np.broadcast_to(array[tuple(clipped)], inside.shape).astype(value.dtype)
    places = np.zeros(inside.shape, "i8")
    for index, size in zip(clipped, array.shape, strict=True):
        places = places * size + index
    if params["mode"] == "fill":
        elements = np.where(inside, elements, np.asarray(params["fill_value"], value.dtype))
        places = np.where(inside, places, -1)
    return elements, places


def check_given(case: Case, found: Evaluated, arguments: np.ndarray) -> None:
    """Checks inputs, constants, literals, sizes and reads."""
    program, places = case.program, {}
    for index, value in enumerate(program.values):
        params, got = dict(value.params), decoded(program, found, index)
        if value.op in INPUTS:
            want = arguments[value.op]
        elif value.op == "constant":
            want = np.asarray(params["value"], value.dtype)
        elif value.op == "literal":
            want = np.asarray(program.literals[params["index"]], value.dtype)
        elif value.op == "size":
            want = case.arrays[params["array"]].shape[1 + params["dim"]]
        elif value.op == "read":
            indices = [decoded(program, found, arg) for arg in value.args]
            want, places[index] = read_elements(case, value, indices)
        else:
            continue
        np.testing.assert_array_equal(got, want, err_msg=str(value))
    for number in range(found.offsets.shape[1]):
        read = program.float_reads[number]
        np.testing.assert_array_equal(found.offsets[:, number], places[read])
        np.testing.assert_array_equal(found.read_values[:, number], decoded(program, found, read))


def check_structs(program: Program, found: Evaluated) -> None:
    """Keeping values per head, row and column changes no bit, except those of NaN."""
    for number, result in enumerate(program.results):
        direct = decoded(program, found, result)
        through = np.ascontiguousarray(found.results[:, number])
        through = through.astype(bool) if direct.dtype == bool else through.view(direct.dtype)
        np.testing.assert_array_equal(through, direct, err_msg=f"result {number}")


def check_operations(cases: list[Case], evaluated: list[Evaluated]) -> set[tuple[str, str]]:
    """Checks each operation of all programs against lax; returns the operations with their
    dtypes.
    """
    calls: dict[Any, list[Any]] = defaultdict(list)
    for (program, precise, _), found in zip(cases, evaluated, strict=True):
        for index, value in enumerate(program.values):
            if value.args and value.op != "read":
                operands = [decoded(program, found, arg) for arg in value.args]
                dtypes = tuple(str(x.dtype) for x in operands)
                key = (value.op, value.dtype, value.params, dtypes, precise)
                calls[key].append((operands, decoded(program, found, index)))
    joined = []
    for (op, dtype, params, _, precise), found in calls.items():
        operands = [np.concatenate(column) for column in zip(*(x for x, _ in found), strict=True)]
        got = np.concatenate([result for _, result in found])
        joined.append((Value(op, dtype, (), params), operands, got, precise))
    wanted = expected([(value, operands) for value, operands, _, _ in joined])
    failures = []
    for (value, operands, got, precise), want in zip(joined, wanted, strict=True):
        if (wrong := differs(value, operands, got, want, precise)).any():
            first = np.flatnonzero(wrong)[:3]
            failures.append(
                f"{value} precise={precise} of {[x[first].tolist() for x in operands]}: "
                f"got {got[first]}, expected {want[first]}, wrong: {wrong.sum()}"
            )
    assert not failures, "\n".join(failures)
    return {(op, dtypes[0]) for op, _, _, dtypes, _ in calls}


@pytest.mark.rotating(3)
def test_values_of_random_programs_are_those_of_lax():
    arguments = compiled_programs.points(POINTS)
    arrays = captured_arrays()
    drawn = [
        Case(program, i % 3 > 0, [arrays[key] for key in dims_of(program)])
        for i, program in enumerate(programs(COUNT))
    ]
    seen: set[tuple[str, str]] = set()
    for start in range(0, len(drawn), BATCH):
        cases = drawn[start : start + BATCH]
        evaluated = compiled_programs.evaluate(cases, arguments)
        for case, found in zip(cases, evaluated, strict=True):
            check_given(case, found, arguments)
            check_structs(case.program, found)
        seen |= check_operations(cases, evaluated)
    if COUNT >= 70:
        assert not set(EVERY) - seen
