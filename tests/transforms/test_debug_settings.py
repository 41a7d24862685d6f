"""The settings of JAX that look for mistakes in programs find none in the library."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, dot_product_attention

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (jnp.asarray(x, jnp.float32) for x in RNG.standard_normal((3, 2, 40, 2, 8)))
SLOPES, LENGTHS = jnp.asarray([0.5, 2.0]), jnp.asarray([30, 0])
STARTS = jnp.asarray([0, 10, 25])
POOL = jnp.zeros((5, 16, 2, 8))
TABLE = np.array([[0, 1], [2, -1]])
LISTS, COUNTS = jnp.asarray([[0, -1], [1, 0], [2, 2]]), jnp.asarray([1, 2, 2])


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES[h] * (k - q).astype(jnp.float32)


def of_lengths(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < LENGTHS[b]


def packed(query: Any, key: Any, value: Any) -> Any:
    arrays = query[0], key[0], value[0]
    return jax_memeff.varlen_attention(
        *arrays, STARTS, STARTS, 15, 15, return_residual=True, return_max_logits=True
    )


def paged(query: Any, key: Any, value: Any) -> Any:
    pool = POOL.astype(key.dtype)
    pools = jax_memeff.append_to_pages(pool, pool, key[:, :1], value[:, :1], TABLE, LENGTHS)
    return jax_memeff.paged_attention(query[:, :1], *pools, TABLE, LENGTHS, score_mod=alibi)


def paged_rows(query: Any, key: Any, value: Any) -> Any:
    pool, mask = POOL.astype(key.dtype), jnp.ones((1, 1, 8, 32), bool)
    del value
    return jax_memeff.paged_attention(query[:, :8], pool, pool, TABLE, LENGTHS, mask=mask)


def blocks(query: Any, key: Any, value: Any) -> Any:
    mask = (Mask.causal() | Mask.function(of_lengths)).blocks(query, key)
    return dot_product_attention(query, key, value, mask=mask)


def padded_rows(query: Any, key: Any, value: Any) -> Any:
    sinks = SLOPES.astype(query.dtype)
    return dot_product_attention(query, key, value, query_seq_lengths=LENGTHS, sinks=sinks)


def packed_row_bias(query: Any, key: Any, value: Any) -> Any:
    arrays = query[0], key[0], value[0]
    bias = query[:, :1, :, :1].transpose(0, 2, 1, 3)
    return jax_memeff.varlen_attention(*arrays, STARTS, STARTS, 15, 15, bias, return_residual=True)


def ring(query: Any, key: Any, value: Any) -> Any:
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("s",))
    attend = functools.partial(jax_memeff.ring_attention, axis_name="s", layout="zigzag")
    attend = functools.partial(attend, query_seq_lengths=LENGTHS, sinks=SLOPES.astype(query.dtype))
    spec = jax.sharding.PartitionSpec(None, "s")
    return jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)(query, key, value)


KEYS = jnp.asarray(RNG.integers(-1, 45, (2, 40, 6)))


def keys(query: Any, key: Any, value: Any) -> Any:
    """With every feature whose elements follow the lists."""
    return dot_product_attention(
        query,
        key,
        value,
        query[:, :1, :, :1].transpose(0, 2, 1, 3),
        Mask.keys(KEYS)
        & Mask.segments(KEYS[0, :, 0], KEYS[1, :, 0])
        & Mask.boolean(KEYS[0, :, :1] > 4),
        score_mod=alibi,
        key_value_seq_lengths=LENGTHS,
        is_causal=True,
        dropout_rate=0.5,
        dropout_key=jax.random.key(0),
        offsets=jax_memeff.Offsets(query=LENGTHS, key=3),
    )


def paged_keys(query: Any, key: Any, value: Any) -> Any:
    pool, scale = POOL.astype(jnp.float8_e4m3fn), jnp.ones((5, 2), jnp.float32)
    lists = KEYS[None, :, :8]
    arguments = {"key_scale": scale, "value_scale": scale[0], "mask": Mask.keys(lists)}
    return jax_memeff.paged_attention(query[:, :8], pool, pool, TABLE, LENGTHS, **arguments)


CALLS: dict[str, Any] = {
    "ring": ring,
    "padded_rows": padded_rows,
    "packed_row_bias": packed_row_bias,
    "lengths": lambda *x: dot_product_attention(*x, key_value_seq_lengths=LENGTHS, is_causal=True),
    "function": lambda *x: dot_product_attention(*x, score_mod=alibi),
    "lists": lambda *x: dot_product_attention(
        *x, mask=Mask.kv_blocks(LISTS, COUNTS, block_size=16)
    ),
    "keys": keys,
    "blocks": blocks,
    "packed": packed,
    "paged": paged,
    "paged_rows": paged_rows,
    "paged_keys": paged_keys,
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.mark.rotating(3)
@every_call
@pytest.mark.parametrize("wide", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_promotion(call, dtype, wide):
    with (
        jax.enable_x64(wide),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        jax.jit(call).lower(*(x.astype(dtype) for x in (QUERY, KEY, VALUE)))


@pytest.mark.rotating(3)
@every_call
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_promotion_of_derivatives(call, dtype):
    if call in (paged, paged_rows, paged_keys):
        pytest.skip("paged_attention has no gradient")

    def loss(*arrays):
        return sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(call(*arrays)))

    def of_gradient(*arrays):
        return jax.jvp(jax.grad(loss, (0, 1, 2)), arrays, arrays)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.jit(of_gradient).lower(*(x.astype(dtype) for x in (QUERY, KEY, VALUE)))


@pytest.mark.rotating(3)
@every_call
def test_without_jit(assert_close, call):
    with jax.disable_jit():
        got = call(QUERY, KEY, VALUE)
    assert_close(got, jax.jit(call)(QUERY, KEY, VALUE), 1e-6)


def test_derivatives_without_jit(assert_close):
    def gradient(query):
        return jax.grad(lambda query: CALLS["lengths"](query, KEY, VALUE).sum())(query)

    with jax.disable_jit():
        got = jax.jvp(gradient, [QUERY], [VALUE])
    assert_close(got, jax.jvp(gradient, [QUERY], [VALUE]), 1e-5)


def test_no_tracer_leaks():
    def loss(slopes):
        def function(score, b, h, q, k):
            return score * slopes[h]

        return dot_product_attention(QUERY, KEY, VALUE, score_mod=function).sum()

    with jax.checking_leaks():
        jax.jit(jax.grad(loss)).lower(SLOPES)
