"""Test calls that are sharded over the batch and the heads."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from several_devices import ON_HOST, Devices, shape_of, transfers

from jax_memeff import dot_product_attention

B, T, N, K, H = 4, 16, 4, 2, 8
"""T and H on the host."""
DATA, TENSOR = 4, 2
"""The sizes of the mesh of eight devices."""
ON_BOTH = P("data", None, "tensor")
DROPOUT_KEY = jax.random.key(7)
LENGTHS = np.array([16, 5, 11, 0])


def mesh_of(axis_type, devices: Devices):
    shape = {8: (DATA, TENSOR), 4: (2, 2), 2: (2, 1)}[len(devices)]
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(axis_type,) * 2, devices=devices)


def random(*shape, dtype=np.float32):
    seed = int(np.prod(shape)) + 31 * len(shape)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@functools.cache
def projections(kv_heads=K, sizes=ON_HOST) -> tuple[Any, Any, Any]:
    """Query, key and value; on the host value has one column more than key."""
    length, dim = T * sizes.scale, sizes.head_dim
    value_dim = dim + 1 if sizes is ON_HOST else dim
    return (
        random(B, length, N, dim, dtype=sizes.dtype),
        random(B, length, kv_heads, dim, dtype=sizes.dtype),
        random(B, length, kv_heads, value_dim, dtype=sizes.dtype),
    )


def put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def loss(query, key, value, bias=None, *, attention=dot_product_attention, **arguments):
    """A number that depends on every element of out and lse."""
    out, lse = attention(query, key, value, bias=bias, return_residual=True, **arguments)
    out, weights = out.astype(jnp.float32), jnp.cos(jnp.arange(out.shape[-1]))
    return jnp.sum(out * out * weights) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) ** 2)


def value_and_grad(function, *operands):
    return jax.jit(jax.value_and_grad(function, tuple(range(len(operands)))))


def run(function, *operands):
    """The results of a function, compiled for sharded operands, and its HLO."""
    compiled = function.lower(*operands).compile()
    return compiled(*operands), compiled.as_text() or ""


def refused_or_gathered(axis_type, function, operands, message, messages, assert_close):
    """Explicit axes raise this message; under automatic ones the call runs, and it is logged.

    Args:
        operands: sharded.
        messages: the fixture.
    """
    if axis_type == AxisType.Explicit:
        with pytest.raises(ValueError, match=f"^{message}"):
            jax.jit(function).lower(*operands)
        return
    got = jax.jit(function)(*operands)
    assert_close(got, jax.jit(function)(*(np.asarray(x) for x in operands)))
    assert any(re.search(f" bytes. .*{message}", text) for text in messages())


def gathered(hlo):
    """The shapes of the results of all collectives that move arrays instead of summing them."""
    moved = transfers(hlo, "all-gather", "all-to-all", "collective-permute")
    return [shape_of(array) for array in moved]
