"""Our attention has every argument of the installed Flax, with the same meaning."""

from __future__ import annotations

import functools
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, linen, nnx

import jax_memeff
import jax_memeff.flax
from jax_memeff import UnsupportedError
from jax_memeff.flax import attention_fn

OURS = jax_memeff.flax
BATCH, ROWS, HEADS, FEATURES = 2, 5, 4, 32


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X = normal(0, BATCH, ROWS, FEATURES)
PAIRS = {
    "linen.MultiHeadAttention": (
        OURS.linen.MultiHeadAttention.__call__,
        linen.MultiHeadAttention.__call__,
    ),
    "linen.MultiHeadAttention.fields": (
        OURS.linen.MultiHeadAttention,
        linen.MultiHeadAttention,
    ),
    "nnx.MultiHeadAttention": (
        OURS.nnx.MultiHeadAttention.__call__,
        nnx.MultiHeadAttention.__call__,
    ),
    "linen.dot_product_attention": (attention_fn, linen.dot_product_attention),
    "nnx.dot_product_attention": (attention_fn, nnx.dot_product_attention),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", PAIRS)
def test_every_argument_of_flax_is_one_here(name):
    """Name, kind, default and position are the same.

    If a Flax release adds an argument, this test fails until the argument is supported here.
    """
    ours, flax = (inspect.signature(function).parameters for function in PAIRS[name])
    missing = set(flax) - set(ours)
    assert not missing, f"{name} of flax takes {missing}, and ours does not"
    for parameter in flax.values():
        mine = ours[parameter.name]
        if parameter.name in ("attention_fn", "promote_dtype"):
            continue  # Our own functions; linen and nnx have the latter at different positions.
        assert mine.default == parameter.default, mine
        assert mine.kind == parameter.kind or mine.kind == parameter.KEYWORD_ONLY, mine
    positional = [p.name for p in flax.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    common = [name for name in ours if name in positional]
    assert common == positional[: len(common)] or name.endswith("dot_product_attention")


def test_every_keyword_of_the_nnx_constructor_reaches_flax():
    ours, flax = (
        inspect.signature(api.MultiHeadAttention.__init__).parameters for api in (OURS.nnx, nnx)
    )
    own = ("rotary_base", "sinks_init")
    named = [p for p in ours.values() if p.kind != p.VAR_KEYWORD and p.name not in own]
    for parameter in named:
        assert (parameter.kind, parameter.default) == (
            flax[parameter.name].kind,
            flax[parameter.name].default,
        )
    # Other keywords of Flax pass through; its positional arguments must be named here.
    positional = [p.name for p in flax.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours.values() if p.kind == p.POSITIONAL_OR_KEYWORD] == positional


# ----------------------------------------------------------------------------- input_positions


def rotary_layer(**settings: Any) -> Any:
    settings = {"rotary_base": 100.0, "decode": False, **settings}
    return OURS.nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **settings)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_positions_are_those_of_the_rotary_embedding():
    layer = rotary_layer()
    plain = layer(X)
    assert_close(layer(X, input_positions=jnp.arange(ROWS)), plain)
    # Only differences matter; each batch index may have its own positions.
    starts = jnp.array([[7], [1000]])
    assert_close(layer(X, input_positions=starts + jnp.arange(ROWS)), plain)
    order = np.random.default_rng(0).permutation(ROWS)
    assert_close(layer(X[:, order], input_positions=jnp.asarray(order)), plain[:, order])
    assert np.abs(layer(X, input_positions=2 * jnp.arange(ROWS)) - plain).max() > 1e-3


def test_a_left_padded_prompt_continues_from_its_last_position():
    """Two tokens of padding and a prompt of three tokens, then one token, through the cache."""
    layer = rotary_layer(decode=True)
    want = layer(X[:, 2:], is_causal=True, decode=False)
    layer.init_cache(X.shape)
    mask = (jnp.arange(ROWS) >= 2)[None, None, None]
    prompt = layer(X[:, :4], mask=mask, input_positions=jnp.array([0, 0, 0, 1]))
    last = layer(X[:, 4:], mask=mask, input_positions=jnp.array([2]))
    assert_close(jnp.concatenate([prompt[:, 2:], last], 1), want)


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="nnx.RoPE came with flax 0.12.12")
def test_positions_equal_those_of_flax():
    positions = jnp.array([0, 0, 5, 6, 9])
    rope: Any = getattr(nnx, "RoPE")  # noqa: B009, older releases have none
    rotate = functools.partial(rope(theta=100.0), input_positions=positions)
    rotate = jax.vmap(rotate, in_axes=-2, out_axes=-2)  # over the heads

    def rotary(query, key, *arguments, **keywords):
        return nnx.dot_product_attention(rotate(query), rotate(key), *arguments, **keywords)

    settings: Any = {"attention_fn": rotary, "decode": False, "rngs": nnx.Rngs(0)}
    flax = nnx.MultiHeadAttention(HEADS, FEATURES, **settings)
    ours = rotary_layer()(X, is_causal=True, input_positions=positions)
    assert_close(ours, flax(X, is_causal=True))


@pytest.mark.parametrize(
    "settings, arguments, message",
    [
        ({"rotary_base": None}, {}, "input_positions must be None in a layer without a rotary"),
        ({}, {"input_positions": jnp.arange(4)}, r"input_positions .* \[2, 5\].* got shape \(4,\)"),
        ({}, {"input_positions": jnp.zeros((3, 5))}, r"input_positions .* got shape \(3, 5\)"),
        ({}, {"inputs_k": X[:, :3]}, "as many keys as queries, 5, got 3"),
    ],
)
def test_bad_positions_raise(settings, arguments, message):
    with pytest.raises(ValueError, match=message):
        rotary_layer(**settings)(X, **{"input_positions": jnp.arange(ROWS), **arguments})


# ---------------------------------------------------------------------------------- inputs_kv


def test_inputs_kv_of_linen():
    layer, memory = OURS.linen.MultiHeadAttention(HEADS), normal(1, BATCH, 7, FEATURES)
    variables = layer.init(jax.random.key(0), X, memory)
    with pytest.warns(DeprecationWarning, match="inputs_kv"):
        got = layer.apply(variables, X, inputs_kv=memory)
    assert_close(got, layer.apply(variables, X, memory))
    with pytest.raises(ValueError, match="inputs_kv must be None if inputs_k or inputs_v"):
        layer.apply(variables, X, memory, inputs_kv=memory)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "MultiHeadDotProductAttention"])
def test_a_positional_mask_of_linen(name):
    """Flax warns about values of a mask's shape, which programs for Flax before 0.7.4 pass."""
    mask = linen.make_causal_mask(jnp.ones((BATCH, ROWS)))
    for api in (OURS.linen, linen):
        layer = getattr(api, name)(HEADS)
        variables = jax.eval_shape(layer.init, jax.random.key(0), X)
        text = "the function signature of MultiHeadDotProductAttention's `__call__` method"
        with (
            pytest.warns(DeprecationWarning, match=text),
            pytest.raises(errors.ScopeParamShapeError),
        ):
            jax.eval_shape(layer.apply, variables, X, X, mask)
        # Named values of another shape give no warning.
        jax.eval_shape(layer.apply, variables, X, X, X, mask=mask)


# --------------------------------------------------------------------------------- the message


def test_sow_weights_raises_on_every_platform():
    """``sow_weights`` is refused on every platform."""
    layer = OURS.nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(UnsupportedError) as caught:
        layer(X, sow_weights=True)
    first, *reasons = str(caught.value).splitlines()
    assert first == "memory-efficient attention cannot do this:"
    assert len(reasons) == 1 and "sow_weights=False" in reasons[0]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.reasons == caught.value.reasons
