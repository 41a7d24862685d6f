"""The largest logits through every public function, against the scores by their definition."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from arrays import changed, normal
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, dot_product_attention

B, T, S, N, K, H = 2, 24, 30, 4, 2, 8
LENGTHS: Any = np.array([24, 9]), np.array([0, 30])
SINKS = np.array([0.5, -np.inf, 30.0, -40.0], np.float32)


QUERY, KEY, VALUE = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
BIAS = changed(normal(3, 1, N, T, S), np.s_[:, 2], -np.inf)
ROW_BIAS = changed(normal(4, B, N, T, 1), np.s_[:, 1, 3:], -np.inf)


def defined(query, key, mask=None, bias=None, scale=None, soft_cap=None):
    """The largest logits [B, N] by the definition, in float64."""
    mask = Mask() if mask is None else mask
    batch, rows, heads, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    with jax.enable_x64(True):
        added = jnp.zeros(()) if bias is None else jnp.asarray(bias, jnp.float64)
        query, key = (jnp.asarray(x, jnp.float64) for x in (query, key))
        scores_of = jax.jit(oracle.scores_of, static_argnums=(3, 4))
        scores = np.asarray(scores_of(query, key, added, scale, soft_cap))
    valid = oracle.valid_elements(mask, batch, heads, rows, key.shape[1])
    return np.where(valid, scores, -np.inf).max((2, 3))


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"scale": -0.7, "mask": Mask.causal() & Mask.lengths(*LENGTHS)},
        {"bias": BIAS, "soft_cap": 0.7, "mask": Mask.window(3, 2)},
        {"bias": ROW_BIAS, "mask": Mask.lengths(*LENGTHS)},
        {"mask": Mask.boolean(np.random.default_rng(5).random((B, 1, T, S)) < 0.3)},
    ],
    ids=["plain", "causal", "bias", "row_bias", "boolean"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_definition(features, dtype, x64):
    query, key, value = (x.astype(dtype) for x in (QUERY, KEY, VALUE))
    call = {name: x for name, x in features.items() if name not in ("bias", "soft_cap")}
    bias = features.get("bias")
    out, lse, largest = dot_product_attention(
        query,
        key,
        value,
        None if bias is None else bias.astype(dtype),
        logits_soft_cap=features.get("soft_cap"),
        return_residual=True,
        return_max_logits=True,
        **call,
    )
    assert (out.dtype, lse.shape, largest.shape) == (query.dtype, (B, T, N), (B, N))
    assert largest.dtype == lse.dtype == ("float64" if dtype == "float64" else "float32")
    if bias is not None:
        features = {**features, "bias": bias.astype(dtype)}
    tolerance = 1e-12 if dtype == "float64" else 2e-6
    np.testing.assert_allclose(largest, defined(query, key, **features), tolerance, tolerance)


def test_results_are_those_without():
    plain = dot_product_attention(QUERY, KEY, VALUE, is_causal=True, return_residual=True)
    *others, _ = dot_product_attention(
        QUERY, KEY, VALUE, is_causal=True, return_residual=True, return_max_logits=True
    )
    out, _ = dot_product_attention(QUERY, KEY, VALUE, is_causal=True, return_max_logits=True)
    jax.tree.map(np.testing.assert_array_equal, (*others, out), (*plain, plain[0]))


def test_heads_without_a_valid_score():
    """Sinks are no scores, neither in rows without keys nor if they exceed all scores."""
    features: Any = {"sinks": SINKS, "mask": Mask.lengths(*LENGTHS), "return_max_logits": True}
    _, largest = dot_product_attention(QUERY, KEY, VALUE, BIAS, **features)
    np.testing.assert_array_equal(largest[0], -np.inf)
    np.testing.assert_array_equal(largest[1, 2], -np.inf)
    wanted = defined(QUERY, KEY, features["mask"], BIAS)
    np.testing.assert_allclose(largest, wanted, 2e-6)


@pytest.mark.parametrize(("rows", "columns"), [(0, S), (T, 0)])
def test_empty_sequences(rows, columns):
    out, largest = dot_product_attention(
        QUERY[:, :rows], KEY[:, :columns], VALUE[:, :columns], return_max_logits=True
    )
    assert out.shape == (B, rows, N, H)
    np.testing.assert_array_equal(largest, np.full((B, N), -np.inf))


def test_without_a_batch():
    out, largest = dot_product_attention(QUERY[0], KEY[0], VALUE[0], return_max_logits=True)
    assert out.shape == (T, N, H)
    np.testing.assert_allclose(largest, defined(QUERY, KEY)[0], 2e-6)


def test_gradients_are_those_without():
    """The maxima have no gradient, of first or second order, in reverse or forward mode."""

    def loss(query, key, factor):
        out, largest = dot_product_attention(query, key, VALUE, return_max_logits=True)
        return jnp.sum(jnp.sin(out)) + factor * jnp.sum(largest), largest

    def plain(query, key):
        return jnp.sum(jnp.sin(dot_product_attention(query, key, VALUE)))

    got, largest = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(QUERY, KEY, 100.0)
    jax.tree.map(np.testing.assert_array_equal, got, jax.jit(jax.grad(plain, (0, 1)))(QUERY, KEY))
    np.testing.assert_allclose(largest, defined(QUERY, KEY), 2e-6)

    def hessian_vector(function):
        return jax.jit(jax.grad(lambda query: jnp.vdot(jax.grad(function)(query), QUERY)))(QUERY)

    second = hessian_vector(lambda query: loss(query, KEY, 100.0)[0])
    np.testing.assert_allclose(second, hessian_vector(lambda query: plain(query, KEY)), 1e-5, 1e-6)
    with jax_memeff.forward_mode():
        _, (_, tangent) = jax.jit(
            lambda query: jax.jvp(lambda query: loss(query, KEY, 100.0), [query], [query])
        )(QUERY)
    np.testing.assert_array_equal(tangent, 0)


def test_checkpointed():
    """A policy that saves output and logsumexp runs no second forward for the maxima."""

    @functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_only_these_names("jax_memeff_out", "jax_memeff_lse"),
    )
    def attend(query):
        return dot_product_attention(query, KEY, VALUE, return_max_logits=True)

    def loss(query):
        out, largest = attend(query)
        return jnp.sum(jnp.sin(out)), largest

    program = str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(QUERY))
    assert program.count("attention_fwd[") == 1


@pytest.mark.parametrize("mapped", ["query", "key", "both"])
def test_vmap(mapped):
    query = jnp.stack([QUERY, 2 * QUERY]) if mapped != "key" else QUERY
    key = jnp.stack([KEY, -KEY]) if mapped != "query" else KEY
    axes = (0 if mapped != "key" else None, 0 if mapped != "query" else None)

    def attend(query, key):
        return dot_product_attention(query, key, VALUE, return_max_logits=True)[1]

    got = jax.jit(jax.vmap(attend, axes))(query, key)
    queries, keys = (jnp.broadcast_to(x, (2, *x.shape[-4:])) for x in (query, key))
    np.testing.assert_allclose(got, [defined(*x) for x in zip(queries, keys, strict=True)], 2e-6)


def test_packed_sequences():
    """Maxima are per sequence, -inf without tokens; tokens of no sequence do not count."""
    starts_q, starts_k = np.array([1, 6, 6, 14, 15]), np.array([0, 7, 9, 9, 11])
    query, key, value = normal(7, 17, N, H), normal(8, 12, K, H), normal(9, 12, K, H)
    # Tokens 0, 5, 15 and 16 of the query are in no sequence.
    query = query.at[np.array([0, 5, 15, 16])].multiply(1e3)

    @jax.jit
    def packed(query, key, value, starts_q, starts_k):
        return jax_memeff.varlen_attention(
            query, key, value, starts_q, starts_k, 4, 7, return_residual=True, sinks=SINKS,
            return_max_logits=True,
        )  # fmt: skip

    out, lse, largest = packed(query, key, value, starts_q, starts_k)
    assert (out.shape, lse.shape, largest.shape) == ((17, N, H), (17, N), (4, N))
    wanted = np.full((4, N), -np.inf)
    wanted[0] = defined(query[None, 1:5], key[None, :7])[0]
    wanted[3] = defined(query[None, 14:15], key[None, 9:11])[0]
    np.testing.assert_allclose(largest, wanted, 2e-6)


def test_one_array_of_query_key_and_value():
    qkv = normal(10, B, T, 3, N, H)
    out, lse, largest = jax_memeff.dot_product_attention_packed(
        qkv, return_residual=True, return_max_logits=True
    )
    separate = dot_product_attention(
        *jnp.unstack(qkv, axis=2), return_residual=True, return_max_logits=True
    )
    jax.tree.map(np.testing.assert_array_equal, (out, lse, largest), separate)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("data", None, "tensor"), P(None, ("data", "tensor"))])
def test_sharded(axis_type, spec):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    of_keys = spec if spec[0] else P()
    arrays = [
        jax.device_put(x, NamedSharding(mesh, own))
        for x, own in ((QUERY, spec), (KEY, of_keys), (VALUE, of_keys))
    ]

    @jax.jit
    def attend(query, key, value):
        return dot_product_attention(
            query, key, value, is_causal=True, return_residual=True, return_max_logits=True
        )

    with jax.set_mesh(mesh):
        got = attend(*arrays)
    for x, want in zip(got, attend(QUERY, KEY, VALUE), strict=True):
        np.testing.assert_allclose(x, want, 1e-5, 1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_packed_sequences_with_sharded_heads(axis_type):
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(axis_type,))
    starts = np.array([0, 9, 9, 24])
    arrays = [x.reshape(-1, *x.shape[2:])[:24] for x in (QUERY, KEY, VALUE)]
    sharded = [jax.device_put(x, NamedSharding(mesh, P(None, "tensor"))) for x in arrays]

    @jax.jit
    def attend(query, key, value):
        return jax_memeff.varlen_attention(
            query, key, value, starts, starts, 15, 15, return_max_logits=True
        )

    with jax.set_mesh(mesh):
        got = attend(*sharded)
    for x, want in zip(got, attend(*arrays), strict=True):
        np.testing.assert_allclose(x, want, 1e-5, 1e-6)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("method", "layout", "features"),
    [
        ("ring", "contiguous", {}),
        ("ring", "zigzag", {"is_causal": True, "sinks": SINKS}),
        ("ring", "zigzag", {"bias": ROW_BIAS, "query_seq_lengths": np.array([24, 0])}),
        ("all_gather", "zigzag", {"is_causal": True}),
        ("all_to_all", "contiguous", {"query_seq_lengths": np.array([24, 0])}),
        ("all_to_all", "zigzag", {"is_causal": True}),
    ],
)
def test_ring(method, layout, features):
    """Every device has the same result: the out_specs name no axis, so the type guarantees it."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("ring",))
    key, value = (x[:, :T] for x in (KEY, VALUE))
    bias = [features["bias"]] if "bias" in features else []
    others = {name: x for name, x in features.items() if name != "bias"}
    local = functools.partial(
        jax_memeff.ring_attention,
        axis_name="ring",
        method=method,
        layout=layout,
        return_residual=True,
        return_max_logits=True,
        **others,
    )

    def ordered(x, axis=1):
        return jax_memeff.zigzag(x, axis, 4) if layout == "zigzag" else x

    rows = P(None, "ring")
    ring = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, rows, rows, *[P(None, None, "ring")] * len(bias)),
        out_specs=(rows, rows, P()),
    )

    def loss(query):
        out, lse, largest = ring(
            ordered(query), ordered(key), ordered(value), *(ordered(x, 2) for x in bias)
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(largest), (ordered(out), lse, largest)

    def one_device(query):
        out, lse, largest = dot_product_attention(
            query, key, value, *bias, return_residual=True, return_max_logits=True, **others
        )
        return jnp.sum(jnp.sin(out)), (out, lse, largest)

    got, want = (
        jax.jit(jax.grad(function, has_aux=True))(QUERY) for function in (loss, one_device)
    )
    np.testing.assert_allclose(got[0], want[0], 1e-4, 1e-5)
    np.testing.assert_allclose(got[1][2], want[1][2], 2e-6)


def test_check_takes_the_argument():
    jax_memeff.check(QUERY, KEY, VALUE, return_max_logits=True)


@pytest.mark.parametrize(
    "function", [dot_product_attention, jax_memeff.dot_product_attention_packed]
)
@pytest.mark.parametrize("value", [None, "yes", 2, np.ones(2, bool)])
def test_bad_values(function, value):
    arrays = (
        (QUERY, KEY, VALUE) if function is dot_product_attention else (normal(1, B, T, 3, N, H),)
    )
    with pytest.raises((TypeError, ValueError), match="return_max_logits"):
        function(*arrays, return_max_logits=value)
