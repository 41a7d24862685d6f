"""Paged calls over several devices: tensor parallelism over heads, and sequences over devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_case import gathered, refused_or_gathered

HOST = jax.devices("cpu")[:8]
auto_and_explicit = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


@functools.cache
def case(batch=4, heads=(8, 4)):
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 60, batch)
    found = paging.paging(rng, lengths, [3] * batch, max_pages=4, pages=5 * batch, heads=heads)
    new = rng.standard_normal((2, batch, 3, heads[1], 8)).astype(np.float32)
    query = found.query.reshape(batch, 3, heads[0], 8)
    return [jnp.asarray(x) for x in (query, *found.arguments[1:], *new)]


def step(query, key_pages, value_pages, table, lengths, key, value):
    pools = paging.append_to_pages(key_pages, value_pages, key, value, table, lengths)
    out = paging.paged_attention(query, *pools, table, lengths, return_residual=True)
    return *out, *pools


HEADS, POOL = P(None, None, "x"), P(None, None, "x")
OVER_HEADS = (HEADS, POOL, POOL, P(), P(), HEADS, HEADS)


def put(mesh, specs, arrays):
    return [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


@auto_and_explicit
def test_heads(axis_type):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=HOST[:4])
    arrays = case()
    expected = jax.jit(step)(*arrays)
    with jax.set_mesh(mesh):
        given = put(mesh, OVER_HEADS, arrays)
        compiled = jax.jit(step, donate_argnums=(1, 2)).lower(*given).compile()
        assert not gathered(compiled.as_text())
        memory: Any = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == 2 * given[1].nbytes // 4
        found = compiled(*given)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert found[0].sharding.spec[2] == "x"
    assert found[2].sharding.spec[2] == "x"


@auto_and_explicit
def test_more_devices_than_key_heads(axis_type):
    """The pool is replicated over the devices of one key head."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=HOST[:4])
    arrays = case(heads=(8, 2))[:5]
    attention = functools.partial(paging.paged_attention, return_residual=True)
    expected = attention(*arrays)
    specs = (P(None, None, ("x", "y")), P(None, None, "x"), P(None, None, "x"), P(), P())
    with jax.set_mesh(mesh):
        compiled = jax.jit(attention).lower(*put(mesh, specs, arrays)).compile()
        assert not gathered(compiled.as_text())
        found = compiled(*put(mesh, specs, arrays))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("own_pool", [False, True])
def test_sequences_in_shard_map(own_pool):
    """Each device has its own sequences; the pool is replicated or divided like them."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=HOST[:4])
    arrays = case()[:5]
    attention = functools.partial(paging.paged_attention, return_residual=True)
    expected = attention(*arrays)
    rows, pool = P("x"), P("x") if own_pool else P()
    if own_pool:
        pages = arrays[1].shape[0]
        # Each device has all pages, so that tables stay the same.
        arrays[1:3] = [jnp.concatenate([x] * 4) for x in arrays[1:3]]
        assert arrays[1].shape[0] == 4 * pages
    sharded = jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(rows, pool, pool, rows, rows),
        out_specs=(rows, rows),
    )
    for got, want in zip(jax.jit(sharded)(*arrays), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_bits_do_not_depend_on_the_number_of_devices():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=HOST[:4])
    arrays = case()[:5]
    attention = functools.partial(
        paging.paged_attention, batch_invariant=True, return_residual=True
    )
    expected = jax.jit(attention)(*arrays)
    rows = P("x")
    sharded = jax.shard_map(
        attention, mesh=mesh, in_specs=(rows, P(), P(), rows, rows), out_specs=(rows, rows)
    )
    for got, want in zip(jax.jit(sharded)(*arrays), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.rotating(2)
@auto_and_explicit
@pytest.mark.parametrize(
    ("spec", "features"), [(P("x", None, "y"), True), (P(("x", "y")), False)], ids=str
)
def test_sequences(axis_type, spec, features):
    """The table and the lengths are sharded like the query, and the pool is replicated."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=HOST[:4])
    query, *others = case()[:5]
    slopes = np.linspace(0.1, 0.5, 8)

    def attention(*arrays):
        arguments: Any = {"return_residual": True}
        if features:
            own = jnp.asarray(slopes)
            arguments["score_mod"] = lambda s, b, h, q, k: s + own[h] * (k - q) * (b + 1)
            arguments["local_window_size"] = (20, 0)
            arguments["sinks"] = own
        return paging.paged_attention(*arrays, **arguments)

    expected = jax.jit(attention)(query, *others)
    pool = P(None, None, "y") if spec == P("x", None, "y") else P()
    rows = P(spec[0])
    with jax.set_mesh(mesh):
        given = put(mesh, (spec, pool, pool, rows, rows), [query, *others])
        compiled = jax.jit(attention).lower(*given).compile()
        # Only the lengths are gathered, to compute the starts.
        assert all(np.prod(shape) <= 5 for shape in gathered(compiled.as_text()))
        found = compiled(*given)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert found[0].sharding.spec[0] == spec[0]


@auto_and_explicit
def test_one_new_token_of_each_sequence(axis_type):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=HOST[:4])
    query, *others = case()[:5]
    expected = paging.paged_attention(query[:, :1], *others)
    with jax.set_mesh(mesh):
        given = put(mesh, (P("x"), P(), P(), P("x"), P("x")), [query[:, :1], *others])
        found = jax.jit(paging.paged_attention)(*given)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@auto_and_explicit
def test_one_new_token_of_one_sequence(axis_type):
    """An axis of size 1 shards nothing, so it may name a batch of 1."""
    mesh = jax.make_mesh((1, 4), ("data", "x"), axis_types=(axis_type,) * 2, devices=HOST[:4])
    query, *others = case(batch=1)[:5]
    expected = paging.paged_attention(query[:, :1], *others)
    specs = P("data", None, "x"), POOL, POOL, P("data"), P("data")
    with jax.set_mesh(mesh):
        found = jax.jit(paging.paged_attention)(*put(mesh, specs, [query[:, :1], *others]))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@auto_and_explicit
def test_ragged_tokens_are_not_divided(axis_type, messages, assert_close):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=HOST[:4])
    query, *others = case()[:5]
    specs = (P("x"), *[P()] * 4)
    given = put(mesh, specs, [query.reshape(12, 8, 8), *others])
    call = functools.partial(paging.paged_attention, query_starts=np.arange(5) * 3)
    message = "query of shape .*packed sequences cannot be cut"
    refused_or_gathered(axis_type, call, given, message, messages, assert_close)


def test_the_tokens_of_a_sequence_are_not_divided(messages, assert_close):
    """Of four devices two have a sequence each."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=HOST[:4])
    query, *others = case(batch=2)[:5]
    given = put(mesh, (P("x", "y"), *[P()] * 4), [query[:, :2], *others])
    call = functools.partial(paging.paged_attention)
    message = "the number of sequences, 2, cannot be divided by 4"
    refused_or_gathered(AxisType.Auto, call, given, message, messages, assert_close)


def test_an_automatic_pool_is_not_divided_by_pages():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=HOST[:4])
    given = put(mesh, (P(), P("x"), P("x"), P(), P()), case()[:5])
    # The message is not wrapped in an error of XLA.
    with pytest.raises(ValueError, match=r"^key of shape .* cannot be divided by pages: shard"):
        jax.jit(paging.paged_attention).lower(*given).compile()


@auto_and_explicit
def test_new_tokens_of_all_devices_go_to_a_replicated_pool(axis_type):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=HOST[:4])
    arrays, rows = case(), P("x")
    expected = jax.jit(step)(*arrays)
    with jax.set_mesh(mesh):
        given = put(mesh, (rows, P(), P(), rows, rows, rows, rows), arrays)
        found = jax.jit(step)(*given)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_pages_are_not_divided():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=HOST[:4])
    specs = (P(), P("x"), P("x"), P(), P())
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"key_pages of shape.*is sharded as"):
        paging.paged_attention(*put(mesh, specs, case()[:5]))


def test_new_tokens_do_not_go_to_divided_pages():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=HOST[:4])
    _, keys, values, table, lengths, *new = case()
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"value_pages of shape.*is sharded as"),
    ):
        pools = put(mesh, (P(), P("x")), (keys, values))
        paging.append_to_pages(*pools, *new, table, lengths)


def test_pages_are_not_divided_automatically():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=HOST[:4])
    specs = (P(), P("x"), P("x"), P(), P())
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="key_pages and value_pages cannot be"):
        given = put(mesh, specs, case()[:5])
        jax.jit(paging.paged_attention).lower(*given).compile()
