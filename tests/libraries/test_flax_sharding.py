"""Every Flax entry point on eight host devices: explicit axes, automatic axes, inside shard_map.

The oracle is the same layer with the same parameters on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_case import DATA, gathered, mesh_of, put, run

import jax_memeff.flax
from jax_memeff import Mask
from jax_memeff.flax import attention_fn

HOST = jax.devices("cpu")[:8]
BATCH, ROWS, HEADS, HEAD_DIM, FEATURES = 4, 16, 4, 8, 32
RNG = jax.random.key(3)

auto_and_explicit = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def assert_close(got, want):
    # An absolute tolerance, too, because the gradient of the key's bias is 0 except for rounding.
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(compare, got, want)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = random(0, BATCH, ROWS, FEATURES)
BIAS = random(1, 1, HEADS, ROWS, ROWS)
MASK = random(2, BATCH, 1, ROWS, ROWS) > -1
MASK[..., 0] = True


class Layer(NamedTuple):
    """A layer as a function of its parameters and inputs, and whether it takes a bias."""

    apply: Callable[..., jax.Array]
    parameters: Any
    takes_bias: bool


def linen_layer(module: Any, takes_bias: bool) -> Layer:
    parameters = module.init(jax.random.key(0), X, deterministic=True)

    def apply(parameters, x, **arguments):
        return module.apply(parameters, x, deterministic=False, dropout_rng=RNG, **arguments)

    return Layer(apply, parameters, takes_bias)


def nnx_layer(layer: Any, takes_bias: bool) -> Layer:
    graph, parameters, others = nnx.split(layer, nnx.Param, ...)

    def apply(parameters, x, **arguments):
        layer = nnx.merge(graph, parameters, others)
        return layer(x, deterministic=False, rngs=nnx.Rngs(dropout=RNG), **arguments)

    return Layer(apply, parameters, takes_bias)


@functools.cache
def layer_of(door: str) -> Layer:
    settings: Any = {"dropout_rate": 0.25}
    if door == "attention_fn in linen":
        module = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, **settings)
        return linen_layer(module, False)
    if door == "linen":
        return linen_layer(jax_memeff.flax.linen.MultiHeadAttention(HEADS, **settings), True)
    settings.update(decode=False, rngs=nnx.Rngs(0))
    if door == "attention_fn in nnx":
        layer = nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=attention_fn, **settings)
        return nnx_layer(layer, False)
    return nnx_layer(jax_memeff.flax.nnx.MultiHeadAttention(HEADS, FEATURES, **settings), True)


DOORS = ["attention_fn in linen", "linen", "attention_fn in nnx", "nnx"]


def value_and_gradients(layer: Layer) -> Callable[..., Any]:
    def loss(parameters, x, bias, mask):
        arguments = {"bias": bias} if layer.takes_bias else {}
        out = layer.apply(parameters, x, mask=mask, **arguments)
        return jnp.sum(out * jnp.cos(out)), out

    wanted = (0, 1, 2) if layer.takes_bias else (0, 1)
    return jax.value_and_grad(loss, wanted, has_aux=True)


@functools.cache
def unsharded(door: str) -> Any:
    layer = layer_of(door)
    return jax.jit(value_and_gradients(layer))(layer.parameters, X, BIAS, MASK)


@pytest.mark.rotating(3)
@auto_and_explicit
@pytest.mark.parametrize("door", DOORS)
def test_layers_over_a_mesh(door, axis_type):
    """The calls have dropout, a mask per batch index and, if supported, a bias with a gradient."""
    layer = layer_of(door)
    function = jax.jit(value_and_gradients(layer))
    mesh = mesh_of(axis_type, HOST)
    sharded = (
        jax.tree.map(lambda leaf: put(mesh, leaf), layer.parameters),
        put(mesh, X, "data"),
        put(mesh, BIAS),
        put(mesh, MASK, "data"),
    )
    got, hlo = run(function, *sharded)
    assert gathered(hlo) == []
    # As in the public functions, explicit axes enter shard_map; only automatic axes need the rule
    # for the partitioner.
    assert ("jax_memeff_digest" in hlo) == (axis_type == AxisType.Auto)
    (_, out), (_, dx, *_) = got
    for array in (out, dx):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3)
    assert_close(got, unsharded(door))


@pytest.mark.rotating(2)
@pytest.mark.parametrize("door", DOORS)
def test_layers_inside_shard_map(door):
    """Broadcast dropout drops the same elements of all batch indices, whatever their device."""
    layer = layer_of(door)

    def local(parameters, x, bias, mask):
        arguments = {"bias": bias} if layer.takes_bias else {}
        out = layer.apply(parameters, x, mask=mask, **arguments)
        return jax.lax.psum(jnp.sum(out * jnp.cos(out)), "data"), out

    loss = jax.shard_map(
        local,
        mesh=mesh_of(AxisType.Auto, HOST),
        in_specs=(P(), P("data"), P(), P("data")),
        out_specs=(P(), P("data")),
        axis_names={"data", "tensor"},
    )
    wanted = (0, 1, 2) if layer.takes_bias else (0, 1)
    got = jax.jit(jax.value_and_grad(loss, wanted, has_aux=True))(layer.parameters, X, BIAS, MASK)
    assert_close(got, unsharded(door))


# ------------------------------------------------------------------------------- the function


def heads_of(*batch: int) -> list[np.ndarray]:
    return [random(seed, *batch, ROWS, HEADS, HEAD_DIM) for seed in (4, 5, 6)]


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "batch, spec",
    [
        ((DATA,), ("data", None, "tensor")),
        ((DATA, 3), ("data", None, None, "tensor")),
        ((DATA, 2), ("data", "tensor")),
        ((1, DATA), (None, "data", None, "tensor")),
        ((), (None, "tensor")),
    ],
)
@auto_and_explicit
def test_attention_fn_with_batch_dims(batch, spec, axis_type):
    """Heads and several batch dims are sharded; the result is sharded like the query."""
    bias = random(7, *batch, HEADS, ROWS, ROWS)
    mesh = mesh_of(axis_type, HOST)

    @jax.jit
    def function(query, key, value, bias):
        def loss(query, key, value, bias):
            out = attention_fn(
                *(query, key, value, bias),
                is_causal=True,
                dropout_rng=RNG,
                dropout_rate=0.5,
                broadcast_dropout=False,
            )
            return jnp.sum(out * jnp.cos(out)), out

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(query, key, value, bias)

    operands = heads_of(*batch)
    bias_spec = (*spec[: len(batch)], *([None] * (len(batch) - len(spec))), "tensor")
    if "tensor" in spec[: len(batch)]:
        bias_spec = bias_spec[:-1]
    got = function(*(put(mesh, x, *spec) for x in operands), put(mesh, bias, *bias_spec))
    out = got[0][1]
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), out.ndim)
    assert_close(got, function(*operands, bias))


def test_an_inner_batch_dim_that_is_sharded_alone_raises():
    """One flat dim cannot express the sharding, and nothing is gathered silently."""
    mesh = mesh_of(AxisType.Explicit, HOST)
    query, key, value = (put(mesh, x, None, "data") for x in heads_of(2, DATA))
    message = r"query: .*outermost .*\(2, 4\).*'data' on dimension 1.*jnp\.moveaxis"
    with pytest.raises(ValueError, match=message):
        attention_fn(query, key, value)


# -------------------------------------------------------------------------------- the modules


@auto_and_explicit
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_segments_rotary_positions_and_masks(api, axis_type):
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (BATCH, ROWS)))
    settings: Any = {"num_kv_heads": 2, "rotary_base": 100.0}
    if api == "linen":
        layer = linen_layer(jax_memeff.flax.linen.MultiHeadAttention(HEADS, **settings), True)
    else:
        settings.update(decode=False, rngs=nnx.Rngs(0))
        layer = nnx_layer(jax_memeff.flax.nnx.MultiHeadAttention(HEADS, FEATURES, **settings), True)

    @jax.jit
    def call(parameters, x, ids, lengths):
        mask = Mask.window(5, 0) & Mask.lengths(key=lengths)
        return layer.apply(parameters, x, segment_ids=ids, mask=mask)

    lengths = np.array([16, 9, 12, 16], np.int32)
    mesh = mesh_of(axis_type, HOST)
    parameters = jax.tree.map(lambda leaf: put(mesh, leaf), layer.parameters)
    got = call(parameters, put(mesh, X, "data"), put(mesh, ids, "data"), put(mesh, lengths, "data"))
    assert_close(got, call(layer.parameters, X, ids, lengths))


@auto_and_explicit
def test_heads_of_nnx_are_sharded(axis_type):
    """Tensor parallelism: each device has the columns of the weights of its heads."""
    layer = layer_of("nnx")
    mesh = mesh_of(axis_type, HOST)
    explicit = axis_type == AxisType.Explicit
    shardings = {"out_sharding": NamedSharding(mesh, P("data"))} if explicit else {}
    specs = {"query": P(None, "tensor"), "key": P(None, "tensor"), "value": P(None, "tensor")}

    def spec_of(path, leaf):
        name = path[0].key
        if name == "out":
            return P("tensor") if leaf.ndim == 3 else P()
        return specs[name] if leaf.ndim == 3 else P("tensor")

    parameters = jax.tree_util.tree_map_with_path(
        lambda path, leaf: put(mesh, leaf, *spec_of(path, leaf)), layer.parameters
    )
    call = jax.jit(functools.partial(layer.apply, is_causal=True))
    sharded = jax.jit(functools.partial(layer.apply, is_causal=True, **shardings))
    got = sharded(parameters, put(mesh, X, "data"), bias=put(mesh, BIAS, None, "tensor"))
    assert_close(got, call(layer.parameters, X, bias=BIAS))


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_shard_map_over_one_of_two_explicit_axes(axis):
    mesh, operands = mesh_of(AxisType.Explicit, HOST), heads_of(BATCH)
    spec = {"data": P("data"), "tensor": P(None, None, "tensor")}[axis]
    local = jax.shard_map(attention_fn, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={axis})
    with jax.set_mesh(mesh):
        got = jax.jit(local)(*(put(mesh, x, "data", None, "tensor") for x in operands))
    query, key, value = operands
    assert_close(got, attention_fn(query, key, value))


@pytest.mark.rotating(2)
@auto_and_explicit
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_decoding(api, axis_type):
    mesh = mesh_of(axis_type, HOST)
    want = decoded(api, lambda leaf, *spec: leaf)
    assert_close(decoded(api, functools.partial(put, mesh)), want)


def decoded(api: str, place: Callable[..., Any]) -> jax.Array:
    """Two steps of a layer whose cache is sharded over the batch."""

    def placed(leaf):
        return place(leaf, "data") if leaf.ndim == 4 else place(leaf)

    steps = [place(X[:, :5], "data"), place(X[:, 5:6], "data")]
    longest = (BATCH, ROWS, FEATURES)
    if api == "linen":
        layer = jax_memeff.flax.linen.MultiHeadAttention(HEADS, rotary_base=10.0, decode=True)
        variables = jax.tree.map(placed, layer.init(jax.random.key(0), jnp.zeros(longest)))
        step = jax.jit(functools.partial(layer.apply, mutable=["cache"]))
        outs = []
        for x in steps:
            out, cache = step(variables, x)
            variables = {**variables, **cache}
            outs.append(out)
        return jnp.concatenate(outs, 1)
    layer: Any = jax_memeff.flax.nnx.MultiHeadAttention(
        HEADS, FEATURES, rotary_base=10.0, rngs=nnx.Rngs(0)
    )
    layer.init_cache(longest)
    nnx.update(layer, jax.tree.map(placed, nnx.state(layer)))
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    return jnp.concatenate([step(layer, x) for x in steps], 1)
