"""The axes of a mesh: those of the user, or those that follow from the compiler's shardings.

The compiler numbers the devices and forgets the axes of the mesh. A dim that it shards is divided
over a :class:`Stride`, or several. One of them may be part of a mesh axis: a projection of 6 heads,
sharded over 4 devices, has its heads sharded over 2. So the mesh of a call is made of its
shardings (:class:`DeviceAxes`). Its axes end where a sharding of an operand begins or ends, and
where a dim that the devices do not divide evenly has to end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

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


class Stride(NamedTuple):
    """``size`` devices whose numbers are ``stride`` apart."""

    size: int
    stride: int

    @property
    def end(self) -> int:
        return self.size * self.stride


def strides_of_dims(devices: np.ndarray, rank: int) -> list[list[Stride]] | None:
    """The strides of each dim, outermost first.

    Args:
        devices: the devices that have each part of an array, by their numbers. The dims after
            the first ``rank`` are devices with the same part.
        rank: the rank of the array.

    Returns:
        None if the devices of a dim are not at regular distances.

    >>> strides_of_dims(np.arange(8).reshape(2, 2, 2).transpose(2, 0, 1).reshape(2, 4), 2)
    [[Stride(size=2, stride=1)], [Stride(size=4, stride=2)]]
    """
    along = [
        devices[tuple(slice(None) if other == dim else 0 for other in range(devices.ndim))]
        for dim in range(devices.ndim)
    ]
    found = [_strides(numbers) for numbers in along[:rank]]
    expected = [_numbers(strides) for strides in found] + along[rank:]
    return found if np.array_equal(sum(np.ix_(*expected)), devices) else None


def _strides(numbers: np.ndarray) -> list[Stride]:
    """The strides in which the numbers increase from 0, as far as they do."""
    found: list[Stride] = []
    while len(numbers) > 1:
        stride = int(numbers[1])
        is_regular = numbers == stride * np.arange(len(numbers))
        size = len(numbers) if is_regular.all() else int(np.argmin(is_regular))
        if stride < 1 or size < 2:
            break
        found.insert(0, Stride(size, stride))
        numbers = numbers[::size]
    return found


def _numbers(strides: Iterable[Stride]) -> np.ndarray:
    """The inverse of :func:`_strides`."""
    numbers = np.zeros(1, int)
    for size, stride in strides:
        numbers = np.add.outer(numbers, stride * np.arange(size)).ravel()
    return numbers


class DeviceAxes(MeshAxes):
    """A mesh of strides: each axis is named by its stride.

    Args:
        cuts: the numbers of devices at which axes begin and end, ascending from 1; each divides
            the next one.
        users: the sizes of the axes of the user's mesh, for messages; empty if it is unknown.
    """

    def __init__(self, cuts: Sequence[int], users: Mapping[Any, int]) -> None:
        self.cuts = tuple(cuts)
        strides = [Stride(end // cut, cut) for cut, end in itertools.pairwise(self.cuts)]
        self.strides = {f"stride{stride.stride}": stride for stride in reversed(strides)}
        super().__init__({name: stride.size for name, stride in self.strides.items()})
        self.users = users

    @property
    def mesh(self) -> AbstractMesh:
        return AbstractMesh(tuple(self.sizes.values()), tuple(self.sizes))

    def cut_at(self, *numbers: int) -> DeviceAxes:
        """The mesh with more cuts, without those that do not fit between two others."""
        cuts = list(self.cuts)
        for number in numbers:
            place = int(np.searchsorted(cuts, number))
            if number not in cuts and not number % cuts[place - 1] and not cuts[place] % number:
                cuts.insert(place, number)
        return DeviceAxes(cuts, self.users)

    def cut_evenly(self, strides: Iterable[Stride], number: int) -> DeviceAxes:
        """The mesh with an axis cut where ``number`` stops being a multiple of the devices.

        Args:
            strides: those of a dim.
            number: what the devices should divide.

        >>> DeviceAxes((1, 8), {}).cut_evenly([Stride(8, 1)], 12).sizes
        {'stride2': 4, 'stride1': 2}
        """
        for axis in self.axes(strides) or ():
            size, end = self.sizes[axis], self.strides[axis].end
            part = math.gcd(number, size)
            if part < size:
                return self.cut_at(end // part)
            number //= size
        return self

    def axes(self, strides: Iterable[Stride]) -> Axes | None:
        """The axes that the strides consist of, outermost first; None if they end inside one."""
        found: list[str] = []
        for stride in strides:
            if not {stride.stride, stride.end} <= set(self.cuts):
                return None
            found += [
                name
                for name, own in self.strides.items()
                if stride.stride <= own.stride < stride.end
            ]
        return tuple(found)

    def spec(self, dims: Sequence[Sequence[Stride]] | None) -> PartitionSpec | None:
        """The sharding of an array whose dims are over these strides, if there is one."""
        entries = None if dims is None else list(map(self.axes, dims))
        return None if entries is None or None in entries else PartitionSpec(*entries)

    def text(self, axes: Axes) -> str:
        if not self.users and axes:
            return f"mesh axes of {self.devices(axes)} devices"
        shared = self._of_users(axes)
        return text(
            tuple(shared), tuple(user for user in shared if shared[user] < self.users[user])
        )

    def remedy(self, spec: PartitionSpec) -> str:
        by = "by jax.lax.with_sharding_constraint"
        dims = [self._of_users((axes,) if isinstance(axes, str) else axes or ()) for axes in spec]
        if not self.users or any(shared.items() - self.users.items() for shared in dims):
            return f"constrain both to whole mesh axes {by}"
        entries = (
            tuple(shared) if len(shared) > 1 else next(iter(shared), None) for shared in dims
        )
        return f"constrain it to {PartitionSpec(*entries)} {by}"

    def _of_users(self, axes: Axes) -> dict[Any, int]:
        """The axes of the user's mesh, and how many devices of each these axes are."""
        found: dict[Any, int] = {}
        for own in (self.strides[axis] for axis in axes):
            end = math.prod(self.users.values())
            for user, size in self.users.items():
                shared = min(own.end, end) // max(own.stride, end // size)
                if shared > 1:
                    found[user] = found.get(user, 1) * shared
                end //= size
        return found
