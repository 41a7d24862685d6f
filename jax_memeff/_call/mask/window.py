"""Windows: the columns around the diagonal that a row attends to."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_memeff._call import values
from jax_memeff._call.values import INT32_MAX

Bound = int | jax.Array | None
"""A bound of a window; an array is a traced scalar."""

Alignment = Literal["top_left", "bottom_right"]
"""Whether the diagonal of a window starts at row 0, column 0 or ends at the last valid ones."""

_MOST_TRACED = 2**30
"""No column minus row reaches this bound, and its sum with the shift of a diagonal fits int32."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Row t attends to columns ``t + d - left <= s <= t + d + right``; None is no bound."""

    left: int | None
    right: int | None

    def __and__(self, other: Window) -> Window:
        def smaller(a: int | None, b: int | None) -> int | None:
            return min((x for x in (a, b) if x is not None), default=None)

        return Window(smaller(self.left, other.left), smaller(self.right, other.right))

    def traced(self) -> TracedWindow:
        """The same window with bounds that are data, aligned top-left."""
        own = self.clamped(_MOST_TRACED)
        left, right = (None if x is None else jnp.int32(x) for x in (own.left, own.right))
        return TracedWindow(left, right, "top_left")

    def clamped(self, most: int) -> Window:
        """The window with bounds in [-most, most]."""

        def fitting(bound: int | None) -> int | None:
            return None if bound is None else max(-most, min(bound, most))

        return Window(fitting(self.left), fitting(self.right))

    @staticmethod
    def of(left: int | None, right: int | None) -> Window:
        """The window with bounds clamped to int32.

        This changes no mask, because no column minus row reaches the clamped bounds.
        """
        return Window(left, right).clamped(INT32_MAX)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TracedWindow(values.HoldsArrays):
    """A window whose bounds are data: int32[], or [B] after a ``jax.vmap``."""

    left: jax.Array | None
    right: jax.Array | None
    alignment: Alignment = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of(left: Any, right: Any, alignment: Alignment) -> TracedWindow | None:
        """The window of those bounds that are traced; None if none of them is."""
        if not isinstance(left, Tracer) and not isinstance(right, Tracer):
            return None
        return TracedWindow(_traced("left", left), _traced("right", right), alignment)

    def moved(self, distance: int | jax.Array) -> TracedWindow:
        """The same window, aligned top-left; its diagonal is ``distance`` further to the right."""
        return TracedWindow(
            None if self.left is None else self.left - distance,
            None if self.right is None else self.right + distance,
            "top_left",
        )


def _traced(name: str, bound: Any) -> jax.Array | None:
    if not isinstance(bound, Tracer):
        return None
    array = values.integers(f"window {name}", bound)
    if array.ndim:
        raise ValueError(f"window {name} must be one integer, got an array of shape {array.shape}")
    return jnp.asarray(values.clipped(array, -_MOST_TRACED, _MOST_TRACED))


def intersection(a: Window | None, b: Window | None) -> Window | None:
    """The columns in both windows; None means all columns."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
