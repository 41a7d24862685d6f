"""The axes of a mesh, and their names in messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

Axes = tuple[Any, ...]
"""Names of mesh axes that one dim is sharded over; empty for none."""


class MeshAxes:
    """The axes of the mesh of explicit types."""

    def __init__(self, sizes: Mapping[Any, int]) -> None:
        self.sizes = sizes

    def devices(self, axes: Axes) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def dividing(self, axes: Axes) -> Axes:
        """Those of more than one device."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    def text(self, axes: Axes) -> str:
        """The axes in a message."""
        return text(axes)

    def remedy(self, spec: PartitionSpec) -> str:
        """How to give an operand this sharding."""
        return f"reshard it to {spec} by jax.sharding.reshard"


def text(axes: Axes, parts: Axes = ()) -> str:
    """The axes in a message.

    Args:
        axes: their names.
        parts: those of which only a part is meant.

    >>> text(("data", "model"), parts=("model",))
    "mesh axes ('data', part of 'model')"
    """
    if len(axes) == 1:
        return f"{'part of ' if parts else ''}mesh axis {axes[0]!r}"
    names = (f"part of {axis!r}" if axis in parts else repr(axis) for axis in axes)
    return f"mesh axes ({', '.join(names)})" if axes else "no mesh axis"
