"""The forward of latent attention: on the emulated machine, and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import emulator
import jax
import numpy as np
import pytest
from paged_case import Case, assert_matches

from jax_memeff.codegen import strategy
from jax_memeff.codegen.features import AskedPages
from jax_memeff.codegen.kernels.sm90.latent import LARGE_GROUP_SEGMENTS, SMALL_GROUP_SEGMENTS
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import explain, select
from jax_memeff.codegen.strategy import Sizes, Strategy
from jax_memeff.errors import UnsupportedError

LATENT = Case(
    (100, 17, 1, 0, 64),
    (1, 1, 1, 1, 1),
    page_size=64,
    heads=(16, 1),
    dims=(576, 512),
    is_latent=True,
)
LONG = dataclasses.replace(LATENT, lengths=(700, 65, 0, 300), counts=(1, 1, 1, 1))
SEVERAL = dataclasses.replace(LATENT, lengths=(300, 70, 5, 0, 129), counts=(5, 3, 7, 2, 1))
EQUAL = dataclasses.replace(LATENT, lengths=(300, 300, 0, 300), counts=(1, 1, 1, 1))
PROMPTS = dataclasses.replace(LATENT, lengths=(150, 260), counts=(20, 70))


def _invariant(case: Case, **changes: Any) -> Case:
    changed = dataclasses.replace(case, **changes)
    return dataclasses.replace(changed, features=(*changed.features, "batch_invariant"))


EMULATED = [
    (5, LATENT),
    # A sequence is divided over CTAs, and CTAs have parts of two; row tiles share keys.
    (7, dataclasses.replace(LONG, heads=(128, 1), page_size=32)),
    (6, dataclasses.replace(LONG, heads=(128, 1), dtype="float16", seed=3)),
    (11, dataclasses.replace(LONG, heads=(64, 1), page_size=16, is_missing=True)),
    (1, dataclasses.replace(LONG, features=("is_causal", "sinks"), heads=(48, 1), page_size=80)),
    # Parts end at sequences: several parts per sequence, one part, and several sequences per part.
    (32, EQUAL),
    (6, dataclasses.replace(EQUAL, heads=(128, 1))),
    (1, EQUAL),
    (3, dataclasses.replace(SEVERAL, page_size=16)),
    (4, dataclasses.replace(SEVERAL, features=("sinks", "logits_soft_cap"), dims=(544, 480))),
    (12, dataclasses.replace(SEVERAL, heads=(96, 2), page_size=48)),
    (9, dataclasses.replace(PROMPTS, features=("is_causal", "local_window_size"))),
    # One sequence has more items than a warp has lanes, others have few; and two calls.
    (8, dataclasses.replace(PROMPTS, lengths=(80, 9, 150), counts=(3, 0, 70), heads=(48, 1))),
    (6, dataclasses.replace(LONG, lengths=(100, 300, 30, 1, 150), counts=(1, 1, 1, 1, 40))),
    # Functions of scores and masks; rows of a tile have several heads and queries.
    (5, dataclasses.replace(SEVERAL, features=("tree",))),
    (7, dataclasses.replace(LONG, heads=(128, 1), features=("is_causal", "score_mod", "sinks"))),
    (4, dataclasses.replace(SEVERAL, features=("is_causal", "score_mod", "mask"), page_size=32)),
    (6, dataclasses.replace(LONG, features=("prefix", "score_mod"), is_missing=True)),
    (3, dataclasses.replace(PROMPTS, features=("sinks and window", "logits_soft_cap"))),
    (2, dataclasses.replace(LONG, features=("none", "sinks"))),
    (5, dataclasses.replace(SEVERAL, features=("is_causal", "kv_blocks"))),
    # Batch-invariant results: every row tile is a sum of segments.
    (5, _invariant(LATENT, lengths=(0, 1, 255, 256, 257), features=("sinks",))),
    (7, _invariant(LONG, heads=(128, 1), page_size=32, is_missing=True)),
    (3, _invariant(SEVERAL, heads=(96, 2), features=("is_causal", "score_mod", "sinks"))),
    (9, _invariant(PROMPTS, features=("is_causal", "local_window_size", "logits_soft_cap"))),
    (4, _invariant(LONG, features=("prefix", "score_mod"), dims=(544, 480), page_size=80)),
]


def _float8(case: Case, scales: tuple[str, str] = ("heads", "heads"), **changes: Any) -> Case:
    return dataclasses.replace(case, scales=scales, **changes)


_NONE, _PAGES = ("none", "none"), ("pages", "pages")
FLOAT8 = [
    (5, _float8(LATENT)),
    (7, _float8(LONG, heads=(128, 1), page_size=32, scales=_PAGES)),
    (11, _float8(LONG, heads=(64, 1), page_size=16, is_missing=True, scales=_PAGES)),
    (1, _float8(LONG, features=("is_causal", "sinks"), page_size=80, scales=_NONE)),
    (4, _float8(SEVERAL, features=("sinks", "logits_soft_cap"), dims=(544, 480))),
    (12, _float8(SEVERAL, heads=(96, 2), page_size=48, scales=_PAGES)),
    (3, _float8(SEVERAL, features=("is_causal", "score_mod", "mask"), scales=_NONE)),
    (6, _float8(LONG, features=("prefix",), is_missing=True, scales=_PAGES)),
    (9, _float8(LATENT, lengths=(150, 260), counts=(20, 70), page_size=128)),
    (5, _float8(SEVERAL, features=("is_causal", "batch_invariant"), scales=_PAGES)),
]
"""Pools of float8: every scale, also with pages that are smaller than a tile."""


_FEATURES = ("is_causal", "logits_soft_cap", "local_window_size", "sinks", "score_mod", "mask")


def lower(case: Case, multiprocessors: int) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    # Each case has another order of warps, copies and products.
    emulator.configure("sm_90a", multiprocessors=multiprocessors, seed=multiprocessors)
    return case.lowered(case.batch())


def emulated(case: Case, multiprocessors: int) -> Any:
    """Runs in the process of ``machine``."""
    lowered = emulator.lowered(lower, case, multiprocessors)
    emulator.configure("sm_90a", multiprocessors=multiprocessors, seed=multiprocessors)
    return case.found(case.batch(), lowered)


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all cases before the first one runs."""
    names = ("case", "multiprocessors")
    calls = [tuple(map(call.get, names)) for call in selected if {*names} <= {*call}]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(("multiprocessors", "case"), [*EMULATED, *FLOAT8], ids=str)
def test_emulated_kernels(multiprocessors, case, machine, assert_close):
    found = machine.submit(emulated, case, multiprocessors).result(timeout=600)
    assert_matches(found, case, assert_close)


def random_cases(seed: int) -> Iterator[Case]:
    """Endless random ragged batches."""
    rng = np.random.default_rng(seed)
    for number in itertools.count():
        heads = int(rng.choice([16, 32, 48, 128]))
        batch = int(rng.choice([1, 3, 40]))
        # The expected result takes H float64 for each key and head.
        longest = int(rng.choice([70, 700, 32000 // heads]))
        lengths = rng.integers(0, longest // int(rng.choice([1, 8])) + 1, batch)
        most = int(rng.choice([1, 1, 2, 5, 100]))
        counts = rng.integers(0, most + 1, batch)
        lengths[0], counts[0] = longest, most
        yield Case(
            tuple(map(int, lengths)),
            tuple(map(int, counts)),
            page_size=int(rng.choice([1, 2, 4, 8, 16, 32, 48, 64, 128, 256])),
            heads=(heads, 1),
            dims=((576, 512), (576, 512), (544, 480))[rng.integers(3)],
            dtype=str(rng.choice(["bfloat16", "float16"])),
            features=tuple(name for name in _FEATURES if rng.random() < 0.3),
            is_missing=bool(rng.random() < 0.3),
            seed=number,
            is_latent=True,
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *itertools.islice(random_cases(0), 60),
        *map(_invariant, itertools.islice(random_cases(1), 30)),
    ],
    ids=str,
)
def test_kernels(case, assert_close):
    assert_matches(case.found(case.batch()), case, assert_close)


_MANY = tuple(map(int, np.random.default_rng(3).integers(0, 3000, 40)))
_LONG_BESIDE_SHORT = dataclasses.replace(
    LATENT, lengths=(20000, *[100] * 30), counts=(1,) * 31, page_size=32, dtype="float16"
)
_LARGE = [
    dataclasses.replace(LATENT, lengths=(100, 17, 1, 0, 64, 65), counts=(1,) * 6, heads=(128, 1)),
    dataclasses.replace(LATENT, lengths=(4096, 1000, 3, 2047), counts=(1,) * 4, page_size=16),
    dataclasses.replace(
        LATENT, lengths=(900, 300, 77), counts=(2, 1, 2), heads=(48, 1), dims=(544, 480)
    ),
    dataclasses.replace(LATENT, lengths=(4096, 1000, 3, 2047), counts=(1,) * 4, heads=(128, 1)),
    dataclasses.replace(LATENT, lengths=_MANY, counts=(1,) * 40, heads=(128, 1), page_size=16),
    dataclasses.replace(LATENT, lengths=(4096,) * 32, counts=(1,) * 32, heads=(128, 1)),
    _LONG_BESIDE_SHORT,
    dataclasses.replace(_LONG_BESIDE_SHORT, heads=(128, 1), seed=5),
    dataclasses.replace(LATENT, lengths=(900, 300), counts=(130, 300), page_size=48),
    dataclasses.replace(SEVERAL, lengths=(700, 5, 1500, 9, 77), heads=(128, 1)),
]


_LARGE_FLOAT8 = [
    _float8(LATENT, lengths=(100, 17, 1, 0, 64, 65), counts=(1,) * 6, heads=(128, 1)),
    _float8(LATENT, lengths=(4096, 1000, 3, 2047), counts=(1,) * 4, page_size=16),
    _float8(LATENT, lengths=_MANY, counts=(1,) * 40, heads=(128, 1), scales=_PAGES),
    _float8(LATENT, lengths=_MANY, counts=(1,) * 40, page_size=16, scales=_PAGES),
    _float8(LATENT, lengths=(4096,) * 32, counts=(1,) * 32, heads=(128, 1)),
    _float8(LATENT, lengths=(20000, *[100] * 30), counts=(1,) * 31, scales=_NONE),
    _float8(LATENT, lengths=(900, 300), counts=(130, 300), page_size=48, scales=_PAGES),
    _float8(SEVERAL, lengths=(700, 5, 1500, 9, 77), heads=(128, 1), scales=_NONE),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *_LARGE,
        *map(_invariant, _LARGE),
        *(case for _, case in FLOAT8),
        *_LARGE_FLOAT8,
        *map(_invariant, _LARGE_FLOAT8),
    ],
    ids=str,
)
def test_large_batches(case, assert_close):
    """Parts have many lengths and run on all SMs, unlike on the emulated machine."""
    assert_matches(case.found(case.batch()), case, assert_close)


def latent(arch: str = "sm_90a", dims: tuple[int, int] = (576, 512), **asked) -> Problem:
    pages = AskedPages(64, is_latent=True)
    return Problem("forward", "bf16", *dims, arch, {"packed": True, "pages": pages, **asked})


@pytest.mark.parametrize("query_rows", [None, *strategy.QUERY_ROWS])
def test_one_kernel_for_every_strategy(query_rows):
    spec = select(latent(), Strategy(query_rows=query_rows))
    assert spec.kernel.stem == "sm90/latent"
    assert spec.name == "fmha_fwd_bf16_d576v512_64x64_latent_varlen_pages64_sm90"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (latent("sm_80"), "it reads values from a separate array"),
        (latent(boolean=True), "the rows of its tiles belong to several heads"),
        (latent(row_maxima=True), "it splits the keys of a row, and merges no maxima"),
        (latent(dims=(640, 512)), "head_dim 640 is above its 576"),
        (
            dataclasses.replace(latent(), dtype="f32"),
            "a kernel on Hopper for queries of bfloat16 or float16, got f32: cast query and pool",
        ),
    ],
    ids=str,
)
def test_what_it_refuses(problem, reason):
    with pytest.raises(UnsupportedError, match=reason):
        select(problem)


INVARIANT_PAGES = AskedPages(64, is_latent=True, is_invariant=True)
MIB = 2**20


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "rows", "slots"),
    [
        # Short segments and 16 rows up to 16 heads, and long segments for more. The first segment
        # of a row tile has no slot.
        (32, 1, 4096, 16, 16, 32 * 7),
        (32, 1, 4096, 17, 32, 32 * 3),
        (64, 1, 4096, 128, 64, 128 * 3),
        (64, 2, 4096, 16, 32, 64 * 7),
        (8, 1, 512, 128, 64, 0),
        # Their lengths double at 32,768 and at 8192 keys.
        (1, 1, 2**18, 16, 16, 64 + 224 - 1),
        (1, 1, 2**15 + 1025, 16, 16, 64 + 2 - 1),
        (1, 1, 2**14 + 1, 128, 64, 2 * (8 + 5 - 1)),
        # The last segment has one key.
        (32, 1, 1025, 128, 64, 64),
        # There is memory for fewer.
        (512, 1, 8192, 16, 16, 128 * MIB // (16 * 528 * 4)),
        (128, 1, 8192, 128, 64, 128 * MIB // (64 * 528 * 4)),
        (2**16, 2**10, 2**28, 128, 64, 128 * MIB // (64 * 528 * 4)),
    ],
)
def test_memory_of_segments(batch, queries, keys, heads, rows, slots):
    """Each CTA has a running sum, and the segments after the first of a row tile have slots, as
    many as fit in the memory.
    """
    spec = select(latent(pages=INVARIANT_PAGES))
    sizes = Sizes(batch=batch, queries=queries, keys=keys, heads=heads, key_heads=1)
    found = {it.name: it.shape for it in spec.kernel.workspaces(spec, sizes, 132)}
    packed = queries * heads
    ctas = min(144, 2 * batch * -(-packed // 128) * -(-keys // 64))
    tiles = batch * -(-packed // 64)
    assert found == {"partial_out": (ctas + slots, rows, 512 + 16), "tile_parts": (tiles, 4)}


@pytest.mark.parametrize("segments", [SMALL_GROUP_SEGMENTS, LARGE_GROUP_SEGMENTS], ids=str)
def test_segments_are_counted(segments):
    """A sequence has a segment for each position at which one begins."""
    short, twice = segments.doubles_at, 2 * segments.keys
    begins = [*range(0, short, segments.keys), *range(short, 4 * short, twice)]
    for keys in {0, 1, short, *(begin + near for begin in begins for near in (-1, 0, 1))}:
        if keys >= 0:
            assert segments.count(keys) == sum(begin < keys for begin in begins)


def test_other_values_are_not_latent():
    problem = Problem("forward", "bf16", 576, 512, "sm_90a")
    (reasons,) = (why for spec, why in explain(problem) if "latent" in spec.kernel.stem)
    assert "its values are columns of the keys" in reasons
