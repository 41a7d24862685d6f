"""Pages of 1, 2, 4 and 8 keys in the kernels: on the emulated machine, and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import emulator
import jax
import numpy as np
import pytest
from paged_case import Case, assert_matches
from paging import Paging

from jax_memeff.codegen.features import AskedPages
from jax_memeff.codegen.features.pages import SMALL_SIZES
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import select
from jax_memeff.errors import UnsupportedError

STEPS = Case((100, 317, 21, 1, 0, 150, 513), (1,) * 7, heads=(8, 2))
CHUNKS = dataclasses.replace(STEPS, counts=(100, 130, 5, 1, 3, 7, 64), heads=(4, 2))
PROMPTS = dataclasses.replace(CHUNKS, query_rows=None)
LATENT = Case((300, 70, 5, 0, 129), (1, 3, 7, 2, 1), heads=(16, 1), dims=(576, 512), is_latent=True)
_FREED = {"features": ("is_causal", "local_window_size"), "frees_pages": True}
_INVARIANT = ("is_causal", "batch_invariant")


def _with(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)


FAMILIES = {
    # Split keys: a warp has 16 keys of a block, 32, or whole segments, or groups of warps have 32.
    "steps": ("sm_90a", _with(STEPS, dims=(128, 128), is_missing=True)),
    "steps_of_64_columns": ("sm_80", _with(STEPS, features=("sinks", "score_mod"))),
    "freed_steps": ("sm_90a", _with(STEPS, **_FREED)),
    "draft_tokens": ("sm_90a", _with(STEPS, counts=(5, 3, 8, 1, 1, 0, 8), is_missing=True)),
    "chunks": ("sm_90a", _with(CHUNKS, query_rows="64", features=("is_causal", "mask"))),
    "mask_function": ("sm_90a", _with(STEPS, counts=(5,) * 7, features=("is_causal", "tree"))),
    "segments_of_warps": ("sm_90a", _with(STEPS, dims=(128, 128), features=_INVARIANT)),
    "segments": ("sm_80", _with(STEPS, features=(*_INVARIANT, "sinks"), is_missing=True)),
    "float8": ("sm_90a", _with(STEPS, dims=(128, 128), scales=("heads", "none"))),
    "float8_chunks": ("sm_80", _with(CHUNKS, scales=("none", "heads"), is_missing=True)),
    "without_async_copies": ("sm_75", _with(STEPS, dtype="float16", is_missing=True)),
    # Tiles of queries on mma.sync.
    "prompts_sm80": ("sm_80", _with(PROMPTS, is_missing=True)),
    "freed_prompts_sm80": ("sm_86", _with(PROMPTS, **_FREED)),
    "float32": ("sm_80", _with(PROMPTS, dtype="float32")),
    "rows_of_8_bytes": ("sm_80", _with(PROMPTS, dims=(36, 44), is_missing=True)),
    "large_dims": ("sm_80", _with(STEPS, dims=(320, 264), is_missing=True)),
    # The Hopper forward: with three consumers, two, and consumer groups.
    "prompts": ("sm_90a", _with(PROMPTS, is_missing=True)),
    "prompts_of_128_columns": ("sm_90a", _with(PROMPTS, dims=(128, 128))),
    "odd_columns": ("sm_90a", _with(PROMPTS, dims=(72, 88), features=("sinks",), is_missing=True)),
    "prompts_of_256_columns": ("sm_90a", _with(PROMPTS, dims=(256, 192), is_missing=True)),
    "freed_prompts": ("sm_90a", _with(PROMPTS, dims=(128, 128), **_FREED)),
    "consumer_groups": ("sm_90a", _with(PROMPTS, query_rows="consumer_groups", is_missing=True)),
    "functions": (
        "sm_90a",
        _with(PROMPTS, features=("is_causal", "score_mod", "mask", "logits_soft_cap")),
    ),
    # Latent attention.
    "latent": ("sm_90a", LATENT),
    "latent_of_128_heads": ("sm_90a", _with(LATENT, heads=(128, 1), is_missing=True)),
    "latent_window": ("sm_90a", _with(LATENT, **_FREED)),
    "latent_invariant": ("sm_90a", _with(LATENT, features=_INVARIANT, is_missing=True)),
    "latent_functions": ("sm_90a", _with(LATENT, features=("tree", "score_mod"))),
    "latent_padding": ("sm_90a", _with(LATENT, dims=(544, 480), dtype="float16")),
    "latent_float8": ("sm_90a", _with(LATENT, scales=("heads", "heads"), is_missing=True)),
    "latent_float8_pages": (
        "sm_90a",
        _with(LATENT, heads=(128, 1), scales=("pages", "pages"), is_missing=True),
    ),
}


def lower(case: Case, arch: str) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    emulator.configure(arch, multiprocessors=5, seed=case.page_size)
    return case.lowered(case.batch())


def emulated(case: Case, arch: str) -> Any:
    """Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, case, arch)
    emulator.configure(arch, multiprocessors=5, seed=case.page_size)
    return case.found(case.batch(), lowered)


CASES = [
    pytest.param(arch, dataclasses.replace(case, page_size=size), id=f"{name}-{size}")
    for size, (name, (arch, case)) in itertools.product(SMALL_SIZES, FAMILIES.items())
]


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(("arch", "case"), CASES)
def test_emulated_kernels(arch, case, machine, assert_close):
    found = machine.submit(emulated, case, arch).result(timeout=600)
    assert_matches(found, case, assert_close)


def in_pages(made: Paging, size: int) -> Paging:
    """The same sequences in a pool of other pages, with the same largest length."""
    counts = -(-made.lengths // size)
    columns = made.table.shape[1] * made.key_pages.shape[1]
    table = np.full((len(counts), columns // size), -1, np.int32)
    for row, count, first in zip(table, counts, np.cumsum(counts) - counts, strict=True):
        row[:count] = first + np.arange(count)
    pools = []
    for pool, sequences in ((made.key_pages, made.keys), (made.value_pages, made.values)):
        pages = np.full((int(counts.sum()), size, *pool.shape[2:]), np.nan, pool.dtype)
        for row, count, sequence in zip(table, counts, sequences, strict=True):
            rows = np.full((count * size, *pool.shape[2:]), np.nan, pool.dtype)
            rows[: len(sequence)] = sequence
            pages[row[:count]] = rows.reshape(count, size, *pool.shape[2:])
        pools.append(pages)
    return dataclasses.replace(made, key_pages=pools[0], value_pages=pools[1], table=table)


SAME_BITS = {
    "steps": _with(STEPS, dims=(128, 128), features=_INVARIANT),
    "chunks": _with(CHUNKS, features=_INVARIANT),
    "prompts": _with(PROMPTS, dims=(128, 128), features=_INVARIANT),
    "latent": _with(LATENT, features=_INVARIANT),
    "latent_float8": _with(LATENT, features=_INVARIANT, scales=("heads", "heads")),
}


def with_other_pages(arch: str | None, case: Case, sizes: tuple[int, ...]) -> list[Any]:
    """Runs in the process of ``machine`` if it emulates an architecture."""
    if arch is not None:
        emulator.configure(arch, multiprocessors=5)
    made = case.batch()
    return [case.found(in_pages(made, size)) for size in sizes]


def assert_same_bits(found: list[Any]) -> None:
    for out, lse in found[1:]:
        np.testing.assert_array_equal(out, found[0][0])
        np.testing.assert_array_equal(lse, found[0][1])


@pytest.mark.rotating(5)
@pytest.mark.parametrize("case", SAME_BITS.values(), ids=SAME_BITS)
def test_emulated_bits_do_not_depend_on_the_page_size(case, machine):
    assert_same_bits(machine.submit(with_other_pages, "sm_90a", case, (16, 1, 4)).result(600))


@pytest.mark.gpu
@pytest.mark.parametrize("case", SAME_BITS.values(), ids=SAME_BITS)
def test_bits_do_not_depend_on_the_page_size(case):
    longer = dataclasses.replace(case, lengths=tuple(9 * length for length in case.lengths))
    assert_same_bits(with_other_pages(None, longer, (16, *SMALL_SIZES)))


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("case", [case for _, case in FAMILIES.values()], ids=FAMILIES)
def test_pools_without_a_spare_page(case, assert_close):
    made = dataclasses.replace(case, page_size=1, is_exact=True)
    assert_matches(made.found(made.batch()), made, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case.values[1] for case in CASES], ids=[c.id for c in CASES])
def test_kernels(case, assert_close):
    longer = dataclasses.replace(case, lengths=tuple(7 * length for length in case.lengths))
    assert_matches(longer.found(longer.batch()), longer, assert_close)


@pytest.mark.parametrize("scales", [("pages", "heads"), ("none", "pages")], ids=str)
def test_what_is_refused(scales):
    asked = AskedPages(4, "f8e4m3", key_scale=scales[0], value_scale=scales[1])
    problem = Problem("forward", "bf16", 128, 128, "sm_90a", {"packed": True, "pages": asked})
    with pytest.raises(UnsupportedError, match=r"at least 16 keys by a scale of a page.*have 4"):
        select(problem)
