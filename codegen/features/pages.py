"""Paged keys and values: a pool of pages, and a table with the pages of each sequence."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..launch import CapturedArray
from .feature import Constant, CppType, Feature, Operand, SupportRow, expect_one_of

if TYPE_CHECKING:
    from ..problem import Problem
    from ..spec import Kernel, KernelSpec

PoolDtype = Literal["query", "f8e4m3"]

MULTIPLE = 16
"""Page sizes are multiples of this."""

_XLA = "pass implementation='xla'"


class AskedPages(NamedTuple):
    """The pool of a call. ``size`` is the number of keys of a page, 0 if keys are not paged."""

    size: int
    dtype: PoolDtype = "query"
    is_latent: bool = False
    """Whether the values are the first columns of the keys."""
    is_invariant: bool = False
    """Whether the bits of a row depend only on its own query, keys, values and position."""


class CompiledPages(NamedTuple):
    """The page size of a kernel, whether its values are the first columns of the keys, and whether
    its results are batch invariant.

    An invariant kernel never splits keys, because the number of splits depends on the batch and on
    the device.
    """

    size: int = 0
    is_invariant: bool = False
    is_latent: bool = False


class Pages(Feature[AskedPages, CompiledPages]):
    """Keys and values in pages, and whether results are batch invariant."""

    name, title = "pages", "paged keys"
    off = AskedPages(0)
    together = off
    operands = (
        Operand("page_table", "B max_pages", places=("pages.table",)),
        Operand(
            "key_scale",
            "1 pages? K 1",
            "1 pages? K 1",
            places=("pages.key_scale",),
            placement="like query or replicated",
        ),
        Operand(
            "value_scale",
            "1 pages? K 1",
            "1 pages? K 1",
            places=("pages.value_scale",),
            placement="like query or replicated",
        ),
    )
    support = (
        SupportRow(
            "keys and values in pages (`paged_attention`)",
            ({"varlen": True, "pages": AskedPages(16)},),
        ),
    )

    def check(self, asked: AskedPages) -> None:
        if asked.size < 0 or asked.size % MULTIPLE:
            raise ValueError(
                f"expected the size of {self.name} to be a multiple of {MULTIPLE}, got {asked.size}"
            )
        expect_one_of("the dtype of pages", asked.dtype, ("query", "f8e4m3"))

    def words(self, asked: AskedPages) -> str:
        dtype = "" if asked.dtype == "query" else f" of {asked.dtype}"
        others = ", latent" * asked.is_latent + ", batch invariant" * asked.is_invariant
        return f"pages of {asked.size} keys{dtype}{others}"

    def compiled(self, problem: Problem, kernel: Kernel) -> CompiledPages:
        asked = problem[self]
        return CompiledPages(asked.size, asked.is_invariant, asked.is_latent)

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        size = spec[self].size
        return {"kPageSize": size, **({"kKeyBoxRows": key_box_rows(spec)} if size else {})}

    def captured_arrays(self, spec: KernelSpec) -> tuple[CapturedArray, ...]:
        return (CapturedArray("page_table", f"B S/{spec[self].size}"),) if spec[self].size else ()

    def tag(self, compiled: CompiledPages, kernel: Kernel) -> str:
        invariant = "_invariant" * compiled.is_invariant
        return f"pages{compiled.size}{invariant}" if compiled.size else ""

    def sort_key(self, compiled: CompiledPages) -> tuple:
        return compiled

    def family_reasons(self, problem: Problem) -> list[str]:
        asked, reasons = problem[self], []
        if asked.size and problem.direction == "backward":
            reasons.append("paged keys have no gradient: call varlen_attention")
        if asked.dtype != "query":
            reasons.append(f"no kernel reads pages of float8 yet: {_XLA}, or cast the pool")
        return reasons

    def reasons(self, spec: KernelSpec, problem: Problem) -> list[str]:
        if spec[self] != self.compiled(problem, spec.kernel):
            return ["it is compiled for other pages"]
        if spec[self].size and not spec.kernel.reads_pages:
            return ["it has no paged keys"]
        if problem[self].is_latent and not spec.kernel.reads_latent:
            return [f"it reads values from an array of their own: {_XLA}"]
        if spec.kernel.reads_latent and not problem[self].is_latent:
            return ["its values are columns of the keys"]
        return []

    def asked_by(self, call: Any) -> AskedPages:
        pages, operands = call.operands.pages, call.operands
        if pages is None:
            return self.off
        is_same = operands.key.dtype == operands.query.dtype
        dtype: PoolDtype = "query" if is_same else "f8e4m3"
        is_latent = pages.latent_dim is not None
        return AskedPages(pages.page_size, dtype, is_latent, pages.is_invariant)

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--page-size", type=int, default=0, help="keys of a page, if keys are paged"
        )

    def from_flags(self, flags: argparse.Namespace) -> AskedPages:
        return AskedPages(flags.page_size)


PAGES = Pages()


def key_box_rows(spec: KernelSpec) -> int:
    """The rows of a TMA box of keys: the largest number that divides a tile and a page."""
    return math.gcd(spec.tile.key, spec[PAGES].size)
