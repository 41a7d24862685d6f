"""Gradients with the same bits in every run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .feature import (
    Constant,
    CppType,
    Feature,
    KernelTraits,
    ProblemLike,
    SpecLike,
    SupportRow,
    expect_one_of,
)


class Deterministic(Feature[bool, bool]):
    """Fixes the order of sums: CTAs that add to one gradient wait for each other.

    Kernels whose sums have a fixed order anyway are compiled without this feature.
    """

    name, title = "deterministic", "deterministic sums"
    off, together = False, False
    alone = ({"deterministic": True}, {"deterministic": True, "mask": "causal"})
    axes = (("deterministic", (False, True)),)
    support = (SupportRow("`deterministic_backward=True`", ({"deterministic": True},)),)

    def check(self, asked: bool) -> None:
        expect_one_of(self.name, asked, (False, True))

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> bool:
        return problem[self] and kernel.adds_across_blocks(problem)

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        return {"kDeterministic": spec[self]} if spec.direction == "backward" else {}

    def gradient_tag(self, compiled: bool) -> str:
        return "deterministic" if compiled else ""

    def sort_key(self, compiled: bool) -> tuple:
        return (compiled,)

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        if spec[self] == self.compiled(problem, spec.kernel):
            return []
        return [f"its sums are {'' if spec[self] else 'not '}deterministic"]

    def asked_by(self, call: Any) -> bool:
        return call.needs_grad is not None and call.options.deterministic_backward

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--deterministic", action="store_true", help=self.title)

    def from_flags(self, flags: argparse.Namespace) -> bool:
        return flags.deterministic


DETERMINISTIC = Deterministic()
