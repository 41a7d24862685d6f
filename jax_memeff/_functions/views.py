"""Parts of captured arrays that a function has indexed, and the reads of their elements.

A part of any size is kept as a :class:`View`, so ``table[head][query - key]`` is one read. It
becomes scalars, one read each, when something other than an index operation uses it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_memeff._functions.graph import Graph
from jax_memeff._functions.operations import SCALAR_TYPES

MOST_ELEMENTS = 16
"""The largest array of intermediates that is unrolled into scalars."""

SAFE, CLIP, FILL = "safe", "clip", "fill"


class NotScalarError(Exception):
    """A part of the function has no scalar form; the message says which and what to do."""


@dataclasses.dataclass(frozen=True)
class Scalars:
    """An intermediate array: the index in the graph of each element."""

    elements: np.ndarray
    dtype: np.dtype
    """The dtype in JAX; the graph may compute in another type."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape


@dataclasses.dataclass(frozen=True)
class View:
    """A window into a captured array. Starts, extents and modes have one entry per array dim."""

    array: Any
    starts: tuple[int, ...]
    """The first index of the window: a value of the graph."""
    extents: tuple[int, ...]
    modes: tuple[str, ...]
    """A start that is out of range is clipped or filled; ``safe`` starts are in range."""
    axes: tuple[int | None, ...]
    """The dim of the array that each axis of the view is; None for an axis of length 1."""
    dtypes: tuple[np.dtype, ...]
    """The dtype of the array, and those that it was converted to."""
    fill_value: Any = None
    guards: tuple[tuple[int, Any], ...] = ()
    """Predicates, and the value of an element if its predicate is false."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if axis is None else self.extents[axis] for axis in self.axes)

    @property
    def dtype(self) -> np.dtype:
        return self.dtypes[-1]

    def with_axes(self, axes: Sequence[int | None]) -> View:
        return dataclasses.replace(self, axes=tuple(axes))

    def reshaped(self, shape: Sequence[int]) -> View | None:
        """The view with axes of length 1 added or removed; None if more than that changes."""
        axes = [axis for axis, size in zip(self.axes, self.shape, strict=True) if size != 1]
        if [size for size in shape if size != 1] != [self.extents[axis or 0] for axis in axes]:
            return None
        left = iter(axes)
        return self.with_axes([None if size == 1 else next(left) for size in shape])


def whole(graph: Graph, array: Any) -> View:
    """All of a captured array."""
    rank = len(array.shape)
    zero = graph.number(0, "int32")
    return View(
        array=array,
        starts=(zero,) * rank,
        extents=tuple(array.shape),
        modes=(SAFE,) * rank,
        axes=tuple(range(rank)),
        dtypes=(np.dtype(array.dtype),),
    )


def materialized(graph: Graph, view: View) -> Scalars:
    """The reads of all elements of a view."""
    check_size(view.shape, "an array that the function closes over (or a part of one)")
    elements = np.empty(view.shape, int)
    for position in np.ndindex(view.shape):
        elements[position] = _read(graph, view, position)
    return Scalars(elements, view.dtype)


def check_size(shape: tuple[int, ...], what: str) -> None:
    """Raise :class:`NotScalarError` for arrays that are too large to be unrolled."""
    if math.prod(shape) > MOST_ELEMENTS:
        raise NotScalarError(
            f"{what} is used with all of its {math.prod(shape)} elements (shape {shape}); index "
            f"it by head, query or key first, since at most {MOST_ELEMENTS} elements are unrolled"
        )


def _read(graph: Graph, view: View, position: tuple[int, ...]) -> int:
    offsets = [0] * len(view.starts)
    for axis, index in zip(view.axes, position, strict=True):
        if axis is not None:
            offsets[axis] = index
    filled = FILL in view.modes
    indices = []
    for dim, (start, offset, mode) in enumerate(zip(view.starts, offsets, view.modes, strict=True)):
        if filled and mode == CLIP:
            start = clamped(graph, start, view.array.shape[dim] - 1)
        indices.append(shifted(graph, start, offset))
    source = graph.captured(view.array)
    params: dict[str, Any] = {"array": source, "mode": FILL if filled else CLIP}
    dtype = SCALAR_TYPES[view.dtypes[0].name]
    if filled:
        params["fill_value"] = _number(view.fill_value, dtype)
    read = graph.add("read", dtype, tuple(indices), params)
    for source, target in itertools.pairwise(view.dtypes):
        read = graph.converted(read, source, target)
    for predicate, otherwise in view.guards:
        fill = graph.number(otherwise, graph.dtype(read), structural=True)
        read = graph.add("select_n", graph.dtype(read), (predicate, fill, read))
    return read


def _number(value: Any, dtype: str) -> Any:
    number = np.asarray(value).astype(dtype).item()
    return math.nan if number != number else number


def shifted(graph: Graph, start: int, offset: int) -> int:
    """An index plus a number that the shape of an array determines."""
    if offset == 0:
        return start
    number = graph.static(start)
    if number is not None:
        structural = graph.constant(start) is not None
        return graph.number(number + offset, "int32", structural=structural)
    return graph.add("add", "int32", (start, graph.number(offset, "int32", structural=True)))


def clamped(graph: Graph, index: int, most: int) -> int:
    """An index clamped to [0, ``most``]."""
    number = graph.static(index)
    if number is not None:
        return graph.number(min(max(number, 0), most), "int32")
    if most == 0:
        return graph.number(0, "int32")
    bounds = graph.number(0, "int32"), graph.number(most, "int32")
    return graph.add("clamp", "int32", (bounds[0], index, bounds[1]))


def in_range(graph: Graph, index: int, most: int) -> int:
    """Whether an index is in [0, ``most``]."""
    number = graph.static(index)
    if number is not None:
        return graph.number(0 <= number <= most, "bool")
    below = graph.add("ge", "bool", (index, graph.number(0, "int32")))
    above = graph.add("le", "bool", (index, graph.number(most, "int32")))
    return graph.add("and", "bool", (below, above))


def window(
    graph: Graph,
    view: View,
    starts: Sequence[int],
    sizes: Sequence[int],
    mode: str,
    fill_value: Any = None,
) -> View:
    """A part of a view: ``sizes`` elements of each axis, from ``starts`` on.

    Args:
        starts: int32 values of the graph.
        mode: ``clip`` moves the part into the view; ``fill`` gives ``fill_value`` for all
            elements unless the part lies inside.
    """
    fields = {name: list(getattr(view, name)) for name in ("starts", "extents", "modes")}
    guards, filled = list(view.guards), view.fill_value
    for axis, start, size in zip(view.axes, starts, sizes, strict=True):
        length = 1 if axis is None else view.extents[axis]
        static = graph.static(start)
        if static is not None and 0 <= static <= length - size:
            now = SAFE
        elif mode == FILL and not _fills(view, axis, size, filled, fill_value):
            guards.append((in_range(graph, start, length - size), fill_value))
            start, now = clamped(graph, start, length - size), SAFE
        elif mode == FILL:
            filled, now = fill_value, FILL
        elif axis is not None and size == 1 and _is_whole(view, axis):
            now = CLIP
        else:
            start, now = clamped(graph, start, length - size), SAFE
        if axis is None:
            continue
        if size == 1 and now != SAFE:
            start = _counted_from_end(graph, view.array, axis, start)
        if not _is_whole(view, axis):
            start = _sum(graph, view.starts[axis], start)
            now = view.modes[axis] if view.modes[axis] != SAFE else now
        fields["starts"][axis], fields["extents"][axis] = start, size
        fields["modes"][axis] = now
    return dataclasses.replace(
        view,
        **{name: tuple(values) for name, values in fields.items()},
        guards=tuple(guards),
        fill_value=filled,
    )


def _is_whole(view: View, axis: int) -> bool:
    return view.extents[axis] == view.array.shape[axis] and view.modes[axis] == SAFE


def _fills(view: View, axis: int | None, size: int, filled: Any, fill_value: Any) -> bool:
    """Whether a read of the array can itself fill elements outside of an axis of the view."""
    same = filled is None or _same(filled, fill_value)
    # Reads fill in the dtype of the array, guards in that of the view.
    return (
        same
        and axis is not None
        and size == 1
        and _is_whole(view, axis)
        and len(view.dtypes) == 1
        and not view.guards
    )


def _same(first: Any, second: Any) -> bool:
    return bool(first == second or (first != first and second != second))


def _sum(graph: Graph, start: int, offset: int) -> int:
    if (number := graph.static(offset)) is not None:
        return shifted(graph, start, number)
    return graph.add("add", "int32", (start, offset))


def _counted_from_end(graph: Graph, array: Any, dim: int, index: int) -> int:
    """``jnp``'s ``where(i < 0, i + length, i)``, with the length as a size instead of a number.

    The length is not one of the function's numbers: it may equal another by chance, and it changes
    with the call without changing the structure.
    """
    select = graph.values[index]
    if select.op != "select_n":
        return index
    predicate, if_false, if_true = select.args
    less, total = graph.values[predicate], graph.values[if_true]
    if less.op != "lt" or total.op != "add" or less.args[0] != if_false:
        return index
    if graph.static(less.args[1]) != 0 or if_false not in total.args:
        return index
    length = total.args[1] if total.args[0] == if_false else total.args[0]
    if graph.static(length) != array.shape[dim]:
        return index
    size = graph.add("size", "int32", (), {"array": graph.captured(array), "dim": dim})
    normal = graph.add("add", "int32", (if_false, size))
    return graph.add("select_n", "int32", (predicate, if_false, normal))
