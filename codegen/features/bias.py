"""The bias that is added to scores, its access, and the sum of its gradient."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal

from .feature import (
    Constant,
    CppType,
    Feature,
    KernelTraits,
    Operand,
    ProblemLike,
    SpecLike,
    SupportRow,
    expect_one_of,
)
from .flags import DETERMINISTIC

BiasBits = Literal["16", "32"]
BiasLayout = Literal["full", "common", "columns", "rows"]
BiasAccess = Literal["vectors", "words", "columns", "rows", "elements"]
BiasGradient = Literal["none", "full", "common", "columns", "dbias_kernel"]

BIAS_BITS: tuple[BiasBits, ...] = ("16", "32")
BIAS_LAYOUTS: tuple[BiasLayout, ...] = ("full", "common", "columns", "rows")
BIAS_ACCESSES: tuple[BiasAccess, ...] = ("vectors", "words", "columns", "rows", "elements")
BIAS_GRADIENTS: tuple[BiasGradient, ...] = ("none", "full", "common", "columns", "dbias_kernel")

_DIMS = (
    *("BNTS", "1NTS", "B1TS", "11TS"),
    *("BN1S", "B11S", "1N1S", "111S"),
    *("BNT1", "1NT1", "1111"),
)
"""A letter for each full dim, and 1 for each broadcast one."""


@dataclasses.dataclass(frozen=True)
class AskedBias:
    """A bias as a call passes it.

    ``layout`` is ``rows`` if the bias is broadcast over columns, else ``columns`` if over rows,
    else ``common`` if over batch indices or heads, else ``full``. Each of its rows begins at a
    multiple of ``alignment`` bytes.

    Raises ``ValueError`` for a value that no bias can have.
    """

    bits: BiasBits
    layout: BiasLayout = "full"
    alignment: int = 16

    def __post_init__(self):
        expect_one_of("bias bits", self.bits, BIAS_BITS)
        expect_one_of("bias layout", self.layout, BIAS_LAYOUTS)
        if self.alignment < 1:
            raise ValueError(f"expected a bias alignment of at least 1, got {self.alignment}")


@dataclasses.dataclass(frozen=True)
class CompiledBias:
    """A bias as a kernel is compiled for it: ``access`` is how it reaches the scores
    (codegen/memeff/core/common.cuh), ``gradient`` how its gradient is summed.
    """

    bits: BiasBits
    access: BiasAccess
    gradient: BiasGradient = "none"


class Bias(Feature[AskedBias | None, CompiledBias | None]):
    """A 16-bit bias has the dtype of the query; a 32-bit bias is float32."""

    name, title = "bias", "bias"
    off = None
    together = AskedBias("32", "common")
    alone = (
        {"bias": AskedBias("16")},
        {"bias": AskedBias("16", "common")},
        {"bias": AskedBias("16", "common", alignment=2)},
        {"bias": AskedBias("16", "columns")},
        {"bias": AskedBias("16", "rows")},
        {"bias": AskedBias("32", "common")},
    )
    operands = (
        Operand(
            "bias",
            "B~ N? T? S?",
            array_dims="B? N? T? S?",
            has_gradient=True,
            placement="like query or replicated",
        ),
    )
    per_head = True
    modifies = "scores"
    axes = (
        ("bias", (None, *_DIMS)),
        ("bias_dtype", (None, "float32")),
    )
    every = tuple(
        {"bias": AskedBias(bits, layout, alignment)}
        for bits, layout, alignment in itertools.product(BIAS_BITS, BIAS_LAYOUTS, (2, 16))
    )
    """Every size and every broadcast, with rows of any alignment."""
    support = (SupportRow("bias of every broadcast, and its gradient", every),)

    def check(self, asked: AskedBias | None) -> None:
        if not isinstance(asked, AskedBias | None):
            raise ValueError(f"expected bias to be an AskedBias or None, got {asked!r}")

    def words(self, asked: AskedBias | None) -> str:
        if asked is None:
            return ""
        aligned = f", bias_alignment={asked.alignment}" if asked.alignment != 16 else ""
        return f"{asked.bits}-bit {asked.layout} bias{aligned}"

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> CompiledBias | None:
        asked = problem[self]
        if asked is None:
            return None
        return CompiledBias(asked.bits, _access(asked, kernel), _gradient(asked, problem, kernel))

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        constants: dict[str, Constant | CppType] = {"kBias": spec[self] is not None}
        if (bias := spec[self]) is not None:
            element = "float" if bias.bits == "32" else spec.bias_element
            constants["BiasElement"] = CppType(element)
            constants["kBiasAccess"] = f"memeff::BiasAccess::{bias.access}"
            constants["kTmaBias"] = spec.tma_bias
        if spec.direction == "backward":
            constants["kBiasGradient"] = f"memeff::BiasGradient::{gradient(spec)}"
        return constants

    def tag(self, compiled: CompiledBias | None, kernel: KernelTraits) -> str:
        if compiled is None:
            return ""
        usual = "elements" if kernel.reads_bias_by_elements else "vectors"
        return f"bias{compiled.bits}{'' if compiled.access == usual else compiled.access}"

    def gradient_tag(self, compiled: CompiledBias | None) -> str:
        if compiled is None or compiled.gradient == "none":
            return ""
        return f"dbias{compiled.gradient}"

    def sort_key(self, compiled: CompiledBias | None) -> tuple:
        if compiled is None:
            return "", 0, 0
        return (
            compiled.bits,
            BIAS_ACCESSES.index(compiled.access),
            BIAS_GRADIENTS.index(compiled.gradient),
        )

    def family_reasons(self, problem: ProblemLike) -> list[str]:
        asked = problem[self]
        if problem.dtype in ("f32", "tf32") and asked and asked.bits == "16":
            return [
                "a 16-bit bias with float32 inputs has no kernel: cast it, or pass "
                "implementation='xla'"
            ]
        return []

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        has, asked = spec[self], self.compiled(problem, spec.kernel)
        reasons = []
        if _bits(has) != _bits(asked):
            reasons.append(f"its bias is {_bits(has)}, not {_bits(asked)}")
        if has and asked and has.access != asked.access:
            reasons.append(f"it reads a bias by {has.access}, not by {asked.access}")
        if (computed := gradient(spec)) != (wanted := asked.gradient if asked else "none"):
            reasons.append(f"its bias gradient is {computed}, not {wanted}")
        return reasons

    def needs_registers(self, spec: SpecLike) -> bool:
        bias = spec[self]
        return bias is not None and (spec.kernel.reads_bias_by_elements or bias.access != "rows")

    def asked_by(self, call: Any) -> AskedBias | None:
        if call.operands.bias is None:
            return None
        bits = "32" if call.operands.bias.dtype == "float32" else "16"
        return AskedBias(bits, call.bias_layout, call.bias_alignment)

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--bias", choices=BIAS_BITS, help="bits of a bias element")
        parser.add_argument(
            "--bias-layout",
            choices=BIAS_LAYOUTS,
            help="broadcast over batch indices or heads (common), over rows (columns), or over "
            "columns (rows)",
        )

    def from_flags(self, flags: argparse.Namespace) -> AskedBias | None:
        if flags.bias is None:
            if flags.bias_layout is not None:
                raise ValueError(f"--bias-layout {flags.bias_layout} needs --bias, got none")
            return None
        return AskedBias(flags.bias, flags.bias_layout or BIAS_LAYOUTS[0])


def gradient(spec: SpecLike) -> BiasGradient:
    """How a kernel sums the gradient of the bias."""
    bias = spec[BIAS]
    return "none" if bias is None else bias.gradient


def _bits(bias: CompiledBias | None) -> str:
    return "none" if bias is None else f"{bias.bits}-bit"


def _access(asked: AskedBias, kernel: KernelTraits) -> BiasAccess:
    if asked.layout in ("columns", "rows"):
        return asked.layout
    if kernel.reads_bias_by_elements:
        return "elements"
    return "vectors" if asked.alignment % 16 == 0 else "words"


def _gradient(asked: AskedBias, problem: ProblemLike, kernel: KernelTraits) -> BiasGradient:
    """How the gradient is summed; one that is broadcast over columns needs no sum."""
    if problem.direction != "backward" or "bias" not in problem.needs_grad:
        return "none"
    if asked.layout == "rows":
        return "none"
    if asked.layout == "common" and (problem[DETERMINISTIC] or not kernel.sums_common_bias):
        return "dbias_kernel"
    return asked.layout


BIAS = Bias()
