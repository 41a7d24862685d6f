"""Kernels with random delays and a given number of stages, and their bits in many runs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attention_case import Case

from jax_memeff._call.operands import needs_grad_of
from jax_memeff._cuda import selection
from jax_memeff.codegen import arch as architectures
from jax_memeff.codegen import emit, gpu
from jax_memeff.codegen.kernels.sm90.backward import FmhaBwdSm90
from jax_memeff.codegen.kernels.sm90.base import PersistentTile, WgmmaTile
from jax_memeff.codegen.kernels.sm90.f16x3_forward import FmhaFwdF16x3Sm90
from jax_memeff.codegen.kernels.sm90.forward import FmhaFwdSm90
from jax_memeff.codegen.kernels.sm90.large_dim_backward import FmhaBwdLargeDimSm90
from jax_memeff.codegen.kernels.sm90.large_dim_forward import FmhaFwdLargeDimSm90
from jax_memeff.codegen.kernels.sm90.large_dim_forward import Tile as LargeDimTile
from jax_memeff.codegen.kernels.sm90.tangent import FmhaTangentSm90
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import PLAIN, Strategy, ceil_div, using

CODEGEN = Path(emit.__file__).parent
SMALLEST_KEY_TILE = 32
TANGENTS = ("query", "key", "value")


def make_late(patch: pytest.MonkeyPatch) -> None:
    """Makes kernels sleep at random wherever their warps synchronize (arch/thread.cuh)."""
    source = emit.source
    patch.setattr(emit, "source", lambda spec: f"#define MEMEFF_RANDOM_SLEEP\n{source(spec)}")


def remove_barrier(patch: pytest.MonkeyPatch, stem: str, comment: str) -> None:
    """Compiles the main kernel of ``stem`` without the barrier that has this comment behind it."""
    source = emit.source
    header = (CODEGEN / f"kernels/{stem}.cuh").read_text()

    def without(spec: KernelSpec) -> str:
        if spec.kernel.stem != stem:
            return source(spec)
        name = spec.kernel.class_name
        struct = rf"^template <class Config>\nstruct {name} \{{\n.*?^\}};\n"
        (text,) = re.findall(struct, header, re.M | re.S)
        text, count = re.subn(rf" *sync_threads\(\);  // {re.escape(comment)}.*\n", "", text)
        assert count == 1
        # The header still has the kernel that is right, so this one has a name of its own.
        include = f"#include <kernels/{stem}.cuh>\n"
        before, after = source(spec).split(include)
        own = f"using namespace memeff;\n{text.replace(name, f'{name}WithRace')}"
        return before + include + own + after.replace(f"memeff::{name}<", f"{name}WithRace<")

    patch.setattr(emit, "source", without)


@contextlib.contextmanager
def set_stages(stages: int | None) -> Iterator[None]:
    """A context in which problems of any size use Hopper kernels: with this many stages, or with
    consumer groups if it is None.

    A two-kernel backward keeps its stages, because no other number fits. The smallest number for
    large head dims holds one KV block in a forward, and two blocks in a backward.
    """
    if stages is None:
        with using(forward=Strategy(query_rows="consumer_groups")):
            yield
        return
    with pytest.MonkeyPatch.context() as patch, using(forward=PLAIN):
        for kernel in (FmhaFwdSm90, FmhaFwdF16x3Sm90, FmhaTangentSm90):
            rows = kernel.tiles.items()
            patch.setattr(kernel, "tiles", {dims: _fitting(row, stages) for dims, row in rows})
        if stages == 1:
            rows = FmhaFwdLargeDimSm90.tiles.items()
            large = {dims: _with_one_kv_block(dims, row) for dims, row in rows}
            patch.setattr(FmhaFwdLargeDimSm90, "tiles", large)
            rows = FmhaBwdLargeDimSm90.tiles.items()
            small = {dims: _staged(row, _fewest_panels(dims)) for dims, row in rows}
            patch.setattr(FmhaBwdLargeDimSm90, "tiles", small)
        rows = FmhaBwdSm90.tiles.items()
        patch.setattr(FmhaBwdSm90, "tiles", {dims: _staged(row, stages) for dims, row in rows})
        yield


def _with_one_kv_block(dims: tuple[int, int], row: Sequence[WgmmaTile]) -> list[WgmmaTile]:
    found = []
    for tile in row:
        assert isinstance(tile, LargeDimTile)
        panels = dims[0] // 64 // tile.column_ctas
        found.append(dataclasses.replace(tile, stages=panels, value_stages=1))
    return found


def _fewest_panels(dims: tuple[int, int]) -> int:
    """The stages for two blocks of the larger dim. The rings of both dims have as many panels as
    the smaller one has in all of its stages.
    """
    return ceil_div(2 * max(dims), min(dims))


def _staged(row: Sequence[WgmmaTile], stages: int) -> list[WgmmaTile]:
    return [dataclasses.replace(tile, stages=stages) for tile in row]


def _fitting(row: Sequence[WgmmaTile], stages: int) -> list[WgmmaTile]:
    """The tiles with this many stages, and smaller ones in case those do not fit."""
    large = _staged(row, stages)
    medium = []
    for tile in large:
        assert isinstance(tile, PersistentTile)
        medium.append(dataclasses.replace(tile, query_stages=1))
    small = [dataclasses.replace(tile, key=SMALLEST_KEY_TILE) for tile in medium]
    return [*large, *medium, *small]


def has_backward(case: Case) -> bool:
    """Whether a case without a bias has a Hopper backward."""
    head, value = max(FmhaBwdLargeDimSm90.tiles)
    fits = head >= case.H and value >= case.value_dim
    return case.dtype != "float32" and fits


def kernels(case: Case) -> list[KernelSpec]:
    """The Hopper forward of a case in set_stages(), and its backward if it has one."""
    operands, _, _ = case.arrays(None)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_MEMEFF_ARCHS", gpu.WGMMA_ARCH)
        for needs_grad in (None, case.needs_grad) if has_backward(case) else (None,):
            found += selection.kernels(operands, case.options, needs_grad).values()
        if has_tangents(case):
            needs_grad = needs_grad_of(operands, TANGENTS)
            found += selection.kernels(operands, case.options, needs_grad, is_tangent=True).values()
    assert all(spec.family == "sm90" for spec in found)
    return found


def has_tangents(case: Case) -> bool:
    """Whether Hopper has a kernel for the tangents of query, key and value of a case, with any
    number of stages.
    """
    return case.dtype != "float32" and case.H < 256


def has_gpu(arch: str) -> bool:
    """Whether a GPU of this process runs kernels for ``arch``."""
    for device in jax.devices("cuda"):
        major, minor = map(int, device.compute_capability.split("."))
        if architectures.of_capability(major, minor) == arch:
            return True
        if architectures.is_virtual(arch) and 10 * major + minor >= architectures.capability(arch):
            return True
    return False


def assert_equal_runs(
    patch: pytest.MonkeyPatch,
    run: Callable[[Any, jax.Array], dict[str, jax.Array]],
    arrays: Any,
    repeats: int,
    arch: str = gpu.WGMMA_ARCH,
) -> None:
    """Compares the bits of runs whose warps are late."""
    counts = count_other_runs(patch, run, arrays, repeats, arch)
    assert counts == dict.fromkeys(counts, 0)


def count_other_runs(
    patch: pytest.MonkeyPatch,
    run: Callable[[Any, jax.Array], dict[str, jax.Array]],
    arrays: Any,
    repeats: int,
    arch: str,
) -> dict[str, int]:
    """The number of runs with late warps in which each result differed from the first run. Skips
    the test if no GPU runs kernels for ``arch``.

    ``run`` takes the arrays and an integer that is always zero. XLA cannot see that; it would
    compute results that depend on the arrays alone once for all runs.
    """
    if not has_gpu(arch):
        pytest.skip(f"no GPU here runs kernels for {arch}")
    patch.setenv("JAX_MEMEFF_ARCHS", arch)
    make_late(patch)

    @jax.jit
    def count(arrays: Any, zero: jax.Array) -> dict[str, jax.Array]:
        def compare(index: jax.Array, counts: dict[str, jax.Array]) -> dict[str, jax.Array]:
            other = run(arrays, index * zero)
            return {
                name: counts[name] + jnp.any(_bits(other[name]) != _bits(first[name]))
                for name in counts
            }

        first = run(arrays, jnp.int32(0))
        return jax.lax.fori_loop(1, repeats, compare, dict.fromkeys(first, jnp.int32(0)))

    found = count(jax.tree.map(jnp.asarray, arrays), jnp.int32(0))
    return {name: int(times) for name, times in found.items()}


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, {2: jnp.uint16, 4: jnp.uint32}[array.itemsize])
