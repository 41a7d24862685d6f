"""The axes of a batch: those that ``jax.vmap`` added, and the call's own, as separate dims.

Because they are separate dims, the compiler may shard each of them. An operand that is broadcast
over part of the batch has a contiguous run of the axes, and each device's part of the operand is
broadcast in the same way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from jax_memeff._sharding.dims import batch_names
from jax_memeff._sharding.layout import Layout
from jax_memeff._sharding.mesh_axes import MeshAxes


class BatchAxes(NamedTuple):
    """The sizes of the axes, outermost first.

    >>> axes = BatchAxes((3, 4))
    >>> axes.named("batch columns key_heads head_dim", indices=12)
    'vmap0 batch columns key_heads head_dim'
    >>> axes.named("batch columns key_heads head_dim", indices=4)
    'batch columns key_heads head_dim'
    >>> axes.named("batch heads rows columns", indices=3, divisor=4)
    'vmap0 heads rows columns'
    """

    sizes: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return batch_names(len(self.sizes))

    def run(self, indices: int, divisor: int) -> slice:
        """The axes of an operand with this many batch indices and this divisor."""
        if indices == math.prod(self.sizes):
            return slice(0, len(self.sizes))
        of_later = [math.prod(self.sizes[axis:]) for axis in range(len(self.sizes) + 1)]
        return slice(of_later.index(indices * divisor), of_later.index(divisor))

    def later(self, run: slice) -> int:
        """The divisor of an operand whose axes are this run."""
        return math.prod(self.sizes[run.stop :])

    def of_device(self, layout: Layout, mesh: MeshAxes) -> BatchAxes:
        """The sizes of the axes on one device."""
        return BatchAxes(
            tuple(
                size // mesh.devices(layout.axes(name))
                for name, size in zip(self.names, self.sizes, strict=True)
            )
        )

    def named(self, dims: str, indices: int, divisor: int = 1) -> str:
        """The dims of an array, with the batch replaced by its axes."""
        if not dims.startswith("batch"):
            return dims
        own = self.names[self.run(indices, divisor)] or ("one",)
        return " ".join((*own, *dims.split()[1:]))

    def split_shape(self, shape: tuple[int, ...], dims: str) -> tuple[int, ...]:
        """The shape of :meth:`split`'s result, whose dims have these names."""
        names = dims.split()
        own = [size for name, size in zip(self.names, self.sizes, strict=True) if name in names]
        return (*own, *shape[1:]) if own else shape

    def split(self, x: jax.Array, dims: str) -> jax.Array:
        """The array with the first dim split into the axes of the batch."""
        return x.reshape(self.split_shape(x.shape, dims))

    def joined(self, x: jax.Array, dims: str) -> jax.Array:
        """The inverse of :meth:`split`."""
        own = sum(name in self.names for name in dims.split())
        return x.reshape(-1, *x.shape[own:]) if own else x
