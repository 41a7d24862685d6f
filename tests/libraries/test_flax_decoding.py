"""Decoding with the caches of ``jax_memeff.flax``'s modules, which are those of Flax."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_layers import (
    BATCH,
    FEATURES,
    HEADS,
    OURS,
    X,
    apply,
    assert_close,
    linen_variables,
    make,
    nnx_layer,
    normal,
    quickly,
)

from jax_memeff import Mask
from jax_memeff.codegen.features import MASK
from jax_memeff.flax import rotary_embedding

STEPS = [slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 10)]
INPUTS = normal(5, BATCH, 10, FEATURES)
LONGEST = (BATCH, 12, FEATURES)


@pytest.mark.parametrize("mask", [None, Mask.window(2, None)], ids=["all", "window"])
def test_nnx_decoding_equals_the_whole_sequence(mask):
    """One or several tokens per step, in a cache that is longer than the sequence."""
    layer = nnx_layer(OURS.nnx, num_kv_heads=2, rotary_base=100.0)
    layer.init_cache(LONGEST)
    step = nnx.jit(lambda layer, x: layer(x, decode=True, mask=mask))
    outs = [step(layer, INPUTS[:, part]) for part in STEPS]
    assert layer.cache_index is not None and layer.cache_index[...] == 10
    whole = layer(INPUTS, is_causal=True, mask=mask)
    assert_close(jnp.concatenate(outs, 1), whole, 1e-4)


LENGTHS = Mask.lengths(key=jnp.array([3, 7]))
OF_PADDED_PROMPTS = {
    "lengths": LENGTHS,
    "and a window": LENGTHS & Mask.window(2, None),
    "and a window with the other alignment": LENGTHS & Mask.window(2, None, "bottom_right"),
    "of queries": Mask.lengths(key=jnp.array([5, 9]), query=jnp.array([2, 4])),
}


@pytest.mark.parametrize("name", OF_PADDED_PROMPTS)
def test_lengths_of_a_mask_do_not_move_windows_in_a_cache(name):
    """The lengths hide columns of the cache. Rows and columns keep their positions."""
    layer = nnx_layer(OURS.nnx, num_kv_heads=2)
    layer.init_cache(LONGEST)
    step = nnx.jit(lambda layer, x: layer(x, decode=True, mask=OF_PADDED_PROMPTS[name]))
    outs = [step(layer, INPUTS[:, part]) for part in STEPS]

    row, column = np.arange(10)[:, None], np.arange(10)
    valid = np.broadcast_to(column <= row, (BATCH, 10, 10)).copy()
    for batch, length in enumerate((5, 9) if name == "of queries" else (3, 7)):
        valid[batch] &= column < length
        if name == "of queries":  # rows count in each call
            within = np.concatenate([np.arange(part.stop - part.start) for part in STEPS])
            valid[batch] &= (within < (2, 4)[batch])[:, None]
    if "window" in name:
        valid &= row - column <= 2
    assert_close(jnp.concatenate(outs, 1), layer(INPUTS, mask=valid[:, None]), 1e-4)


def test_functions_and_windows_count_alike_in_a_full_cache():
    """New tokens of a full cache replace its last ones, so the last row is at its last column."""
    outs = []
    for mask in (Mask.window(2, 0), Mask.function(lambda b, h, q, k: (q - k <= 2) & (k <= q))):
        layer = nnx_layer(OURS.nnx, num_kv_heads=2)
        layer.init_cache((BATCH, 6, FEATURES))
        for part in (slice(0, 6), slice(6, 8), slice(8, 9)):
            out = layer(INPUTS[:, part], decode=True, mask=mask)
        outs.append(out)
    assert_close(outs[0], outs[1], 1e-5)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.float8_e4m3fn, jnp.complex64])
def test_a_cache_that_cannot_hold_keys_is_named(dtype):
    layer = nnx_layer(OURS.nnx, num_kv_heads=2)
    layer.init_cache(LONGEST, dtype=dtype)
    with pytest.raises(TypeError, match=f"cached_key must be one of .* got {jnp.dtype(dtype)}"):
        layer(INPUTS[:, :1], decode=True)


def test_linen_decoding_equals_the_whole_sequence():
    layer = make("linen", num_kv_heads=2, rotary_base=100.0, decode=True)
    cache = quickly(layer.init, jax.random.key(0), jnp.zeros(LONGEST))["cache"]

    params = linen_variables(2)

    @jax.jit
    def step(cache, x):
        out, updated = layer.apply({**params, "cache": cache}, x, mutable=["cache"])
        return out, updated["cache"]

    outs = []
    for part in STEPS:
        out, cache = step(cache, INPUTS[:, part])
        outs.append(out)
    whole = apply("linen", layer.clone(decode=False), INPUTS, is_causal=True)
    assert_close(jnp.concatenate(outs, 1), whole, 1e-4)


@pytest.mark.parametrize("parts", [[(0, 10)], [(0, 4), (4, 9), (9, 10)]], ids=["whole", "parts"])
def test_the_last_query_alone_has_its_own_position(parts):
    """A prefill that only needs the last row passes all new tokens as keys."""
    layer = nnx_layer(OURS.nnx, rotary_base=100.0)
    layer.init_cache(LONGEST)
    whole = layer(INPUTS, is_causal=True)
    for first, end in parts:
        out = layer(INPUTS[:, end - 1 : end], INPUTS[:, first:end], decode=True)
        assert_close(out, whole[:, end - 1 : end], 1e-4)


def test_a_cache_of_flax_continues_in_ours():
    inputs = INPUTS[:, :3]
    flax, ours = (api.MultiHeadAttention(HEADS, decode=True) for api in (linen, OURS.linen))
    variables = quickly(flax.init, jax.random.key(0), inputs)
    assert_close(quickly(ours.init, jax.random.key(0), inputs), variables, 0)

    def step(module, variables, row):
        return quickly(functools.partial(module.apply, mutable=["cache"]), variables, row)

    for row in range(2):
        _, cache = step(flax, variables, inputs[:, row : row + 1])
        variables = {**variables, **cache}
    last = [step(module, variables, inputs[:, 2:]) for module in (ours, flax)]
    assert_close(*last)

    flax, ours = (nnx_layer(api, num_kv_heads=2) for api in (nnx, OURS.nnx))
    flax.init_cache(inputs.shape)
    ours.init_cache(inputs.shape)
    for row in range(2):
        flax(inputs[:, row : row + 1], decode=True)
    nnx.update(ours, nnx.state(flax))
    assert_close(ours(inputs[:, 2:], decode=True), flax(inputs[:, 2:], decode=True))


def test_a_full_cache_keeps_its_length():
    """Tokens beyond the end overwrite the last ones and nothing else."""
    layer: Any = OURS.nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0))
    layer.init_cache((BATCH, 3, FEATURES))
    layer(X[:, :3], decode=True)
    before = layer.cached_key[...]
    out = layer(X[:, 3:4], decode=True)
    assert np.isfinite(out).all()
    assert_close(layer.cached_key[:, :2], before[:, :2], 0)
    assert np.any(layer.cached_key[:, 2] != before[:, 2])


@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_splits_the_keys_on_cuda(monkeypatch, fake_compiler, rows):
    jax.clear_caches()
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")
    layer = OURS.nnx.MultiHeadAttention(
        8, 512, num_kv_heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    layer.init_cache((4, 8192, 512), jnp.bfloat16)
    graph, state = nnx.split(layer)

    def step(state, x):
        layer = nnx.merge(graph, state)
        return layer(x, decode=True), nnx.state(layer)

    x = jax.ShapeDtypeStruct((4, rows, 512), jnp.bfloat16)
    text = jax.jit(step).trace(state, x).lower(lowering_platforms=("cuda",)).as_text()
    ((spec, _),) = fake_compiler
    assert spec.kernel.splits_keys and spec.pack_gqa
    assert spec[MASK] == ("none" if rows == 1 else "causal")
    assert "key_lengths" in text and "partial_out" in text and "4x8192x2x64xbf16" in text


def test_bad_decoding_raises():
    layer = OURS.nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), dropout_rate=0.5)
    with pytest.raises(ValueError, match="call init_cache"):
        layer(X, decode=True, deterministic=True)
    with pytest.raises(ValueError, match="deterministic must be True or False"):
        layer(X)
    with pytest.raises(TypeError, match=r"rngs must be flax.nnx.Rngs .* got .*Key"):
        layer(X, deterministic=False, rngs=cast(Any, jax.random.key(0)))
    layer.init_cache((BATCH, 3, FEATURES))
    with pytest.raises(ValueError, match=r"\[2, at most 3, 4, 8\], got shape \(2, 5, 4, 8\)"):
        layer(X, decode=True, deterministic=True)
    with pytest.raises(ValueError, match="inputs_v must have the length of inputs_k, 3, got 2"):
        layer(X[:, :1], X[:, :3], X[:, :2], decode=True, deterministic=True)
    with pytest.raises(ValueError, match="segment_ids must be None while decoding"):
        ids = jnp.zeros((BATCH, 1), int)
        layer(X[:, :1], decode=True, deterministic=True, segment_ids=ids)
    with pytest.raises(ValueError, match="even head dim, got 3"):
        rotary_embedding(jnp.ones((2, 1, 3)), jnp.arange(2))
