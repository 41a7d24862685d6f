"""Why a kernel does not fit a problem, in sentences that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator

from jax_memeff.codegen import arch as archs
from jax_memeff.codegen import gpu
from jax_memeff.codegen.features import FEATURES
from jax_memeff.codegen.kernels.common.base import LARGE_DIM, UNALIGNED_ROWS
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import KernelSpec, Row
from jax_memeff.codegen.strategy import PLAIN, Strategy

_XLA = "pass implementation='xla'"
_DTYPE_NAMES = {"bf16": "bfloat16", "f32": "float32", "tf32": "float32"}


def family_reasons(problem: Problem) -> list[str]:
    """The reasons that apply to every kernel. They are listed once instead of for each kernel."""
    reasons = []
    dtypes = gpu.of(problem.arch).dtypes
    first = gpu.FIRST_CAPABILITY
    if archs.capability(problem.arch) < first:
        reasons.append(f"{problem.arch} is older than sm_{first}, the first with kernels: {_XLA}")
    if problem.dtype == "f64":
        reasons.append(f"float64 has no kernel: {_XLA}, or cast to bfloat16 or float16")
    for feature in FEATURES:
        reasons += feature.family_reasons(problem)
    if problem.direction == "tangent":
        reasons += _tangent_reasons(problem)
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if dim > LARGE_DIM:
            reasons.append(f"{name} is {dim}, and the largest with a kernel is {LARGE_DIM}: {_XLA}")
    if problem.dtype != "f64" and problem.dtype not in dtypes:
        reasons.append(
            f"the tensor cores of {problem.arch} do not multiply {_DTYPE_NAMES[problem.dtype]}: "
            f"cast to float16, or {_XLA}"
        )
    return reasons


def _tangent_reasons(problem: Problem) -> list[str]:
    reasons = []
    if not gpu.has_wgmma(problem.arch):
        reasons.append(
            f"tangents have kernels for sm_90a, not for {problem.arch}: they are computed in plain "
            "JAX"
        )
    if problem.dtype in F32_DTYPES:
        reasons.append("float32 tangents have no kernel: they are computed in plain JAX")
    if problem.alignment < 16:
        reasons.append(
            "the kernels of tangents need head dims that are multiples of 8, got "
            f"{problem.head_dim} and {problem.value_dim}: others are computed in plain JAX"
        )
    return reasons


def spec_reasons(spec: KernelSpec, problem: Problem, strategy: Strategy = PLAIN) -> list[str]:
    """The reasons against this spec, besides those that apply to every kernel."""
    return list(_each_reason(spec, problem, strategy))


def solves(spec: KernelSpec, problem: Problem, strategy: Strategy = PLAIN) -> bool:
    """Whether ``spec_reasons`` is empty. The first reason ends the search for others."""
    return next(_each_reason(spec, problem, strategy), None) is None


def _each_reason(spec: KernelSpec, problem: Problem, strategy: Strategy) -> Iterator[str]:
    if spec.direction != problem.direction:
        yield f"it is a {spec.direction} kernel, not a {problem.direction} one"
    if spec.dtype != problem.dtype:
        yield f"it is for {spec.dtype}, not {problem.dtype}"
    for feature in FEATURES:
        yield from feature.reasons(spec, problem)
    if spec.alignment > problem.alignment:
        yield (
            f"it moves {spec.alignment} bytes at a time, and rows begin at multiples of "
            f"{problem.alignment}"
        )
    yield from _tile_reasons(spec)
    yield from spec.kernel.reasons(spec, problem, strategy)
    yield from _dim_reasons(spec, problem)
    yield from _shared_memory_reasons(spec, problem)


def has_room(row: Row, problem: Problem) -> bool:
    """Whether the dims of a row are large enough, which is false for most rows of the table."""
    return problem.head_dim <= row.padded_head_dim and problem.value_dim <= row.padded_value_dim


def _dim_reasons(spec: KernelSpec, problem: Problem) -> list[str]:
    dims = (
        ("head_dim", problem.head_dim, spec.padded_head_dim),
        ("value_dim", problem.value_dim, spec.padded_value_dim),
    )
    return [f"{name} {dim} is above its {padded}" for name, dim, padded in dims if dim > padded]


def unsupported_reasons(
    spec: KernelSpec, problem: Problem, strategy: Strategy = PLAIN
) -> list[str]:
    """Every reason why ``spec`` does not solve ``problem``; empty if it does.

    >>> from jax_memeff.codegen.select import select
    >>> problem = Problem("forward", "bf16", 64, 64, "sm_80")
    >>> unsupported_reasons(select(problem), problem)
    []
    """
    return family_reasons(problem) + spec_reasons(spec, problem, strategy)


def _tile_reasons(spec: KernelSpec) -> list[str]:
    needed = [
        feature.title for feature in FEATURES if feature.modifies and feature.needs_registers(spec)
    ]
    if spec.kernel.moves_unaligned_rows_in_pieces and spec.alignment < 16:
        needed.append(UNALIGNED_ROWS)
    if missing := [title for title in needed if title not in spec.tile.modifiers]:
        return [f"its tile has no registers left for {' and '.join(missing)}"]
    return []


def _shared_memory_reasons(spec: KernelSpec, problem: Problem) -> list[str]:
    blocks = spec.tile.blocks_per_sm
    available = gpu.of(problem.arch).shared_bytes(blocks)
    if spec.shared_bytes <= available:
        return []
    return [
        f"it needs {spec.shared_bytes} bytes of shared memory, and a block on {problem.arch} "
        f"has {available}{f' when {blocks} share an SM' if blocks > 1 else ''}"
    ]
