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
