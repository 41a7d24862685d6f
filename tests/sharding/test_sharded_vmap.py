"""vmap of sharded calls: each axis of the folded batch is sharded alone, and nothing is copied."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from several_devices import at, sizes
from sharding_case import B, H, K, N, T, gathered, loss, mesh_of, put, random, run

from jax_memeff import Offsets, dot_product_attention

HOST = jax.devices("cpu")[:8]
SIZE = 2 * B
MAPPED = [
    (("key", "mask"), 1),
    (("query", "value", "bias", "first"), B),
    (("query", "bias"), 1),
    (("first",), 1),
]
"""The mapped arrays, and the number of elements of the bias."""
DIFFERENTIABLE = ("query", "key", "value", "bias")


def arrays_of(mapped, sizes, bias_elements):
    """All arrays of a call with B batch indices, and the names of dims that may be sharded."""
    length, dim = T * sizes.scale, sizes.head_dim
    dims = {
        "query": ("batch", "rows", "heads", "dim"),
        "key": ("batch", "columns", "heads", "dim"),
        "value": ("batch", "columns", "heads", "dim"),
        "bias": ("batch" if bias_elements == B else "one", "heads", "rows", "columns"),
        "mask": ("one", "one", "rows", "columns"),
        "lengths": ("batch",),
        "first": (),
    }
    size_of = {"batch": B, "rows": length, "columns": length, "dim": dim, "one": 1, "vmap": SIZE}
    dims = {name: ("vmap",) * (name in mapped) + own for name, own in dims.items()}

    def draw(name, own):
        heads = {"heads": K if name in ("key", "value") else N}
        return random(*((size_of | heads)[dim] for dim in own), dtype=sizes.dtype)

    arrays: dict[str, Any] = {name: draw(name, own) for name, own in dims.items()}
    arrays["mask"] = arrays["mask"] < 1
    shape = arrays["lengths"].shape
    # With dropout kernels need multiples of 16.
    arrays["first"] = 16 * np.arange(arrays["first"].size).reshape(arrays["first"].shape)
    arrays["lengths"] = np.arange(arrays["lengths"].size).reshape(shape) % (length + 1)
    return arrays, dims


def gradients(mapped, names):
    """The gradients of the float arrays for every mapped index."""

    def of_element(arrays):
        def value(floats):
            return loss(
                *(floats[name] for name in DIFFERENTIABLE),
                mask=arrays["mask"],
                key_value_seq_lengths=arrays["lengths"],
                offsets=Offsets(query=arrays["first"]),
                dropout_rate=0.25,
                dropout_key=jax.random.key(3),
            )

        return jax.value_and_grad(value)({name: arrays[name] for name in DIFFERENTIABLE})

    return jax.vmap(of_element, ({name: 0 if name in mapped else None for name in names},))


def partitioned(text):
    """The shapes of the operands of partitioned calls."""
    calls = re.findall(r"custom_call @CustomSPMDPartitioning.* : \((.*)\) ->", text)
    return [
        [tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<([^>]*)>", operands)]
        for operands in calls
    ]


def test_explicit_axes_of_a_mapped_dim_are_an_error():
    mesh = mesh_of(AxisType.Explicit, HOST)
    queries = put(mesh, random(SIZE, B, T, N, H), "data")
    attend = jax.vmap(lambda x: dot_product_attention(x, x, x))
    with pytest.raises(ValueError, match=r"over mesh axis 'data'.* around jax.vmap"):
        jax.jit(attend).lower(queries)

    local = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert jax.eval_shape(local, queries).shape == queries.shape


@pytest.mark.rotating(3)
@pytest.mark.parametrize("sharded", ["vmap", "batch"])
@at(
    "mapped, bias_elements, devices",
    cpu=[(names, elements, 8) for names, elements in MAPPED],
    cuda=[(names, elements, 2) for names, elements in MAPPED],
)
def test_broadcast_operands_are_not_repeated_on_each_device(
    mapped, bias_elements, sharded, devices, assert_close
):
    arrays, dims = arrays_of(mapped, sizes(devices), bias_elements)
    function = jax.jit(gradients(mapped, arrays))
    axes = {sharded: "data", "heads": "tensor"}
    mesh = mesh_of(AxisType.Auto, devices)
    placed = {name: put(mesh, x, *map(axes.get, dims[name])) for name, x in arrays.items()}
    got, hlo = run(function, placed)
    assert_close(got, function(arrays), sizes(devices).tolerance)
    assert gathered(hlo) == []
    calls = partitioned(function.lower(placed).as_text())
    assert len(calls) == 2
    for shapes in calls:
        assert shapes[0] == (SIZE, *arrays["query"].shape[-4:])
        bias = [size for size in arrays["bias"].shape[:-3] if size > 1] or [1]
        assert shapes[1:3] == [arrays["key"].shape, arrays["value"].shape]
        assert shapes[3] == (*bias, *arrays["bias"].shape[-3:])
