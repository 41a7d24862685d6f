"""Sums in fixed point: their scale, and the number that they represent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_memeff import Mask
from jax_memeff._call.operands import Operands
from jax_memeff._call.options import Options
from jax_memeff._call.scaling import Scaling
from jax_memeff._cuda import fixed_point_sums
from jax_memeff.codegen.functions.sums import FIXED_POINT_BITS

SCALE = 2.0**50
UNIT = 2**FIXED_POINT_BITS


def rounded(sums: np.ndarray, scale: float, shape: tuple[int, ...]) -> np.ndarray:
    found = fixed_point_sums.rounded(
        jnp.asarray(sums), jnp.full(1, scale), shape, jnp.dtype("float32")
    )
    return np.asarray(found)


def words(low: int, high: int) -> np.ndarray:
    """The sums of one element: two 64-bit integers, each as two words."""
    return np.array([low, high], np.int64).view(np.int32)


def kernel_sum(terms: np.ndarray) -> np.ndarray:
    """The sums of a kernel, computed with Python's integers."""
    scaled = terms.astype(np.float32).astype(np.float64) * SCALE
    high = np.rint(scaled / UNIT)
    low = np.rint(scaled - high * UNIT)
    return words(sum(map(int, low)), sum(map(int, high)))


@pytest.mark.parametrize("magnitude", [1e-9, 1e-3, 1.0, 1e8])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_sums_are_rounded_once(magnitude, count):
    rng = np.random.default_rng(count)
    terms = (rng.standard_normal((20, count)) * magnitude).astype(np.float32)
    terms[:, -1] -= terms[:, :-1].sum(-1)  # most of the sum cancels
    sums = np.stack([kernel_sum(own) for own in terms]).reshape(1, -1)
    found = rounded(sums, SCALE, (1, 20))
    want = terms.astype(np.float64).sum(-1)[None]
    np.testing.assert_allclose(found, want, rtol=4e-7, atol=count / SCALE)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (1, 0), (-1, 0), (-UNIT, 1), (UNIT - 1, -1), (2**62, -(2**22)), (-(2**62), 5)],
)
def test_the_two_integers_are_one_number(low, high):
    found = rounded(words(low, high)[None], 1.0, (1,))
    want = low + high * UNIT
    assert abs(float(found[0]) - want) <= 2.0**-23 * abs(want)


@pytest.mark.parametrize("others", [0, 2**60, -(2**60)])
def test_a_mark_makes_the_sum_nan(others):
    mark = 0x6000000000000000
    assert np.isnan(rounded(words(7, mark + others)[None], SCALE, (1,)))


H = 64


def scale_of(value: float, dout: float, dtype: str, other: float = 0.0) -> float:
    """The scale of two rows and two keys: the first key has the elements ``value`` and the first
    row ``dout``; the second ones have ``other``.
    """
    values, gradients = (
        jnp.stack([jnp.full((1, H), x), jnp.full((1, H), other)])[None].astype(dtype)
        for x in (value, dout)
    )
    operands = Operands(values, values, values, None, Mask(), None, None)
    lse = jnp.zeros((1, 2, 1), jnp.float32)
    leaves, tree = jax.tree.flatten((operands, jnp.zeros_like(values), lse, gradients, None))
    return fixed_point_sums.scale(*leaves, tree=tree, options=Options(Scaling(1.0))).item()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("value", "dout"), [(1.0, 1.0), (1e30, 1e-20), (1e-25, 1e30), (1e25, 1e-25), (3e38, 1e-37)]
)
def test_the_largest_score_gradient_keeps_its_bits(value, dout, dtype):
    """This includes rows whose squared norm overflows or underflows."""
    bits = scale_of(value, dout, dtype) * value * dout * H
    assert 2.0**54 < bits <= 2.0**56 * 1.01  # bfloat16 rounds the elements


def test_the_scale_of_the_largest_numbers_is_finite():
    assert scale_of(3e38, 3e38, "float32") == 2.0**-4
    assert scale_of(3e38, 0.0, "float32") == 2.0**116


@pytest.mark.parametrize("other", [np.nan, np.inf])
def test_rows_that_are_not_finite_do_not_count(other):
    assert scale_of(1.0, 1.0, "float32", other) == scale_of(1.0, 1.0, "float32")
