"""``jax_memeff.flax``'s modules have the parameters, results, gradients and caches of Flax's."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx, serialization
from flax_layers import (
    BATCH,
    COLUMNS,
    HEADS,
    MEMORY,
    OURS,
    ROWS,
    X,
    apply,
    assert_close,
    boolean,
    gradients,
    linen_variables,
    make,
    nnx_layer,
    normal,
    quickly,
    scrambled,
)

import jax_memeff
import jax_memeff.flax
from jax_memeff import Mask, UnsupportedError
from jax_memeff.flax import rotary_embedding

# ------------------------------------------------------------------------------ checkpoints


def parent(api, name: str, **settings) -> linen.Module:
    """A module with an unnamed attention layer."""

    class Parent(linen.Module):
        @linen.compact
        def __call__(self, x, memory, mask):
            layer = getattr(api, name)(HEADS, qkv_features=16, **settings)
            return layer(x, memory, mask=mask)

    return Parent()


@pytest.mark.parametrize("name", ["MultiHeadAttention", "MultiHeadDotProductAttention"])
def test_linen_parameters_have_the_names_of_flax(name):
    settings = {"use_bias": False, "out_features": 6}
    flax, ours = (
        jax.eval_shape(parent(api, name, **settings).init, jax.random.key(0), X, MEMORY, None)
        for api in (linen, OURS.linen)
    )
    assert jax.tree.leaves_with_path(ours) == jax.tree.leaves_with_path(flax)
    assert f"{name}_0" in ours["params"]


def test_linen_parameters_are_those_of_flax():
    """Both initialize the same values, and each can use what the other saved."""
    mask = boolean(2, BATCH, HEADS, ROWS, COLUMNS)
    flax, ours = (
        parent(api, "MultiHeadAttention", normalize_qk=True) for api in (linen, OURS.linen)
    )
    variables = quickly(flax.init, jax.random.key(0), X, MEMORY, mask)
    initial = quickly(ours.init, jax.random.key(0), X, MEMORY, mask)
    assert_close(initial, variables, 0)
    saved = serialization.to_bytes(scrambled(variables))
    assert_close(serialization.from_bytes(initial, saved), scrambled(variables), 0)
    variables = serialization.from_bytes(initial, saved)

    def run(module):
        return gradients(lambda *operands: module.apply(*operands, mask), variables, X, MEMORY)

    assert_close(run(ours), run(flax), 1e-4)


def test_nnx_parameters_are_those_of_flax():
    settings = {"num_kv_heads": 2, "normalize_qk": True}
    mask = boolean(2, BATCH, 1, ROWS, ROWS)
    flax, ours = (nnx_layer(api, **settings) for api in (nnx, OURS.nnx))
    assert_close(*(nnx.to_pure_dict(nnx.state(layer)) for layer in (ours, flax)), tolerance=0)
    nnx.update(flax, scrambled(nnx.state(flax, nnx.Param)))
    nnx.update(ours, nnx.state(flax, nnx.Param))

    def run(layer):
        graph, parameters = nnx.split(layer)

        def call(parameters, x):
            return nnx.merge(graph, parameters)(x, mask=mask, is_causal=True)

        (dparameters, dx), out = gradients(call, parameters, X)
        return nnx.to_pure_dict(dparameters), dx, out

    assert_close(run(ours), run(flax), 1e-4)


@functools.cache
def test_grouped_heads_of_linen_are_repeated_heads():
    grouped = OURS.linen.MultiHeadAttention(HEADS, num_kv_heads=2)
    variables = linen_variables(2)
    repeated = dict(variables["params"])
    for name in ("key", "value"):
        repeated[name] = jax.tree.map(lambda x: jnp.repeat(x, 2, -2), repeated[name])
    full = linen.MultiHeadAttention(HEADS)
    expected = quickly(full.apply, {"params": repeated}, X)
    assert_close(quickly(grouped.apply, variables, X), expected)


# ---------------------------------------------------------------------------- more arguments


@pytest.fixture(params=["linen", "nnx"])
def api(request):
    return request.param


def test_bias_of_minus_infinity_is_a_mask(api):
    layer = make(api)
    mask = boolean(2, BATCH, 1, ROWS, ROWS)
    masked = apply(api, layer, X, bias=jnp.where(mask, 0.0, -jnp.inf))
    assert_close(masked, apply(api, layer, X, mask=mask))


def test_gradient_of_the_bias():
    api, layer = "nnx", make("nnx")
    bias = normal(3, HEADS, ROWS, ROWS)
    (gradient,), out = gradients(lambda bias: apply(api, layer, X, bias=bias), bias)
    assert gradient.shape == bias.shape and np.all(gradient != 0)
    step = 1e-2 * normal(4, *bias.shape)
    weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    ends = [jnp.vdot(apply(api, layer, X, bias=bias + s * step), weights) for s in (1, -1)]
    assert_close((ends[0] - ends[1]) / 2, jnp.vdot(gradient, step), 1e-3)


def test_packed_sequences_are_separate_sequences(api):
    layer = make(api, rotary_base=100.0)
    ids = jnp.array([[4, 4, 7, 7, 7], [1, 2, 2, 2, -1]])
    out = apply(api, layer, X, segment_ids=ids, is_causal=True)
    for row, first, last in ((0, 0, 2), (0, 2, 5), (1, 1, 4)):
        alone = apply(api, layer, X[row : row + 1, first:last], is_causal=True)
        assert_close(out[row, first:last], alone[0], 1e-4)
    same = apply(api, layer, X, segment_ids=(ids, ids), mask=Mask.causal())
    assert_close(out, same)
    nowhere = apply(api, layer, X, mask=jnp.zeros((1, 1, 1, ROWS)))
    assert_close(out[1, 4], nowhere[1, 4])


def test_dropout_is_the_kernels(api):
    layer = make(api, dropout_rate=0.5, broadcast_dropout=False)
    key = jax.random.key(3)
    random = {"rngs": nnx.Rngs(dropout=key)} if api == "nnx" else {"rngs": {"dropout": key}}
    first, second = (apply(api, layer, X, deterministic=False, **random) for _ in range(2))
    quiet = apply(api, layer, X, deterministic=True)
    assert np.any(first != quiet)
    if api == "nnx":
        assert np.any(first != second)  # each call gets a new key of the stream
    else:
        assert np.all(first == second)
        given = apply(api, layer, X, deterministic=False, dropout_rng=key)
        module = linen.MultiHeadAttention(
            HEADS,
            dropout_rate=0.5,
            broadcast_dropout=False,
            attention_fn=jax_memeff.flax.attention_fn,
        )
        expected = module.apply(linen_variables(), X, deterministic=False, dropout_rng=key)
        assert_close(given, expected)


# ------------------------------------------------------------------------------------ rotary


def test_rotary_embedding_turns_complex_numbers():
    x = normal(0, 2, 6, 3, 8)
    positions = np.array([0, 1, 2, 5, 40, 1000])
    turned = rotary_embedding(x, positions, 100.0)
    pairs = np.asarray(x[..., :4] + 1j * x[..., 4:], np.complex128)
    angle = positions[:, None, None] * 100.0 ** (-np.arange(4) / 4)
    expected = pairs * np.exp(1j * angle)
    assert_close(turned, jnp.concatenate([expected.real, expected.imag], -1), 1e-4)
    assert rotary_embedding(x.astype(jnp.bfloat16), positions).dtype == jnp.bfloat16


def test_rotary_embedding_sees_differences_of_positions(api):
    out = apply(api, make(api, rotary_base=50.0), X)
    assert np.any(np.abs(out - apply(api, make(api), X)) > 1e-3)
    query, key = normal(0, 4, 2, 16), normal(1, 4, 2, 16)

    def scores(first):
        at = first + jnp.arange(4)
        turned = rotary_embedding(query, at), rotary_embedding(key, at)
        return jnp.einsum("tnh,snh->nts", *turned)

    assert_close(scores(0), scores(1000), 1e-3)


# ------------------------------------------------------------------------------------- errors


def test_bad_calls_raise(api):
    layer = make(api)
    for arguments, message in (
        ({"segment_ids": jnp.zeros((BATCH, 3), int)}, r"queries must have shape \(2, 5\)"),
        ({"segment_ids": jnp.zeros((BATCH, ROWS))}, "integer"),
        ({"inputs_v": X}, "inputs_k must be given"),
        ({"segment_ids": (jnp.zeros((BATCH, ROWS), int),) * 3}, "segment_ids must be .* 3 arrays"),
        ({"bias": jnp.zeros((3, 1, 1))}, "bias"),
        ({"bias": "alibi"}, "bias must be an array, got str"),
        ({"mask": "causal"}, r"got 'causal'; pass is_causal=True"),
        ({"mask": lambda b, h, q, k: q >= k}, r"pass mask=jax_memeff.Mask.function\(function\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            apply(api, layer, X, **arguments)
    with pytest.raises(UnsupportedError, match="sow_weights=False"):
        apply(api, layer, X, sow_weights=True)
    with pytest.raises(TypeError, match="attention_fn cannot be replaced"):
        apply(api, make(api, attention_fn=linen.dot_product_attention), X)
    for heads in (3, 0, -2):
        with pytest.raises(ValueError, match=f"num_kv_heads must be at least 1 .* got {heads}"):
            apply(api, make(api, num_kv_heads=heads), X)
    with pytest.raises(TypeError, match=r"num_kv_heads must be a Python integer, got 2\.0"):
        apply(api, make(api, num_kv_heads=2.0), X)


@pytest.mark.parametrize("name", ["inputs_q", "inputs_k", "inputs_v"])
def test_nnx_layers_name_inputs_with_other_features(name):
    layer = jax_memeff.flax.nnx.MultiHeadAttention(
        num_heads=2, in_features=8, in_kv_features=6, decode=False, rngs=nnx.Rngs(0)
    )
    features = {"inputs_q": 8, "inputs_k": 6, "inputs_v": 6} | {name: 7}
    inputs: dict[str, Any] = {key: jnp.ones((2, 4, own)) for key, own in features.items()}
    with pytest.raises(ValueError, match=rf"{name} must have the .* got shape \(2, 4, 7\)"):
        layer(**inputs)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_no_mask_needs_promotion(api, dtype):
    mask = np.tril(np.ones((ROWS, ROWS), dtype))
    expected = apply(api, make(api), X, is_causal=True)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_close(apply(api, make(api), X, mask=mask), expected)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_heads_are_counted(api):
    heads: Any
    for heads, error, message in (
        (0, ValueError, "num_heads must be at least 1, got 0"),
        (4.0, TypeError, r"num_heads must be a Python integer, got 4\.0"),
    ):
        with pytest.raises(error, match=message):
            if api == "nnx":
                OURS.nnx.MultiHeadAttention(heads, 32, rngs=nnx.Rngs(0))
            else:
                OURS.linen.MultiHeadAttention(heads).init(jax.random.key(0), X)


def test_sinks_are_a_parameter_of_both(assert_close):
    """Sinks are learned, one per head. Far below the scores they change nothing."""
    x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    low, init = linen.initializers.constant(-1e30), linen.initializers.normal(1.0)
    make = functools.partial(jax_memeff.flax.linen.MultiHeadAttention, num_heads=4)
    variables: Any = make(sinks_init=init).init(jax.random.key(1), x)
    assert variables["params"]["sinks"].shape == (4,)

    def loss(params: Any) -> jax.Array:
        out: Any = make(sinks_init=init).apply({"params": params}, x)
        return jnp.sum(jnp.sin(out))

    gradient = jax.grad(loss)(variables["params"])["sinks"]
    assert bool(jnp.all(gradient != 0))
    lowered = {**variables["params"], "sinks": jnp.full(4, -1e30)}
    without = {name: lowered[name] for name in lowered if name != "sinks"}
    got = make(sinks_init=low).apply({"params": lowered}, x)
    assert_close(got, make().apply({"params": without}, x), 1e-6)

    layer = jax_memeff.flax.nnx.MultiHeadAttention(4, 32, sinks_init=init, rngs=nnx.Rngs(0))
    plain = jax_memeff.flax.nnx.MultiHeadAttention(4, 32, rngs=nnx.Rngs(0))
    assert layer.sinks is not None and plain.sinks is None
    of_layer = nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x))))(layer)
    assert bool(jnp.all(of_layer["sinks"][...] != 0))
    layer.sinks[...] = jnp.full(4, -1e30)
    assert_close(layer(x), plain(x), 1e-6)
    layer.sinks[...] = jnp.zeros(4)
    query, key, value = (getattr(layer, name)(x) for name in ("query", "key", "value"))
    out = jax_memeff.dot_product_attention(query, key, value, sinks=jnp.zeros(4))
    assert_close(layer(x), layer.out(out), 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sinks_are_promoted_like_other_parameters(dtype, assert_close):
    """Checkpoints are often cast as a whole."""
    x = jax.random.normal(jax.random.key(0), (2, 10, 32))
    layer = OURS.linen.MultiHeadAttention(4, sinks_init=linen.initializers.normal(1.0))
    variables: Any = layer.init(jax.random.key(1), x)
    cast = jax.tree.map(lambda parameter: parameter.astype(dtype), variables)
    out: Any = layer.apply(cast, x)
    assert out.dtype == jnp.float32
    assert_close(out, layer.apply(variables, x), 0.05)
    of_float16: Any = layer.clone(dtype=jnp.bfloat16).apply(cast, x)
    assert of_float16.dtype == jnp.bfloat16
    of_nnx = OURS.nnx.MultiHeadAttention(
        4, 32, sinks_init=lambda *_: jnp.ones(4, dtype), rngs=nnx.Rngs(0)
    )
    assert of_nnx(x).dtype == jnp.float32
    x4 = jnp.ones((1, 2, 4, 8))
    with pytest.raises(TypeError, match="sinks must have the dtype of query, float32, got int32"):
        OURS.attention_fn(x4, x4, x4, sinks=jnp.ones(4, jnp.int32))


@pytest.mark.parametrize(
    ("x", "positions", "error", "message"),
    [
        (None, np.arange(3), TypeError, "x must be an array, got NoneType"),
        (
            np.ones((3, 4)),
            np.arange(3),
            ValueError,
            r"floats of shape .* got float32 of shape \(3, ",
        ),
        (np.ones((3, 2, 4), int), np.arange(3), ValueError, "x must be floats .* got int32 of"),
        (
            np.ones((3, 2, 4)),
            np.arange(5),
            ValueError,
            r"broadcast to .* = \[3\], got shape \(5,\)",
        ),
        (np.ones((3, 2, 4)), None, TypeError, "positions must be an array, got NoneType"),
        (np.ones((3, 2, 4)), np.ones(3, complex), TypeError, "real numbers, got dtype complex128"),
        (np.ones((3, 2, 4)), jax.random.key(0), TypeError, "real numbers, got dtype key<fry>"),
    ],
)
def test_wrong_arguments_of_rotary_embedding(x, positions, error, message):
    with pytest.raises(error, match=message):
        rotary_embedding(x, positions)


@pytest.mark.parametrize(
    ("base", "error", "message"),
    [
        (0, ValueError, "base must be > 0, got 0.0; layers take it as rotary_base"),
        (-10.0, ValueError, "base must be > 0, got -10.0"),
        ("10", TypeError, "base must be a number, got '10'"),
    ],
)
def test_wrong_base_of_rotary_embedding(base, error, message):
    with pytest.raises(error, match=message):
        rotary_embedding(jnp.ones((3, 2, 4)), jnp.arange(3), base)
