"""Values on which a jump depends: quotients and roots of all sizes, and derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax import lax

from jax_memeff._functions import operations
from jax_memeff._functions.evaluate import evaluate
from jax_memeff._functions.operations import apply_rounded
from jax_memeff._functions.trace import traced_score_function
from jax_memeff.codegen.functions.program import Value


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_random_quotients(dtype, x64):
    """All signs and exponents; XLA takes subnormal numbers for zero, so they are left out."""
    integer = np.int32 if dtype == "float32" else np.int64
    limits = np.iinfo(integer)
    bits = np.random.default_rng(0).integers(limits.min, limits.max, (2, 200_000), integer)
    dividends, divisors = bits.view(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -3.0], dtype)
    dividends[:49], divisors[:49] = np.repeat(special, 7), np.tile(special, 7)
    with np.errstate(all="ignore"):
        want = dividends / divisors
    got = jax.jit(lambda *args: apply_rounded(Value("div", dtype), list(args)))(dividends, divisors)
    tiny = np.finfo(dtype).tiny
    subnormal = [(np.abs(x) < tiny) & (x != 0) for x in (dividends, divisors, want)]
    left = ~np.any(subnormal, axis=0)
    assert left.mean() > 0.7
    np.testing.assert_array_equal(np.asarray(got)[left], want[left])
    signs = np.signbit(got) == np.signbit(want)
    assert (signs | np.isnan(want))[left].all()


@pytest.mark.parametrize("error", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_random_roots(dtype, error, x64):
    """Also if XLA's root is wrong by some units in the last place, as on GPUs."""
    integer = np.int32 if dtype == "float32" else np.int64

    def inexact(x):
        bits = lax.bitcast_convert_type(lax.sqrt(x), integer)
        return lax.bitcast_convert_type(bits + error, dtype)

    normal_numbers = np.finfo(dtype).tiny, np.finfo(dtype).max
    first, last = (np.array(end, dtype).view(integer).item() for end in normal_numbers)
    numbers = np.random.default_rng(0).integers(first, last, 200_000, integer).view(dtype)
    squares = np.arange(1, 3000, dtype=dtype) ** 2
    numbers = np.concatenate([numbers, squares, np.nextafter(squares, 0), np.nextafter(squares, 1)])
    got = jax.jit(lambda x: operations._corrected_root(x, inexact))(numbers)
    np.testing.assert_array_equal(got, np.sqrt(numbers))


def test_roots_of_special_numbers():
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0], np.float32)
    got = jax.jit(lambda x: apply_rounded(Value("sqrt", "float32"), [x]))(special)
    np.testing.assert_array_equal(got, [0.0, -0.0, np.inf, np.nan, np.nan, np.nan])


def test_derivatives_of_rounded_values(x64, assert_close):
    """A jump depends on the product and the quotient; so does the value next to the jump."""
    weights = normal(1, 5).astype("float64")
    scores = normal(2, 5).astype("float64")

    def function(weights):
        def of_score(s, b, h, q, k):
            product, quotient = s * weights[k], weights[k] / (2 + s**2)
            kink = jnp.where((product > 0.1) & (quotient < 0.3), product**3, quotient)
            kink = jnp.where(jnp.sqrt(2 + product**2) > 1.5, kink, jnp.sqrt(2 + product))
            return kink - jnp.square(product) + (s + weights[k]) * jnp.floor(product)

        return of_score

    def traced(weights, scores):
        program, arrays = traced_score_function(function(weights), "float64")
        return evaluate(program, scores, 0, 0, 0, np.arange(5), arrays)

    def direct(weights, scores):
        indices = (jnp.zeros(5, int), jnp.zeros(5, int), jnp.zeros(5, int), jnp.arange(5))
        return jax.vmap(function(weights))(scores, *indices)

    def derivatives(attend):
        hessian = jax.hessian(lambda w, s: attend(w, s).sum(), (0, 1))
        return jax.jit(lambda w, s: (attend(w, s), hessian(w, s)))(weights, scores)

    assert_close(derivatives(traced), derivatives(direct), 1e-14)
