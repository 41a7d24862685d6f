"""Programs agree with the functions that they were traced from, in values and derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from score_functions import (
    BATCH,
    COLUMNS,
    HEADS,
    MASK_FUNCTIONS,
    ROWS,
    SCORE_FUNCTIONS,
    everywhere,
    positions,
)

from jax_memeff._functions.evaluate import derivatives, evaluate
from jax_memeff._functions.trace import traced_mask_function, traced_score_function

SHAPE = (BATCH, HEADS, ROWS, COLUMNS)
SCORES = 3 * normal(100, *SHAPE)
COTANGENT = normal(101, *SHAPE)


def floats(arrays):
    return [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]


def split(arrays):
    moving = [x for x, is_float in zip(arrays, floats(arrays), strict=True) if is_float]

    def joined(moving):
        left = iter(moving)
        pairs = zip(arrays, floats(arrays), strict=True)
        return [next(left) if is_float else x for x, is_float in pairs]

    return moving, joined


def traced(make, arrays, scores):
    program, captured = traced_score_function(make(*arrays), scores.dtype.name)
    return evaluate(program, scores, *positions(), captured)


def direct(make, arrays, scores):
    return everywhere(make(*arrays), scores, *positions())


@pytest.mark.rotating(5)
@pytest.mark.quick("alibi-float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_values_and_gradients_are_those_of_the_function(name, dtype, request, assert_close):
    if dtype == "float64":
        request.getfixturevalue("x64")
    make, arrays = SCORE_FUNCTIONS[name]
    moving, joined = split(arrays)
    moving = [x.astype(dtype) for x in moving]
    scores, cotangent = SCORES.astype(dtype), COTANGENT.astype(dtype)

    def loss(attend):
        def value(moving, scores):
            out = attend(make, joined(moving), scores)
            return jnp.vdot(out, cotangent), out

        return jax.jit(jax.grad(value, (0, 1), has_aux=True))

    tolerance = 2e-6 if dtype == "float32" else 1e-14
    assert_close(loss(traced)(moving, scores), loss(direct)(moving, scores), tolerance)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("name", ["distance", "gates", "composed", "branches"])
def test_derivatives_of_any_order_and_mode(name, x64, assert_close):
    make, arrays = SCORE_FUNCTIONS[name]
    moving, joined = split(arrays)
    moving = [x.astype("float64") for x in moving]
    scores = SCORES.astype("float64")

    def both(attend):
        def value(moving, scores):
            return attend(make, joined(moving), scores)

        def hessian_product(moving, scores):
            gradient = jax.grad(lambda *at: jnp.vdot(value(*at), COTANGENT), (0, 1))
            return jax.jvp(gradient, (moving, scores), (moving, scores))

        forward = jax.jit(lambda *at: jax.jvp(value, at, at))
        return forward(moving, scores), jax.jit(hessian_product)(moving, scores)

    assert_close(both(traced), both(direct), 1e-13)


@pytest.mark.parametrize("name", ["alibi", "learned_distances", "gates", "through_integers"])
def test_derivatives_are_by_the_score_and_by_each_float_read(name, assert_close):
    make, arrays = SCORE_FUNCTIONS[name]
    program, captured = traced_score_function(make(*arrays))
    moving, joined = split(arrays)
    ones = [np.ones_like(x) for x in moving]

    @jax.jit
    def all_derivatives():
        want = jax.grad(lambda s: direct(make, arrays, s).sum())(SCORES)
        _, along_ones = jax.jvp(lambda x: direct(make, joined(x), SCORES), (moving,), (ones,))
        return derivatives(program, SCORES, *positions(), captured), want, along_ones

    (by_score, *by_reads), want, along_ones = all_derivatives()
    assert_close(by_score, want)
    assert len(by_reads) == len(program.float_reads) == len(program.results) - 2
    # Their sum over reads and scores is the directional derivative along ones.
    assert_close(sum(map(np.asarray, by_reads)), along_ones)


@pytest.mark.rotating(3)
@pytest.mark.quick("documents")
@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_masks_are_those_of_the_function(name):
    make, arrays = MASK_FUNCTIONS[name]
    program, captured = traced_mask_function(make(*arrays))
    got = evaluate(program, None, *positions(), captured)
    want = everywhere(make(*arrays), *positions())
    assert got.dtype == jnp.bool_ and got.shape == SHAPE
    np.testing.assert_array_equal(got, want)
    assert 0 < want.sum() < want.size


def test_tracers_of_transformations_around_the_call_are_captured(assert_close):
    make, arrays = SCORE_FUNCTIONS["learned_distances"]
    tables = jnp.stack([arrays[0], 2 * arrays[0]])

    def mapped(attend):
        def loss(table, scores):
            return jnp.vdot(attend(make, [table], scores), COTANGENT)

        def step(total, table):
            return total + loss(table, SCORES), None

        gradients = jax.vmap(jax.value_and_grad(loss), (0, None))(tables, SCORES)
        return gradients, jax.lax.scan(step, 0.0, tables)[0]

    assert_close(jax.jit(mapped, static_argnums=0)(traced), mapped(direct), 2e-6)


def test_one_function_object_is_traced_for_each_call():
    """Hazard: JAX caches jaxprs by function, and a jaxpr keeps the tracers of its own call."""
    table = normal(1, 3)
    held = {}

    def function(score, b, h, q, k):
        return score + held["table"][h]

    @jax.jit
    def call(table):
        held["table"] = table
        program, arrays = traced_score_function(function)
        return evaluate(program, 0.0, 0, 1, 0, 0, arrays)

    assert call(table) == table[1]
    assert jax.grad(call)(table).tolist() == [0, 1, 0]


def test_inside_shard_map_with_the_index_of_the_device():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    table = normal(1, 4)
    spec = jax.sharding.PartitionSpec("x")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def local(part):
        device = jax.lax.axis_index("x")
        program, arrays = traced_score_function(
            lambda s, b, h, q, k: s * part[h] + jax.lax.axis_index("x") * 10 + device
        )
        return evaluate(program, 2.0, 0, jnp.arange(2), 0, 0, arrays)

    np.testing.assert_allclose(local(table), 2 * table + np.array([0, 0, 11, 11]))


@pytest.mark.parametrize("run", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_a_search_inside_shard_map(run):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    ends = np.array([[2, 3, 5, 8], [0, 1, 6, 7]], np.int32)

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def local(part):
        program, arrays = traced_mask_function(
            lambda b, h, q, k: jnp.searchsorted(part[0], q, side="right") == k
        )
        rows, columns = np.arange(9)[:, None], np.arange(5)
        return jax.jit(lambda *arrays: evaluate(program, None, 0, 0, rows, columns, arrays))(
            *arrays
        )

    want = [np.searchsorted(part, np.arange(9), side="right") for part in ends]
    np.testing.assert_array_equal(run(local)(ends).argmax(1), np.concatenate(want))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_arrays_and_arithmetic_are_float32(dtype):
    table = normal(1, 5).astype(dtype)

    def function(score, b, h, q, k):
        position = q.astype(dtype)  # 1001 is 1000 in bfloat16
        return score.astype(dtype) + table[h] * position

    program, arrays = traced_score_function(function)
    assert arrays[0].dtype == dtype and program.arrays[0].dtype == dtype
    assert {value.dtype for value in program.values} == {"float32", "int32"}
    got = evaluate(program, np.float32(1 / 3), 0, 2, 1001, 0, arrays)
    want = np.float32(1 / 3) + np.float32(table[2]) * np.float32(1001)
    assert got == pytest.approx(want, rel=1e-6)


def test_arrays_of_64_bits_in_a_call_of_32_bits(x64):
    table = jnp.array([0.1, 0.2])
    buckets = jnp.array([1, 0])
    program, arrays = traced_score_function(lambda s, b, h, q, k: s * table[buckets[h]])
    assert [program.values[read].dtype for read in program.reads] == ["int64", "float64"]

    def value(score, table):
        return evaluate(program, score, 0, 0, 0, 0, [arrays[0], table])

    value_now, gradients = jax.value_and_grad(value, (0, 1))(np.float32(2), table)
    assert (value_now.dtype, value_now) == (jnp.float32, np.float32(0.4))
    assert [x.dtype for x in gradients] == [jnp.float32, jnp.float64]
    assert gradients[1].tolist() == [0, 2]


def test_gradients_of_16_bit_arrays_are_rounded_once():
    table = jnp.ones(2, jnp.bfloat16)
    program, _ = traced_score_function(lambda s, b, h, q, k: s + table[h])
    count = 1001  # a sum in bfloat16 stays at 256

    def loss(table):
        return evaluate(program, jnp.zeros(count), 0, 1, 0, 0, [table]).sum()

    gradient = jax.grad(loss)(table)
    assert gradient.dtype == jnp.bfloat16
    assert gradient.tolist() == [0, jnp.bfloat16(count)]


def test_elements_that_are_not_valid_have_no_derivative():
    program, arrays = traced_score_function(lambda s, b, h, q, k: s * jnp.sqrt(q - k + 0.0) ** 3)
    rows, scores = np.array([0, 5], np.int32), jnp.ones(2)

    def loss(scores, valid):
        value = evaluate(program, scores, 0, 0, rows, 1, arrays, valid=valid)
        return jnp.where(rows > 1, value, 0).sum()

    assert np.isnan(jax.grad(loss)(scores, None)[0])
    assert jax.grad(loss)(scores, rows > 1).tolist() == pytest.approx([0, 8])


def test_a_derivative_of_minus_zero_is_no_number_of_the_function(assert_close):
    """The derivative of ``s / -inf`` is -0.0, the only float literal that a derivative adds."""

    def function(s, b, h, q, k):
        return 3.7 * k + s / -jnp.inf

    program, arrays = traced_score_function(function)
    (slope,) = derivatives(program, SCORES[0, 0], 0, 0, 1, 2, arrays)
    assert_close(slope, np.zeros_like(SCORES[0, 0]), 0)
