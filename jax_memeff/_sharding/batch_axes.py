"""The axes of a batch, those that ``jax.vmap`` put in front of it, as dims of their own.

A compiler that divides a program among devices may divide any of them then. An operand that
elements of the batch share has the axes that it differs along, which are next to each other, and a
device's part of it is shared alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jax_memeff._sharding.layout import Layout, batch_names


class BatchAxes(NamedTuple):
    """The sizes of the axes, outermost first.

    >>> axes = BatchAxes((3, 4))
    >>> axes.named("batch columns key_heads head_dim", elements=12)
    'vmap0 batch columns key_heads head_dim'
    >>> axes.named("batch columns key_heads head_dim", elements=4)
    'batch columns key_heads head_dim'
    >>> axes.named("batch heads rows columns", elements=3, divisor=4)
    'vmap0 heads rows columns'
    """

    sizes: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return batch_names(len(self.sizes))

    def run(self, elements: int, divisor: int) -> slice:
        """The axes of an operand of so many elements, shared by this divisor."""
        if elements == math.prod(self.sizes):
            return slice(0, len(self.sizes))
        of_later = [math.prod(self.sizes[axis:]) for axis in range(len(self.sizes) + 1)]
        return slice(of_later.index(elements * divisor), of_later.index(divisor))

    def later(self, run: slice) -> int:
        """The divisor of an operand that has a run of the axes."""
        return math.prod(self.sizes[run.stop :])

    def of_device(self, layout: Layout, mesh: Mesh) -> BatchAxes:
        """The part of each axis that a device has."""
        return BatchAxes(
            tuple(
                size // math.prod(mesh.shape[axis] for axis in layout.axes(name))
                for name, size in zip(self.names, self.sizes, strict=True)
            )
        )

    def named(self, dims: str, elements: int, divisor: int = 1) -> str:
        """The dims of an array, with the axes of the batch in place of that."""
        if not dims.startswith("batch"):
            return dims
        own = self.names[self.run(elements, divisor)] or ("one",)
        return " ".join((*own, *dims.split()[1:]))

    def split_shape(self, shape: tuple[int, ...], dims: str) -> tuple[int, ...]:
        """Of an array whose dims have these names then."""
        names = dims.split()
        own = [size for name, size in zip(self.names, self.sizes, strict=True) if name in names]
        return (*own, *shape[1:]) if own else shape

    def split(self, x: jax.Array, dims: str) -> jax.Array:
        """The array with its axes of the batch for the first dim."""
        return x.reshape(self.split_shape(x.shape, dims))

    def joined(self, x: jax.Array, dims: str) -> jax.Array:
        """The array before :meth:`split`."""
        own = sum(name in self.names for name in dims.split())
        return x.reshape(-1, *x.shape[own:]) if own else x
