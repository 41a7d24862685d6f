"""Kernels that are late at random, and have as many buffers as a test asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from attention_case import Case

from jax_memeff._cuda import lowering as cuda
from jax_memeff.codegen import emit
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.tiles import sm90

SMALLEST_KEY_TILE = 32


def make_late(patch: pytest.MonkeyPatch) -> None:
    """Kernels sleep at random from now on, wherever their warps meet (arch/thread.cuh)."""
    source = emit.source
    patch.setattr(emit, "source", lambda spec: f"#define MEMEFF_RANDOM_SLEEP\n{source(spec)}")


def set_stages(patch: pytest.MonkeyPatch, stages: int | None) -> None:
    """Problems of any size get kernels of Hopper from now on, which have so many stages, or of
    which teams share the rows.

    A backward in two kernels keeps those it has: fewer or more are not to be had.
    """
    query_rows = "consumer_groups" if stages is None else None
    patch.setattr(cuda.support, "query_rows", lambda *_, **__: query_rows)
    if stages is None:
        return
    for name in ("FORWARD", "FORWARD_F32"):
        rows = getattr(sm90, name).items()
        patch.setattr(sm90, name, {dim: _fitting(row, stages) for dim, row in rows})
    patch.setattr(
        sm90, "BACKWARD", {dim: _staged(row, stages) for dim, row in sm90.BACKWARD.items()}
    )


def _staged(row: Sequence[sm90.Tile], stages: int) -> list[sm90.Tile]:
    return [tile if tile.two_kernel else dataclasses.replace(tile, stages=stages) for tile in row]


def _fitting(row: Sequence[sm90.Tile], stages: int) -> list[sm90.Tile]:
    """The tiles with so many stages, and smaller ones for where those find no room."""
    large = _staged(row, stages)
    medium = [dataclasses.replace(tile, query_stages=1) for tile in large]
    small = [dataclasses.replace(tile, key=SMALLEST_KEY_TILE) for tile in medium]
    return [*large, *medium, *small]


def kernels(case: Case) -> list[KernelSpec]:
    """Forward and backward of a case on Hopper, as set_stages() has them; float32 has no backward
    there.
    """
    operands, _, _ = case.arrays()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_MEMEFF_ARCHS", sm90.ARCH)
        for needs_grad in (None,) if case.dtype == "float32" else (None, case.needs_grad):
            found += cuda.kernels(operands, case.options, needs_grad).values()
    assert all(spec.family == "sm90" for spec in found)
    return found
