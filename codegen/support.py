"""Why a kernel does not fit a problem, in sentences a user can act on."""

from __future__ import annotations

import math
from typing import Literal

from jax_memeff.codegen import arch as archs
from jax_memeff.codegen.problem import F32_DTYPES, Problem
from jax_memeff.codegen.spec import SPEC_GRADIENTS, BiasAccess, BiasGradient, KernelSpec
from jax_memeff.codegen.tiles import sm80, sm90, tile

_XLA = "pass implementation='xla'"
_DTYPE_NAMES = {"bf16": "bfloat16", "f32": "float32", "tf32": "float32"}

_FEW_TILES = 64
"""So many tiles, of the rows that follow, leave half of a large GPU idle."""
_PLAIN_ROWS = 128

MULTIPROCESSORS = 132
"""Of an H100 and an H200."""
_LEAST_Q_BLOCKS = 4
"""Tiles of 64 queries for each of the blocks that share a tile of keys, or sums take longer."""
_PARTS_A_Q_BLOCK = 2
"""As many parts of dk and dv are read from L2 in the time of a visit."""
_SPLIT_KEY = 2
"""A key of kernels without wgmma, which get half out of the tensor cores."""
_COMBINATION = 1024
"""A second kernel, and partial results in global memory: 3 us."""


def family_reasons(problem: Problem) -> list[str]:
    """What no spec of the sm80 family does, so that it is said once and not per spec."""
    reasons = []
    dtypes = sm80.part(problem.arch).dtypes
    first = sm80.FIRST_CAPABILITY
    if archs.capability(problem.arch) < first:
        reasons.append(f"{problem.arch} is older than sm_{first}, the first with kernels: {_XLA}")
    if problem.dtype == "f64":
        reasons.append(f"float64 has no kernel: {_XLA}, or cast to bfloat16 or float16")
    if problem.dtype in F32_DTYPES and problem.bias == "16":
        reasons.append(f"a 16-bit bias with float32 inputs has no kernel: cast it, or {_XLA}")
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if dim > sm80.LARGE_DIM:
            reasons.append(
                f"{name} is {dim}, and the largest with a kernel is {sm80.LARGE_DIM}: {_XLA}"
            )
    if problem.dtype != "f64" and problem.dtype not in dtypes:
        reasons.append(
            f"the tensor cores of {problem.arch} do not multiply {_DTYPE_NAMES[problem.dtype]}: "
            f"cast to float16, or {_XLA}"
        )
    return reasons


def spec_reasons(spec: KernelSpec, problem: Problem) -> list[str]:
    """What this spec lacks beside what its whole family lacks."""
    reasons = []
    if spec.direction != problem.direction:
        reasons.append(f"it is a {spec.direction} kernel, not a {problem.direction} one")
    if spec.dtype != problem.dtype:
        reasons.append(f"it is for {spec.dtype}, not {problem.dtype}")
    if spec.mask != mask_kind(problem.masks):
        reasons.append(f"its mask is {spec.mask}, not {mask_kind(problem.masks)}")
    for feature, compiled, asked in (
        ("packed sequences", spec.varlen, problem.varlen),
        ("a shared batch", spec.broadcast_batch, problem.broadcast_batch),
        ("segments", spec.segments, "segments" in problem.masks),
        ("a boolean mask", spec.boolean, "boolean" in problem.masks),
        ("soft cap", spec.soft_cap, problem.soft_cap),
        ("dropout", spec.dropout, problem.dropout),
    ):
        if compiled != asked:
            reasons.append(f"it is compiled {'with' if compiled else 'without'} {feature}")
    if spec.bias != problem.bias:
        reasons.append(f"its bias is {_bits(spec.bias)}, not {_bits(problem.bias)}")
    access = bias_access(problem, large_dim=spec.large_dim)
    if problem.bias and spec.bias_access != access:
        reasons.append(f"it reads a bias by {spec.bias_access}, not by {access}")
    gradient = bias_gradient(problem, spec.family)
    if spec.bias_gradient != gradient:
        reasons.append(f"its bias gradient is {spec.bias_gradient}, not {gradient}")
    if spec.split and problem.varlen:
        reasons.append("it does not split the keys of packed sequences yet")
    elif spec.split and problem.query_rows is None:
        reasons.append("it splits the keys, and there are tiles for a whole GPU without that")
    rows = 16 if problem.query_rows == "16" else 64
    if spec.split and problem.query_rows and spec.tile.query < rows:
        reasons.append(f"its tile has {spec.tile.query} rows, not {rows}")
    if spec.deterministic != sums_in_order(spec, problem):
        reasons.append(f"its sums are {'' if spec.deterministic else 'not '}deterministic")
    if spec.split_q != splits_queries(spec, problem):
        reasons.append("its blocks share tiles of keys, or not, as is right for another number")
    wanted = tuple(name for name in SPEC_GRADIENTS if name in problem.needs_grad)
    if spec.direction == problem.direction == "backward" and spec.gradients != wanted:
        reasons.append(
            f"it computes the gradients of {', '.join(spec.gradients)}, not of {', '.join(wanted)}"
        )
    if spec.alignment > problem.alignment:
        reasons.append(
            f"it moves {spec.alignment} bytes at a time, and rows begin at multiples of "
            f"{problem.alignment}"
        )
    if spec.mask not in spec.tile.masks:
        reasons.append(f"its tile is not for the mask {spec.mask}")
    modifiers = (
        ("soft cap", spec.soft_cap),
        ("bias", spec.bias and (spec.large_dim or spec.bias_access != "rows")),
        ("dropout", spec.dropout),
        ("segments", spec.segments),
        ("a boolean mask", spec.boolean),
        (tile.PIECES, spec.large_dim and spec.alignment < 16),
    )
    unserved = [name for name, on in modifiers if on and name not in spec.tile.modifiers]
    if unserved:
        reasons.append(f"its tile has no registers left for {' and '.join(unserved)}")
    if spec.f16x3 and spec.broadcast_batch:
        reasons.append("it writes query, key and value anew for each element of the batch")
    if spec.family == "sm90":
        beside = {"full": "query", "columns": "key"}.get(spec.bias_gradient)
        if spec.two_kernel and beside and beside not in spec.gradients:
            reasons.append(
                f"it computes the gradient of this bias beside that of the {beside} only"
            )
        if (
            spec.two_kernel
            and max(problem.head_dim, problem.value_dim) <= sm90.LARGEST_ONE_KERNEL_DIM
        ):
            reasons.append(f"it is for head dims above {sm90.LARGEST_ONE_KERNEL_DIM}")
        if spec.consumer_groups > 1 and problem.query_rows != "consumer_groups":
            reasons.append("its warpgroups share rows, for few tiles with keys that are not long")
        elif spec.consumer_groups == 1 and problem.query_rows is not None and not problem.varlen:
            reasons.append("it does not split the keys, and there are too few tiles without that")
        if 2 * max(problem.head_dim, problem.value_dim) <= min(
            spec.padded_head_dim, spec.padded_value_dim
        ):
            reasons.append("half of its columns would be padding")
    if problem.head_dim > spec.padded_head_dim:
        reasons.append(f"head_dim {problem.head_dim} is above its {spec.padded_head_dim}")
    if problem.value_dim > spec.padded_value_dim:
        reasons.append(f"value_dim {problem.value_dim} is above its {spec.padded_value_dim}")
    blocks = spec.tile.blocks_per_sm
    available = sm80.part(problem.arch).shared_bytes(blocks)
    if spec.shared_bytes > available:
        reasons.append(
            f"it needs {spec.shared_bytes} bytes of shared memory, and a block on {problem.arch} "
            f"has {available}{f' when {blocks} share an SM' if blocks > 1 else ''}"
        )
    for product, (rows, columns) in spec.products.items():
        warps = spec.threads // 32
        if not any(_warps_fit(rows, columns, warps, owned) for owned in spec.warp_rows):
            reasons.append(f"{warps} warps cannot share its {rows}x{columns} {product}")
    return reasons


def unsupported_reasons(spec: KernelSpec, problem: Problem) -> list[str]:
    """Every reason why ``spec`` does not solve ``problem``; empty when it does.

    >>> from jax_memeff.codegen.select import select
    >>> problem = Problem("forward", "bf16", 64, 64, "sm_80")
    >>> unsupported_reasons(select(problem), problem)
    []
    """
    return family_reasons(problem) + spec_reasons(spec, problem)


def mask_kind(masks: frozenset[str]):
    """The mask a kernel is compiled for: a window has both bounds, so it includes causal."""
    if "window" in masks:
        return "window"
    return "causal" if "causal" in masks else "none"


def pack_heads(problem: Problem) -> bool:
    """Whether a tile of a split forward has rows of all query heads that share a key head.

    Features that look at heads or at positions in 16x16 blocks take them one by one.
    """
    return not (problem.bias or problem.dropout or problem.masks & {"boolean", "segments"})


def query_rows(
    problem: Problem, *, batch: int, queries: int, keys: int, heads: int, group: int
) -> Literal["16", "64", "consumer_groups"] | None:
    """The ``query_rows`` of a forward of these sizes, of which packed sequences have the longest.

    >>> plain = Problem("forward", "bf16", 64, 64, "sm_90a")
    >>> query_rows(plain, batch=1, queries=1, keys=4096, heads=32, group=4)
    '16'
    >>> query_rows(plain, batch=1, queries=1024, keys=1024, heads=8, group=1)
    'consumer_groups'
    >>> query_rows(plain, batch=1, queries=128, keys=32768, heads=8, group=1)
    '64'
    >>> query_rows(plain, batch=8, queries=2048, keys=2048, heads=32, group=4)
    """
    packed = group if pack_heads(problem) else 1
    rows = queries * packed
    few_tiles = batch * heads * -(-queries // _PLAIN_ROWS) <= _FEW_TILES
    tiles, split_tiles = (
        batch * heads // together * -(-queries * together // sm90.WARPGROUP_ROWS)
        for together in (1, packed)
    )
    teams = problem.arch == sm90.ARCH and few_tiles
    if problem.varlen:
        return "consumer_groups" if teams else None
    if rows <= 16:
        return "16"
    if teams and _consumer_groups_time(tiles, keys) <= _split_time(split_tiles, keys):
        return "consumer_groups"
    return "64" if rows <= 64 or few_tiles else None


def _consumer_groups_time(tiles: int, keys: int) -> float:
    """Of blocks whose warpgroups share 64 rows, in keys that one gets through."""
    return -(-tiles // MULTIPROCESSORS) * keys


def _split_time(tiles: int, keys: int) -> float:
    """Of blocks that split the keys, and the kernel that combines their results."""
    return _SPLIT_KEY * keys * tiles / MULTIPROCESSORS + _COMBINATION


def bias_access(problem: Problem, *, large_dim: bool = False) -> BiasAccess:
    """How the bias comes to the scores of a kernel, which may be one for wide head dims."""
    if problem.bias and problem.bias_layout in ("columns", "rows"):
        return problem.bias_layout
    if problem.bias and large_dim:
        return "elements"
    return "vectors" if problem.bias_alignment % 16 == 0 else "words"


def bias_gradient(problem: Problem, family: str) -> BiasGradient:
    """How the gradient of the bias is summed; one that is broadcast over columns needs no sum. The
    two products more that wgmma computes cost less than sums in global memory.
    """
    if problem.bias is None or problem.bias_layout == "rows" or "bias" not in problem.needs_grad:
        return "none"
    if problem.bias_layout == "shared" and (problem.deterministic or family == "sm90"):
        return "dbias_kernel"
    return problem.bias_layout


def sums_in_order(spec: KernelSpec, problem: Problem) -> bool:
    """Whether ``spec`` adds up what must have an order; dk, dv and full bias gradients have one."""
    query_sums = "query" in problem.needs_grad and not spec.owns_outputs
    bias_sums = bias_gradient(problem, spec.family) == "columns"
    return problem.deterministic and (query_sums or bias_sums)


def q_splits(*, batch: int, queries: int, keys: int, heads: int, group: int) -> int:
    """How many blocks of a backward may share a tile of keys of these sizes, ``heads`` being those
    of the keys. The launcher has fewer where the device is smaller.

    >>> q_splits(batch=1, queries=1024, keys=1024, heads=8, group=1)
    2
    >>> q_splits(batch=2, queries=1024, keys=1024, heads=8, group=1)
    1
    """
    tiles = batch * heads * -(-keys // _PLAIN_ROWS)
    visits = queries * group // sm90.WARPGROUP_ROWS
    # A block makes visits / shares of them, the last one reads shares parts.
    quickest = math.isqrt(_PARTS_A_Q_BLOCK * visits)
    return max(1, min(MULTIPROCESSORS // max(1, tiles), visits // _LEAST_Q_BLOCKS, quickest))


def splits_queries(spec: KernelSpec, problem: Problem) -> bool:
    """Whether blocks of ``spec`` may share a tile of keys: where they add to the gradient of the
    query in an order, or own a gradient of the bias, they do not.
    """
    ordered = spec.orders_queries or spec.bias_gradient not in ("none", "dbias_kernel")
    owned = bool({"key", "value"} & set(spec.gradients))
    one_kernel = spec.family == "sm90" and spec.direction == "backward" and not spec.two_kernel
    by_range = not problem.varlen and not spec.has_block_mask
    return problem.few_keys and one_kernel and owned and by_range and not ordered


def _bits(bias: str | None) -> str:
    return "none" if bias is None else f"{bias}-bit"


def _warps_fit(rows: int, columns: int, warps: int, owned_rows: int) -> bool:
    """Whether warps with ``owned_rows`` rows and a multiple of 16 columns each tile the product."""
    row_warps = rows // owned_rows
    return (
        owned_rows % 16 == 0
        and rows % owned_rows == 0
        and row_warps > 0
        and warps % row_warps == 0
        and columns % (16 * (warps // row_warps)) == 0
    )
