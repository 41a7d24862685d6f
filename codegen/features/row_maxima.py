"""The largest score of each row, beside output and logsumexp."""

from __future__ import annotations

from collections.abc import Mapping

from ..launch import CapturedArray
from .feature import (
    Constant,
    CppType,
    Flag,
    KernelTraits,
    ProblemLike,
    SpecLike,
)


class RowMaxima(Flag):
    """A forward writes them when it finishes a row. They have no derivative, so a backward ignores
    them.
    """

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> bool:
        return problem[self] and problem.direction == "forward"

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        return super().constants(spec) if spec.direction == "forward" else {}

    def captured_arrays(self, spec: SpecLike) -> tuple[CapturedArray, ...]:
        return (CapturedArray(self.name),) if spec[self] else ()

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        if spec[self] and spec.kernel.splits_keys:
            return ["it splits the keys of a row, and merges no maxima"]
        return super().reasons(spec, problem)


ROW_MAXIMA = RowMaxima(
    "row_maxima",
    "row maxima",
    constant="kRowMaxima",
    tag="rowmax",
    asked_by=lambda call: call.options.row_maxima and call.needs_grad is None,
    values=(False, True),
    support="max logits (`return_max_logits=True`)",
)
