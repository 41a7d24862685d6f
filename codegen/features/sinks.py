"""Attention sinks: a logit per head that takes part in the softmax and has no value."""

from __future__ import annotations

from ..launch import CapturedArray
from .feature import (
    Flag,
    KernelTraits,
    Operand,
    ProblemLike,
    SpecLike,
)


class Sinks(Flag):
    """A forward reads the sinks when it finishes a row. The logsumexp contains them, so a backward
    only has to write delta, from which XLA computes their gradient.
    """

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> bool:
        needed = problem.direction == "backward" and "sinks" in problem.needs_grad
        return problem[self] and (problem.direction == "forward" or needed)

    def captured_arrays(self, spec: SpecLike) -> tuple[CapturedArray, ...]:
        if not spec[self]:
            return ()
        if spec.direction == "forward":
            return (CapturedArray("sinks"),)
        return (CapturedArray("delta"),)


SINKS = Sinks(
    "sinks",
    "attention sinks",
    constant="kSinks",
    tag="sinks",
    asked_by=lambda call: call.operands.sinks is not None,
    operands=(
        Operand(
            "sinks",
            "B~ N",
            array_dims="B? N",
            has_gradient=True,
            placement="like query or replicated",
        ),
    ),
    values=(False, True),
)
