"""Numbers that the documentation states are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jax_memeff._api.paged import append
from jax_memeff._call import sequences
from jax_memeff._call.mask import block_mask
from jax_memeff._command import models
from jax_memeff._cuda import block_mask as block_masks_of_kernels
from jax_memeff.codegen import gpu, select
from jax_memeff.codegen.features import pages
from jax_memeff.codegen.features.pages import INVARIANT_COLUMNS
from jax_memeff.codegen.kernels.common.base import LARGE_DIM
from jax_memeff.codegen.kernels.sm80 import split
from jax_memeff.codegen.kernels.sm90 import backward, large_dim_backward, large_dim_forward, latent
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.spec import SPEC_GRADIENTS
from jax_memeff.codegen.toolchain import program_cache

ROOT = Path(__file__).parents[2]
SUPERSCRIPTS = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"


def numbers(page: str, pattern: str) -> list[int | float]:
    """The numbers in the groups of ``pattern`` in a page; a space matches any line break."""
    found = re.findall(pattern.replace(" ", r"\s+"), (ROOT / page).read_text())
    assert len(found) == 1, f"{page} has {len(found)} matches of {pattern!r}"
    groups = found[0] if isinstance(found[0], tuple) else found
    return [number(group) for group in groups]


def number(text: str) -> int | float:
    """A number such as 2,048, or a power such as 2⁻¹²."""
    if power := re.fullmatch(rf"2([{SUPERSCRIPTS}]+)", text):
        return 2.0 ** int(power[1].translate(str.maketrans(SUPERSCRIPTS, "-0123456789")))
    return int(text.replace(",", ""))


def constants(header: str, *names: str) -> list[float]:
    """The values of float constants in a device header."""
    text = (ROOT / "codegen/memeff" / header).read_text()
    found = [re.search(rf"float {name} = (\S+)f;", text) for name in names]
    return [
        float.fromhex(match[1]) if "x" in match[1] else float(match[1]) for match in found if match
    ]


LARGEST_LARGE = [
    max(head for head, _ in large_dim_forward.DIMS),
    max(value for _, value in large_dim_forward.DIMS),
]
STATED = [
    ("docs/support.md", r"up to head dim (\d+) and value dim (\d+), without bias", LARGEST_LARGE),
    ("docs/guide/memory.md", r"up to head dim (\d+) and value dim (\d+), without", LARGEST_LARGE),
    ("docs/architecture.md", r"up to (\d+) key columns and (\d+) value columns", LARGEST_LARGE),
    (
        "docs/guide/serving.md",
        r"with up to (\d+) columns of keys and (\d+) of values",
        [latent.HEAD_DIM, latent.VALUE_DIM],
    ),
    ("docs/support.md", r"head dims from 257 to (\d+)", [LARGE_DIM]),
    ("docs/guide/memory.md", r"at most (\d+) tiles\. ", [split._MOST_CTAS]),
    (
        "docs/guide/memory.md",
        r"at most (\d+) tiles of (\d+) keys",
        [gpu.multiprocessors("sm_90a"), backward.TILES[128][0].key],
    ),
    ("docs/deployment/jit.md", r"Beyond (\d+) MiB", [program_cache.MAX_BYTES // 2**20]),
    (
        "docs/guide/masks.md",
        r"more than (\d+) million tiles",
        [block_masks_of_kernels._MOST_TILES_OF_SEQUENCES // 2**20],
    ),
    (
        "docs/guide/masks.md",
        r"a part is a single element up to ([\d,]+) rows and columns",
        [block_mask._MOST_EVALUATIONS**0.5],
    ),
    ("docs/guide/serving.md", r"must fit in (\d+) MiB", [pages._MOST_SEGMENT_BYTES // 2**20]),
    ("docs/guide/serving.md", r"in segments of (\d+), in ascending", [INVARIANT_COLUMNS]),
    ("docs/architecture.md", r"absolute multiples of (\d+) and add up", [INVARIANT_COLUMNS]),
    (
        "docs/guide/serving.md",
        r"has segments of (\d+) keys if at most (\d+) query heads share a key head, and of twice "
        r"as many from position ([\d,]+) on\. Otherwise segments have (\d+) keys, and twice "
        r"as many from position (\d+) on",
        [
            latent.SMALL_GROUP_SEGMENTS.keys,
            latent.SMALL_GROUP,
            latent.SMALL_GROUP_SEGMENTS.doubles_at,
            *latent.LARGE_GROUP_SEGMENTS,
        ],
    ),
    ("docs/guide/serving.md", r"clips to ±(\d+), the largest", [append.LARGEST_FLOAT8]),
    ("docs/guide/transforms.md", r"more than (2\S+) tokens", [sequences.MOST_POSITIONS]),
    (
        "docs/guide/precision.md",
        r"slope is above (\d+), if the scale is below (2⁻¹²) or above (\d+), or if the product of "
        r"slope and lengths is above (2\S+)\.",
        constants(
            "collective/softmax/linear_scores.cuh",
            *("kMostSlope", "kLeastScale", "kMostScale", "kMostShift"),
        ),
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("page", "pattern", "expected"), STATED, ids=[row[0] for row in STATED])
def test_numbers_are_those_of_the_code(page, pattern, expected):
    assert numbers(page, pattern) == expected


@pytest.mark.quick
def test_large_head_dims_have_the_same_limit_in_both_directions():
    assert [*map(max, zip(*large_dim_backward.TILES, strict=True))] == LARGEST_LARGE


def padded_dims(arch: str) -> set[int]:
    """The padded head dims up to 256 of an architecture's kernels for 16-bit elements."""
    dims = range(16, 257, 16)
    forwards = [Problem("forward", "bf16", dim, dim, arch) for dim in dims]
    backwards = [
        Problem("backward", "bf16", dim, dim, arch, needs_grad=SPEC_GRADIENTS) for dim in dims
    ]
    problems = forwards + backwards
    return {select.select(problem).padded_head_dim for problem in problems}


def test_padded_head_dims():
    everywhere = r"head dims \((\d+), (\d+), (\d+), (\d+), (\d+) or (\d+), "
    pattern = everywhere + r"and on Hopper also (\d+), (\d+) and (\d+);"
    stated = numbers("docs/deployment/jit.md", pattern)
    assert set(stated[:6]) == padded_dims("sm_80")
    assert set(stated) == padded_dims("sm_90a")


def test_kernels_of_the_archive_in_the_example():
    (stated,) = numbers("docs/deployment/jit.md", r"models in the example need (\d+) kernels")
    assert stated == len(models.kernels(["llama", "gemma", "gpt-oss"], ["sm_90a"]))
