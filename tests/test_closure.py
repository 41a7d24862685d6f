"""A sample of all kernels, compiled for each architecture: no spills, no lost performance.

All of them: ``python -m jax_memeff build --all --arch sm_80``.
"""

from __future__ import annotations

import random

import pytest

from jax_memeff.codegen import parallel, select
from jax_memeff.codegen.tiles import sm80, sm90

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
PER_DIRECTION = 2
LARGEST_SPILL = 64
"""More than a few registers per thread is a wrong tile, however fast it was measured to be."""


ODD_DIMS = ((7, 7), (66, 66), (100, 100), (255, 33))
"""Head dims whose rows begin at multiples of 2, 4 and 8 bytes."""


def sample(arch):
    """The same kernels in every run, others for each architecture, and both directions."""
    generator = random.Random(arch)
    specs = [*select.closure(arch), *select.closure(arch, dims=ODD_DIMS)]
    return [
        spec
        for direction in ("forward", "backward")
        for spec in generator.sample(
            [spec for spec in specs if spec.direction == direction], PER_DIRECTION
        )
    ]


def allowed_spill(spec):
    """What the tile row records; a few registers with features beside window and soft cap, and
    with rows that are moved in pieces."""
    features = spec.bias or spec.dropout or spec.segments or spec.boolean or spec.varlen
    features = features or spec.alignment < 16
    return LARGEST_SPILL if features else spec.tile.spill_bytes


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_keep_their_accumulators_in_registers(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_CACHE_DIR", str(tmp_path))
    jobs = [(spec, arch) for spec in sample(arch)]
    wrong = []
    for (spec, _), compiled in zip(jobs, parallel.compile_many(jobs), strict=True):
        assert tuple(resource.name for resource in compiled.resources) == compiled.names
        wrong += compiled.warnings
        wrong += [
            f"{resource.name} spills {resource.spill_store} bytes, {allowed_spill(spec)} allowed"
            for resource in compiled.resources
            if resource.spill_store > allowed_spill(spec)
        ]
    assert not wrong, "\n".join([f"on {arch}:", *wrong])


@pytest.mark.parametrize("arch", ARCHS)
def test_allowed_spills_are_small(arch):
    part = sm80.part(arch)
    for tiles in (part.forward, part.backward, sm90.FORWARD, sm90.BACKWARD):
        assert all(0 <= tile.spill_bytes <= LARGEST_SPILL for row in tiles.values() for tile in row)
