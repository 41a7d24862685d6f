"""``jax_memeff.flax``'s modules have the parameters, results, gradients and caches of Flax's."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx, serialization

import jax_memeff
import jax_memeff.flax
from jax_memeff import Mask, UnsupportedError
from jax_memeff.codegen.features import MASK
from jax_memeff.flax import rotary_embedding

BATCH, ROWS, COLUMNS, HEADS, FEATURES = 2, 5, 7, 4, 32
OURS = jax_memeff.flax


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X = normal(0, BATCH, ROWS, FEATURES)
MEMORY = normal(1, BATCH, COLUMNS, FEATURES)


def boolean(seed: int, *shape: int) -> jax.Array:
    """A random mask in which the first key of every row is valid."""
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.6).at[..., 0].set(True)


def assert_close(got, expected, tolerance=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    compare = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(compare, got, expected)


def scrambled(tree):
    """Random values for every array, so that nothing agrees only because it is 0 or 1."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = [leaf + 0.1 * normal(9 + i, *leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, leaves)


def gradients(function, *operands):
    def scalar(*operands):
        out = function(*operands)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    argnums = tuple(range(len(operands)))
    # These programs run once, so they are not optimized.
    options: Any = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.grad(scalar, argnums, has_aux=True), compiler_options=options)(*operands)


def quickly(function, *operands):
    options: Any = {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options)(*operands)


def nnx_layer(api, **settings):
    rngs = nnx.Rngs(0)
    return api.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=rngs, **settings)


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
def linen_variables(num_kv_heads: int = HEADS):
    layer = OURS.linen.MultiHeadAttention(HEADS, num_kv_heads=num_kv_heads)
    return scrambled(quickly(layer.init, jax.random.key(0), X))


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


def apply(api: str, layer: Any, x: jax.Array, **arguments: Any) -> Any:
    """A layer of either API, with fixed parameters."""
    if api == "nnx":
        return layer(x, **arguments)
    return layer.apply(linen_variables(layer.num_kv_heads or HEADS), x, **arguments)


def make(api: str, **settings: Any) -> Any:
    if api == "nnx":
        return nnx_layer(OURS.nnx, **settings)
    return OURS.linen.MultiHeadAttention(HEADS, **settings)


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


# ---------------------------------------------------------------------------------- decoding

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
    assert spec.kernel.splits_keys and spec.pack_heads
    assert spec[MASK] == ("none" if rows == 1 else "causal")
    assert "key_lengths" in text and "partial_out" in text and "4x8192x2x64xbf16" in text


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
    with pytest.raises(ValueError, match="segment_ids must be None while decoding"):
        ids = jnp.zeros((BATCH, 1), int)
        layer(X[:, :1], decode=True, deterministic=True, segment_ids=ids)
    with pytest.raises(ValueError, match="even head dim, got 3"):
        rotary_embedding(jnp.ones((2, 1, 3)), jnp.arange(2))


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
