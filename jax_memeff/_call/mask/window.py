"""Windows: the columns around the diagonal that a row attends to."""

from __future__ import annotations

import dataclasses

from jax_memeff._call.values import INT32_MAX


@dataclasses.dataclass(frozen=True)
class Window:
    """Row t attends to columns ``t + d - left <= s <= t + d + right``; None is no bound."""

    left: int | None
    right: int | None

    def __and__(self, other: Window) -> Window:
        def smaller(a: int | None, b: int | None) -> int | None:
            return min((x for x in (a, b) if x is not None), default=None)

        return Window(smaller(self.left, other.left), smaller(self.right, other.right))

    @staticmethod
    def of(left: int | None, right: int | None) -> Window:
        """The window with bounds clamped to int32.

        This changes no mask: no difference of a column and a row reaches the clamped bounds.
        """

        def fitting(bound: int | None) -> int | None:
            return None if bound is None else max(-INT32_MAX, min(bound, INT32_MAX))

        return Window(fitting(left), fitting(right))
