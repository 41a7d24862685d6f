"""``append_to_pages`` writes the new tokens of each sequence, and nothing else."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from jax.sharding import AxisType
from jaxprs import primitives_of

from jax_memeff import UnsupportedError

append = jax.jit(paging.append_to_pages)
"""Jitted, because one program compiles faster than its operations one by one."""


def written(pool, new, case, starts):
    """The pool with the new tokens, by the definition."""
    pool = np.array(pool)
    pages, page_size = pool.shape[:2]
    for b, length in enumerate(case.lengths):
        count = starts[b + 1] - starts[b]
        length = min(length, case.table.shape[1] * page_size)
        for token in range(count):
            position = length - count + token
            if position >= 0:
                page = case.table[b, position // page_size]
                if 0 <= page < pages:
                    pool[page, position % page_size] = new[starts[b] + token]
    return pool


def new_tokens(rng, case):
    count = len(case.query)
    return [
        rng.standard_normal((count, *pool.shape[2:])).astype(pool.dtype)
        for pool in (case.key_pages, case.value_pages)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(3))
def test_last_tokens_are_written(seed):
    rng = np.random.default_rng(seed)
    case = paging.paging(
        rng, lengths=[37, 2, 16, 0, 40, 17], counts=[4, 5, 16, 3, 1, 0], gap=3, dims=(8, 4)
    )
    case.table[4, 2] = [-1, len(case.key_pages), 10**9][seed]  # the page of its last token
    new = new_tokens(rng, case)
    found = append(*case.arguments[1:3], *new, case.table, case.lengths, case.starts)
    for pool, x, got in zip(case.arguments[1:3], new, found, strict=True):
        np.testing.assert_array_equal(got, written(pool, x, case, case.starts))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("longest", [5, 600])
def test_dtypes_that_a_cpu_does_not_scatter(dtype, longest):
    """It writes a few tokens one by one, and many as integers."""
    rng = np.random.default_rng(12)
    counts = [longest, 5, 1, 0, 3]
    case = paging.paging(rng, lengths=[longest + 9, 2, 16, 0, 40], counts=counts, gap=3)
    case.table[4, 2] = -1  # the page of its last token
    pools = [jnp.nan_to_num(jnp.asarray(x)).astype(dtype) for x in case.arguments[1:3]]
    new = [jnp.asarray(x).astype(dtype) for x in new_tokens(rng, case)]
    found = append(*pools, *new, case.table, case.lengths, case.starts)
    for pool, x, got in zip(pools, new, found, strict=True):
        want = written(pool, np.asarray(x), case, case.starts)
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(np.float32))
    nothing = append(*pools, *[x[:0] for x in new], case.table, case.lengths, 0 * case.starts)
    for pool, got in zip(pools, nothing, strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), pool.astype(jnp.float32))


def test_vmap_of_float8_pools():
    rng = np.random.default_rng(13)
    each = [arguments(rng, pages=8) for _ in range(2)]
    each = [tuple(x.astype("float8_e4m3fn") for x in own[:2]) + own[2:] for own in each]
    scales = jnp.array([0.5, 2.0])

    def scaled(*own):
        return paging.append_to_pages(*own, key_scale=scales, value_scale=scales)

    found = jax.jit(jax.vmap(scaled))(*[jnp.stack(x) for x in zip(*each, strict=True)])
    for index, own in enumerate(each):
        for got, want in zip(found, jax.jit(scaled)(*own), strict=True):
            np.testing.assert_array_equal(got[index].astype("float32"), want.astype("float32"))


def test_tokens_with_a_batch_dim():
    rng = np.random.default_rng(3)
    case = paging.paging(rng, lengths=[37, 2, 16], counts=[3, 3, 3])
    new = new_tokens(rng, case)
    batched = [x.reshape(3, 3, *x.shape[1:]) for x in new]
    found = append(*case.arguments[1:3], *batched, case.table, case.lengths)
    for pool, x, got in zip(case.arguments[1:3], new, found, strict=True):
        np.testing.assert_array_equal(got, written(pool, x, case, case.starts))


def test_lengths_beyond_the_table_write_at_its_end():
    """Attention reads them likewise: the last token is at the last position of the table."""
    rng = np.random.default_rng(4)
    case = paging.paging(rng, lengths=[32, 16], counts=[3, 4], max_pages=2)
    new = new_tokens(rng, case)
    lengths = jnp.asarray(case.lengths).at[0].set(10**6)
    found, _ = append(*case.arguments[1:3], *new, case.table, lengths, case.starts)
    np.testing.assert_array_equal(found, written(case.key_pages, new[0], case, case.starts))


def test_it_has_no_derivative():
    pool, new = jnp.zeros((2, 16, 1, 8)), jnp.ones((1, 1, 1, 8))
    where = jnp.array([[1]]), jnp.array([3])

    def total(new):
        return append(pool, pool, new, new, *where)[0].sum()

    for derivative in (jax.grad(total), lambda new: jax.jvp(total, [new], [new])):
        with pytest.raises(UnsupportedError, match="append_to_pages has no derivative"):
            derivative(new)
    # It may be part of a differentiated function if its arguments are not differentiated.
    assert jax.grad(lambda x: x * total(jax.lax.stop_gradient(new)))(1.0) == 8


def test_two_sequences_that_write_one_slot():
    rng = np.random.default_rng(5)
    case = paging.paging(rng, lengths=[20, 20], counts=[1, 1])
    case.table[1] = case.table[0]
    new = new_tokens(rng, case)
    found, _ = append(*case.arguments[1:3], *new, case.table, case.lengths, case.starts)
    page, slot = case.table[0, 1], 3
    assert any((found[page, slot] == x).all() for x in new[0])
    rest = np.array(found)
    rest[page, slot] = case.key_pages[page, slot]
    np.testing.assert_array_equal(rest, case.key_pages)


@pytest.mark.parametrize("per_page", [False, True])
def test_float8_saturates(per_page):
    """A plain cast would turn numbers beyond 448 into NaN."""
    pages, heads = 3, 2
    pool = jnp.zeros((pages, 16, heads, 4), jnp.float8_e4m3fn)
    scale = jnp.array([[0.5, 2.0], [1.0, 1.0], [4.0, 0.25]])
    key = jnp.stack([jnp.full((1, heads, 4), x) for x in (1.0, 1e4, -1e4, 3.3)])
    table, lengths = jnp.array([[0], [1], [2], [2]]), jnp.array([1, 1, 1, 2])
    keys, values = append(
        pool,
        pool,
        key,
        key.astype(jnp.bfloat16),
        table,
        lengths,
        key_scale=scale if per_page else scale[0],
    )
    of_pages = scale if per_page else jnp.broadcast_to(scale[0], scale.shape)
    for place, (page, slot, x) in enumerate([(0, 0, 1.0), (1, 0, 1e4), (2, 0, -1e4), (2, 1, 3.3)]):
        expected = jnp.clip(x / of_pages[page], -448, 448).astype(jnp.float8_e4m3fn)
        got = keys[page, slot, :, 0]
        assert (got.astype(jnp.float32) == expected.astype(jnp.float32)).all(), place
    assert jnp.isfinite(values.astype(jnp.float32)).all()
    assert keys.dtype == values.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("per_page", [False, True])
def test_float8_head_of_zeros_has_scale_zero(per_page):
    pool = jnp.zeros((1, 16, 2, 4), jnp.float8_e4m3fn)
    tokens = jax.random.normal(jax.random.key(0), (1, 3, 2, 4)).at[:, :, 1].set(0)
    scale = jnp.abs(tokens).max((0, 1, 3)) / 448
    place = jnp.array([[0]]), jnp.array([3])
    scales = dict.fromkeys(("key_scale", "value_scale"), scale[None] if per_page else scale)
    pools = append(pool, pool, tokens, tokens, *place, **scales)
    assert not np.asarray(pools[0], np.float32)[:, :, 1].any()
    out = paging.paged_attention(jnp.ones((1, 1, 4, 4)), *pools, *place, **scales)
    assert np.isfinite(out).all() and not np.asarray(out)[..., 2:, :].any()


def test_float8_tokens_are_divided_by_the_scale():
    pool = jnp.zeros((1, 16, 2, 4), jnp.float8_e4m3fn)
    scale = jnp.array([0.5, 2.0])
    tokens = jnp.full((1, 1, 2, 4), 3.0)
    place = jnp.array([[0]]), jnp.array([1])
    expected, plain = append(pool, pool, tokens, tokens, *place, key_scale=scale)
    found, unscaled = append(pool, pool, *[tokens.astype(pool.dtype)] * 2, *place, key_scale=scale)
    assert expected[0, 0, :, 0].astype(jnp.float32).tolist() == [6, 1.5]
    for got, want in ((found, expected), (unscaled, plain)):
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)], ids=["pages", "heads", "both"])
@pytest.mark.parametrize("per_page", [True, False])
def test_scales_of_an_empty_float8_pool(shape, per_page):
    pages, heads = shape
    pool = jnp.zeros((pages, 16, heads, 4), jnp.float8_e4m3fn)
    scale = jnp.ones((pages, heads) if per_page else heads, jnp.float32)
    scales = {"key_scale": scale, "value_scale": scale}
    sequences = jnp.array([[0, 1]]), jnp.array([17])
    new = jnp.ones((1, 1, heads, 4))
    pools = paging.append_to_pages(pool, pool, new, new, *sequences, **scales)
    assert [x.shape for x in pools] == [pool.shape] * 2
    out = paging.paged_attention(jnp.ones((1, 1, 2 * heads, 4)), *pools, *sequences, **scales)
    assert out.shape == (1, 1, 2 * heads, 4) and not out.any()


def test_latent():
    pool = jnp.zeros((2, 16, 1, 24))
    key, value = paging.append_to_pages(
        pool, None, jnp.ones((1, 2, 1, 24)), None, jnp.array([[1]]), jnp.array([5])
    )
    assert value is None
    assert np.argwhere(np.asarray(key)[..., 0, 0]).tolist() == [[1, 3], [1, 4]]


def appended(key_pages, value_pages, key, value, table, lengths):
    return paging.append_to_pages(key_pages, value_pages, key, value, table, lengths)


def arguments(rng, pages=64, batch=4):
    pools = [jnp.asarray(rng.standard_normal((pages, 16, 2, 8)), jnp.float32) for _ in range(2)]
    new = [jnp.asarray(rng.standard_normal((batch, 1, 2, 8)), jnp.float32) for _ in range(2)]
    table = jnp.asarray(rng.permutation(pages)[: 2 * batch].reshape(batch, 2), jnp.int32)
    return *pools, *new, table, jnp.asarray(rng.integers(1, 33, batch), jnp.int32)


def test_a_donated_pool_is_not_copied():
    rng = np.random.default_rng(6)
    given = arguments(rng)
    compiled = jax.jit(appended, donate_argnums=(0, 1)).lower(*given).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * given[0].nbytes
    assert memory.temp_size_in_bytes < given[0].nbytes // 8
    assert not copies(compiled, given[0].shape)
    assert len(copies(jax.jit(appended).lower(*given).compile(), given[0].shape)) == 2
    expected = appended(*given)
    pools = [jnp.array(x) for x in given[:2]]
    places = [x.unsafe_buffer_pointer() for x in pools]
    found = compiled(*pools, *given[2:])
    assert [x.unsafe_buffer_pointer() for x in found] == places
    for got, x in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, x)


def copies(compiled, shape):
    """The dims of the arrays of at least so many elements that a program copies."""
    count = np.prod(shape)

    found = re.findall(r"= \w+\[([\d,]*)\]\S* copy(?:-start)?\(", compiled.as_text())
    return [dims for dims in found if np.prod([int(x) for x in dims.split(",") if x]) == count]


def test_no_loop_waits_for_the_device():
    """XLA launches kernels in each step of a loop, such as a binary search."""
    pool = jnp.zeros((8, 16, 1, 4))
    tokens, starts = jnp.ones((9, 1, 4)), jnp.array([0, 4, 9])
    table, lengths = jnp.arange(8).reshape(2, 4), jnp.array([20, 50])
    jaxpr = jax.make_jaxpr(paging.append_to_pages)(
        pool, pool, tokens, tokens, table, lengths, starts
    )
    assert not {e.primitive.name for e in primitives_of(jaxpr.jaxpr)} & {"while", "scan", "cond"}


def test_only_a_cpu_writes_float8_one_by_one():
    rng = np.random.default_rng(14)
    given = arguments(rng)
    pools = [x.astype(jnp.float8_e4m3fn) for x in given[:2]]
    traced = jax.jit(appended).trace(*pools, *given[2:])
    for platform, expected in (("cpu", True), ("cuda", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.while" in text) == expected


def test_tokens_of_each_device_in_a_replicated_float8_pool():
    """Inside shard_map the tokens vary over the devices, and the pool does not yet."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rng = np.random.default_rng(15)
    keys, values, key, value, table, lengths = arguments(rng)
    pools = [x.astype(jnp.float8_e4m3fn) for x in (keys, values)]
    rows, pool = jax.P("x"), jax.P()

    def each(*own):
        return [x[None] for x in appended(*own)]

    sharded = jax.shard_map(each, mesh=mesh, in_specs=(pool, pool, *[rows] * 4), out_specs=rows)
    found = jax.jit(sharded)(*pools, key, value, table, lengths)
    for index in range(2):
        own = slice(2 * index, 2 * index + 2)
        want = append(*pools, key[own], value[own], table[own], lengths[own])
        for got, expected in zip(found, want, strict=True):
            np.testing.assert_array_equal(got[index].astype("float32"), expected.astype("float32"))


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_decoding_in_a_loop_copies_no_pool(loop):
    rng = np.random.default_rng(7)
    key_pages, value_pages, key, value, table, _ = arguments(rng)
    query = jnp.tile(key, (1, 1, 2, 1))

    def step(carry):
        keys, values, lengths, total = carry
        keys, values = appended(keys, values, key, value, table, lengths)
        out = paging.paged_attention(query, keys, values, table, lengths)
        return keys, values, lengths + 1, total + out

    def scanned(keys, values):
        start = keys, values, jnp.full(4, 3), jnp.zeros_like(query)
        return jax.lax.scan(lambda carry, _: (step(carry), None), start, length=20)[0]

    def repeated(keys, values):
        start = keys, values, jnp.full(4, 3), jnp.zeros_like(query)
        return jax.lax.while_loop(lambda carry: carry[2][0] < 23, step, start)

    function = {"scan": scanned, "while": repeated}[loop]
    compiled = jax.jit(function, donate_argnums=(0, 1)).lower(key_pages, value_pages).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * key_pages.nbytes
    assert memory.temp_size_in_bytes < key_pages.nbytes
    assert not copies(compiled, key_pages.shape)
    keys, values, lengths, total = compiled(jnp.array(key_pages), jnp.array(value_pages))
    state = key_pages, value_pages, jnp.full(4, 3), jnp.zeros_like(query)
    for _ in range(20):
        state = step(state)
    for got, expected in zip((keys, values, lengths), state[:3], strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(total, state[3], rtol=1e-5, atol=1e-5)


def test_a_pool_that_the_user_still_holds_is_not_changed():
    rng = np.random.default_rng(8)
    given = arguments(rng)
    held = np.array(given[0])
    jax.block_until_ready(jax.jit(appended)(*given))
    np.testing.assert_array_equal(given[0], held)
    # Results of a step do not change if the next step donates the pool.
    step = jax.jit(appended, donate_argnums=(0, 1))
    pools = [jnp.array(x) for x in given[:2]]
    out = paging.paged_attention(jnp.tile(given[2], (1, 1, 2, 1)), *pools, *given[4:])
    before = np.array(out)
    jax.block_until_ready(step(*pools, *given[2:]))
    np.testing.assert_array_equal(out, before)
    with pytest.raises(RuntimeError, match="deleted"):
        jax.block_until_ready(pools[0] + 1)


@pytest.mark.parametrize("axes", [(0,) * 6, (0, 0, 0, 0, None, 0), (0, 0, None, None, 0, None)])
def test_vmap_of_a_mapped_pool(axes):
    rng = np.random.default_rng(9)
    each = [arguments(rng, pages=8) for _ in range(3)]
    each = [
        tuple(each[0][i] if axis is None else own[i] for i, axis in enumerate(axes)) for own in each
    ]
    each[1] = (*each[1][:5], each[1][5]) if axes[4] is None else each[1]
    stacked = [
        each[0][i] if axis is None else jnp.stack([own[i] for own in each])
        for i, axis in enumerate(axes)
    ]
    found = jax.jit(jax.vmap(appended, axes))(*stacked)
    for index, own in enumerate(each):
        for got, expected in zip(found, append(*own), strict=True):
            np.testing.assert_array_equal(got[index], expected)


def test_nested_vmap_drops_pages_that_a_pool_does_not_have():
    rng = np.random.default_rng(10)
    given = [jnp.stack([x] * 2) for x in map(lambda *xs: jnp.stack(xs), *[arguments(rng, 8)] * 3)]
    given[4] = given[4].at[0, 1, 2].set(8).at[1, 0, 0].set(-1)
    found = jax.jit(jax.vmap(jax.vmap(appended)))(*given)
    for i, j in np.ndindex(2, 3):
        for got, expected in zip(found, append(*(x[i, j] for x in given)), strict=True):
            np.testing.assert_array_equal(got[i, j], expected)


def test_a_pool_that_is_not_mapped_is_an_error():
    given = arguments(np.random.default_rng(11))
    stacked = [jnp.stack([x, x]) for x in given[2:4]]
    with pytest.raises(ValueError, match=r"must be mapped by jax.vmap"):
        jax.vmap(appended, (None, None, 0, 0, None, None))(*given[:2], *stacked, *given[4:])
