"""Paged keys in the kernels: on the emulated machine, and on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import paged_case
import pytest
from paged_case import DECIDED, TOLERANCES, Case, assert_matches
from paging import paged_attention

DECODE = Case((100, 17, 1, 0), (1, 1, 1, 1))
RAGGED = Case((120, 48, 200, 3), (100, 1, 130, 5))
MIXED = Case((100, 400, 30, 1, 0, 150), (1, 1, 1, 1, 1, 70))  # decode steps and a prompt
# Two prompts among decode steps: the tile scheduler skips the work tiles of the steps.
STEPS_AROUND_PROMPTS = Case(
    (60,) * 12 + (300,) + (40,) * 6 + (200, 20, 30), (1,) * 12 + (200,) + (1,) * 6 + (130, 1, 1)
)
EMULATED = [
    ("sm_90a", STEPS_AROUND_PROMPTS),
    ("sm_90a", dataclasses.replace(STEPS_AROUND_PROMPTS, features=())),
    ("sm_80", DECODE),
    ("sm_80", MIXED),
    ("sm_90a", dataclasses.replace(MIXED, features=("sinks", "score_mod"), is_missing=True)),
    ("sm_80", dataclasses.replace(DECODE, is_missing=True, page_size=32, query_rows="16")),
    ("sm_80", dataclasses.replace(RAGGED, features=("local_window_size", "sinks"), page_size=48)),
    ("sm_80", dataclasses.replace(RAGGED, dtype="float32", is_missing=True)),
    ("sm_80", dataclasses.replace(DECODE, dims=(36, 44), query_rows=None)),  # rows of 8 bytes
    ("sm_75", dataclasses.replace(DECODE, dtype="float16")),
    ("sm_90a", dataclasses.replace(RAGGED, query_rows=None, is_missing=True)),
    ("sm_90a", dataclasses.replace(RAGGED, query_rows=None, page_size=128, dims=(128, 128))),
    ("sm_90a", dataclasses.replace(RAGGED, query_rows="consumer_groups", page_size=80)),
    ("sm_90a", dataclasses.replace(RAGGED, query_rows="64", features=("is_causal", "mask"))),
    # With a function the query heads of a key head share a tile, with few rows each or many.
    (
        "sm_80",
        dataclasses.replace(
            DECODE, heads=(6, 1), features=("is_causal", "score_mod", "mask", "sinks")
        ),
    ),
    (
        "sm_90a",
        dataclasses.replace(
            RAGGED, heads=(6, 2), counts=(5, 1, 33, 3), features=("is_causal", "mask", "score_mod")
        ),
    ),
    # A few draft tokens have a tile of 32 rows.
    (
        "sm_90a",
        dataclasses.replace(
            RAGGED, heads=(8, 2), counts=(5, 1, 8, 3), features=("is_causal", "mask", "score_mod")
        ),
    ),
    ("sm_90a", dataclasses.replace(RAGGED, heads=(8, 2), counts=(5, 7, 8, 3), dims=(128, 128))),
    ("sm_80", dataclasses.replace(RAGGED, features=("is_causal", "kv_blocks"))),
    (
        "sm_90a",
        dataclasses.replace(
            RAGGED, query_rows=None, features=("is_causal", "score_mod", "logits_soft_cap")
        ),
    ),
    ("sm_80", dataclasses.replace(MIXED, dims=(320, 264), is_missing=True)),
    (
        "sm_86",
        dataclasses.replace(
            RAGGED, dims=(264, 300), features=("is_causal", "sinks", "local_window_size")
        ),
    ),
    ("sm_80", dataclasses.replace(DECODE, dims=(276, 276), dtype="float32", page_size=48)),
    ("sm_90a", dataclasses.replace(MIXED, scales=("heads", "heads"))),
    ("sm_80", dataclasses.replace(DECODE, scales=("none", "none"), dtype="float16")),
    (
        "sm_90a",
        dataclasses.replace(
            DECODE, scales=("pages", "pages"), dims=(128, 192), page_size=32, is_missing=True
        ),
    ),
    (
        "sm_80",
        dataclasses.replace(
            RAGGED,
            scales=("pages", "heads"),
            dims=(80, 48),
            features=("is_causal", "sinks", "score_mod", "mask"),
        ),
    ),
    ("sm_86", dataclasses.replace(RAGGED, scales=("heads", "pages"), dims=(256, 256))),
    ("sm_75", dataclasses.replace(DECODE, scales=("heads", "pages"), dtype="float16")),
    ("sm_89", dataclasses.replace(MIXED, dims=(128, 128))),
    ("sm_120", dataclasses.replace(MIXED, dims=(128, 128))),
]

# Tiles that a mask function leaves out, or whose elements it need not test: one and five tokens,
# lengths at the ends of pages and of tiles, heads that share a tile or not.
_STEPS = Case(
    (700, 320, 321, 319, 5, 1, 0, 64),
    (5, 5, 5, 5, 5, 1, 1, 5),
    page_size=64,
    heads=(8, 2),
    dims=(128, 128),
)
EMULATED += [
    ("sm_90a", dataclasses.replace(_STEPS, features=("is_causal", "tree", "sinks"))),
    ("sm_90a", dataclasses.replace(_STEPS, heads=(8, 1), features=("tree", "score_mod"))),
    ("sm_90a", dataclasses.replace(_STEPS, heads=(32, 1), features=("is_causal", "tree"))),
    ("sm_80", dataclasses.replace(_STEPS, features=("sinks and window",), is_missing=True)),
    ("sm_90a", dataclasses.replace(_STEPS, counts=(1,) * 8, features=("sliding", "sinks"))),
    ("sm_90a", dataclasses.replace(_STEPS, counts=(1,) * 8, features=("none", "sinks"))),
    ("sm_90a", dataclasses.replace(_STEPS, heads=(2, 2), features=("prefix",), page_size=32)),
    (
        "sm_90a",
        dataclasses.replace(_STEPS, features=("is_causal", "tree"), scales=("heads", "pages")),
    ),
    (
        "sm_90a",
        dataclasses.replace(_STEPS, features=("is_causal", "tree", "batch_invariant"), seed=1),
    ),
    (
        "sm_80",
        dataclasses.replace(
            _STEPS, features=("sinks and window", "batch_invariant"), dims=(64, 64)
        ),
    ),
    # Prompts, in the Hopper forward.
    *(
        ("sm_90a", dataclasses.replace(RAGGED, query_rows=rows, dims=dims, features=features))
        for rows, dims, features in (
            (None, (128, 128), ("is_causal", "tree")),
            (None, (64, 64), ("prefix",)),
            (None, (64, 64), ("sliding", "sinks")),
            ("consumer_groups", (128, 128), ("sinks and window",)),
        )
    ),
]


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(("arch", "case"), EMULATED, ids=str)
def test_emulated_kernels(arch, case, machine, assert_close):
    found = machine.submit(paged_case.emulated, case, arch).result(timeout=600)
    assert_matches(found, case, assert_close)


_FEATURES = ("is_causal", "logits_soft_cap", "local_window_size", "sinks", "score_mod", "mask")


def random_cases(seed: int) -> Iterator[Case]:
    """Endless random ragged batches."""
    rng = np.random.default_rng(seed)
    for number in itertools.count():
        batch = int(rng.integers(1, 9))
        longest = int(rng.choice([40, 300, 2000]))
        lengths = rng.integers(0, longest, batch)
        most = int(rng.choice([1, 1, 5, 64, 400]))
        counts = rng.integers(0, most + 1, batch)
        lengths[0], counts[0] = longest, most
        key_heads = int(rng.choice([1, 2, 8]))
        case = Case(
            tuple(map(int, lengths)),
            tuple(map(int, counts)),
            page_size=int(rng.choice([1, 2, 4, 8, 16, 32, 48, 64, 128, 256])),
            heads=(key_heads * int(rng.choice([1, 4, 6])), key_heads),
            dims=((64, 64), (128, 128), (128, 128), (192, 128), (40, 72), (256, 256))[
                rng.integers(6)
            ],
            dtype=str(rng.choice(["bfloat16", "bfloat16", "float16", "float32"])),
            features=tuple(name for name in _FEATURES if rng.random() < 0.3),
            is_missing=bool(rng.random() < 0.3),
            seed=number,
        )
        # No kernel scales keys of small pages by page.
        choices = ["none", "heads", "pages"][: 3 if case.page_size >= 16 else 2]
        layouts = tuple(map(str, rng.choice(choices, 2)))
        if rng.random() < 0.3 and case.dtype != "float32" and not any(d % 16 for d in case.dims):
            case = dataclasses.replace(case, scales=layouts)
        if rng.random() < 0.4 and "mask" not in case.features:
            decided = str(rng.choice(list(DECIDED)))
            case = dataclasses.replace(case, features=(*case.features, decided))
        yield case


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(itertools.islice(random_cases(0), 200)), ids=str)
def test_kernels(case, assert_close):
    assert_matches(case.found(case.batch()), case, assert_close)


ANY_LENGTHS = np.array([-5, 0, 1, 30, 48, 49, 10**6, -(2**31), 2**31 - 1], np.int32)


def step(arch: str | None, lengths: np.ndarray, dims: tuple[int, int], implementation: Any) -> Any:
    """A decode step whose lengths are on the device; a sequence has at most 48 keys."""
    if arch is not None:
        emulator.configure(arch, multiprocessors=5)
    rng = np.random.default_rng(0)
    is_latent = dims[0] > 256
    heads = (16, 1) if is_latent else (4, 2)
    pools = [jnp.asarray(rng.standard_normal((40, 16, heads[1], dim)), "bfloat16") for dim in dims]
    query = jnp.asarray(rng.standard_normal((len(lengths), 1, heads[0], dims[0])), "bfloat16")
    table = jnp.asarray(rng.permutation(40)[:27].reshape(len(lengths), 3).astype(np.int32))
    call = jax.jit(
        functools.partial(
            paged_attention,
            local_window_size=(20, 0),
            value_dim=dims[1] if is_latent else None,
            return_residual=True,
            implementation=implementation,
        )
    )
    values = None if is_latent else pools[1]
    found = call(query, pools[0], values, table, jnp.asarray(lengths))
    return jax.tree.map(lambda x: np.asarray(x, np.float32), found)


STEPS = [("sm_80", (64, 64)), ("sm_90a", (128, 128)), ("sm_90a", (576, 512))]


def assert_clamped(found: Any, dims: tuple[int, int], assert_close: Any) -> None:
    assert_close(found, step(None, ANY_LENGTHS.clip(0, 48), dims, "xla"), TOLERANCES["bfloat16"])
    assert not found[0][ANY_LENGTHS <= 0].any()


@pytest.mark.rotating(3)
@pytest.mark.parametrize(("arch", "dims"), STEPS, ids=str)
def test_emulated_steps_clamp_lengths(arch, dims, machine, assert_close):
    """Only the kernels clamp them: XLA computes nothing before them."""
    found = machine.submit(step, arch, ANY_LENGTHS, dims, "cuda").result(600)
    assert_clamped(found, dims, assert_close)
    assert_clamped(step(None, ANY_LENGTHS, dims, "xla"), dims, assert_close)


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (264, 264), (576, 512)], ids=str)
def test_steps_clamp_lengths(dims, assert_close):
    assert_clamped(step(None, ANY_LENGTHS, dims, "cuda"), dims, assert_close)


_CHUNKS = dataclasses.replace(RAGGED, lengths=(900, 300, 77, 0), counts=(130, 300, 5, 2))
_LARGE_DIMS = [
    dataclasses.replace(case, dims=dims, dtype=dtype, page_size=page_size)
    for dims, dtype, page_size in (
        ((320, 264), "bfloat16", 16),
        ((512, 512), "float16", 64),
        ((264, 300), "float32", 48),
    )
    for case in (dataclasses.replace(MIXED, lengths=(900, 5000, 30, 1, 0, 150)), _CHUNKS)
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", _LARGE_DIMS, ids=str)
def test_head_dims_above_256(case, assert_close):
    assert_matches(case.found(case.batch()), case, assert_close)


_PROMPTS = dataclasses.replace(RAGGED, query_rows=None, dims=(128, 128))
_LATENT = dataclasses.replace(
    DECODE, heads=(128, 1), dims=(576, 512), is_latent=True, lengths=(700, 65, 0, 300)
)
_EXACT = [
    dataclasses.replace(case, is_exact=True)
    for case in (
        DECODE,
        dataclasses.replace(MIXED, is_missing=True, page_size=48),
        dataclasses.replace(_PROMPTS, page_size=64),
        dataclasses.replace(_PROMPTS, page_size=16, is_missing=True),
        dataclasses.replace(RAGGED, query_rows="64", features=("is_causal", "mask")),
        dataclasses.replace(RAGGED, dtype="float32"),
        dataclasses.replace(DECODE, dims=(36, 44)),
        dataclasses.replace(DECODE, dims=(320, 264)),
        dataclasses.replace(DECODE, scales=("pages", "heads"), dims=(128, 64), page_size=32),
        dataclasses.replace(MIXED, features=("is_causal", "batch_invariant")),
        _LATENT,
        dataclasses.replace(_LATENT, features=("is_causal", "batch_invariant")),
    )
]


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("case", _EXACT, ids=str)
def test_pools_without_a_spare_page(case, assert_close):
    assert_matches(case.found(case.batch()), case, assert_close)
