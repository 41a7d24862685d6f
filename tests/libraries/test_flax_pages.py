"""Caches in pages: the modules give the results of the whole sequence."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_memeff
import jax_memeff.flax
from jax_memeff import Mask, PagePool
from jax_memeff.flax import Pages

FEATURES, HEADS = 32, 4
LENGTHS = (37, 12, 21)
"""The lengths of three sequences. Their last tokens come one at a time."""
PROMPTS = (33, 9, 17)
X = [
    np.random.default_rng(seed).normal(size=(length, FEATURES)).astype(np.float32)
    for seed, length in enumerate(LENGTHS)
]
WINDOW = Mask.window(11, None)


def nnx_layer(**settings) -> Any:
    return jax_memeff.flax.nnx.MultiHeadAttention(
        HEADS, FEATURES, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), **settings
    )


def linen_layer(**settings) -> Any:
    return jax_memeff.flax.linen.MultiHeadAttention(HEADS, num_kv_heads=2, **settings)


def steps(call) -> list[np.ndarray]:
    """Runs the prompts of all sequences in one call, then one token of each per call; returns the
    parts of each sequence.
    """
    pool = PagePool(12, 16)
    names = [pool.allocate(count) for count in PROMPTS]

    def pages(starts=None):
        return Pages(jnp.asarray(pool.table(names, 4)), jnp.asarray(pool.lengths(names)), starts)

    bounds = np.cumsum([0, *PROMPTS])
    prompts = [x[:count] for x, count in zip(X, PROMPTS, strict=True)]
    out = np.asarray(call(jnp.asarray(np.concatenate(prompts)), pages(jnp.asarray(bounds))))
    parts = [[out[first:last]] for first, last in itertools.pairwise(bounds)]
    for step in range(3):
        for name in names:
            pool.grow(name)
        tokens = [x[count + step][None] for x, count in zip(X, PROMPTS, strict=True)]
        out = np.asarray(call(jnp.asarray(np.stack(tokens)), pages()))
        for part, own in zip(parts, out, strict=True):
            part.append(own)
    return [np.concatenate(part) for part in parts]


def check(found, whole, tolerance=2e-5):
    # Attention is causal, so a sequence does not see its padding.
    padded = np.stack([np.pad(x, ((0, max(LENGTHS) - len(x)), (0, 0))) for x in X])
    for got, expected in zip(found, jax.jit(whole)(padded), strict=True):
        np.testing.assert_allclose(got, expected[: len(got)], atol=tolerance, rtol=tolerance)


@pytest.mark.quick
def test_nnx():
    layer = nnx_layer(rotary_base=100.0, sinks_init=nnx.initializers.normal(1.0))
    layer.init_pages(12, 16)
    step = nnx.jit(lambda layer, x, pages: layer(x, pages=pages, mask=WINDOW))
    found = steps(lambda x, pages: step(layer, x, pages))
    check(found, lambda x: layer(x, is_causal=True, mask=WINDOW))


def test_linen():
    layer = linen_layer(rotary_base=100.0, pool_shape=(12, 16))
    pages = Pages(jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32))
    variables = layer.init(jax.random.key(0), X[0][None], pages=pages)
    params, cache = variables["params"], variables["cache"]
    assert jax.tree.map(jnp.shape, cache) == dict.fromkeys(
        ("key_pages", "value_pages"), (12, 16, 2, 8)
    )
    assert not any(map(jnp.any, cache.values()))

    @jax.jit
    def step(cache, x, pages):
        out, updated = layer.apply(
            {"params": params, "cache": cache}, x, pages=pages, mask=WINDOW, mutable=["cache"]
        )
        return out, updated["cache"]

    def call(x, pages):
        nonlocal cache
        out, cache = step(cache, x, pages)
        return out

    found = steps(call)
    check(found, lambda x: layer.apply({"params": params}, x, is_causal=True, mask=WINDOW))


def test_masks_may_be_numbers(assert_close):
    """Flax makes float32 masks, in which nonzero means attend."""
    layer = linen_layer(pool_shape=(12, 16))
    variables = layer.init(jax.random.key(0), X[0][None])
    pages = Pages(jnp.array([[7, 4, 2]]), jnp.array([37]))
    mask = nnx.make_causal_mask(jnp.ones((1, 48)))[:, :, :37] * (jnp.arange(48) != 3)
    assert mask.dtype == jnp.float32
    outs = [
        layer.apply(variables, X[0][None], pages=pages, mask=each, mutable=["cache"])[0]
        for each in (mask, mask != 0, -2 * mask)
    ]
    for out in outs[1:]:
        assert_close(out, outs[0], 0)


def test_linen_call_without_a_cache_appends_to_an_empty_one(assert_close):
    layer = linen_layer(pool_shape=(12, 16))
    params = {"params": layer.init(jax.random.key(0), X[0][None])["params"]}
    pages = Pages(jnp.array([[7, 4, 2]]), jnp.array([37]))
    out, updated = layer.apply(params, X[0][None], pages=pages, mutable=["cache"])
    assert_close(out, layer.apply(params, X[0][None], is_causal=True), 1e-5)
    written = jnp.any(updated["cache"]["key_pages"] != 0, (1, 2, 3))
    assert jnp.flatnonzero(written).tolist() == [2, 4, 7]


def test_linen_init_takes_the_masks_of_the_calls():
    layer = linen_layer(pool_shape=(12, 16))
    pages = Pages(jnp.array([[7, 4, 2]]), jnp.array([37]))
    layer.init(jax.random.key(0), X[0][None], pages=pages, mask=jnp.ones((1, 1, 37, 48), bool))


def test_bfloat16_pool_of_a_float32_layer():
    layer = nnx_layer()
    layer.init_pages(12, 16, jnp.bfloat16)
    step = nnx.jit(lambda layer, x, pages: layer(x, pages=pages))
    found = steps(lambda x, pages: step(layer, x, pages))
    assert found[0].dtype == jnp.float32
    assert layer.key_pages[...].dtype == jnp.bfloat16
    check(found, lambda x: layer(x, is_causal=True), 3e-2)


def test_float8_pool():
    layer = linen_layer(pool_shape=(12, 16), pool_dtype=jnp.float8_e4m3fn)
    scale = jnp.full(2, 1 / 64, jnp.float32)
    pages = Pages(jnp.arange(3)[None], jnp.array([37]), None, scale, scale)
    variables = layer.init(jax.random.key(0), X[0][None], pages=pages)
    call = jax.jit(lambda x: layer.apply(variables, x, pages=pages, mutable=["cache"]))
    out, updated = call(X[0][None])
    assert updated["cache"]["key_pages"].dtype == jnp.float8_e4m3fn
    expected = layer.apply({"params": variables["params"]}, X[0][None], is_causal=True)
    assert jnp.linalg.norm(out - expected) < 0.1 * jnp.linalg.norm(expected)


def test_positions_of_the_user():
    layer = nnx_layer(rotary_base=100.0)
    layer.init_pages(4, 16)
    pages = Pages(jnp.array([[2]]), jnp.array([12]))
    moved = layer(X[1][None], pages=pages, input_positions=jnp.arange(12) * 2)
    expected = layer(X[1][None], is_causal=True, input_positions=jnp.arange(12) * 2)
    np.testing.assert_allclose(moved, expected, atol=2e-5)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("wide", [False, True], ids=["", "x64"])
@pytest.mark.parametrize("starts", [None, np.array([0, 12, 24])], ids=["batch", "packed"])
def test_strict_promotion(starts, wide):
    """Rotary positions have the ranks and dtypes of what they are combined with."""
    layer = linen_layer(rotary_base=100.0, pool_shape=(4, 16), dtype=jnp.bfloat16)
    table, lengths = jnp.array([[2], [0]], jnp.int32), jnp.array([12, 12], jnp.int32)
    x = jnp.stack([X[1], X[1]]).reshape((24, -1) if starts is not None else (2, 12, -1))
    with (
        jax.enable_x64(wide),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        layer.init_with_output(jax.random.key(0), x, pages=Pages(table, lengths, starts))
        layer.init_with_output(jax.random.key(0), x.reshape(2, 12, -1), is_causal=True)


def test_the_last_query_alone_has_its_own_position(assert_close):
    """A prefill that only needs the last row passes all new tokens as keys."""
    layer = nnx_layer(rotary_base=100.0)
    layer.init_pages(4, 16)
    x = X[0][None]
    whole, end = layer(x, is_causal=True), x.shape[1]
    pages = Pages(jnp.array([[2, 0, 3]]), jnp.array([end]))
    assert_close(layer(x[:, -1:], x, pages=pages), whole[:, -1:], 1e-5)
    with pytest.raises(ValueError, match=f"expected as many keys as queries, 1, got {end}"):
        layer(x[:, -1:], x, pages=pages, input_positions=jnp.array([end - 1]))


@pytest.mark.parametrize(
    ("lengths", "starts", "meant"),
    [([3, 4, 2], [0, 3, 1, 5], ([3, 4, 2], [0, 3, 3, 5])), ([99, -1], None, ([16, 0], None))],
    ids=["decreasing starts", "lengths beyond the table"],
)
def test_positions_follow_the_clamped_numbers(lengths, starts, meant, assert_close):
    """A token is rotated to the position at which it is written."""
    found = []
    x = X[0][:5] if starts else np.stack([X[0][:5]] * 2)
    for own_lengths, own_starts in ((lengths, starts), meant):
        layer = nnx_layer(rotary_base=100.0)
        layer.init_pages(4, 16)
        pages = Pages(
            jnp.arange(len(lengths))[:, None],
            jnp.array(own_lengths),
            None if own_starts is None else jnp.array(own_starts),
        )
        out = layer(x, pages=pages)
        found.append((out, layer.key_pages[...]))
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, 1e-6)


def test_no_sequences():
    layer = nnx_layer(rotary_base=100.0)
    layer.init_pages(4, 16)
    pages = Pages(jnp.zeros((0, 1), jnp.int32), jnp.zeros(0, jnp.int32), jnp.array([0]))
    assert layer(X[1], pages=pages).shape == X[1].shape


PAGES = Pages(jnp.zeros((1, 3), jnp.int32), jnp.array([37]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bias": jnp.zeros((37, 48))}, "bias must be None with pages"),
        ({"segment_ids": jnp.zeros((1, 37), int)}, "segment_ids must be None with pages"),
        ({"decode": True}, "decode must be None with pages, got bool"),
        ({"input_positions": jnp.arange(37)}, "input_positions must be None in a layer without"),
        ({"deterministic": False}, "deterministic must be True with pages"),
        ({"mask": Mask.lengths(key=jnp.array([3]))}, "mask must not have lengths"),
    ],
)
def test_arguments_that_pages_do_not_have(arguments, message):
    layer = nnx_layer(dropout_rate=0.5, deterministic=True)
    layer.init_pages(4, 16)
    with pytest.raises(ValueError, match=message):
        layer(X[0][None], pages=PAGES, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("4", 16), TypeError, "pages must be a Python integer, got '4'"),
        ((-1, 16), ValueError, "pages must be at least 0, got -1"),
        ((4, 24), ValueError, "page_size must be 1, 2, 4, 8 or a multiple of 16, got 24"),
        ((4, 0), ValueError, "page_size must be at least 1, got 0"),
        ((4, 16, jnp.int8), TypeError, "dtype of pages must be one of .* got int8"),
    ],
)
def test_pools_that_no_call_could_read(arguments, error, message):
    with pytest.raises(error, match=message):
        nnx_layer().init_pages(*arguments)
    layer = linen_layer(pool_shape=arguments[:2], pool_dtype=(*arguments, None)[2])
    with pytest.raises(error, match=message):
        layer.init(jax.random.key(0), X[0][None], pages=PAGES)


def test_pool_shape_is_a_pair():
    with pytest.raises(ValueError, match=r"pool_shape must be \(pages, page_size\), got \(4,\)"):
        linen_layer(pool_shape=(4,)).init(jax.random.key(0), X[0][None], pages=PAGES)


def test_pages_have_their_type():
    layer = nnx_layer()
    layer.init_pages(4, 16)
    with pytest.raises(TypeError, match=r"pages must be a jax_memeff.flax.Pages, got tuple"):
        layer(X[0][None], pages=(PAGES.page_table, PAGES.kv_lengths))


TABLE = PAGES.page_table
WRONG: Any = Pages  # with arguments of wrong types
MISFITS = {
    "no lengths": (WRONG(TABLE, None), TypeError, "kv_lengths must be an array, got None"),
    "text": (WRONG(TABLE, "y"), TypeError, "kv_lengths must be an array, got str"),
    "a number": (WRONG(TABLE, 37), ValueError, r"kv_lengths must have shape \[B\] = \[1\]"),
    "two": (WRONG(TABLE, [37, 37]), ValueError, r"kv_lengths must have shape \[B\] = \[1\]"),
    "starts": (
        WRONG(TABLE, [37], jnp.array([0, 37])),
        ValueError,
        r"query must have shape \[tokens, N, H\], because query_starts is given",
    ),
    "batch": (
        WRONG(jnp.zeros((2, 3), int), [37, 37]),
        ValueError,
        "query must have the batch size of page_table, 2, got 1",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_pages_that_do_not_fit_are_named_before_positions_are_computed(name):
    pages, error, message = MISFITS[name]
    layer = nnx_layer(rotary_base=100.0)
    layer.init_pages(4, 16)
    with pytest.raises(error, match=message):
        layer(X[0][None], pages=pages)


@pytest.mark.parametrize("rate", ["x", None, [0.1], 1j])
def test_a_rate_that_is_no_number_is_named(rate):
    with pytest.raises(TypeError, match="dropout_rate must be a number, got"):
        nnx_layer(dropout_rate=rate)


def test_missing_caches():
    with pytest.raises(ValueError, match=r"call init_pages\(pages, page_size\) first"):
        nnx_layer()(X[0][None], pages=PAGES)
    with pytest.raises(ValueError, match=r"give the module pool_shape=\(pages, page_size\)"):
        linen_layer().init(jax.random.key(0), X[0][None], pages=PAGES)
