"""Index operations of lax: they narrow a view of a captured array, or select from scalars.

Each rule returns None if the result is no longer a view; its elements are then read one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from jax_memeff._functions.graph import Graph
from jax_memeff._functions.rules import choice, scalar_type
from jax_memeff._functions.views import (
    CLIP,
    FILL,
    NotScalarError,
    Scalars,
    View,
    check_size,
    clamped,
    in_range,
    materialized,
    window,
)

Params = dict[str, Any]
Indexed = View | Scalars


def _index(graph: Graph, scalars: Scalars, position: tuple[int, ...] = ()) -> int:
    """An index as int32; larger ones are clamped to the range of int32."""
    value = int(scalars.elements[position])
    if "score" in graph.dependence(value):
        raise NotScalarError("an index depends on the score; it may depend on positions only")
    dtype = graph.dtype(value)
    if dtype == "int32":
        return value
    if (number := graph.static(value)) is not None:
        limited = min(max(number, -(2**31)), 2**31 - 1)
        return graph.number(limited, "int32", graph.constant(value) is not None)
    most = graph.number(2**31 - 1, dtype, structural=True)
    value = graph.add("min", dtype, (value, most))
    if dtype == "int64":
        value = graph.add("max", dtype, (value, graph.number(-(2**31), dtype, structural=True)))
    return graph.add("convert_element_type", "int32", (value,))


def _window(
    graph: Graph,
    operand: Indexed,
    starts: Sequence[int],
    sizes: Sequence[int],
    mode: str,
    fill_value: Any = None,
) -> Indexed:
    if isinstance(operand, View):
        return window(graph, operand, starts, sizes, mode, fill_value)
    elements, inside = operand.elements, []
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        most = elements.shape[axis] - size
        if mode == FILL:
            inside.append(in_range(graph, start, most))
        elements = _chosen(graph, elements, axis, clamped(graph, start, most), size)
    for predicate in inside:
        dtype = scalar_type(operand.dtype)
        fill = graph.number(fill_value, dtype, structural=True)
        select = [graph.add("select_n", dtype, (predicate, fill, int(e))) for e in elements.flat]
        elements = np.array(select, int).reshape(elements.shape)
    return Scalars(elements, operand.dtype)


def _chosen(graph: Graph, elements: np.ndarray, axis: int, start: int, size: int) -> np.ndarray:
    """``size`` elements of an axis from ``start`` on."""
    parts = [
        np.take(elements, range(first, first + size), axis)
        for first in range(elements.shape[axis] - size + 1)
    ]
    if (number := graph.static(start)) is not None:
        return parts[number]
    chosen = np.empty_like(parts[0])
    for position in np.ndindex(chosen.shape):
        chosen[position] = choice(graph, start, [int(part[position]) for part in parts])
    return chosen


def _dynamic_slice(graph: Graph, params: Params, operand: Indexed, *starts: Scalars) -> Indexed:
    indices = [_index(graph, start) for start in starts]
    return _window(graph, operand, indices, params["slice_sizes"], CLIP)


def _slice(graph: Graph, params: Params, operand: Indexed) -> Indexed | None:
    if isinstance(operand, Scalars) or any(step != 1 for step in params["strides"] or ()):
        return None
    first, limit = params["start_indices"], params["limit_indices"]
    starts = [graph.number(start, "int32") for start in first]
    sizes = [end - start for start, end in zip(first, limit, strict=True)]
    return _window(graph, operand, starts, sizes, CLIP)


def _gather(graph: Graph, params: Params, operand: Indexed, indices: Scalars) -> Indexed:
    dims, sizes = params["dimension_numbers"], params["slice_sizes"]
    mode, fill_value = _mode(params, operand.dtype)
    batch = indices.shape[:-1]
    dropped = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    kept = [axis for axis in range(len(sizes)) if axis not in dropped]
    rank = len(batch) + len(kept)
    places = [axis for axis in range(rank) if axis not in dims.offset_dims]

    def part(position: tuple[int, ...]) -> Indexed:
        starts = [graph.number(0, "int32")] * len(sizes)
        for column, axis in enumerate(dims.start_index_map):
            starts[axis] = _index(graph, indices, (*position, column))
        for axis, source in zip(
            dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True
        ):
            starts[axis] = graph.number(position[source], "int32", structural=True)
        return _window(graph, operand, starts, sizes, mode, fill_value)

    if isinstance(operand, View) and math.prod(batch) == 1:
        found = part((0,) * len(batch))
        assert isinstance(found, View)
        axes: list[int | None] = [None] * rank
        for place, axis in zip(dims.offset_dims, kept, strict=True):
            axes[place] = found.axes[axis]
        return found.with_axes(axes)
    inner = [sizes[axis] for axis in kept]
    check_size((*batch, *inner), "the result of an index operation")
    out = np.empty((*batch, *inner), int)
    for position in np.ndindex(batch):
        found = part(position)
        scalars = materialized(graph, found) if isinstance(found, View) else found
        out[position] = scalars.elements.reshape(inner)
    moved = np.moveaxis(out, range(rank), (*places, *dims.offset_dims))
    return Scalars(moved, operand.dtype)


def _mode(params: Params, dtype: np.dtype) -> tuple[str, Any]:
    """How a gather treats indices out of range, and the number that it fills in.

    Kernels also evaluate masked elements, so promises about indices cannot be relied on.
    """
    mode = GatherScatterMode.from_any(params["mode"])
    if mode in (GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS):
        return CLIP, None
    if mode != GatherScatterMode.FILL_OR_DROP:
        raise NotScalarError(f"the gather mode {mode} has no scalar form; use 'clip' or 'fill'")
    fill_value = params["fill_value"]
    if fill_value is None:
        kind = "f" if dtype.name == "bfloat16" else dtype.kind
        defaults = {"f": lambda: math.nan, "b": lambda: True}
        limits = {"i": lambda: np.iinfo(dtype).min, "u": lambda: np.iinfo(dtype).max}
        fill_value = (defaults | limits)[kind]()
    return FILL, fill_value


def _reshaped(graph: Graph, params: Params, operand: Indexed) -> Indexed | None:
    if isinstance(operand, Scalars):
        return None
    return operand.reshaped(params["new_sizes"])


def _broadcast_in_dim(graph: Graph, params: Params, operand: Indexed) -> Indexed | None:
    if isinstance(operand, Scalars):
        return None
    axes: list[int | None] = [None] * len(params["shape"])
    for place, axis in zip(params["broadcast_dimensions"], operand.axes, strict=True):
        axes[place] = axis
    view = operand.with_axes(axes)
    return view if view.shape == tuple(params["shape"]) else None


def _squeezed(graph: Graph, params: Params, operand: Indexed) -> Indexed | None:
    if isinstance(operand, Scalars):
        return None
    kept = [axis for i, axis in enumerate(operand.axes) if i not in params["dimensions"]]
    return operand.with_axes(kept)


def _transposed(graph: Graph, params: Params, operand: Indexed) -> Indexed | None:
    if isinstance(operand, Scalars):
        return None
    return operand.with_axes([operand.axes[axis] for axis in params["permutation"]])


def _converted(graph: Graph, params: Params, operand: Indexed) -> Indexed | None:
    if isinstance(operand, Scalars):
        return None
    scalar_type(params["new_dtype"])
    dtypes = (*operand.dtypes, np.dtype(params["new_dtype"]))
    return View(**{**vars(operand), "dtypes": dtypes})


RULES: dict[str, Callable[..., Indexed | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _converted,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "reshape": _reshaped,
    "slice": _slice,
    "squeeze": _squeezed,
    "transpose": _transposed,
}
"""A function from the graph, the parameters, the operand and the indices to the part."""
