"""With a window, keys that come before it do not matter: engines free their pages.

Both the blockwise path and the kernels read pools with NaN there, in whole pages and in the first
rows of the page where the window begins.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged_case
import pytest
from paged_case import Case, assert_matches
from paging import paged_attention

from jax_memeff import Mask

STEPS = Case(
    (100, 317, 21, 1, 0, 150, 512),
    (1, 1, 1, 1, 1, 1, 1),
    features=("is_causal", "local_window_size"),
    frees_pages=True,
)
PROMPTS = dataclasses.replace(STEPS, counts=(100, 130, 21, 1, 0, 7, 64))
BLOCKWISE = [
    STEPS,
    PROMPTS,
    dataclasses.replace(STEPS, features=("local_window_size", "sinks"), page_size=48),
    dataclasses.replace(PROMPTS, features=(*PROMPTS.features, "mask", "score_mod")),
    dataclasses.replace(PROMPTS, features=(*PROMPTS.features, "batch_invariant")),
    dataclasses.replace(PROMPTS, scales=("pages", "heads")),
    dataclasses.replace(STEPS, heads=(4, 1), dims=(64, 48), is_latent=True),
    dataclasses.replace(
        STEPS, heads=(4, 1), dims=(64, 48), is_latent=True, scales=("pages", "none")
    ),
    dataclasses.replace(PROMPTS, is_missing=True),
]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("case", BLOCKWISE, ids=str)
def test_blockwise(case, assert_close):
    made = case.batch()
    assert_matches(case.found(made, case.lowered(made, "xla")), case, assert_close)


def test_a_traced_window(assert_close):
    made = PROMPTS.batch()

    @jax.jit
    def windowed(left: jax.Array) -> Any:
        return paged_attention(
            *map(jnp.asarray, made.arguments),
            query_starts=jnp.asarray(made.starts),
            mask=Mask.window(left, 3),
            return_residual=True,
            implementation="xla",
        )

    found = jax.tree.map(np.asarray, windowed(jnp.int32(20)))
    assert_matches(found, PROMPTS, assert_close)


SMALL_PROMPTS = dataclasses.replace(PROMPTS, lengths=(100, 217, 21, 0), counts=(70, 130, 21, 0))
KERNELS = [
    # The split forward: tiles of one row and of many, groups that divide keys, and segments.
    ("sm_80", STEPS),
    ("sm_90a", dataclasses.replace(STEPS, heads=(8, 1), page_size=48, dims=(128, 128))),
    ("sm_90a", dataclasses.replace(STEPS, counts=(5, 7, 8, 1, 0, 3, 8), heads=(8, 2))),
    (
        "sm_80",
        dataclasses.replace(STEPS, features=(*STEPS.features, "batch_invariant"), page_size=32),
    ),
    ("sm_90a", dataclasses.replace(STEPS, features=(*STEPS.features, "score_mod", "mask"))),
    ("sm_90a", dataclasses.replace(STEPS, scales=("pages", "pages"), dims=(128, 192))),
    ("sm_80", dataclasses.replace(STEPS, scales=("heads", "none"), page_size=64)),
    # The forward by cp.async, in rows of 16 and of 8 bytes, and in column chunks.
    ("sm_80", dataclasses.replace(SMALL_PROMPTS, page_size=48)),
    ("sm_80", dataclasses.replace(SMALL_PROMPTS, dims=(36, 44), query_rows=None)),
    ("sm_80", dataclasses.replace(SMALL_PROMPTS, dtype="float32")),
    ("sm_80", dataclasses.replace(SMALL_PROMPTS, dims=(264, 264))),
    # The Hopper forward, which copies by TMA.
    ("sm_90a", dataclasses.replace(SMALL_PROMPTS, query_rows=None, page_size=128)),
    (
        "sm_90a",
        dataclasses.replace(
            SMALL_PROMPTS, query_rows=None, dims=(128, 128), features=("local_window_size", "sinks")
        ),
    ),
    ("sm_90a", dataclasses.replace(SMALL_PROMPTS, query_rows="consumer_groups", page_size=80)),
    *(
        ("sm_90a", dataclasses.replace(case, heads=(16, 1), dims=(576, 512), is_latent=True))
        for case in (
            dataclasses.replace(STEPS, lengths=(100, 317, 21, 1, 0), counts=(1,) * 5),
            dataclasses.replace(
                STEPS, lengths=(150, 260), counts=(20, 30), scales=("pages", "pages")
            ),
            dataclasses.replace(
                STEPS,
                lengths=(300, 129),
                counts=(9, 1),
                features=(*STEPS.features, "batch_invariant"),
                page_size=64,
            ),
        )
    ),
]


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(("arch", "case"), KERNELS, ids=str)
def test_emulated_kernels(arch, case, machine, assert_close):
    found = machine.submit(paged_case.emulated, case, arch).result(timeout=600)
    assert_matches(found, case, assert_close)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for _, case in KERNELS], ids=str)
def test_kernels(case, assert_close):
    assert_matches(case.found(case.batch()), case, assert_close)
