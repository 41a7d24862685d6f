"""The features that are only on or off.

Deterministic sums, dropout, positions (of row 0 and column 0 in the whole problem, for ``Offsets``,
shards and the parts of a ring), row maxima (the largest score of each row, beside output and
logsumexp), and sinks (a logit per head that takes part in the softmax and has no value).
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Mapping
from typing import Any

from ..launch import CapturedArray, ParamsField
from .feature import (
    Constant,
    CppType,
    Feature,
    Flag,
    KernelTraits,
    Operand,
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


class Dropout(Flag):
    """Its parameters are fields of ``DropoutParams`` (ffi/include/memeff/params.h) and not rows of
    the table of arrays: the way in which they are loaded changes ptxas's schedule of the main loop.
    """

    numbers = ("dropout_threshold", "dropout_scale")

    def params_fields(self, spec: SpecLike) -> tuple[ParamsField, ...]:
        if not spec[self]:
            return ()
        return (
            ParamsField("dropout.key_words", 200, "key_words"),
            ParamsField("dropout.batch_base", 208, "batch_base"),
            ParamsField("dropout.head_index", 216, "head_index"),
            ParamsField("dropout.threshold", 224, "dropout_threshold"),
            ParamsField("dropout.scale", 228, "dropout_scale"),
        )

    def number_values(self, call: Any) -> tuple[int, ...]:
        (scale,) = struct.unpack("<i", struct.pack("<f", call.options.kept_scale))
        return call.options.dropout_threshold, scale


DROPOUT = Dropout(
    "dropout",
    "dropout",
    constant="kDropout",
    tag="dropout",
    asked_by=lambda call: call.options.dropout_threshold > 0,
    modifies="probabilities",
    positional=True,
    operands=(
        Operand("key_words", "B 2", places=("dropout.key_words",)),
        Operand("batch_base", "B", places=("dropout.batch_base",)),
        Operand("head_index", "N", places=("dropout.head_index",)),
    ),
    per_head=True,
    values=(0.0, 0.1, 0.5),
)


class Positions(Flag):
    """Only kernels with a ``positional`` feature are compiled with positions.

    Whether there are positions is a compile-time constant, because loading one for each batch index
    costs a forward that draws random bits up to 4 % at head dim 64 (H200).
    """

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> bool:
        return problem[self] and problem.is_positional


POSITIONS = Positions(
    "positions",
    "positions",
    constant="kPositions",
    tag="positions",
    asked_by=lambda call: call.operands.position is not None,
    operands=(
        # Or scalars, which have no dims and are repeated for the kernels.
        Operand("query_position", "B", places=("position.query",)),
        Operand("key_position", "B", places=("position.key",)),
    ),
    support="offsets of shards, one for all batch indices or one for each",
)
POSITIONS.alone = ({"positions": True, "mask": "causal"},)


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
