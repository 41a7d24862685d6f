"""``score_mod`` under JAX's transformations, its arrays' gradients, and errors."""

from __future__ import annotations

import itertools
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import primitives_of

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention, varlen_attention

B, T, N, H = 2, 24, 2, 8


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr("jax_memeff._blockwise.tiles.LONGEST_BLOCK", 16)


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


ARRAYS = (draw(0, B, T, N, H), draw(1, B, T, N, H), draw(2, B, T, N, H), draw(3, N, 2 * T))
COTANGENT = draw(4, B, T, N, H)


def attention(query, key, value, table, **features):
    def function(s, b, h, q, k):
        return jnp.tanh(s) + table[h, q - k + T] * (b + 1)

    arguments: Any = {"is_causal": True} | features
    return dot_product_attention(query, key, value, score_mod=function, **arguments)


def loss(*arrays):
    return jnp.vdot(attention(*arrays), COTANGENT)


gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))


def dense(query, key, value, table):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") * H**-0.5
    distance = np.arange(T)[:, None] - np.arange(T)
    factors = jnp.arange(1, B + 1)[:, None, None, None]
    scores = jnp.tanh(scores) + table[:, distance + T] * factors
    weights = jax.nn.softmax(jnp.where(distance >= 0, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "axes",
    [(None, None, None, 0), (0, None, None, None), (0, 0, 0, None), (0, 0, 0, 0)],
    ids=["table", "query", "all but table", "all"],
)
def test_vmap(axes, assert_close):
    given = tuple(
        x if axis is None else jnp.stack([x, -x / 2, x + 0.3])
        for x, axis in zip(ARRAYS, axes, strict=True)
    )
    rows = [
        tuple(x if axis is None else x[i] for x, axis in zip(given, axes, strict=True))
        for i in range(3)
    ]
    each = [gradients(*row) for row in rows]
    want = jax.tree.map(lambda *x: jnp.stack(x), *each)
    assert_close(jax.jit(jax.vmap(gradients, axes))(*given), want)

    def total(*arrays):
        return jax.vmap(loss, axes)(*arrays).sum()

    summed = tuple(x if axis == 0 else x.sum(0) for x, axis in zip(want, axes, strict=True))
    assert_close(jax.jit(jax.grad(total, (0, 1, 2, 3)))(*given), summed)


AXES_OF_SHARED = (0, 0, 0, None)
SHARED = (*(jnp.stack([x, -x / 2, x + 0.3]) for x in ARRAYS[:3]), ARRAYS[3])


def emulated_gradients() -> Any:
    """Runs in the process of ``machine``."""
    emulator.configure("sm_80", multiprocessors=2)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(gradients, AXES_OF_SHARED))(*SHARED))


@pytest.mark.rotating(3)
def test_kernels_sum_the_gradient_of_a_shared_array_in_each_mapped_call(machine, assert_close):
    """All operands of the kernel have the whole batch, and the table's gradient has not."""
    found = machine.submit(emulated_gradients).result(timeout=600)

    def dense_loss(*arrays):
        return jnp.vdot(dense(*arrays), COTANGENT)

    want = jax.vmap(jax.grad(dense_loss, (0, 1, 2, 3)), AXES_OF_SHARED)
    assert_close(found, jax.jit(want)(*SHARED), 2e-5)


def test_nested_vmap(assert_close):
    """A vmap over queries around one over tables: each batch index reads its own table."""
    queries, tables = (jnp.stack([x, -x / 2]) for x in (ARRAYS[0], ARRAYS[3]))
    _, key, value, _ = ARRAYS
    inner = jax.vmap(gradients, (None, None, None, 0))
    got = jax.vmap(inner, (0, None, None, None))(queries, key, value, tables)
    rows = [[gradients(query, key, value, table) for table in tables] for query in queries]
    want = jax.tree.map(lambda *x: jnp.stack(x).reshape(2, 2, *x[0].shape), *itertools.chain(*rows))
    assert_close(got, want)


def test_forward_mode_and_second_derivatives(assert_close):
    tangents = tuple(map(jnp.cos, ARRAYS))
    with jax_memeff.forward_mode():
        got = jax.jit(lambda *x: jax.jvp(attention, x, tangents))(*ARRAYS)
    assert_close(got, jax.jvp(dense, ARRAYS, tangents))

    def second(function):
        def first(*arrays):
            return jax.grad(lambda *x: jnp.vdot(function(*x), COTANGENT), (0, 1, 2, 3))(*arrays)

        def directional(*arrays):
            return sum(map(jnp.vdot, first(*arrays), tangents))

        return jax.jit(jax.grad(directional, (0, 1, 2, 3)))(*ARRAYS)

    assert_close(second(attention), second(dense), 2e-5)


def test_checkpoint_and_scan(assert_close):
    """Layers of a scan, each with a table of its own, recomputed in the backward."""
    query, key, value, table = ARRAYS
    tables = jnp.stack([table, -table])

    @jax.checkpoint
    def layer(x, table):
        return attention(x, key, value, table), None

    def scanned(query, tables):
        return jnp.vdot(jax.lax.scan(layer, query, tables)[0], COTANGENT)

    def unrolled(query, tables):
        for table in tables:
            query = dense(query, key, value, table)
        return jnp.vdot(query, COTANGENT)

    got, want = (jax.jit(jax.grad(f, (0, 1)))(query, tables) for f in (scanned, unrolled))
    assert_close(got, want)


@pytest.mark.parametrize("batch", ["static", "symbolic"])
def test_export(batch, assert_close):
    query, key, value, table = ARRAYS
    symbol = B if batch == "static" else jax.export.symbolic_shape("b")[0]
    shapes = [jax.ShapeDtypeStruct((symbol, *x.shape[1:]), x.dtype) for x in (query, key, value)]
    shapes.append(jax.ShapeDtypeStruct(table.shape, table.dtype))

    def function(query, key, value, table):
        mask = Mask.causal() | Mask.function(lambda b, h, q, k: k < b + 2)
        return attention(query, key, value, table, mask=mask, implementation="xla")

    exported = jax.export.export(jax.jit(function))(*shapes)
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(*ARRAYS), function(*ARRAYS))


def test_offsets_give_global_indices(assert_close):
    """A chunk of rows and heads gives that part of the whole result."""
    query, key, value, table = ARRAYS
    whole = attention(query, key, value, table)
    for rows in (slice(0, 8), slice(8, 24)):
        offsets = Offsets(batch=1, head=1, num_heads=N, query=rows.start)
        part = (x[1:, :, 1:] for x in (query[:, rows], key, value))
        got = attention(*part, table=table, offsets=offsets)
        assert_close(got, whole[1:, rows, 1:])


def test_qkv_packed(assert_close):
    query, key, value, table = ARRAYS

    def function(qkv, table):
        def score_mod(s, b, h, q, k):
            return jnp.tanh(s) + table[h, q - k + T] * (b + 1)

        out = jax_memeff.dot_product_attention_packed(qkv, score_mod=score_mod, is_causal=True)
        return jnp.vdot(out, COTANGENT)

    dqkv, dtable = jax.grad(function, (0, 1))(jnp.stack([query, key, value], 2), table)
    assert_close((*jnp.unstack(dqkv, axis=2), dtable), gradients(*ARRAYS))


def test_only_arrays_that_need_gradients_have_them():
    query, key, value, table = ARRAYS
    buckets = jnp.arange(T) // 3

    def function(table, other):
        def score_mod(s, b, h, q, k):
            return s + table[h, buckets[q] + buckets[k]] + other[q]

        return dot_product_attention(query, key, value, score_mod=score_mod).sum()

    jaxpr = jax.make_jaxpr(jax.grad(function))(table, jnp.ones(T))
    (backward,) = (
        equation
        for equation in primitives_of(jaxpr.jaxpr)
        if equation.primitive.name == "attention_bwd"
    )
    (needed,) = (x for x in (backward.params["needs_grad"].captured,) if len(x) == 3)
    assert sum(needed) == len(backward.outvars) == 1
    assert jax.grad(function)(table, jnp.ones(T)).shape == table.shape


def test_gradients_are_rounded_once():
    """1000 terms of 1 add up to 1000 in bfloat16 only if they are summed in float32."""
    length = 1000
    query = jnp.zeros((1, length, 1, 8), jnp.bfloat16)
    value = jnp.broadcast_to(
        jnp.array([1.0, -1.0] * (length // 2), jnp.bfloat16), (1, 1, 8, length)
    )
    value = value.transpose(0, 3, 1, 2)

    def function(gain):
        score_mod = lambda s, b, h, q, k: s + gain[0] * jnp.where(k % 2 == 0, 1, -1)  # noqa: E731
        out = dot_product_attention(query, query, value, score_mod=score_mod)
        return out.astype(jnp.float32).sum() / 8

    (gradient,) = jax.grad(function)(jnp.zeros(1, jnp.bfloat16))
    # d tanh(gain) / d gain for each of the rows.
    assert gradient.dtype == jnp.bfloat16 and float(gradient) == length


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_traced_scale(cap, assert_close):
    query, key, value, table = ARRAYS

    def function(query, scale, table):
        return attention(query, key, value, table, scale=scale, logits_soft_cap=cap)

    def loss(query, scale, table):
        return jnp.vdot(function(query, scale, table), COTANGENT)

    def by_query(query, scale, table):
        return loss(query * scale * H**0.5, H**-0.5, table)

    arguments = query, jnp.float32(0.3), table
    assert_close(jax.jit(function)(*arguments), function(query, 0.3, table))
    got, want = (jax.jit(jax.grad(f, (0, 1, 2)))(*arguments) for f in (loss, by_query))
    assert_close(got, want)


def test_a_traced_scale_alone(assert_close):
    query, key, value, _ = ARRAYS

    def function(scale):
        return dot_product_attention(query, key, value, scale=scale)

    assert_close(jax.jit(function)(0.7), function(0.7))
    with pytest.raises(TypeError, match="scale must be one number, got a traced array"):
        jax.jit(function)(jnp.ones(N))


def test_arrays_wider_than_the_scores(x64, assert_close):
    query, key, value, table = ARRAYS

    def function(table):
        score_mod = lambda s, b, h, q, k: s + table[h, q - k + T]  # noqa: E731
        return jnp.vdot(dot_product_attention(query, key, value, score_mod=score_mod), COTANGENT)

    wide, narrow = (jax.grad(function)(table.astype(dtype)) for dtype in ("float64", "float32"))
    assert wide.dtype == jnp.float64
    assert_close(wide, narrow)


@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (4, 0)])
def test_empty_sequences(rows, columns):
    def function(query, key, gain):
        score_mod = lambda s, b, h, q, k: s * gain  # noqa: E731
        return dot_product_attention(query, key, key, score_mod=score_mod).sum()

    arrays = jnp.ones((B, rows, N, H)), jnp.ones((B, columns, N, H)), jnp.float32(2)
    for gradient, array in zip(jax.grad(function, (0, 1, 2))(*arrays), arrays, strict=True):
        assert gradient.shape == array.shape and not gradient.any()


def test_no_array_is_as_large_as_the_scores():
    """Neither the forward nor the backward has such an array, whatever the function reads."""
    T = 4096
    query = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((2 * T,), jnp.float32)

    def function(query, table):
        score_mod = lambda s, b, h, q, k: s * jnp.cos(table[q - k + T]) + table[q]  # noqa: E731
        return dot_product_attention(query, query, query, score_mod=score_mod).sum()

    compiled = jax.jit(jax.grad(function, (0, 1))).lower(query, table).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes < T * T / 4


def test_a_score_of_minus_1e9_in_a_whole_row_is_as_with_a_bias(assert_close):
    query, key, value, _ = ARRAYS
    bias = jnp.zeros((1, 1, T, 1)).at[:, :, 3].set(-1e9)

    def by_function(query):
        score_mod = lambda s, b, h, q, k: s + bias[0, 0, q, 0]  # noqa: E731
        return dot_product_attention(query, key, value, score_mod=score_mod)

    def by_bias(query):
        full = jnp.broadcast_to(bias, (1, 1, T, T))
        return dot_product_attention(query, key, value, bias=full)

    assert_close(jax.vjp(by_function, query)[0], jax.vjp(by_bias, query)[0])
    assert_close(*(jax.vjp(f, query)[1](COTANGENT) for f in (by_function, by_bias)))


def test_the_largest_logits_contain_the_function(assert_close):
    query, key, value, _ = ARRAYS
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") * H**-0.5
    scores = jnp.where(np.tri(T, dtype=bool), 10 - scores**2, -jnp.inf)
    _, largest = dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        score_mod=lambda s, b, h, q, k: 10 - s**2,
        return_max_logits=True,
    )
    assert_close(largest, scores.max((2, 3)))


def test_sequences_count_from_their_own_start():
    query, key, value, table = (x[0] if x.ndim == 4 else x for x in ARRAYS)
    starts = np.array([0, 10, 24])

    def score_mod(s, b, h, q, k):
        return s + table[h, q - k + T] * (b + 1)

    out = varlen_attention(query, key, value, starts, starts, 14, 14, score_mod=score_mod)
    for index, (first, last) in enumerate(itertools.pairwise(starts)):
        own = (x[first:last] for x in (query, key, value))
        alone = dot_product_attention(
            *own, score_mod=lambda s, b, h, q, k, index=index: score_mod(s, index, h, q, k)
        )
        np.testing.assert_allclose(out[first:last], alone, atol=1e-6)


@pytest.mark.parametrize(
    ("score_mod", "error", "text"),
    [
        (np.ones(3), TypeError, "score_mod must be a function of"),
        (lambda s, q, k: s, TypeError, "score_mod must take"),
        (lambda s, b, h, q, k: q > k, TypeError, "Mask.function"),
        (lambda s, b, h, q, k: jnp.ones(3), ValueError, "array of shape"),
        (lambda s, b, h, q, k: s + np.ones(T)[q], TypeError, "jnp.asarray"),
    ],
    ids=["no function", "three arguments", "bool", "array", "numpy"],
)
def test_errors(score_mod, error, text):
    with pytest.raises(error, match=text):
        dot_product_attention(*ARRAYS[:3], score_mod=score_mod)
