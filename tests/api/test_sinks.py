"""Attention sinks through every public function, against the definition in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from arrays import normal
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, dot_product_attention

B, T, S, N, K, H = 2, 24, 30, 4, 2, 8
SINKS = np.array([0.5, -np.inf, 3.0, -40.0], np.float32)
LENGTHS: Any = np.array([24, 9]), np.array([0, 30])


QUERY, KEY, VALUE = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
BIAS = normal(3, 1, N, T, S)
ROW_BIAS = normal(4, B, N, T, 1)
COTANGENTS = normal(5, B, T, N, H), normal(6, B, T, N)


def defined(query, key, value, bias, sinks, valid, rows):
    """Output and logsumexp by the oracle's formula; rows beyond the lengths have no sink."""
    own = jnp.where(rows, sinks[None, :, None, None], -jnp.inf)
    bias = jnp.zeros((1, 1, 1, 1)) if bias is None else bias
    return oracle.formula(query, key, value, bias, own, valid, 1.0, query.shape[3] ** -0.5, None)


def with_gradients(function, *arrays):
    """Results, and gradients of all arrays for fixed cotangents of both results."""

    def loss(*arrays):
        out, lse = function(*arrays)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        dout, dlse = (x[: out.shape[0]].astype(out.dtype) for x in COTANGENTS)
        return jnp.vdot(out, dout) + jnp.vdot(finite, dlse), (out, lse)

    every = tuple(range(len(arrays)))
    (_, results), gradients = jax.jit(jax.value_and_grad(loss, every, has_aux=True))(*arrays)
    return results, gradients


@pytest.mark.parametrize("bias", [None, BIAS, ROW_BIAS], ids=["plain", "bias", "row_bias"])
def test_the_definition(bias, x64, assert_close):
    mask = Mask.causal() & Mask.lengths(*LENGTHS)
    valid = oracle.valid_elements(mask, B, N, T, S)
    rows = (np.arange(T) < LENGTHS[0][:, None])[:, None, :, None]
    arrays = [jnp.asarray(x, jnp.float64) for x in (QUERY, KEY, VALUE)]
    arrays += [jnp.asarray(SINKS), *([] if bias is None else [jnp.asarray(bias, jnp.float64)])]

    def ours(query, key, value, sinks, *bias):
        return dot_product_attention(
            query, key, value, *bias, mask=mask, sinks=sinks, return_residual=True
        )

    def by_definition(query, key, value, sinks, *bias):
        own = bias[0] if bias else None
        return defined(query, key, value, own, jnp.asarray(sinks, jnp.float64), valid, rows)

    got, want = (with_gradients(function, *arrays) for function in (ours, by_definition))
    assert_close(got[0], want[0], 1e-12)
    # The sinks are float32.
    assert_close(got[1][:3], want[1][:3], 1e-12)
    assert_close(got[1][3:], want[1][3:], 1e-6)


def test_a_row_without_keys_has_the_sink_as_logsumexp():
    out, lse = dot_product_attention(
        QUERY,
        KEY,
        VALUE,
        sinks=SINKS,
        query_seq_lengths=LENGTHS[0],
        key_value_seq_lengths=LENGTHS[1],
        return_residual=True,
    )
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_allclose(lse[0], np.broadcast_to(SINKS, (T, N)))
    np.testing.assert_array_equal(lse[1, 9:], -np.inf)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sink_of_minus_infinity_is_none_exactly(dtype):
    arrays = [x.astype(dtype) for x in (QUERY, KEY, VALUE)]
    none = jnp.full(N, -jnp.inf)
    with_sinks = dot_product_attention(*arrays, sinks=none, return_residual=True)
    without = dot_product_attention(*arrays, return_residual=True)
    for got, want in zip(with_sinks, without, strict=True):
        np.testing.assert_array_equal(got, want)


def test_sinks_far_beyond_the_scores_do_not_overflow():
    sinks = np.array([1e4, -1e4, 200.0, 88.0], np.float32)
    out, lse = dot_product_attention(QUERY, KEY, VALUE, sinks=sinks, return_residual=True)
    plain, plain_lse = dot_product_attention(QUERY, KEY, VALUE, return_residual=True)
    np.testing.assert_array_equal(out[:, :, 0], 0)
    np.testing.assert_allclose(lse[:, :, [0, 2, 3]], np.broadcast_to(sinks[[0, 2, 3]], (B, T, 3)))
    np.testing.assert_array_equal(out[:, :, 1], plain[:, :, 1])
    np.testing.assert_array_equal(lse[:, :, 1], plain_lse[:, :, 1])


@pytest.mark.parametrize("bias", [None, ROW_BIAS], ids=["plain", "row_bias"])
def test_a_sink_of_infinity_is_the_limit_of_large_ones(bias, assert_close):
    """It takes the whole row: the keys have no gradient, and it has that of the logsumexp."""
    out, lse = dot_product_attention(
        QUERY, KEY, VALUE, sinks=jnp.full(N, jnp.inf), return_residual=True
    )
    assert not out.any() and (lse == np.inf).all()

    def loss(query, key, value, sinks):
        out, lse = dot_product_attention(query, key, value, bias, sinks=sinks, return_residual=True)
        return jnp.vdot(out, COTANGENTS[0]) + jnp.vdot(lse, COTANGENTS[1])

    @jax.jit
    def derivatives(sinks):
        arrays = (QUERY, KEY, VALUE, sinks)
        tangents = QUERY, KEY, VALUE, jnp.ones(N)
        gradient = jax.grad(loss, (0, 1, 2, 3))
        with jax_memeff.forward_mode():
            tangent = jax.jvp(loss, arrays, tangents)[1]
        return gradient(*arrays), tangent, jax.jvp(gradient, arrays, tangents)[1]

    large, *others = (derivatives(jnp.array([sink, -np.inf, 3, 0])) for sink in (1e3, 1e9, np.inf))
    for found in others:
        assert_close(found, large, 1e-5)
    np.testing.assert_allclose(large[0][3][0], COTANGENTS[1][..., 0].sum(), rtol=1e-5)


def test_dropout_leaves_the_sinks(assert_close):
    """Sinks take part in the softmax; kept probabilities are scaled by 1 / (1 - rate)."""
    features: Any = {"dropout_rate": 0.5, "dropout_key": jax.random.key(3), "return_residual": True}
    out, lse = dot_product_attention(QUERY, KEY, VALUE, sinks=SINKS, **features)
    plain, plain_lse = dot_product_attention(QUERY, KEY, VALUE, **features)
    share = jnp.exp(plain_lse - lse)
    assert_close(out, plain * share[..., None], 1e-6)


@pytest.mark.parametrize("mapped", ["sinks", "query", "both"])
def test_vmap(mapped, assert_close):
    """Mapped sinks join the batch, and each call has its own gradient."""
    sinks = jnp.stack([jnp.asarray(SINKS), jnp.asarray(SINKS) + 1])
    query = jnp.stack([QUERY, 2 * QUERY])
    axes = (0 if mapped != "sinks" else None, 0 if mapped != "query" else None)

    def attend(query, sinks):
        return with_gradients(
            lambda query, sinks: dot_product_attention(
                query, KEY, VALUE, sinks=sinks, return_residual=True
            ),
            query,
            sinks,
        )

    own = (query if axes[0] == 0 else QUERY, sinks if axes[1] == 0 else sinks[0])
    got = jax.jit(jax.vmap(attend, axes))(*own)
    each = [
        attend(own[0] if axes[0] is None else own[0][i], own[1] if axes[1] is None else own[1][i])
        for i in range(2)
    ]
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *each), 1e-5)


def test_packed_sequences(assert_close):
    """Tokens of no sequence have no sink either."""
    starts_q, starts_k = np.array([1, 6, 6, 14]), np.array([0, 7, 9, 9])
    query, key, value = normal(7, 15, N, H), normal(8, 11, K, H), normal(9, 11, K, H)

    def packed(query, key, value, sinks):
        return jax_memeff.varlen_attention(
            query, key, value, starts_q, starts_k, 8, 7, sinks=sinks, return_residual=True
        )

    def padded(query, key, value, sinks):
        out, lse = jnp.zeros((15, N, H)), jnp.full((15, N), -jnp.inf)
        for (row, end), (column, last) in (((1, 6), (0, 7)), ((6, 14), (9, 9))):
            rows, columns = slice(row, end), slice(column, last)
            own = dot_product_attention(
                query[rows], key[columns], value[columns], sinks=sinks, return_residual=True
            )
            out, lse = out.at[rows].set(own[0]), lse.at[rows].set(own[1])
        return out, lse

    def loss(function, *arrays):
        out, lse = function(*arrays)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(finite)), (out, lse)

    arrays = query, key, value, jnp.asarray(SINKS)
    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, function), (0, 1, 2, 3), has_aux=True))(
            *arrays
        )
        for function in (packed, padded)
    )
    assert_close(got, want, 1e-5)


def test_one_array_of_query_key_and_value(assert_close):
    qkv = normal(10, B, T, 3, N, H)

    def together(qkv, sinks):
        return jax_memeff.dot_product_attention_packed(qkv, sinks=sinks, return_residual=True)

    def separate(qkv, sinks):
        return dot_product_attention(*jnp.unstack(qkv, axis=2), sinks=sinks, return_residual=True)

    arrays = qkv, jnp.asarray(SINKS)
    got, want = (with_gradients(function, *arrays) for function in (together, separate))
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("of_heads", [True, False])
def test_sharded(axis_type, of_heads, assert_close):
    """Sinks are replicated or sharded like the heads; their gradient is summed over the batch."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    projections, own = P("data", None, "tensor"), P("tensor") if of_heads else P()
    arrays = [
        *(jax.device_put(x, NamedSharding(mesh, projections)) for x in (QUERY, KEY, VALUE)),
        jax.device_put(jnp.asarray(SINKS), NamedSharding(mesh, own)),
    ]

    def loss(query, key, value, sinks):
        out, lse = dot_product_attention(query, key, value, sinks=sinks, return_residual=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(lse))

    every = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    with jax.set_mesh(mesh):
        got = every(*arrays)
    assert_close(got, every(QUERY, KEY, VALUE, jnp.asarray(SINKS)), 1e-5)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("method", "layout", "features"),
    [
        ("ring", "contiguous", {}),
        ("ring", "zigzag", {"is_causal": True, "query_seq_lengths": np.array([24, 9])}),
        ("all_gather", "zigzag", {"is_causal": True}),
        ("all_to_all", "contiguous", {"query_seq_lengths": np.array([24, 9])}),
        ("ring", "zigzag", {"bias": ROW_BIAS, "query_seq_lengths": np.array([24, 9])}),
    ],
)
def test_ring(method, layout, features, assert_close):
    mesh = Mesh(np.array(jax.devices()[:4]), ("ring",))
    key, value = (x[:, :T] for x in (KEY, VALUE))
    bias = features.get("bias")
    others = {name: x for name, x in features.items() if name != "bias"}

    def ordered(x, axis):
        return jax_memeff.zigzag(x, axis, 4) if layout == "zigzag" else x

    def ring(query, key, value, sinks, *bias):
        rows = P(None, "ring")
        local = functools.partial(
            jax_memeff.ring_attention,
            axis_name="ring",
            method=method,
            layout=layout,
            return_residual=True,
            **others,
        )
        sharded = jax.shard_map(
            lambda query, key, value, sinks, *bias: local(query, key, value, *bias, sinks=sinks),
            mesh=mesh,
            in_specs=(rows, rows, rows, P(), *[P(None, None, "ring")] * len(bias)),
            out_specs=(rows, rows),
        )
        bias = [ordered(x, 2) for x in bias]
        results = sharded(*(ordered(x, 1) for x in (query, key, value)), sinks, *bias)
        if layout == "zigzag":
            return tuple(jax_memeff.unzigzag(x, 1, 4) for x in results)
        return results

    def one_device(query, key, value, sinks, *bias):
        return dot_product_attention(
            query, key, value, *bias, sinks=sinks, return_residual=True, **others
        )

    arrays = QUERY, key, value, jnp.asarray(SINKS), *([] if bias is None else [bias])
    got, want = (
        jax.jit(functools.partial(with_gradients, function))(*arrays)
        for function in (ring, one_device)
    )
    assert_close(got, want, 1e-5)


def test_only_the_gradient_of_the_sinks():
    """The backward computes no product for it."""

    @jax.jit
    def loss(sinks):
        return jnp.sum(jnp.sin(dot_product_attention(QUERY, KEY, VALUE, sinks=sinks)))

    assert "attention_bwd" not in str(jax.make_jaxpr(jax.grad(loss))(jnp.asarray(SINKS)))
    sinks, size = np.zeros(N, np.float32), 1e-2
    gradient = jax.jit(jax.grad(loss))(sinks)
    for head, step in enumerate(np.eye(N, dtype=np.float32) * size):
        slope = (loss(sinks + step) - loss(sinks - step)) / (2 * size)
        np.testing.assert_allclose(gradient[head], slope, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("sinks", "error", "text"),
    [
        (
            np.zeros(3, np.float32),
            ValueError,
            r"sinks must have shape \[N\] = \[4\], one logit for each head of query",
        ),
        (np.zeros((1, 4), np.float32), ValueError, r"sinks must have shape \[N\]"),
        (np.float32(0), ValueError, r"sinks must have shape \[N\]"),
        (np.zeros(4, np.int32), TypeError, "sinks must have the dtype of query, float32"),
        (np.zeros(4, np.float16), TypeError, "sinks must have the dtype of query, float32"),
        ([[0.0], [1.0, 2.0]], (TypeError, ValueError), "sinks"),
    ],
)
def test_bad_sinks(sinks, error, text):
    with pytest.raises(error, match=text):
        dot_product_attention(QUERY, KEY, VALUE, sinks=sinks)
