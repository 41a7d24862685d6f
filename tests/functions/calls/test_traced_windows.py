"""``Mask.window`` with traced bounds: the results of static bounds, in every kind of call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention

B, T, S, N, H = 2, 32, 48, 2, 8
LENGTHS = Mask.lengths(np.array([32, 9]), np.array([20, 48]))
BOUNDS = [(5, 0), (40, -2), (0, 7)]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr("jax_memeff._blockwise.tiles.LONGEST_BLOCK", 16)


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


QUERY, KEY, VALUE = draw(0, B, T, N, H), draw(1, B, S, N, H), draw(2, B, S, N, H)


def gradient(left: Any, right: Any, alignment: Any = "top_left", more=LENGTHS, **arguments: Any):
    mask = Mask.window(left, right, alignment) & more

    def loss(query):
        out = dot_product_attention(query, KEY, VALUE, mask=mask, **arguments)
        return jnp.sum(out * out), out

    (_, out), dquery = jax.value_and_grad(loss, has_aux=True)(QUERY)
    return out, dquery


@pytest.mark.rotating(3)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_the_static_window(alignment, bounds, assert_close):
    offsets = Offsets(query=8, key=2)
    attend = functools.partial(gradient, alignment=alignment, offsets=offsets)
    assert_close(jax.jit(attend)(*map(jnp.int32, bounds)), attend(*bounds), 1e-6)
    # One traced and one static bound.
    one = jax.jit(lambda left: attend(left, bounds[1]))
    assert_close(one(bounds[0]), attend(*bounds), 1e-6)


def test_vmap_and_scan(assert_close):
    lefts = jnp.array([3, 2**31 - 1, 9])
    want = [gradient(left, 0, "bottom_right") for left in (3, None, 9)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *want)
    one = functools.partial(gradient, right=0, alignment="bottom_right")
    assert_close(jax.vmap(one)(lefts), want, 1e-6)
    assert_close(jax.lax.scan(lambda c, left: (c, one(left)), None, lefts)[1], want, 1e-6)


def test_under_or(assert_close):
    def attend(left):
        return gradient(None, 0, more=LENGTHS & ~Mask.window(left, 0, "bottom_right"))

    assert_close(jax.jit(attend)(4), attend(4), 1e-6)


def test_packed_sequences(assert_close):
    starts = np.array([0, 10, 32])
    query, key, value = QUERY[0], KEY[0, :T], VALUE[0, :T]

    def attend(left):
        mask = Mask.window(left, 0, "bottom_right")
        return jax_memeff.varlen_attention(query, key, value, starts, starts, 22, 22, mask=mask)

    assert_close(jax.jit(attend)(4), attend(4), 1e-6)
    assert_close(jax.vmap(attend)(jnp.array([4, 9])), jnp.stack([attend(4), attend(9)]), 1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_rows(axis_type, assert_close):
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("data", "rows"), (axis_type,) * 2, devices=devices)
    query = jax.device_put(QUERY, NamedSharding(mesh, P("data", "rows")))
    key, value = (jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (KEY, VALUE))

    def attend(left, query, key, value):
        mask = Mask.window(left, 0, "bottom_right")
        return dot_product_attention(query, key, value, mask=mask)

    got = np.asarray(jax.jit(attend)(jnp.int32(6), query, key, value))
    assert_close(got, attend(6, QUERY, KEY, VALUE), 1e-6)


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_ring(method, assert_close):
    mesh = jax.make_mesh((2,), ("ring",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])

    def local(left, query, key, value):
        mask = Mask.window(left, 0, "bottom_right")
        return jax_memeff.ring_attention(
            query, key, value, mask=mask, axis_name="ring", method=method
        )

    rows = P(None, "ring")
    ring = jax.shard_map(local, mesh=mesh, in_specs=(P(), rows, rows, rows), out_specs=rows)
    want = dot_product_attention(QUERY, KEY, VALUE, mask=Mask.window(6, 0, "bottom_right"))
    assert_close(jax.jit(ring)(jnp.int32(6), QUERY, KEY, VALUE), want, 1e-6)


def test_decoding():
    from flax import nnx

    from jax_memeff.flax.nnx import MultiHeadAttention

    layer = MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    whole = layer(x, is_causal=True, mask=Mask.window(3, None))
    layer.init_cache(x.shape)

    @nnx.jit
    def step(layer, x, left):
        return layer(x, decode=True, mask=Mask.window(left, None))

    parts = [step(layer, x[:, i : i + 2], 3) for i in range(0, 8, 2)]
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-5)


def test_a_tile_outside_is_skipped():
    """Its keys are NaN, so computing the tile would give NaN."""
    value = jnp.concatenate([VALUE[:, :16], jnp.full_like(VALUE[:, 16:], jnp.nan)], 1)

    def attend(right):
        mask = Mask.window(None, right)
        return dot_product_attention(QUERY[:, :16], KEY, value, mask=mask)

    assert np.isfinite(jax.jit(attend)(0)).all()
