"""Ranges of single operations: no element lies outside, however it is rounded or wraps around."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_memeff._call.mask.bounds import Captured, evaluate
from jax_memeff._call.mask.ranges import Range, applied
from jax_memeff._functions.trace import traced_mask_function
from jax_memeff.codegen.functions.program import Value

INTEGERS = ["int32", "int64", "uint32", "uint64"]


def elements_of(dtype: str) -> np.ndarray:
    """Small numbers and the limits of all integers that ``dtype`` can hold, in order."""
    limits = [
        int(limit) for other in INTEGERS for limit in (np.iinfo(other).min, np.iinfo(other).max)
    ]
    numbers = sorted({-5, -1, 0, 1, 5, 2**31, 2**32, *limits})
    own = np.iinfo(dtype)
    return np.array([x for x in numbers if own.min <= x <= own.max], dtype)


def tiles_of(dtype: str) -> list[np.ndarray]:
    """All runs of at least two elements."""
    numbers = elements_of(dtype)
    stops = range(2, numbers.size + 1)
    return [numbers[start:stop] for stop in stops for start in range(stop - 1)]


def range_of(value: Value, elements: np.ndarray) -> tuple[int, int]:
    tile = Range(jnp.asarray(elements.min()), jnp.asarray(elements.max()))
    found = applied(value, [tile], [None])
    return found.low.item(), found.high.item()


@pytest.mark.parametrize("target", [*INTEGERS, "float32"])
@pytest.mark.parametrize("source", [*INTEGERS, "bool"])
def test_converted_elements_lie_within_bounds(source, target):
    tiles = [np.array([False, True])] if source == "bool" else tiles_of(source)
    with jax.enable_x64(True):
        for elements in tiles:
            low, high = range_of(Value("convert_element_type", target), elements)
            converted = elements.astype(target)
            assert low <= converted.min().item(), elements
            assert converted.max().item() <= high, elements


@pytest.mark.parametrize(
    ("source", "target"), [("int32", "uint32"), ("int64", "int32"), ("uint32", "int64")]
)
def test_conversions_that_keep_all_numbers_keep_their_range(source, target):
    with jax.enable_x64(True):
        found = range_of(Value("convert_element_type", target), np.array([0, 5], source))
    assert found == (0, 5)


@pytest.mark.parametrize("op", ["neg", "abs"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_signs_of_integers_lie_within_bounds(op, dtype):
    with jax.enable_x64(True):
        for elements in tiles_of(dtype):
            low, high = range_of(Value(op, dtype), elements)
            of_elements = np.negative(elements) if op == "neg" else np.abs(elements)
            assert low <= of_elements.min().item(), elements
            assert of_elements.max().item() <= high, elements


FACTOR = 1 + 2.0**-12
ROUNDED = np.float32(FACTOR) * np.float32(FACTOR)
FIRST, SECOND = np.float32(0.1), np.float32(0.3)
SUM = np.float32(FACTOR) + FIRST + SECOND
MASKS = {
    # A fused product, FACTOR**2 without rounding, is above ROUNDED.
    "product + constant": (lambda x, y, h, k: y[h] * x[k] - ROUNDED <= 0, range(3), (True, True)),
    "constant - product": (lambda x, y, h, k: ROUNDED - x[k] * y[h] >= 0, range(3), (True, True)),
    "negated": (lambda x, y, h, k: ROUNDED + -(x[k] * y[h]) >= 0, range(3), (True, True)),
    "square": (lambda x, y, h, k: x[k] * x[k] - ROUNDED <= 0, range(3), (True, True)),
    "product of a head": (
        lambda x, y, h, k: y[h] * y[h] - (ROUNDED + (FACTOR - x[k])) <= 0,
        range(3),
        (True, True),
    ),
    "product of an element": (lambda x, y, h, k: y[h] * x[k] <= ROUNDED, [2], (True, True)),
    # 0.1 and 0.3 are not added first.
    "sum": (lambda x, y, h, k: x[k] + FIRST + SECOND == SUM, [2], (True, True)),
    # 82 times the reciprocal of 41 is below 2.
    "quotient": (lambda x, y, h, k: jnp.floor(k / 41.0) == 1, range(64, 83), (False, True)),
    "quotient of an element": (lambda x, y, h, k: k / 41.0 < 2, [82], (False, False)),
    "quotient of two": (lambda x, y, h, k: k / 41.0 < 2, range(64, 82), (True, True)),
    "negative power": (lambda x, y, h, k: x[k] ** -2 * ROUNDED == 1, [2], (True, True)),
    # Each library has its own exponentials.
    "exponential": (
        lambda x, y, h, k: jnp.exp(x[k]) <= np.exp(np.float32(FACTOR)),
        [2],
        (False, True),
    ),
}
"""Functions, the columns of a tile, and whether all and whether any of them are valid."""


@pytest.mark.parametrize("name", MASKS)
def test_bounds_of_floats_are_rounded_as_elements_are(name):
    assert ROUNDED == 1 + 2.0**-11 != FACTOR**2
    assert np.float32(FACTOR) + (FIRST + SECOND) != SUM
    mask, columns, decided = MASKS[name]
    x, y = jnp.array([1.0, 1.0, FACTOR]), jnp.array([FACTOR])
    program, arrays = traced_mask_function(lambda b, h, q, k: mask(x, y, h, k))

    @jax.jit  # XLA changes only operations that are compiled together
    def bounds(first, last, arrays):
        exact = len(columns) == 1
        key = Range.exact(first) if exact else Range(first, last, len(columns) - 1)
        zero = Range.exact(jnp.int32(0))
        inputs = {"batch": zero, "head": zero, "query": zero, "key": key}
        found = evaluate(program, inputs, [Captured(array[None], None) for array in arrays])
        return found.low, found.high

    found = bounds(*(jnp.int32(column) for column in (columns[0], columns[-1])), arrays)
    assert tuple(map(bool, found)) == decided


def test_sums_of_floats_are_not_widened():
    tile, one = Range(jnp.float32(1), jnp.float32(3)), Range.exact(jnp.float32(1))
    found = applied(Value("sub", "float32"), [tile, one], [None, 1.0])
    assert (found.low, found.high) == (0, 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_results_that_overflow_may_be_finite_in_a_kernel(sign):
    infinity = Range.exact(jnp.float32(sign * np.inf))
    found = applied(Value("asinh", "float32"), [infinity], [None])
    bounds = sorted(float(bound) for bound in found[:2])
    finite = sign * np.finfo("f4").max
    np.testing.assert_allclose(bounds, sorted([finite, sign * np.inf]), rtol=2e-6)
    assert bounds[0] <= finite <= bounds[1]
