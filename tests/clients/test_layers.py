"""The layers for Equinox and Haiku equal those that they replace."""

import dataclasses
import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

from jax_memeff import Mask

CAUSAL = np.tri(7, dtype=bool)
PER_HEAD = np.stack([CAUSAL, ~CAUSAL.T | np.eye(7, dtype=bool)] * 2)
MASKS: dict[str, Any] = {
    "none": None,
    "causal": CAUSAL,
    "per head": PER_HEAD,
    "float": CAUSAL.astype(np.float32),
    "fractions per head": PER_HEAD * np.float32(-0.25),
    "integer": jnp.asarray(CAUSAL * 3, jnp.int8),
    "bfloat16": jnp.asarray(CAUSAL, jnp.bfloat16),
}


def client(library):
    """The adapter for a library, which imports the library."""
    return importlib.import_module(f"jax_memeff.clients.{library}")


def close_in(dtype, got, want):
    """Gradients that are 0 except for rounding need an absolute tolerance."""
    tolerance = 2e-5 if dtype == jnp.float32 else 0.05
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * abs(theirs).max() + 1e-5)


def assert_same_arguments(ours, theirs):
    """Name, kind and default of each argument; ours may have more."""
    ours, theirs = (inspect.signature(call).parameters for call in (ours, theirs))
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


# --------------------------------------------------------------------------------------- equinox


@pytest.fixture
def equinox():
    return pytest.importorskip("equinox", reason="needs the extra clients")


def equinox_layers(equinox, **arguments):
    """Equinox's layer and the adapter's, which makes the same parameters from the same key."""
    classes = equinox.nn.MultiheadAttention, client("equinox").MultiheadAttention
    return [layer(4, 12, key=jax.random.key(0), **arguments) for layer in classes]


@pytest.mark.rotating(2)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equinox(equinox, mask):
    x = normal(0, 3, 7, 12)

    def result(layer, x):
        return jax.vmap(lambda x: layer(x, x, x, mask))(x)

    def loss(layer, x):
        return jnp.sum(result(layer, x) ** 3)

    theirs, ours = equinox_layers(equinox, use_query_bias=True, qk_size=5, vo_size=6)
    run = equinox.filter_jit(
        lambda layer, x: (result(layer, x), equinox.filter_grad(loss)(layer, x))
    )
    close_in(jnp.float32, run(ours, x), run(theirs, x))


@pytest.mark.parametrize("parameters", ["float32", "bfloat16"])
def test_equinox_promotes_dtypes(equinox, parameters):
    """Queries and keys of different dtypes, and parameters of a third one."""
    x, y = normal(0, 7, 12).astype(jnp.bfloat16), normal(1, 7, 12)
    theirs, ours = equinox_layers(equinox, dtype=jnp.dtype(parameters))
    run = equinox.filter_jit(lambda layer: layer(x, y, y, CAUSAL))
    close_in(jnp.bfloat16, run(ours), run(theirs))


def test_equinox_rotary_heads_masks_and_dropout(equinox, assert_close):
    x = normal(1, 7, 12)
    theirs, ours = equinox_layers(equinox, dropout_p=0.5, qk_size=4)
    rotary = equinox.nn.RotaryPositionalEmbedding(4)

    def process_heads(query, key, value):
        turned = jax.vmap(rotary, in_axes=1, out_axes=1)
        return turned(query), turned(key), value

    run = functools.partial(ours, x, x, x, process_heads=process_heads)
    want = theirs(x, x, x, CAUSAL, inference=True, process_heads=process_heads)
    assert_close(run(Mask.causal(), inference=True), want)
    assert_close(run(is_causal=True, inference=True), want)
    with pytest.warns(UserWarning, match="deprecates deterministic: pass inference"):
        assert_close(run(is_causal=True, deterministic=True), want)
    assert_close(equinox.nn.inference_mode(ours)(x, x, x), theirs(x, x, x, inference=True))
    dropped = run(is_causal=True, key=jax.random.key(1))
    assert not np.allclose(dropped, want)
    assert_close(run(is_causal=True, key=jax.random.key(1)), dropped)
    with pytest.raises(RuntimeError, match="dropout needs key, got None"):
        run()


def test_equinox_draws_dropout_for_each_key_of_a_batch(equinox, assert_close):
    x, keys = normal(2, 3, 7, 12), jax.random.split(jax.random.key(1), 3)
    _, layer = equinox_layers(equinox, dropout_p=0.5)
    batch = jax.vmap(lambda x, key: layer(x, x, x, key=key))(x, keys)
    assert_close(batch[1], layer(x[1], x[1], x[1], key=keys[1]))


def test_equinox_arguments(equinox):
    theirs, ours = equinox.nn.MultiheadAttention, client("equinox").MultiheadAttention
    assert_same_arguments(ours.__call__, theirs.__call__)
    assert inspect.signature(ours) == inspect.signature(theirs)


# ----------------------------------------------------------------------------------------- haiku


@pytest.fixture
def haiku():
    return pytest.importorskip("haiku", reason="needs the extra clients")


def haiku_layers(haiku):
    return client("haiku").MultiHeadAttention, haiku.MultiHeadAttention


def haiku_results(haiku, layer, query, memory, mask):
    """The gradients by parameters and inputs, and the output."""

    @haiku.without_apply_rng
    @haiku.transform
    def model(query, memory):
        initializer = haiku.initializers.VarianceScaling()
        return layer(4, 5, w_init=initializer, value_size=6, model_size=9)(
            query, memory, memory, mask
        )

    def loss(parameters, *inputs):
        out = model.apply(parameters, *inputs)
        return jnp.sum(out.astype(jnp.float32) ** 3), out

    parameters = model.init(jax.random.key(0), query, memory)
    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(parameters, query, memory)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_haiku(haiku, batch):
    x = normal(2, *batch, 7, 12)
    mask = np.broadcast_to(CAUSAL, (*batch, 1, 7, 7))
    ours, theirs = (haiku_results(haiku, layer, x, x, mask) for layer in haiku_layers(haiku))
    assert list(ours[0][0]) == [
        f"multi_head_attention/{name}" for name in ("key", "linear", "query", "value")
    ]
    close_in(jnp.float32, ours, theirs)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((1, 1, 1, 7, 7), "float32"),  # as in the example of a transformer in Haiku's repository
        ((2, 1, 1, 1, 7), "int32"),
        ((1, 3, 4, 7, 7), "bfloat16"),
        ((2, 3, 4, 7, 1), "bool"),
    ],
)
def test_haiku_masks(haiku, shape, dtype):
    drawn = np.random.default_rng(0).random(shape) < 0.7
    drawn[..., 0] = True
    mask, x = jnp.asarray(drawn).astype(dtype), normal(2, 2, 3, 7, 12)
    results = [haiku_results(haiku, layer, x, x, mask) for layer in haiku_layers(haiku)]
    close_in(jnp.float32, *results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_haiku_promotes_dtypes_and_broadcasts_batch_dims(haiku, dtype):
    query, memory = normal(2, 2, 3, 7, 12), normal(3, 1, 3, 5, 12).astype(dtype)
    (ours, our_out), (theirs, their_out) = (
        haiku_results(haiku, layer, query, memory, None) for layer in haiku_layers(haiku)
    )
    assert jax.tree.map(jnp.result_type, ours) == jax.tree.map(jnp.result_type, theirs)
    # In bfloat16 the gradient of a key's bias is all rounding.
    close_in(jnp.dtype(dtype), (ours[1:], our_out), (theirs[1:], their_out))


def test_haiku_arguments(haiku):
    ours, theirs = haiku_layers(haiku)
    assert_same_arguments(ours.__call__, theirs.__call__)
    assert inspect.signature(ours) == inspect.signature(theirs)
    with pytest.raises(ValueError, match=r"mask must have rank 4, got shape \(7, 7\)"):
        haiku_results(haiku, ours, normal(2, 3, 7, 12), normal(2, 3, 7, 12), CAUSAL)


@pytest.mark.rotating(3)
def test_the_transformer_of_haiku(haiku):
    """The example in Haiku's repository: causal and padding mask are multiplied, in float."""

    @dataclasses.dataclass
    class Transformer(haiku.Module):
        attention: Any
        name: str | None = None

        def __call__(self, tokens):
            initializer = haiku.initializers.VarianceScaling(1.0)
            norm = functools.partial(haiku.LayerNorm, -1, True, True)
            mask = (tokens != 0)[:, None, None, :] * np.tril(np.ones((1, 1, 7, 7)))
            hidden = haiku.Embed(11, 12)(tokens)
            for _ in range(2):
                x = norm()(hidden)
                layer = self.attention(num_heads=4, key_size=3, model_size=12, w_init=initializer)
                hidden = hidden + layer(x, x, x, mask=mask)
                hidden = hidden + haiku.nets.MLP([24, 12])(norm()(hidden))
            return haiku.Linear(11)(norm()(hidden))

    tokens = np.array([[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 0, 0, 0]])

    def step(layer):
        model = haiku.without_apply_rng(haiku.transform(lambda x: Transformer(layer)(x)))

        def loss(parameters):
            logits = jax.nn.log_softmax(model.apply(parameters, tokens))
            return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1).mean()

        return jax.jit(jax.value_and_grad(loss))(model.init(jax.random.key(0), tokens))

    ours, theirs = (step(layer) for layer in haiku_layers(haiku))
    close_in(jnp.float32, ours, theirs)
