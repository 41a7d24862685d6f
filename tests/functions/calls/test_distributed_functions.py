"""Functions in calls over several devices get global indices, and gradients are summed once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention, ring_attention

B, T, N, H = 2, 32, 4, 8
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


ARRAYS = {
    "query": draw(0, B, T, N, H),
    "key": draw(1, B, T, 2, H),
    "value": draw(2, B, T, 2, H),
    "table": draw(3, N, 2 * T),
    "gain": draw(4, B),
}
COTANGENT = draw(5, B, T, N, H)
BOUNDS = jnp.array([5, 11])
MASK = (Mask.causal() | Mask.function(lambda b, h, q, k: k < BOUNDS[b])) & ~Mask.window(
    3, -2, "bottom_right"
)


def features(arrays: Any) -> dict[str, Any]:
    def score_mod(s, b, h, q, k):
        return jnp.tanh(s) * arrays["gain"][b] + arrays["table"][h, q - k + T]

    return {"score_mod": score_mod, "mask": MASK}


def attend(arrays: Any, attention: Any = dot_product_attention, **arguments: Any) -> Any:
    projections = (arrays[name] for name in ("query", "key", "value"))
    return attention(*projections, **{**features(arrays), **arguments})


def run(function: Any, arrays: Any, cotangent: Any = COTANGENT) -> Any:
    """The output, and the gradients of all arrays."""

    def loss(arrays):
        out = function(arrays)
        return jnp.sum(out * cotangent), out

    (_, out), gradients = compiled(jax.value_and_grad(loss, has_aux=True))(arrays)
    return jax.tree.map(np.asarray, (out, gradients))


@functools.cache
def expected() -> Any:
    return run(attend, ARRAYS)


def mesh_of(axis_type: AxisType, **axes: int) -> Any:
    count = int(np.prod(list(axes.values())))
    devices = jax.devices("cpu")[:count]
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), (axis_type,) * len(axes), devices=devices
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_rows(axis_type, assert_close):
    mesh = mesh_of(axis_type, data=2, rows=2)
    specs = {"query": P("data", "rows"), "key": P("data"), "value": P("data")}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
        for name, x in ARRAYS.items()
    }
    assert_close(run(attend, placed), expected())


def test_offsets_in_shard_map(assert_close):
    """Devices hold a part of the batch and of the heads and pass its position as ``Offsets``."""
    mesh = mesh_of(AxisType.Auto, data=2, heads=2)

    def local(arrays):
        offsets = Offsets(
            batch=jax.lax.axis_index("data"), head=jax.lax.axis_index("heads") * 2, num_heads=N
        )
        return attend(arrays, offsets=offsets)

    on_both = P("data", None, "heads")
    specs = dict.fromkeys(("query", "key", "value"), on_both) | dict.fromkeys(
        ("table", "gain"), P()
    )
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=on_both)
    assert_close(run(sharded, ARRAYS), expected())


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("layout", "method"),
    [
        ("contiguous", "ring"),
        ("zigzag", "ring"),
        ("zigzag", "all_gather"),
        ("zigzag", "all_to_all"),
    ],
)
def test_ring(layout, method, assert_close):
    devices = 2
    mesh = mesh_of(AxisType.Auto, ring=devices)

    def ordered(x, inverse=False):
        if layout == "contiguous":
            return x
        return (jax_memeff.unzigzag if inverse else jax_memeff.zigzag)(x, 1, devices)

    def ring(arrays):
        arguments = {"axis_name": "ring", "layout": layout, "method": method}
        local = functools.partial(attend, attention=ring_attention, **arguments)
        rows = P(None, "ring")
        names = ("query", "key", "value")
        specs = {name: rows if name in names else P() for name in arrays}
        arrays = {name: ordered(x) if name in names else x for name, x in arrays.items()}
        out = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=rows)(arrays)
        return ordered(out, inverse=True)

    assert_close(run(ring, ARRAYS), expected())


@pytest.mark.parametrize(
    "mask",
    [
        ~Mask.boolean(np.ones((T, T), bool)),
        Mask.causal() | Mask.segments(np.zeros(T, int), np.zeros(T, int)),
    ],
    ids=["boolean", "segments"],
)
def test_arrays_of_one_device_under_or_are_refused_in_a_ring(mask):
    mesh = mesh_of(AxisType.Auto, ring=2)
    x = ARRAYS["query"]

    def local(x):
        return ring_attention(x, x, x, mask=mask, axis_name="ring")

    rows = P(None, "ring")
    with pytest.raises(ValueError, match=r"under \| or ~ is not supported in a ring.*gather"):
        jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows))(x)


def test_vmap_over_a_sharded_axis(assert_close):
    """Each device computes some of the mapped calls, with their tables."""
    mesh = mesh_of(AxisType.Auto, data=2)
    two = jax.tree.map(lambda x: jnp.stack([x, x / 2]), ARRAYS)
    placed = jax.device_put(two, NamedSharding(mesh, P("data")))
    cotangent = jnp.stack([COTANGENT, -COTANGENT])
    got = run(jax.vmap(attend), placed, cotangent)
    want = [run(attend, jax.tree.map(lambda x, i=i: x[i], two), cotangent[i]) for i in range(2)]
    assert_close(got, jax.tree.map(lambda *x: np.stack(x), *want))


def test_sharded_tables_are_gathered_and_their_gradients_are_whole(assert_close):
    mesh = mesh_of(AxisType.Auto, data=2, heads=2)
    specs = dict.fromkeys(("query", "key", "value"), P("data", None, "heads"))
    specs |= {"table": P("heads", "data"), "gain": P("data")}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in ARRAYS.items()
    }
    assert_close(run(attend, placed), expected())
