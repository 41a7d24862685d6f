"""The masks: intervals of columns, lengths, segment ids, boolean arrays, and lists of keys."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Literal

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
    at_least,
    expect_one_of,
)

MaskKind = Literal["none", "causal", "window"]
MASK_KINDS: tuple[MaskKind, ...] = ("none", "causal", "window")
NO_BOUND = -1
"""The value of the flag ``--window`` if it is given without a number."""


class Mask(Feature[MaskKind, MaskKind]):
    """The bounds of the columns that a row attends to: ``causal`` is only a right bound, ``window``
    a left bound with or without a right one. Top-left and bottom-right alignment differ only in a
    run-time offset, so they have no names here.
    """

    name, title = "mask", "a causal mask or a window"
    positional = True
    off, together = "none", "window"
    alone = ({"mask": "causal"}, {"mask": "window"})
    axes = (("mask", ("full", "causal", "bottom_right", "window", "two_windows")),)
    support = (
        SupportRow("causal, both alignments", ({"mask": "causal"},)),
        SupportRow("window, both alignments", ({"mask": "window"},)),
    )

    def check(self, asked: MaskKind) -> None:
        expect_one_of(self.name, asked, MASK_KINDS)

    def words(self, asked: MaskKind) -> str:
        return asked

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> MaskKind:
        return problem[self]

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        return {"kMask": f"memeff::MaskKind::{spec[self]}"}

    def tag(self, compiled: MaskKind, kernel: KernelTraits) -> str:
        return "" if compiled == "none" else compiled

    def sort_key(self, compiled: MaskKind) -> tuple:
        return (MASK_KINDS.index(compiled),)

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        reasons = []
        if spec[self] != problem[self]:
            reasons.append(f"its mask is {spec[self]}, not {problem[self]}")
        if spec[self] not in spec.tile.masks:
            reasons.append(f"its tile does not support the mask {spec[self]}")
        return reasons

    def asked_by(self, call: Any) -> MaskKind:
        bounds = [window for window in call.windows if window is not None]
        if any(window.left is not None for window in bounds):
            return "window"
        return "causal" if any(window.right is not None for window in bounds) else "none"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--causal", action="store_true", help="a causal mask")
        parser.add_argument(
            "--window",
            type=at_least(0),
            nargs="?",
            const=NO_BOUND,
            metavar="LEFT",
            help="a causal window: a row attends to at most LEFT keys before its own, by default "
            "to all. Kernels take the number at run time",
        )

    def from_flags(self, flags: argparse.Namespace) -> MaskKind:
        if flags.window is not None:
            return "window"
        return "causal" if flags.causal else "none"


class Lengths(Feature[bool, None]):
    """Lengths of padded sequences. Every kernel supports them: it reads them at run time if the
    pointer is not null.
    """

    name, title = "lengths", "sequence lengths"
    off, together = False, True
    operands = (
        Operand(
            "query_lengths",
            "B",
            places=("sequences.query_lengths", "mask.query_lengths"),
            placement="like query or replicated",
        ),
        Operand(
            "key_lengths",
            "B",
            places=("sequences.key_lengths", "mask.key_lengths"),
            placement="like query or replicated",
        ),
    )
    support = (SupportRow("sequence lengths", ({"lengths": True},)),)

    def check(self, asked: bool) -> None:
        expect_one_of(self.name, asked, (False, True))

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> None:
        return None

    def asked_by(self, call: Any) -> bool:
        return bool({"query_lengths", "key_lengths"} & call.mask_kinds)


class Keys(Feature[bool, None]):
    """A list of keys for each query row. Kernels read lists as pages of one key."""

    name, title = "keys", "lists of keys"
    off, together = False, False
    operands = (
        Operand(
            "key_lists",
            "B~ K? T list",
            "1 query_tokens K? list",
            places=("mask.key_lists.*.indices",),
            array_dims="B? K? T list",
            placement="like query or replicated",
        ),
    )
    support = (SupportRow("lists of keys for each query (`Mask.keys`)", ({"keys": True},)),)

    def check(self, asked: bool) -> None:
        expect_one_of(self.name, asked, (False, True))

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> None:
        return None

    def family_reasons(self, problem: ProblemLike) -> list[str]:
        if not problem[self] or problem.direction != "tangent":
            return []
        return ["tangents of lists of keys (Mask.keys) are computed in plain JAX"]

    def asked_by(self, call: Any) -> bool:
        return "keys" in call.mask_kinds

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--keys", action="store_true", help=self.support[0].title)

    def from_flags(self, flags: argparse.Namespace) -> bool:
        return flags.keys


MASK = Mask()

KEYS = Keys()

LENGTHS = Lengths()

SEGMENTS = Flag(
    "segments",
    "segments",
    constant="kSegments",
    tag="segments",
    asked_by=lambda call: "segments" in call.mask_kinds,
    modifies="mask",
    operands=(
        Operand(
            "query_segments",
            "B pairs T",
            "1 pairs query_tokens",
            places=("mask.segment_ids.*.0",),
            array_dims="B T",
            placement="like query or replicated",
        ),
        Operand(
            "key_segments",
            "B pairs S",
            "1 pairs key_tokens",
            places=("mask.segment_ids.*.1",),
            array_dims="B S",
            placement="like query or replicated",
        ),
    ),
    per_head=True,
    has_block_mask=True,
    values=(0, 1, 2, "in blocks"),
    support="segment ids",
)

BOOLEAN = Flag(
    "boolean",
    "a boolean mask",
    constant="kBoolean",
    tag="boolean",
    asked_by=lambda call: "boolean" in call.mask_kinds,
    modifies="mask",
    operands=(
        Operand(
            "boolean",
            "B~ N? T? words",
            places=("mask.booleans.*",),
            array_dims="B? N? T? S?",
            placement="like query or replicated",
        ),
        Operand("bits", "B~ N? T words", "1 N? query_tokens words", places=("mask.bits",)),
    ),
    per_head=True,
    has_block_mask=True,
    values=((), ("BNTS",), ("11TS",), ("B11S",), ("1N1S", "B1T1")),
    support="boolean mask",
)
