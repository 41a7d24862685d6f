"""``jax_memeff.flax.attention_fn`` against Flax's own attention, in linen and in nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jax_memeff import Mask, UnsupportedError
from jax_memeff._call import dropout
from jax_memeff.flax import attention_fn

ROWS, COLUMNS, HEADS, DEPTH, FEATURES = 5, 7, 4, 8, 32


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def boolean(seed: int, *shape: int) -> jax.Array:
    """A random mask in which the first key of every row is valid."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


def arrays(*batch: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        normal(0, *batch, ROWS, HEADS, DEPTH),
        normal(1, *batch, COLUMNS, HEADS, DEPTH),
        normal(2, *batch, COLUMNS, HEADS, DEPTH),
    )


def assert_close(got, expected, tolerance=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, expected
    )


def weights(out: jax.Array) -> jax.Array:
    """Cotangents that differ from element to element."""
    return jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)


def value_and_gradients(function, *operands):
    """``function(*operands)``, and the gradients of a weighted sum of it."""

    def scalar(*operands):
        out = function(*operands)
        return jnp.vdot(out, weights(out)), out

    argnums = tuple(range(len(operands)))
    gradients, out = jax.jit(jax.grad(scalar, argnums, has_aux=True))(*operands)
    return out, gradients


def test_a_module_of_flax_takes_a_mask_object():
    x = normal(3, 2, ROWS, FEATURES)
    mask = Mask.causal() & Mask.lengths(key=np.array([ROWS, 2]))
    layer = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn)
    variables = layer.init(jax.random.key(0), x)
    array = mask.as_array(2, 1, ROWS, ROWS)
    assert_close(layer.apply(variables, x, mask=mask), layer.apply(variables, x, mask=array))


# ------------------------------------------------------------------------- against the function


@pytest.mark.parametrize(
    "batch, bias_shape, mask_shape",
    [
        ((), None, None),
        ((), (HEADS, ROWS, COLUMNS), (COLUMNS,)),
        ((2,), (HEADS, 1, COLUMNS), (2, 1, ROWS, COLUMNS)),
        ((2, 3), (2, 3, HEADS, ROWS, COLUMNS), (2, 3, 1, 1, COLUMNS)),
        ((2, 3), (2, 1, HEADS, ROWS, COLUMNS), (1, 3, HEADS, ROWS, COLUMNS)),
        ((2, 1, 2), (1, 1, 1, HEADS, ROWS, 1), (ROWS, COLUMNS)),
    ],
)
def test_equals_flax_with_any_batch_dims(batch, bias_shape, mask_shape):
    query, key, value = arrays(*batch)
    bias = None if bias_shape is None else normal(3, *bias_shape)
    mask = None if mask_shape is None else boolean(4, *mask_shape)

    def run(function):
        def call(query, key, value, bias):
            return function(query, key, value, bias, mask)

        return value_and_gradients(call, query, key, value, bias)

    assert_close(run(attention_fn), run(linen.dot_product_attention))


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8", "float32"])
def test_nonzero_attends(dtype):
    mask = boolean(4, 2, 1, ROWS, COLUMNS)
    expected = linen.dot_product_attention(*arrays(2), mask=mask)
    scaled = mask if dtype == "bool" else 3 * mask.astype(dtype)
    assert_close(attention_fn(*arrays(2), mask=scaled), expected)


@pytest.mark.quick
def test_row_without_keys_is_zero():
    mask = boolean(4, 2, 1, ROWS, COLUMNS).at[:, :, 2].set(False)
    out = attention_fn(*arrays(2), mask=mask)
    assert not np.any(out[:, 2])
    assert np.all(np.any(out[:, 3], axis=-1))


@pytest.mark.parametrize(
    "dtypes, dtype, expected",
    [
        (("bfloat16", "float32", "bfloat16"), None, "float32"),
        (("bfloat16", "bfloat16", "bfloat16"), None, "bfloat16"),
        (("float32", "float32", "float32"), "float16", "float16"),
        (("int32", "int32", "int32"), None, "float32"),
    ],
)
def test_promotes_dtypes_as_flax(dtypes, dtype, expected):
    query, key, value = (array.astype(d) for array, d in zip(arrays(2), dtypes, strict=True))
    out = attention_fn(query, key, value, dtype=dtype)
    reference = linen.dot_product_attention(query, key, value, dtype=dtype)
    assert out.dtype == reference.dtype == expected
    tolerance = 2e-5 if expected == "float32" else 2e-2
    assert_close(out.astype("float32"), reference.astype("float32"), tolerance)


def test_takes_a_promote_dtype():
    def to_half(operands, *, dtype):
        assert dtype is None
        return tuple(operand.astype("float16") for operand in operands)

    assert attention_fn(*arrays(2), promote_dtype=to_half).dtype == "float16"


@pytest.mark.parametrize("bias_dtype", ["float16", "bfloat16", "int32"])
def test_bias_of_another_dtype(bias_dtype):
    bias = (2 * normal(3, HEADS, ROWS, COLUMNS)).astype(bias_dtype)
    expected = linen.dot_product_attention(*arrays(2), bias=bias)
    assert_close(attention_fn(*arrays(2), bias=bias), expected)


@pytest.mark.parametrize(
    "precision", ["highest", "float32", jax.lax.Precision.HIGH, ("default", "highest")]
)
def test_takes_every_flax_precision(precision):
    expected = attention_fn(*arrays(2))
    assert_close(attention_fn(*arrays(2), precision=precision), expected)


# -------------------------------------------------------------------------- through the modules


def linen_layers(**settings) -> tuple[linen.Module, linen.Module]:
    layer = linen.MultiHeadDotProductAttention
    return (
        layer(num_heads=HEADS, attention_fn=attention_fn, **settings),
        layer(num_heads=HEADS, **settings),
    )


@pytest.mark.rotating(2)
@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("settings", [{}, {"normalize_qk": True, "force_fp32_for_softmax": True}])
def test_linen_module(batch, settings):
    inputs, memory = normal(0, *batch, ROWS, FEATURES), normal(1, *batch, COLUMNS, FEATURES)
    mask = linen.make_attention_mask(jnp.ones((*batch, ROWS)), boolean(2, *batch, COLUMNS))
    ours, flax = linen_layers(**settings)
    variables = jax.jit(flax.init)(jax.random.key(0), inputs, memory)

    def run(layer):
        def call(variables, inputs, memory):
            return layer.apply(variables, inputs, memory, mask=mask)

        return value_and_gradients(call, variables, inputs, memory)

    # Gradients of weights sum over rows and batch, so the order of the sums needs more tolerance.
    assert_close(run(ours), run(flax), 1e-4)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("settings", [{}, {"num_kv_heads": 2}])
def test_nnx_module(batch, is_causal, settings):
    inputs = normal(0, *batch, ROWS, FEATURES)
    mask = boolean(2, *batch, HEADS, ROWS, ROWS)

    def run(function):
        layer = nnx.MultiHeadAttention(
            num_heads=HEADS,
            in_features=FEATURES,
            attention_fn=function,
            decode=False,
            rngs=nnx.Rngs(0),
            **settings,
        )
        graph, parameters = nnx.split(layer)

        def call(parameters, inputs):
            return nnx.merge(graph, parameters)(inputs, mask=mask, is_causal=is_causal)

        out, gradients = value_and_gradients(call, parameters, inputs)
        return out, nnx.to_pure_dict(gradients[0]), gradients[1]

    assert_close(run(attention_fn), run(nnx.dot_product_attention), 1e-4)


def test_linen_decodes_through_its_cache():
    inputs = normal(0, 2, ROWS, FEATURES)

    def run(layer):
        variables = jax.jit(layer.init)(jax.random.key(0), inputs)
        decode = jax.jit(lambda variables, row: layer.apply(variables, row, mutable=["cache"]))
        outs = []
        for row in range(ROWS):
            out, cache = decode(variables, inputs[:, row : row + 1])
            variables = {**variables, **cache}
            outs.append(out)
        return jnp.concatenate(outs, 1)

    ours, flax = (run(layer) for layer in linen_layers(decode=True))
    assert_close(ours, flax)


def test_nnx_decodes_through_its_cache():
    inputs = normal(0, 2, ROWS, FEATURES)

    def run(function):
        layer = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=FEATURES, attention_fn=function, rngs=nnx.Rngs(0)
        )
        full = layer(inputs, is_causal=True, decode=False)
        layer.init_cache(inputs.shape)
        decode = nnx.jit(lambda layer, row: layer(row, decode=True))
        steps = [decode(layer, inputs[:, row : row + 1]) for row in range(ROWS)]
        return full, jnp.concatenate(steps, 1)

    full, steps = run(attention_fn)
    assert_close(steps, full)
    assert_close(steps, run(nnx.dot_product_attention)[1])


# ------------------------------------------------------------------------------------- dropout


def kept(batch: int, seed: int, rate: float, size: int = 64, **settings) -> np.ndarray:
    """The dropout mask [B, N, T, S], from uniform probabilities applied to unit vectors.

    A kept element gives ``1 / size * 256 / (256 - T)``, a dropped one gives 0.
    """
    zeros = jnp.zeros((batch, size, HEADS, DEPTH))
    unit = jnp.broadcast_to(jnp.eye(size)[:, None, :], (batch, size, HEADS, size))
    out = attention_fn(
        zeros, zeros, unit, dropout_rng=jax.random.key(seed), dropout_rate=rate, **settings
    )
    scaled = np.asarray(out) * size * (1 - dropout.realised_rate(rate))
    assert set(np.unique(np.round(scaled, 4))) == {0.0, 1.0}
    return np.moveaxis(scaled > 0.5, 2, 1)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_rate(rate):
    mask = kept(4, 0, rate, broadcast_dropout=False)
    expected = 1 - dropout.realised_rate(rate)
    deviation = np.sqrt(expected * (1 - expected) / mask.size)
    assert abs(mask.mean() - expected) < 5 * deviation


def test_broadcast_dropout_is_shared_by_batch_and_heads():
    shared = kept(3, 0, 0.25)
    assert np.all(shared == shared[:1, :1])
    separate = kept(3, 0, 0.25, broadcast_dropout=False)
    flat = separate.reshape(-1, separate[0, 0].size)
    agreement = np.mean(flat[:, None] == flat[None], -1)[~np.eye(len(flat), dtype=bool)]
    # Independent masks agree on 0.75² + 0.25² of the elements.
    assert np.all(np.abs(agreement - 0.625) < 0.05)


def test_dropout_is_a_function_of_its_rng():
    assert np.all(kept(2, 0, 0.5) == kept(2, 0, 0.5))
    assert np.any(kept(2, 0, 0.5) != kept(2, 1, 0.5))


@pytest.mark.parametrize("broadcast_dropout", [True, False])
def test_dropout_gradient(broadcast_dropout):
    """The gradient of the value has the dropout mask of the forward."""
    query, key, value = arrays(2)

    def call(value):
        return attention_fn(
            query,
            key,
            value,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=jax.random.key(0),
            dropout_rate=0.5,
        )

    # The function is linear in value, so the gradient reproduces it.
    out, (gradient,) = value_and_gradients(call, value)
    assert_close(jnp.vdot(gradient, value), jnp.vdot(out, weights(out)))


def test_modules_drop_in_training_only():
    inputs = normal(0, 2, ROWS, FEATURES)
    ours, flax = linen_layers(dropout_rate=0.5)
    variables = flax.init(jax.random.key(0), inputs, deterministic=True)
    quiet = ours.apply(variables, inputs, deterministic=True)
    assert_close(quiet, flax.apply(variables, inputs, deterministic=True))
    rngs = {"dropout": jax.random.key(1)}
    loud = ours.apply(variables, inputs, deterministic=False, rngs=rngs)
    assert np.all(loud == ours.apply(variables, inputs, deterministic=False, rngs=rngs))
    assert np.any(loud != quiet)

    layer = nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=FEATURES,
        dropout_rate=0.5,
        attention_fn=attention_fn,
        decode=False,
        rngs=nnx.Rngs(0),
    )
    assert np.any(layer(inputs, deterministic=False) != layer(inputs, deterministic=True))
    first, second = (layer(inputs, deterministic=False, rngs=nnx.Rngs(7)) for _ in range(2))
    assert np.all(first == second)


# -------------------------------------------------------------------------------------- errors


def test_sown_weights_raise():
    inputs = normal(0, 2, ROWS, FEATURES)
    ours, flax = linen_layers()
    variables = jax.jit(flax.init)(jax.random.key(0), inputs)
    with pytest.raises(UnsupportedError, match="sow_weights=False"):
        ours.apply(variables, inputs, sow_weights=True, mutable=["intermediates"])
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
    )
    with pytest.raises(UnsupportedError, match="sow_weights=False"):
        layer(inputs, sow_weights=True)


def test_replaced_products_raise():
    inputs = normal(0, 2, ROWS, FEATURES)
    ours, flax = linen_layers(
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
    )
    variables = jax.jit(flax.init)(jax.random.key(0), inputs)
    with pytest.raises(UnsupportedError, match="qk_attn_weights_einsum, attn_weights_value_einsum"):
        ours.apply(variables, inputs)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"dropout_rate": 0.5}, "dropout_rng must be given"),
        ({"dropout_rate": 1.5}, r"dropout_rate must be in \[0, 1\), got 1.5"),
        ({"bias": np.zeros((3, 1, ROWS, COLUMNS))}, r"bias .* broadcast to \(2,\)"),
        ({"mask": np.ones((1, 2, 1, 1, COLUMNS))}, r"mask must have rank <= 4"),
        ({"precision": "exact"}, "precision must be .* got 'exact'"),
    ],
)
def test_bad_arguments_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        attention_fn(*arrays(2), **settings)


def test_arguments_that_are_no_arrays_raise():
    query, key, value = arrays(2)
    text: Any = "key"
    functions: list[Any] = [lambda batch, head, query, key: query >= key, Mask.causal]
    with pytest.raises(TypeError, match="key must be an array, got str"):
        attention_fn(query, text, value)
    with pytest.raises(TypeError, match=r"pass mask=jax_memeff.Mask.function\(function\)"):
        attention_fn(query, key, value, mask=functions[0])
    with pytest.raises(TypeError, match=r"pass mask=jax_memeff.Mask.causal\(\.\.\.\)"):
        attention_fn(query, key, value, mask=functions[1])
    with pytest.raises(TypeError, match=r"^mask must be an array of numbers, got key<"):
        attention_fn(query, key, value, mask=jax.random.key(0))
    for bias in (jax.random.key(0), np.ones(COLUMNS, np.complex64)):
        with pytest.raises(TypeError, match=rf"^bias must be .* real numbers, got {bias.dtype}"):
            attention_fn(query, key, value, bias=bias)


def test_bad_shapes_raise():
    query, key, value = arrays(2, 3)
    with pytest.raises(ValueError, match=r"key must have the batch dimensions of query, \(2, 3\)"):
        attention_fn(query, key[:, :2], value)
    with pytest.raises(ValueError, match=r"query must be \[batch\.\.\., length, heads, depth\]"):
        attention_fn(query[0, 0, 0], key, value)
