"""Latent and other paged attention with random delays: equal bits in every run.

``tests/kernels/test_races.py`` says how the delays find a race. Sequences differ in their lengths,
so CTAs have several parts, and parts of a sequence are computed by several CTAs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import lateness
import numpy as np
import pytest
from paged_case import Case
from paging import paged_attention

from jax_memeff.codegen import gpu

REPEATS = 1000
_RNG = np.random.default_rng(3)
STEPS = Case(
    (6000, *map(int, _RNG.integers(0, 1500, 60))),
    (1,) * 61,
    heads=(128, 1),
    dims=(576, 512),
    is_latent=True,
)
PROMPTS = dataclasses.replace(STEPS, lengths=(900, 2500, 70), counts=(90, 300, 70), heads=(16, 1))
INVARIANT = ("is_causal", "batch_invariant")
PAGES = ("pages", "pages")
HUNTS = [
    dataclasses.replace(case, **changes)
    for case in (STEPS, dataclasses.replace(STEPS, heads=(16, 1), page_size=64), PROMPTS)
    for changes in (
        {},
        {"features": INVARIANT},
        {"features": (*INVARIANT, "sinks", "score_mod")},
        {"scales": PAGES},
        {"features": INVARIANT, "scales": PAGES},
    )
]
HUNTS += [
    dataclasses.replace(STEPS, page_size=1),
    dataclasses.replace(PROMPTS, page_size=4, features=INVARIANT),
    dataclasses.replace(PROMPTS, features=(*INVARIANT, "local_window_size")),
    dataclasses.replace(STEPS, features=("tree",)),
]
# Kernels whose products are mma.sync serve decode steps of other heads on every GPU, on Hopper with
# tiles of their own.
OTHER_STEPS = dataclasses.replace(STEPS, heads=(8, 2), dims=(128, 128), is_latent=False)
OTHER_PROMPTS = dataclasses.replace(OTHER_STEPS, lengths=PROMPTS.lengths, counts=PROMPTS.counts)
MMA_HUNTS = [
    (arch, dataclasses.replace(OTHER_STEPS, **changes))
    for arch, changes in (
        ("compute_80", {}),
        ("compute_80", {"page_size": 1, "features": ("is_causal", "sinks")}),
        ("compute_80", {"features": INVARIANT}),
        ("compute_80", {"scales": PAGES}),
        ("compute_86", {"features": INVARIANT, "scales": PAGES}),
        ("compute_86", {"dims": (256, 256)}),
        (gpu.WGMMA_ARCH, {"dims": (64, 64)}),
        (gpu.WGMMA_ARCH, {"features": INVARIANT}),
        (gpu.WGMMA_ARCH, {"scales": PAGES}),
    )
]
MMA_HUNTS += [("compute_80", OTHER_PROMPTS)]


def results(case: Case, arrays: Any, zero: jax.Array) -> dict[str, jax.Array]:
    """The results that must have the same bits in every run, by name."""
    query, *pages, starts, scales = arrays
    out, lse = paged_attention(
        query + zero.astype(query.dtype),
        *pages,
        query_starts=starts,
        max_query_length=max(case.counts),
        return_residual=True,
        implementation="cuda",
        **case.arguments(),
        **scales,
    )
    return {"out": out, "lse": lse}


def drawn(case: Case) -> Any:
    made = case.batch()
    return *made.arguments, made.starts, made.scales


@pytest.mark.gpu
@pytest.mark.parametrize("case", HUNTS, ids=str)
def test_bits_are_equal_in_every_run(case, monkeypatch):
    run = functools.partial(results, case)
    lateness.assert_equal_runs(monkeypatch, run, drawn(case), REPEATS)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("case", HUNTS, ids=str)
def test_every_hunt_has_the_latent_kernel(case, monkeypatch, fake_compiler):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", gpu.WGMMA_ARCH)
    run = jax.jit(functools.partial(results, case))
    short = dataclasses.replace(case, lengths=case.counts)  # the kernel does not depend on lengths
    arrays = jax.tree.map(jnp.asarray, drawn(short))
    run.trace(arrays, jnp.int32(0)).lower(lowering_platforms=("cuda",))
    assert {spec.kernel.stem for spec, _ in fake_compiler} == {"sm90/latent"}


@pytest.mark.gpu
@pytest.mark.parametrize(("arch", "case"), MMA_HUNTS, ids=str)
def test_bits_of_mma_sync_kernels_are_equal_in_every_run(arch, case, monkeypatch):
    run = functools.partial(results, case)
    lateness.assert_equal_runs(monkeypatch, run, drawn(case), REPEATS, arch)


@pytest.mark.rotating(3)
@pytest.mark.parametrize(("arch", "case"), MMA_HUNTS, ids=str)
def test_the_other_hunts_have_mma_sync_kernels(arch, case, monkeypatch, fake_compiler):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", arch)
    run = jax.jit(functools.partial(results, case))
    arrays = jax.tree.map(jnp.asarray, drawn(case))
    run.trace(arrays, jnp.int32(0)).lower(lowering_platforms=("cuda",))
    kernel = "forward" if case.counts == PROMPTS.counts else "split"
    assert {spec.kernel.stem for spec, _ in fake_compiler} == {f"sm80/{kernel}"}
