"""``delta``, the row sum that a backward subtracts from dP, in more digits than the output has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .feature import (
    Constant,
    CppType,
    Feature,
    KernelTraits,
    ProblemLike,
    SpecLike,
)


class AskedDelta(NamedTuple):
    """Delta as the sum of ``P * dP`` over each row."""

    has_sinks: bool
    """Whether rows have sinks; else the probabilities of a row sum to 1."""


class DeltaFromScores(Feature[AskedDelta | None, AskedDelta | None]):
    """A kernel of its own takes delta from the scores, before the main kernel. Only gradients of
    captured arrays ask for it (jax_memeff/_call/functions.py), so it has no flag and no axis.
    """

    name, title = "delta_from_scores", "delta from the scores"
    off = None
    together = None

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> AskedDelta | None:
        return problem[self]

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        compiled = spec[self]
        return {} if compiled is None else {"kNormalizesDelta": not compiled.has_sinks}

    def gradient_tag(self, compiled: AskedDelta | None) -> str:
        if compiled is None:
            return ""
        return "deltasinks" if compiled.has_sinks else "delta"

    def sort_key(self, compiled: AskedDelta | None) -> tuple:
        return () if compiled is None else (1, *compiled)

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        if spec[self] is not None and not spec.kernel.sums_function_gradients:
            return ["it takes delta from the rounded output"]
        return []

    def words(self, asked: AskedDelta | None) -> str:
        return self.title

    def asked_by(self, call: Any) -> AskedDelta | None:
        return call.delta_from_scores


DELTA_FROM_SCORES = DeltaFromScores()
