"""Paged keys and values: a pool of pages, and a table with the pages of each sequence."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ..launch import CapturedArray
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
from .mask import KEYS

PoolDtype = Literal["query", "f8e4m3"]
PoolScale = Literal["none", "heads", "pages"]
"""The scale of a float8 pool: 1, one for each key head, or one for each page and key head."""
SCALES: tuple[PoolScale, ...] = ("none", "heads", "pages")

SMALL_SIZES = (1, 2, 4, 8)
"""The sizes of small pages (``kSmallPages`` of the kernels)."""

MULTIPLE = 16
"""Other page sizes are multiples of this."""

SIZES = f"{', '.join(map(str, SMALL_SIZES))} or a multiple of {MULTIPLE}"

INVARIANT_COLUMNS = 256
"""If results are batch invariant, sums over keys are formed in segments of this length, which begin
at its multiples."""

_MOST_SEGMENT_BYTES = 1 << 27

_XLA = "pass implementation='xla'"


def is_size(size: int) -> bool:
    """Whether a page may have ``size`` keys."""
    return size in SMALL_SIZES or (size > 0 and size % MULTIPLE == 0)


def segments(keys: int) -> int:
    """The number of segments of a batch-invariant call; ``kernels/sm90/latent.py`` has its own."""
    return -(-keys // INVARIANT_COLUMNS)


def most_segments(outputs: int) -> int:
    """The segments of a batch-invariant call for which there is memory, with ``outputs`` numbers
    for each of them. If they do not suffice, CTAs do not divide the keys of a tile, which changes
    no bit.
    """
    return _MOST_SEGMENT_BYTES // (4 * max(outputs, 1))


class AskedPages(NamedTuple):
    """The pool of a call. ``size`` is the number of keys per page, 0 if keys are not paged."""

    size: int
    dtype: PoolDtype = "query"
    is_latent: bool = False
    """Whether the values are the first columns of the keys."""
    is_invariant: bool = False
    """Whether the bits of a row depend only on its own query, keys, values and position."""
    key_scale: PoolScale = "none"
    value_scale: PoolScale = "none"


class CompiledPages(NamedTuple):
    """The page size of a kernel, whether its results are batch invariant, whether its values are
    the first columns of the keys, and the pool's format.

    The split forward of invariant results adds up segments of ``INVARIANT_COLUMNS`` keys in
    ascending order, however CTAs divide them. The latent forward has longer segments for large
    groups. Other kernels do not split the keys.
    """

    size: int = 0
    is_invariant: bool = False
    is_latent: bool = False
    dtype: PoolDtype = "query"
    key_scale: PoolScale = "none"
    value_scale: PoolScale = "none"

    @property
    def is_small(self) -> bool:
        """Whether the kernel copies keys and values row by row."""
        return self.size in SMALL_SIZES

    @property
    def is_float8(self) -> bool:
        """Whether the kernel converts keys and values from float8."""
        return self.dtype == "f8e4m3"

    @property
    def scales(self) -> dict[str, PoolScale]:
        """The scales that are arrays, by operand."""
        scales: dict[str, PoolScale] = {"key": self.key_scale, "value": self.value_scale}
        return {name: scale for name, scale in scales.items() if scale != "none"}


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
            tuple({"packed": True, "pages": AskedPages(size)} for size in (1, 16)),
        ),
        SupportRow(
            "pages of float8, queries of 16 bits",
            tuple(
                {"packed": True, "pages": AskedPages(16, "f8e4m3", False, False, *scales)}
                for scales in itertools.product(SCALES, repeat=2)
            ),
        ),
    )

    def check(self, asked: AskedPages) -> None:
        if asked.size and not (is_size(asked.size) and asked.size < 2**31):
            raise ValueError(
                f"expected the size of {self.name} to be {SIZES} below 2**31, got {asked.size}"
            )
        if not asked.size and asked != self.off:
            raise ValueError(
                "expected a page size (--page-size), because only keys in pages are float8, "
                f"latent, scaled or batch invariant, got {asked.size}"
            )
        expect_one_of("the dtype of pages", asked.dtype, ("query", "f8e4m3"))
        for scale in (asked.key_scale, asked.value_scale):
            expect_one_of("the scale of pages", scale, SCALES)
            if scale != "none" and asked.dtype == "query":
                raise ValueError(
                    f"expected no scale, because only float8 pages have it, got {scale!r}"
                )
        if asked.is_latent and asked.value_scale != "none":
            raise ValueError(
                "expected no scale of values (--value-scale), because latent values have that of "
                f"the keys, got {asked.value_scale!r}"
            )

    def words(self, asked: AskedPages) -> str:
        dtype = "" if asked.dtype == "query" else f" of {asked.dtype}"
        others = ", latent" * asked.is_latent + ", batch invariant" * asked.is_invariant
        for name, scale in (("key", asked.key_scale), ("value", asked.value_scale)):
            others += f", {name} scales of {scale}" * (scale != "none")
        return f"pages of {asked.size} keys{dtype}{others}"

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> CompiledPages:
        asked = problem[self]
        return CompiledPages(
            asked.size,
            asked.is_invariant,
            asked.is_latent,
            asked.dtype,
            asked.key_scale,
            asked.value_scale,
        )

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        pages = spec[self]
        found: dict[str, Constant | CppType] = {
            "kPageSize": pages.size,
            "kFloat8Pages": pages.is_float8,
            "kSegmentKeys": INVARIANT_COLUMNS if pages.is_invariant else 0,
        }
        if pages.size:
            found["kKeyBoxRows"] = key_box_rows(spec)
        if pages.is_float8:
            found["kKeyScale"] = f"memeff::PoolScale::{pages.key_scale}"
            found["kValueScale"] = f"memeff::PoolScale::{pages.value_scale}"
        return found

    def captured_arrays(self, spec: SpecLike) -> tuple[CapturedArray, ...]:
        pages = spec[self]
        if not pages.size:
            return ()
        scales = (CapturedArray(f"{name}_scale") for name in pages.scales)
        return CapturedArray("page_table"), *scales

    def tag(self, compiled: CompiledPages, kernel: KernelTraits) -> str:
        if not compiled.size:
            return ""
        words = [f"pages{compiled.size}"]
        if compiled.is_float8:
            words.append("f8e4m3")
            words += [f"{name[0]}{scale}" for name, scale in compiled.scales.items()]
        return "_".join([*words, *(["invariant"] if compiled.is_invariant else [])])

    def sort_key(self, compiled: CompiledPages) -> tuple:
        return compiled

    def family_reasons(self, problem: ProblemLike) -> list[str]:
        asked, reasons = problem[self], []
        is_latent_list = asked.size == 1 and asked.is_latent and problem.direction == "backward"
        if asked.size and problem.direction != "forward" and not (is_latent_list or problem[KEYS]):
            reasons.append("paged keys have no gradient: call varlen_attention")
        if asked.is_latent and asked.dtype == "query" and problem.dtype not in ("f16", "bf16"):
            reasons.append(
                "latent values have a kernel on Hopper for queries of bfloat16 or float16, got "
                f"{problem.dtype}: cast query and pool, or {_XLA}"
            )
        if asked.dtype != "query":
            reasons += _float8_reasons(problem)
        return reasons

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        if spec[self] != self.compiled(problem, spec.kernel):
            return ["it is compiled for a different kind of pages"]
        if spec[self].size and not spec.kernel.reads_pages:
            return ["it has no paged keys"]
        if problem[self].is_latent and not spec.kernel.reads_latent:
            return [f"it reads values from a separate array: {_XLA}"]
        if spec.kernel.reads_latent and not problem[self].is_latent:
            return ["its values are columns of the keys"]
        if spec[self].is_float8 and not spec.kernel.reads_float8_pages:
            return ["it does not convert float8"]
        return []

    def asked_by(self, call: Any) -> AskedPages:
        pages, operands = call.operands.pages, call.operands
        if pages is None:
            return self.off
        is_same = operands.key.dtype == operands.query.dtype
        dtype: PoolDtype = "query" if is_same else "f8e4m3"
        is_latent = pages.latent_dim is not None
        scales = (_scale_of(pages.key_scale), _scale_of(pages.value_scale))
        return AskedPages(pages.page_size, dtype, is_latent, pages.is_invariant, *scales)

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--page-size",
            type=int,
            default=0,
            help="the number of keys in a page, if keys are paged; --latent, --batch-invariant, "
            "--float8 and the scales need it",
        )
        parser.add_argument(
            "--latent", action="store_true", help="the values are the first columns of the keys"
        )
        parser.add_argument(
            "--batch-invariant",
            action="store_true",
            help="results that do not depend on the rest of the batch",
        )
        parser.add_argument("--float8", action="store_true", help="pages of float8_e4m3fn")
        for name in ("key", "value"):
            parser.add_argument(
                f"--{name}-scale",
                choices=SCALES,
                default="none",
                help="scales of float8 pages: one per key head, or one per page and key head",
            )

    def from_flags(self, flags: argparse.Namespace) -> AskedPages:
        return AskedPages(
            flags.page_size,
            "f8e4m3" if flags.float8 else "query",
            flags.latent,
            flags.batch_invariant,
            flags.key_scale,
            flags.value_scale,
        )


PAGES = Pages()


def _float8_reasons(problem: ProblemLike) -> list[str]:
    reasons = []
    if problem.dtype not in ("f16", "bf16"):
        reasons.append(
            "kernels read pages of float8 with queries of bfloat16 or float16, got "
            f"{problem.dtype}: cast the query, or {_XLA}"
        )
    pool = problem[PAGES]
    is_scaled_by_page = "pages" in (pool.key_scale, pool.value_scale)
    if is_scaled_by_page and pool.size in SMALL_SIZES and not pool.is_latent:
        reasons.append(
            f"kernels multiply at least {MULTIPLE} keys by a scale of a page, and pages have "
            f"{pool.size}: pass a scale for each head, or {_XLA}"
        )
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if dim % 16:
            reasons.append(
                f"{name} is {dim}, and kernels read rows of float8 16 bytes at a time: pad it to a "
                f"multiple of 16, or {_XLA}"
            )
        if dim > 256 and not pool.is_latent:
            reasons.append(
                f"{name} is {dim}, and kernels read pages of float8 up to head dim 256: {_XLA}"
            )
    return reasons


def _scale_of(scale: Any) -> PoolScale:
    """The layout of a scale [1, 1|pages, K, 1]; for a pool of one page, both layouts agree."""
    if scale is None:
        return "none"
    return "heads" if scale.shape[1] == 1 else "pages"


def key_box_rows(spec: SpecLike) -> int:
    """The rows of a TMA box of keys: the largest number that divides a tile and a page."""
    return math.gcd(spec.tile.key, spec[PAGES].size)
