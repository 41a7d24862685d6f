"""The ordered table of kernels, the selection from it, and why a kernel does not fit a problem.

Reasons are sentences that a user can act on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jax_memeff.codegen import arch as archs
from jax_memeff.codegen import features, gpu
from jax_memeff.codegen.features import FEATURES, AskedBias
from jax_memeff.codegen.kernels import KERNELS
from jax_memeff.codegen.kernels.common.base import LARGE_DIM, UNALIGNED_ROWS, query_tiles
from jax_memeff.codegen.kernels.sm80 import split
from jax_memeff.codegen.kernels.sm90 import backward as wgmma_backward
from jax_memeff.codegen.kernels.sm90 import base as wgmma
from jax_memeff.codegen.kernels.sm90 import forward as wgmma_forward
from jax_memeff.codegen.problem import (
    F32_DTYPES,
    REQUIRED_DIRECTIONS,
    Dtype,
    Problem,
)
from jax_memeff.codegen.spec import FAMILIES, SPEC_DTYPES, SPEC_GRADIENTS, Kernel, KernelSpec, Row
from jax_memeff.codegen.strategy import (
    PLAIN,
    QUERY_ROWS,
    QueryRows,
    Sizes,
    Strategy,
    ceil_div,
    forced,
    of_direction,
)
from jax_memeff.errors import UnsupportedError

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


TUNED_DIMS = (
    (32, 32),
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (LARGE_DIM, LARGE_DIM),
)
"""The padded (head_dim, value_dim) that ``build --all`` compiles; (192, 128) is multi-head latent
attention. Other pairs take the tile of the larger one."""

CLOSURE_DIMS = tuple(
    dict.fromkeys([*TUNED_DIMS, *(pair for kernel in KERNELS for pair, _ in kernel.own_problems)])
)
"""The head dims of ``closure``: ``TUNED_DIMS``, and those that only one kernel serves."""

_PLAIN_ROWS = 128
"""The rows of most tiles of a forward."""

_COMMON_BIAS = {"bias": AskedBias("16", "common")}

_STRATEGIES: tuple[tuple[Mapping[str, Any], Strategy], ...] = (
    *(({}, Strategy(query_rows=rows)) for rows in QUERY_ROWS),
    ({"mask": "causal"}, Strategy(query_rows="128")),
    ({"mask": "causal"}, Strategy(query_rows="256")),
    *((alone, Strategy(query_rows="128")) for alone in features.BIAS.alone),
    *(
        (alone, Strategy(query_rows="256"))
        for feature in wgmma_forward.ONE_TILE_FEATURES
        for alone in feature.alone
    ),
    ({"packed": True}, Strategy(query_rows="consumer_groups")),
    (features.together(), Strategy(query_rows="consumer_groups")),
    ({}, Strategy(split_q=True)),
    ({"mask": "causal"}, Strategy(split_q=True)),
    ({"packed": True, "mask": "causal"}, Strategy(split_q=True)),
    ({"deterministic": True, "mask": "causal"}, Strategy(split_q=True)),
    (_COMMON_BIAS, Strategy(split_q=True)),
    ({}, Strategy(mma_sync=True)),
)

# Features that need different kernels together than alone.
_PAIRS: tuple[Mapping[str, Any], ...] = (
    {"deterministic": True, **_COMMON_BIAS},
    {"deterministic": True, "bias": AskedBias("16", "columns")},
)

_FEATURE_SETS: tuple[tuple[Mapping[str, Any], Strategy], ...] = (
    ({}, PLAIN),
    *((alone, PLAIN) for feature in features.FEATURES for alone in feature.alone),
    *((pair, PLAIN) for pair in _PAIRS),
    (features.together(), PLAIN),
    *_STRATEGIES,
)
"""Plain, each feature alone, all together, and each strategy. A window includes causal, so "all"
needs no third interval mask."""


_TANGENT_FEATURES: tuple[Mapping[str, Any], ...] = (
    {},
    *(alone for feature in features.FEATURES for alone in feature.alone),
    features.together(),
)


def choose(problem: Problem, sizes: Sizes, multiprocessors: int) -> Strategy:
    """The strategy for a call of these sizes on a GPU with this many multiprocessors.

    >>> plain = Problem("forward", "bf16", 64, 64, "sm_90a")
    >>> choose(plain, Sizes(batch=1, queries=1, keys=4096, heads=32, key_heads=8), 132)
    Strategy(query_rows='16', split_q=False, mma_sync=False)
    """
    if (strategy := forced(problem.direction)) is not None:
        return strategy
    if problem.direction == "tangent":
        return PLAIN
    if problem.dtype in F32_DTYPES:
        return Strategy(mma_sync=wgmma.prefers_mma_sync(sizes, multiprocessors))
    if problem.direction == "forward":
        return Strategy(query_rows=_query_rows(problem, sizes, multiprocessors))
    deterministic = problem[features.DETERMINISTIC] and "query" in problem.needs_grad
    splits = wgmma_backward.q_splits(problem[features.MASK], sizes, multiprocessors, deterministic)
    return Strategy(split_q=splits > 1)


def _query_rows(problem: Problem, sizes: Sizes, multiprocessors: int) -> QueryRows | None:
    """Which forward has the least time: plain tiles, tiles whose keys are split over consumer
    groups or over CTAs, or tiles that the queries fill.
    """
    if rows := split.required_rows(problem, sizes, multiprocessors):
        return rows
    tiles = query_tiles(sizes, _PLAIN_ROWS)
    leaves_half_idle = 2 * tiles <= multiprocessors
    has_groups = gpu.has_wgmma(problem.arch) and leaves_half_idle
    is_packed = problem[features.PACKED] and not problem.asks(features.PAGES)
    if is_packed or problem[features.ROW_MAXIMA]:
        # Partial results have no maxima.
        return "consumer_groups" if has_groups else None
    if rows := split.few_rows(problem, sizes):
        return rows
    split_time = split.split_time(problem, sizes, multiprocessors)
    if has_groups and wgmma_forward.consumer_groups_time(sizes, multiprocessors) <= split_time:
        return "consumer_groups"
    # If many heads share a key head, a tile of one head has few rows.
    is_faster = split_time < ceil_div(tiles, multiprocessors) * sizes.keys
    if split.gqa_rows(problem, sizes) <= split.ROWS or leaves_half_idle or is_faster:
        return "64"
    return wgmma_forward.rows_to_fill(problem, sizes)


def select(problem: Problem, strategy: Strategy = PLAIN) -> KernelSpec:
    """The first spec of the ordered table that solves ``problem`` with ``strategy``.

    Raises ``UnsupportedError`` if there is none. Its reasons begin with the inputs, and a reason
    that applies to every spec appears once.

    >>> select(Problem("forward", "bf16", 80, 80, "sm_80", {"mask": "causal"})).name
    'fmha_fwd_bf16_d96_128x64_causal_sm80'
    """
    inputs = f"asked for: {', '.join(filter(None, map(str, (problem, strategy))))}"
    if reasons := family_reasons(problem):
        raise UnsupportedError([inputs, *reasons])
    large_enough = (entry for entry in _rows(problem) if has_room(entry[1], problem))
    for kernel, row in sorted(large_enough, key=_order):
        spec = _spec(kernel, row, problem, strategy)
        if solves(spec, problem, strategy):
            return spec
    specs = _table(problem, strategy)
    refused = ((spec.name, spec_reasons(spec, problem, strategy)) for spec in specs)
    raise UnsupportedError(
        [inputs, *(f"{name}: {'; '.join(reasons)}" for name, reasons in refused)]
    )


def select_all(problem: Problem) -> list[KernelSpec]:
    """The results of ``select`` for all strategies that have a kernel, without duplicates.

    Raises ``UnsupportedError`` if the plain strategy has no kernel.

    >>> problem = Problem("backward", "bf16", 64, 64, "sm_90a", {"mask": "causal"})
    >>> [spec.split_q for spec in select_all(problem)]
    [False, True]
    """
    specs = [select(problem)]
    for strategy in of_direction(problem.direction):
        with contextlib.suppress(UnsupportedError):
            specs.append(select(problem, strategy))
    return list(dict.fromkeys(specs))


def explain(problem: Problem, strategy: Strategy = PLAIN) -> list[tuple[KernelSpec, list[str]]]:
    """Every spec of the table in the order of choice, with the reasons against it.

    The first spec with an empty list is what ``select`` returns. For a dtype without kernels the
    table of bf16 is shown, and the reasons name the dtype.
    """
    specs = _table(problem, strategy)
    return [(spec, unsupported_reasons(spec, problem, strategy)) for spec in specs]


def closure(
    arch: str,
    *,
    dtypes: Iterable[Dtype] = SPEC_DTYPES,
    dims: Iterable[tuple[int, int]] = CLOSURE_DIMS,
) -> Iterator[KernelSpec]:
    """Specs times {plain, each feature alone, all features} for ``arch``, in a fixed order.

    ``dims`` are pairs (head_dim, value_dim), padded to their classes; dtypes that the tensor cores
    do not multiply are left out. This is what ``python -m jax_memeff build --all`` compiles.

    >>> len(list(closure("sm_80", dtypes=["bf16"], dims=[(64, 64)])))
    43
    """
    multiplied = gpu.of(arch).dtypes
    dims = tuple(dims)
    specs = {
        spec
        for direction, dtype, pair, (asked, strategy) in itertools.product(
            REQUIRED_DIRECTIONS, dtypes, dims, _FEATURE_SETS
        )
        if dtype in multiplied and (direction == "forward" or strategy.query_rows is None)
        # Features that are listed for split-Q alone add no kernel where there is no split-Q.
        if (spec := select(_problem(direction, dtype, pair, arch, asked), strategy)).split_q
        or not strategy.split_q
    }
    for dtype, pair, asked in itertools.product(dtypes, dims, _TANGENT_FEATURES):
        with contextlib.suppress(UnsupportedError):  # then tangents are computed in plain JAX
            specs.add(select(_problem("tangent", dtype, pair, arch, asked)))
    for kernel, dtype in itertools.product(KERNELS, dtypes):
        for pair, asked in kernel.own_problems:
            if pair in dims:
                with contextlib.suppress(UnsupportedError):  # on other architectures
                    specs.add(select(_problem(kernel.direction, dtype, pair, arch, asked)))
    yield from sorted(specs, key=lambda spec: spec.sort_key)


def _problem(
    direction: Any, dtype: Dtype, dims: tuple[int, int], arch: str, asked: Mapping[str, Any]
) -> Problem:
    """A problem of the closure. f32 has no 16-bit bias, a backward computes the gradients of all
    arrays present, and query, key and value have tangents.
    """
    bias = asked.get("bias")
    if bias is not None and dtype in F32_DTYPES:
        asked = {**asked, "bias": AskedBias("32", bias.layout, bias.alignment)}
    on = [features.BY_NAME[name] for name in asked if asked[name] != features.BY_NAME[name].off]
    gradients = tuple(operand.role for operand in features.operands(on) if operand.has_gradient)
    if (pages := asked.get("pages")) is not None and pages.is_latent:
        gradients = tuple(role for role in gradients if role != "value")
    needs_grad = gradients if direction == "backward" else ()
    return Problem(direction, dtype, *dims, arch, asked, needs_grad)


def table(arch: str) -> str:
    """The closure of ``arch`` as aligned text, one kernel per line; a golden file in the tests."""
    specs = list(closure(arch))
    width = max(len(spec.name) for spec in specs)
    lines = [f"{'kernel':<{width}} {'threads':>7} {'blocks/SM':>9} {'shared bytes':>12}"]
    for spec in specs:
        lines.append(
            f"{spec.name:<{width}} {spec.threads:>7} {spec.tile.blocks_per_sm:>9} "
            f"{spec.shared_bytes:>12}"
        )
    return "\n".join(lines) + "\n"


def _table(problem: Problem, strategy: Strategy) -> list[KernelSpec]:
    rows = sorted(_rows(problem), key=_order)
    return [_spec(kernel, row, problem, strategy) for kernel, row in rows]


def _rows(problem: Problem) -> Iterator[tuple[Kernel, Row]]:
    for kernel in KERNELS:
        if kernel.direction == problem.direction:
            yield from ((kernel, row) for row in kernel.rows(problem))


def _order(entry: tuple[Kernel, Row]) -> tuple:
    """Order by family, then by least padding, then by fewest split rows; the rest stays in the
    order of ``KERNELS`` and of their tiles.
    """
    kernel, row = entry
    split_rows = row.tile.query if kernel.splits_keys else math.inf
    return FAMILIES.index(kernel.family), row.padded_head_dim, row.padded_value_dim, split_rows


def _spec(kernel: Kernel, row: Row, problem: Problem, strategy: Strategy) -> KernelSpec:
    spec = KernelSpec(
        kernel=kernel,
        dtype=problem.dtype if problem.dtype in SPEC_DTYPES else "bf16",
        padded_head_dim=row.padded_head_dim,
        padded_value_dim=row.padded_value_dim,
        tile=row.tile,
        features=tuple(
            (feature.name, feature.compiled(problem, kernel)) for feature in features.FEATURES
        ),
        gradients=tuple(name for name in SPEC_GRADIENTS if name in problem.needs_grad),
        alignment=kernel.alignment(problem),
    )
    return kernel.completed(spec, problem, strategy)
