"""Forward mode and higher derivatives, against JAX's derivatives of the materialized formula."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from blockwise_case import EVERYTHING, Case, lengths, make

import jax_memeff
from jax_memeff import Mask
from jax_memeff._blockwise import tiles as blockwise_tiles
from jax_memeff._op import vjp


def causal(case: Case, rng: Any) -> Mask:
    return Mask.causal()


SIZES: Any = {"T": 20, "S": 35, "dtype": "float64"}
CASES = {
    "everything": dataclasses.replace(EVERYTHING, **SIZES),
    "shared_bias": Case(**SIZES, K=1, scale=-0.5, bias=("", "N", "", "S"), mask=causal),
    "bias_of_rows": Case(**SIZES, bias=("B", "N", "T", ""), mask=lengths),
}
UNOPTIMISED = {"xla_backend_optimization_level": 0}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise_tiles, "LONGEST_BLOCK", 16)


def scalar(results: Any) -> Any:
    """A function of out and lse that is linear in neither."""
    out, lse = results
    return jnp.sum(jnp.sin(2 * out)) + jnp.sum(jnp.cos(jnp.where(jnp.isneginf(lse), 0, lse)))


def hessian_vector_products(function: Any, arrays: Any, vector: Any) -> tuple[Any, Any]:
    """Hessian-vector products by forward over reverse, and by reverse over reverse."""
    every = tuple(range(len(arrays)))
    gradient = jax.grad(lambda *x: scalar(function(*x)), every)

    def projected(*arrays):
        return sum(map(jnp.vdot, gradient(*arrays), vector))

    return jax.jvp(gradient, arrays, vector)[1], jax.grad(projected, every)(*arrays)


def forward_derivatives(function: Any, arrays: Any, vector: Any) -> Any:
    """The first and second derivatives along a vector, by ``jvp`` and by ``linearize``."""

    def along(*arrays):
        return jax.jvp(function, arrays, vector)[1]

    def projected(*arrays):
        return jax.jvp(lambda *x: scalar(function(*x)), arrays, vector)[1]

    every = tuple(range(len(arrays)))
    return (
        along(*arrays),
        jax.linearize(function, *arrays)[1](*vector),
        jax.jvp(along, arrays, vector)[1],
        jax.grad(projected, every)(*arrays),
    )


def compiled(derivatives: Any, function: Any, arrays: Any, vector: Any) -> Any:
    return compiler(derivatives)(function, arrays, vector)


@functools.cache
def compiler(derivatives: Any) -> Any:
    return jax.jit(derivatives, static_argnums=0, compiler_options=UNOPTIMISED)


def ours_and_materialized(case: Case) -> tuple[Any, Any, Any, Any]:
    """Our and the materialized function of the differentiable arrays, these arrays, and
    tangents.
    """
    operands, options, _, _ = make(case)
    valid = oracle.valid_elements(operands.mask, case.B, case.N, case.T, case.S)
    bias_valid = valid
    if operands.bias is not None:
        bias_valid = valid & ~np.isneginf(operands.bias)
    kept = oracle.kept_factors(operands, options)
    given = {name: getattr(operands, name) for name in ("query", "key", "value", "bias", "sinks")}
    given = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    arrays = tuple(given.values())
    rng = np.random.default_rng(3)
    vector = tuple(jnp.asarray(rng.standard_normal(x.shape)) for x in arrays)

    def ours(*arrays):
        return vjp.attention(operands._replace(**dict(zip(given, arrays, strict=True))), options)

    def materialized(*arrays):
        named = dict(zip(given, arrays, strict=True))
        bias = named.get("bias", jnp.zeros((1, 1, 1, 1)))
        return oracle.formula(
            named["query"],
            named["key"],
            named["value"],
            jnp.where(jnp.isneginf(bias), 0, bias),
            named["sinks"][:, :, None, None] if "sinks" in named else oracle.NO_SINKS,
            bias_valid,
            kept,
            options.scaling.scale,
            options.scaling.soft_cap,
        )

    return ours, materialized, arrays, vector


@pytest.mark.rotating(3)
@pytest.mark.quick("bias_of_rows")
@pytest.mark.parametrize("name", CASES)
def test_hessian_vector_products(name, x64, assert_close):
    ours, materialized, arrays, vector = ours_and_materialized(CASES[name])
    got = compiled(hessian_vector_products, ours, arrays, vector)
    (want, _) = compiled(hessian_vector_products, materialized, arrays, vector)
    assert_close(got, (want, want), 1e-10)


def test_forward_mode(x64, assert_close):
    ours, materialized, arrays, vector = ours_and_materialized(CASES["everything"])
    with jax_memeff.forward_mode():
        got = compiled(forward_derivatives, ours, arrays, vector)
    assert_close(got, compiled(forward_derivatives, materialized, arrays, vector), 1e-10)


STARTS_Q, STARTS_K = np.array([1, 6, 6, 12]), np.array([0, 7, 9, 15])


def test_packed_sequences(x64, assert_close):
    """Values of tokens of no sequence reach no result."""
    rng = np.random.default_rng(1)
    shapes = [(13, 2, 4), (15, 1, 4), (15, 1, 3), (3, 2, 6, 7)]
    arrays, vector = (
        tuple(jnp.asarray(rng.standard_normal(shape)) for shape in shapes) for _ in range(2)
    )

    def ours(*arrays: Any):
        attention: Any = jax_memeff.varlen_attention
        query, key, value, bias = arrays
        return attention(
            query, key, value, STARTS_Q, STARTS_K, 6, 7, bias, return_residual=True, is_causal=True
        )

    def materialized(query, key, value, bias):
        valid, scores = np.zeros((1, 2, 13, 15), bool), jnp.zeros((1, 2, 13, 15))
        bounds = zip(itertools.pairwise(STARTS_Q), itertools.pairwise(STARTS_K), strict=True)
        for sequence, ((row, last_row), (col, last_col)) in enumerate(bounds):
            here = (slice(None), slice(None), slice(row, last_row), slice(col, last_col))
            size = last_row - row, last_col - col
            valid[here] = np.tri(*size, dtype=bool)
            own = bias[sequence, :, : size[0], : size[1]]
            scores = scores.at[here].set(own)
        query, key, value = query[None], key[None], value[None]
        out, lse = oracle.formula(query, key, value, scores, oracle.NO_SINKS, valid, 1.0, 0.5, None)
        return out[0], lse[0]

    got = compiled(hessian_vector_products, ours, arrays, vector)
    want, _ = compiled(hessian_vector_products, materialized, arrays, vector)
    assert_close(got, (want, want), 1e-10)


def test_packed_projections(x64, assert_close):
    rng = np.random.default_rng(2)
    shapes = [(2, 9, 3, 2, 4), (1, 2, 9, 9)]
    arrays, vector = (
        tuple(jnp.asarray(rng.standard_normal(shape)) for shape in shapes) for _ in range(2)
    )

    def ours(qkv, bias):
        attention: Any = jax_memeff.dot_product_attention_packed
        return attention(qkv, bias, return_residual=True)

    def materialized(qkv, bias):
        query, key, value = jnp.unstack(qkv, axis=2)
        valid = np.ones((2, 2, 9, 9), bool)
        return oracle.formula(query, key, value, bias, oracle.NO_SINKS, valid, 1.0, 0.5, None)

    want, _ = compiled(hessian_vector_products, materialized, arrays, vector)
    assert_close(compiled(hessian_vector_products, ours, arrays, vector), (want, want), 1e-10)


QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 2, 20, 2, 8))


def attend(*arrays: Any, **features: Any) -> Any:
    return jax_memeff.dot_product_attention(*arrays, **features)


@pytest.mark.quick
def test_only_the_context_has_forward_mode():
    """Programs that were compiled inside the context are not used outside, and vice versa."""
    attention = jax.jit(attend)
    arrays, vector = (QUERY, KEY, VALUE), (KEY, VALUE, QUERY)
    for _ in range(2):
        with pytest.raises(TypeError, match="forward_mode"):
            jax.jvp(attention, arrays, vector)
        with jax_memeff.forward_mode():
            jax.jvp(attention, arrays, vector)


def test_reverse_mode_is_the_same_in_the_context():
    def gradients(*arrays):
        return jax.grad(lambda *x: jnp.sum(attend(*x, is_causal=True) ** 2), (0, 1, 2))(*arrays)

    def run():
        return jax.jit(gradients, compiler_options=UNOPTIMISED)(QUERY, KEY, VALUE)

    want = run()
    with jax_memeff.forward_mode():
        got = run()
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_values_beyond_the_lengths_reach_no_derivative():
    query, key, value = (x.at[:, 13:].set(jnp.nan) for x in (QUERY, KEY, VALUE))
    clean = [x.at[:, 13:].set(0) for x in (QUERY, KEY, VALUE)]

    def ours(*arrays):
        lengths = jnp.array([13, 5])
        return attend(
            *arrays, query_seq_lengths=lengths, key_value_seq_lengths=lengths, return_residual=True
        )

    got = compiled(hessian_vector_products, ours, (query, key, value), (query, key, value))
    want = compiled(hessian_vector_products, ours, tuple(clean), tuple(clean))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("order", ["reverse over reverse", "forward mode"])
def test_memory_is_linear(order):
    """No array of a compiled derivative grows faster than the sequence."""

    def derivative(*arrays):
        gradient = jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x, is_causal=True))), (0, 1, 2))
        if order == "forward mode":
            with jax_memeff.forward_mode():
                return jax.jvp(lambda *x: attend(*x, is_causal=True), arrays, arrays)[1]
        return jax.grad(lambda *x: sum(map(jnp.vdot, gradient(*x), arrays)), (0, 1, 2))(*arrays)

    def bytes_at(length: int) -> int:
        array = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
        compiled: Any = (
            jax.jit(derivative, compiler_options=UNOPTIMISED).lower(*[array] * 3).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_at(512) < 2.2 * bytes_at(256)


def test_empty_problems_have_derivatives():
    empty = jnp.zeros((2, 0, 2, 8))
    arrays = (QUERY, empty, empty)
    with jax_memeff.forward_mode():
        out, tangent = jax.jvp(attend, arrays, arrays)
    assert not out.any() and not tangent.any()
    gradients = jax.grad(lambda *x: jnp.sum(jax.grad(lambda *y: jnp.sum(attend(*y)))(*x)))(*arrays)
    assert not gradients.any()


def test_maps_of_calls_with_an_empty_batch():
    """Hazard: an array that is mapped alone would be repeated for 0 batch indices."""

    def loss(query, slopes):
        return jnp.sum(attend(query, query, query, score_mod=lambda s, b, h, q, k: s * slopes[h]))

    arrays = jnp.ones((3, 0, 5, 2, 8)), jnp.ones((3, 2))
    gradients = jax.vmap(jax.grad(loss, (0, 1)))(*arrays)
    assert [x.shape for x in gradients] == [x.shape for x in arrays]
    assert not gradients[1].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_derivatives_have_the_dtypes_of_what_they_are_of(dtype):
    arrays = (*(x.astype(dtype) for x in (QUERY, KEY, VALUE)), jnp.ones((1, 1, 20, 20)))

    def function(*arrays):
        return attend(*arrays, return_residual=True)

    def forward(*arrays):
        with jax_memeff.forward_mode():
            return jax.jvp(function, arrays, arrays)

    results, tangents = jax.eval_shape(forward, *arrays)
    assert [x.dtype for x in results] == [x.dtype for x in tangents] == [dtype, jnp.float32]
    products = jax.eval_shape(lambda *x: hessian_vector_products(function, x, x), *arrays)
    for product in products:
        assert [x.dtype for x in product] == [dtype] * 3 + [jnp.float32]


def test_inside_shard_map(assert_close):
    """Queries are sharded over the mesh; keys and values are not."""
    mesh = jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Auto,))
    split, whole = jax.P("batch"), jax.P()
    keys = KEY[:1], VALUE[:1]

    def local(*arrays):
        return attend(*arrays, is_causal=True)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(split, whole, whole), out_specs=split)

    def reference(query, key, value):
        return local(query, *(jnp.broadcast_to(x, (2, *x.shape[1:])) for x in (key, value)))

    def products(function):
        def both(*arrays):
            return function(*arrays), jnp.zeros(())

        return compiled(hessian_vector_products, both, (QUERY, *keys), (QUERY, *keys))

    assert_close(products(sharded), products(reference), 1e-5)
