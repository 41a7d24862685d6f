"""Derivatives of ring attention other than its backward, against those of one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ring_case import compiled, natural, normal, ordered, ring_mesh

import jax_memeff
from jax_memeff import Mask

DEVICES = jax.devices("cpu")[:2]


def gradients(function):
    def loss(*arrays):
        return sum(jnp.sum(jnp.sin(x)) for x in function(*arrays))

    return jax.grad(loss, (0, 1, 2, 3))


def forward_derivatives(function, arrays, directions):
    """Derivatives in forward mode, and forward over reverse."""
    with jax_memeff.forward_mode():
        tangents = jax.jvp(function, arrays, directions)[1]
    return tangents, jax.jvp(gradients(function), arrays, directions)[1]


def reverse_over_reverse(function, arrays, directions):
    def along(*arrays):
        return sum(map(jnp.vdot, gradients(function)(*arrays), directions))

    return jax.grad(along, (0, 1, 2, 3))(*arrays)


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    "layout, derivatives",
    [("contiguous", reverse_over_reverse), ("zigzag", forward_derivatives)],
)
def test_derivatives_of_derivatives_and_forward_mode(layout, derivatives, assert_close):
    """Ids are sent with keys of another dtype, and some rows see no columns at first."""
    length = 8 * len(DEVICES)
    shapes = [(1, length, 2, 4), (1, length, 1, 4), (1, length, 1, 3), (1, 2, length, length)]
    arrays = [normal(20 + seed, *shape) for seed, shape in enumerate(shapes)]
    directions = [normal(30 + seed, *shape) for seed, shape in enumerate(shapes)]
    ids = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (1, length)), 1))

    def call(query, key, value, bias, ids, function: Any = jax_memeff.dot_product_attention):
        mask = Mask.segments(ids, ids) & Mask.causal()
        return function(query, key, value, bias, mask, return_residual=True)

    def on_ring(query, key, value, bias):
        ring = functools.partial(jax_memeff.ring_attention, axis_name="ring", layout=layout)
        rows, scores = P(None, "ring"), P(None, None, "ring")
        local: Any = jax.shard_map(
            functools.partial(call, function=ring),
            mesh=ring_mesh(DEVICES),
            in_specs=(rows, rows, rows, scores, rows),
            out_specs=rows,
        )
        by_row = [ordered(layout, x, 1, DEVICES) for x in (query, key, value)]
        bias = ordered(layout, bias, 2, DEVICES)
        results = local(*by_row, bias, ordered(layout, ids, 1, DEVICES))
        return [natural(layout, x, 1, DEVICES) for x in results]

    one_device = functools.partial(call, ids=ids)
    got, want = (
        compiled(derivatives, static_argnums=0)(function, arrays, directions)
        for function in (on_ring, one_device)
    )
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want), 1e-5)


def test_forward_mode_is_named():
    ring = functools.partial(jax_memeff.ring_attention, axis_name="ring")
    rows = P(None, "ring")
    local = jax.jit(
        jax.shard_map(ring, mesh=ring_mesh(DEVICES), in_specs=(rows,) * 3, out_specs=rows)
    )
    arrays = [normal(seed, 1, 4 * len(DEVICES), 1, 2) for seed in range(3)]
    with pytest.raises(TypeError, match=r"forward mode.*`with jax_memeff.forward_mode\(\):`"):
        jax.jvp(local, arrays, arrays)
