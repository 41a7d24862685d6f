"""Test problems of ring attention, with the results of the ring and of one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from several_devices import Devices, Sizes

import jax_memeff
from jax_memeff import Mask

# These tests spend most of their time on compilation.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def ring_mesh(devices: Devices) -> Mesh:
    return Mesh(np.array(devices), ("ring",))


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def ordered(layout: str, x: Any, axis: int, devices: Devices) -> Any:
    return jax_memeff.zigzag(x, axis, len(devices)) if layout == "zigzag" else x


def natural(layout: str, x: Any, axis: int, devices: Devices) -> Any:
    return jax_memeff.unzigzag(x, axis, len(devices)) if layout == "zigzag" else x


def masking(bias: jax.Array) -> jax.Array:
    """The bias with two masked columns (rows, if it has one column), one for each masking value."""
    return bias.at[0, 0, 0, -1].set(-jnp.inf).at[-1, -1, -1, -1].set(-1e38)


class Case:
    """One problem: the arrays of the whole sequence, and the arguments of both functions."""

    def __init__(self, sizes: Sizes, *, rows=128, columns=128, bias=None, **arguments):
        self.sizes = sizes
        draw = functools.partial(normal, dtype=sizes.dtype)
        rows, columns = rows * sizes.scale, columns * sizes.scale
        batch, heads, key_heads, dim = 2, 4, 2, sizes.head_dim
        value_dim = 2 * dim if sizes.scale == 1 else dim
        query = draw(0, batch, rows, heads, dim)
        key = draw(1, batch, columns, key_heads, dim)
        value = draw(2, batch, columns, key_heads, value_dim)
        segments = arguments.pop("segments", None)
        mask = arguments.pop("mask", Mask())
        dout = draw(4, batch, rows, heads, value_dim)
        self.by_row = query, key, value, segments, (dout, normal(5, batch, rows, heads))
        dims = {"B": batch, "N": heads, "T": rows, "S": columns, "1": 1}
        added = None if bias is None else masking(draw(3, *(dims[dim] for dim in bias)))
        self.by_score = added, mask.booleans
        self.mask = Mask(**{**vars(mask), "booleans": ()})
        self.arguments = arguments
        self.programs: dict[Any, Any] = {}

    def call(self, function, by_row, by_score):
        """Output, logsumexp, and the gradients of query, key, value and bias."""
        query, key, value, segments, cotangents = by_row
        bias, booleans = by_score
        mask = self.mask & Mask(booleans=booleans)
        if segments is not None:
            mask &= Mask.segments(*segments)

        def attention(query, key, value, bias):
            return function(query, key, value, bias, mask, return_residual=True, **self.arguments)

        results, transpose = jax.vjp(attention, query, key, value, bias)
        *gradients, bias_gradient = transpose(cotangents)
        return (*results, *gradients), bias_gradient

    @functools.cached_property
    def want(self):
        one_device = functools.partial(self.call, jax_memeff.dot_product_attention)
        return compiled(one_device)(self.by_row, self.by_score)

    def inputs(self, layout: str, devices: Devices) -> tuple[Any, Any]:
        by_row, by_score = jax.tree.map(np.asarray, (self.by_row, self.by_score))
        by_row = jax.tree.map(lambda x: ordered(layout, x, 1, devices), by_row)
        return by_row, jax.tree.map(
            lambda x: ordered(layout, x, 2, devices) if x.shape[2] != 1 else x, by_score
        )

    def program(self, devices: Devices, layout: str, method: str = "ring"):
        """The compiled ring."""
        name = tuple(devices), layout, method
        if name not in self.programs:
            ring: Any = jax_memeff.ring_attention
            function = functools.partial(ring, axis_name="ring", layout=layout, method=method)
            scores = jax.tree.map(
                lambda x: P(None, None, "ring") if x.shape[2] != 1 else P(), self.by_score
            )
            sharded = jax.shard_map(
                functools.partial(self.call, function),
                mesh=ring_mesh(devices),
                in_specs=(P(None, "ring"), scores),
                out_specs=(P(None, "ring"), scores[0]),
            )
            lowered = compiled(sharded).lower(*self.inputs(layout, devices))
            self.programs[name] = lowered.compile()
        return self.programs[name]

    def run(self, devices: Devices, layout: str, method: str = "ring") -> Any:
        """The results of the ring, in the order of its layout."""
        program = self.program(devices, layout, method)
        inputs = self.inputs(layout, devices)
        return program(*jax.tree.map(_placed, inputs, program.input_shardings[0]))

    def got(self, devices: Devices, layout: str, method: str = "ring") -> Any:
        """The results of the ring in natural order."""
        results, bias_gradient = jax.tree.map(np.asarray, self.run(devices, layout, method))
        if bias_gradient is not None and bias_gradient.shape[2] != 1:
            bias_gradient = natural(layout, bias_gradient, 2, devices)
        return tuple(natural(layout, x, 1, devices) for x in results), bias_gradient


def _placed(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array, sharded over the devices of all processes; each process has all of it."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def segment_ids(seed: int, scale: int) -> np.ndarray:
    """Sorted ids [2, 128 * scale]; the last ones are padding."""
    ids = np.sort(np.random.default_rng(seed).integers(0, 3, (2, 128 * scale)), 1)
    ids[:, 120 * scale :] = -1
    return ids


CASES = {
    "everything": lambda sizes: Case(
        sizes,
        bias="1NTS",
        segments=(segment_ids(7, sizes.scale), segment_ids(7, sizes.scale)),
        is_causal=True,
        query_seq_lengths=np.array([128, 90]) * sizes.scale,
        key_value_seq_lengths=np.array([117, 40]) * sizes.scale,
        logits_soft_cap=3.0,
        scale=-0.7,
        dropout_rate=0.25,
        dropout_key=jax.random.key(3),
    ),
    "shared bias": lambda sizes: Case(sizes, bias="B11S", mask=Mask.window(40, 3)),
    "row bias": lambda sizes: Case(sizes, rows=64, bias="1NT1", mask=Mask.causal("bottom_right")),
    "boolean": lambda sizes: Case(
        sizes,
        mask=Mask.boolean(np.random.default_rng(9).random((1, 2, 128, 128)).repeat(2, 1) < 0.5),
        key_value_seq_lengths=np.array([128, 0]),
    ),
}
"""Problems by name. The boolean mask has the sizes for the host."""


@functools.cache
def case(name: str, sizes: Sizes) -> Case:
    return CASES[name](sizes)
