"""The ordered table of kernels, and the choice from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jax_memeff.codegen.problem import DIRECTIONS, F32_DTYPES, Dtype, Problem
from jax_memeff.codegen.spec import (
    FAMILIES,
    SPEC_DTYPES,
    SPEC_GRADIENTS,
    KernelSpec,
    panel_columns,
)
from jax_memeff.codegen.support import (
    bias_access,
    bias_gradient,
    family_reasons,
    mask_kind,
    pack_heads,
    spec_reasons,
    splits_queries,
    sums_in_order,
    unsupported_reasons,
)
from jax_memeff.codegen.tiles import sm80, sm80_f32, sm90
from jax_memeff.errors import UnsupportedError

_ALL_DIMS = (*itertools.product(sm80.CLASSES, repeat=2), (sm80.LARGE_DIM, sm80.LARGE_DIM))

_ALL_GRADIENTS = (*SPEC_GRADIENTS, "bias")

_EVERYTHING: dict[str, Any] = {
    "masks": frozenset({"window", "segments", "boolean"}),
    "varlen": True,
    "broadcast_batch": True,
    "soft_cap": True,
    "dropout": True,
    "bias": "32",
    "bias_layout": "shared",
    "needs_grad": _ALL_GRADIENTS,
}

# Plain, each feature alone, all together, as fields of a problem. A window includes causal, so
# "all" needs no third interval mask.
_FEATURE_SETS: tuple[dict[str, Any], ...] = (
    {},
    {"masks": frozenset({"causal"})},
    {"masks": frozenset({"window"})},
    {"varlen": True},
    {"broadcast_batch": True},
    {"masks": frozenset({"segments"})},
    {"masks": frozenset({"boolean"})},
    {"query_rows": "16"},
    {"query_rows": "64"},
    {"query_rows": "consumer_groups"},
    {"query_rows": "consumer_groups", "varlen": True},
    {"soft_cap": True},
    {"dropout": True},
    {"bias": "16", "needs_grad": _ALL_GRADIENTS},
    {"bias": "16", "bias_layout": "shared", "needs_grad": _ALL_GRADIENTS},
    {"bias": "16", "bias_layout": "shared", "bias_alignment": 2, "needs_grad": _ALL_GRADIENTS},
    {"bias": "16", "bias_layout": "columns", "needs_grad": _ALL_GRADIENTS},
    {"bias": "16", "bias_layout": "rows"},
    {"bias": "32", "bias_layout": "shared", "needs_grad": _ALL_GRADIENTS},
    {"few_keys": True},
    {"few_keys": True, "bias": "16", "bias_layout": "shared", "needs_grad": _ALL_GRADIENTS},
    {"deterministic": True},
    {"deterministic": True, "masks": frozenset({"causal"})},
    {"deterministic": True, "bias": "16", "bias_layout": "shared", "needs_grad": _ALL_GRADIENTS},
    {"deterministic": True, "bias": "16", "bias_layout": "columns", "needs_grad": _ALL_GRADIENTS},
    _EVERYTHING,
    {**_EVERYTHING, "query_rows": "consumer_groups"},
)


def select(problem: Problem) -> KernelSpec:
    """The first spec of the ordered table that solves ``problem``.

    Raises ``UnsupportedError`` when there is none; its reasons begin with the inputs and hold each
    reason once when it applies to every spec.

    >>> select(Problem("forward", "bf16", 80, 80, "sm_80", masks=frozenset({"causal"}))).name
    'fmha_fwd_bf16_d96_128x64_causal_sm80'
    """
    inputs = f"asked for: {problem}"
    if reasons := family_reasons(problem):
        raise UnsupportedError([inputs, *reasons])
    refused = []
    for spec in _table(problem):
        if not (reasons := spec_reasons(spec, problem)):
            return spec
        refused.append(f"{spec.name}: {'; '.join(reasons)}")
    raise UnsupportedError([inputs, *refused])


def explain(problem: Problem) -> list[tuple[KernelSpec, list[str]]]:
    """Every spec of the table in the order of choice, with the reasons against it.

    The first spec with an empty list is what ``select`` returns. For a dtype without kernels the
    table of bf16 is shown, and the reasons name the dtype.
    """
    return [(spec, unsupported_reasons(spec, problem)) for spec in _table(problem)]


def closure(
    arch: str,
    *,
    dtypes: Iterable[Dtype] = SPEC_DTYPES,
    dims: Iterable[tuple[int, int]] = sm80.TUNED_DIMS,
) -> Iterator[KernelSpec]:
    """Specs times {plain, each feature alone, all features} for ``arch``, in a fixed order.

    ``dims`` are pairs (head_dim, value_dim), padded to their classes; dtypes that the tensor cores
    do not multiply are left out. This is what ``python -m jax_memeff build --all`` compiles.

    >>> len(list(closure("sm_80", dtypes=["bf16"], dims=[(64, 64)])))
    37
    """
    problems = (
        Problem(
            direction,
            dtype,
            *dims_pair,
            arch,
            **_features_of(direction, dtype, features),
        )
        for direction, dtype, dims_pair, features in itertools.product(
            DIRECTIONS, dtypes, dims, _FEATURE_SETS
        )
    )
    multiplied = sm80.part(arch).dtypes
    specs = {select(problem) for problem in problems if problem.dtype in multiplied}
    yield from sorted(specs, key=lambda spec: spec.sort_key)


def _features_of(direction: str, dtype: Dtype, features: dict[str, Any]) -> dict[str, Any]:
    """A forward computes no gradients, a backward does not split keys for few query rows, and f32
    has no bias of 16 bits: several feature sets are one there.
    """
    if "bias" in features and dtype in F32_DTYPES:
        features = {**features, "bias": "32"}
    return {**features, **({"query_rows": None} if direction == "backward" else {"needs_grad": ()})}


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


class Row(NamedTuple):
    """A row of a table of tiles, and where it stands there."""

    family: str
    padded_head_dim: int
    padded_value_dim: int
    tile: sm80.Tile | sm90.Tile
    split: bool = False


def _table(problem: Problem) -> list[KernelSpec]:
    rows = [*_rows_sm90(problem), *_rows_sm80(problem)]
    return sorted((_spec(problem, row) for row in rows), key=_order)


def _order(spec: KernelSpec) -> tuple:
    """Families, then little padding, then few split rows; other rows in the order of tiles/."""
    split_rows = spec.tile.query if spec.split else math.inf
    return FAMILIES.index(spec.family), spec.padded_head_dim, spec.padded_value_dim, split_rows


def _rows_sm80(problem: Problem) -> Iterator[Row]:
    part = sm80.part(problem.arch)
    forward = problem.direction == "forward"
    for padded_head_dim, padded_value_dim in _ALL_DIMS:
        larger = max(padded_head_dim, padded_value_dim)
        if problem.dtype in F32_DTYPES:
            tiles, split = sm80_f32.rows(part, problem.direction, larger), ()
        else:
            tiles = (part.forward if forward else part.backward)[larger]
            split = part.split.get(larger, ()) if forward else ()
        for tile in tiles:
            yield Row("sm80", padded_head_dim, padded_value_dim, tile)
        for tile in split:
            yield Row("sm80", padded_head_dim, padded_value_dim, tile, split=True)


def _rows_sm90(problem: Problem) -> Iterator[Row]:
    if problem.arch != sm90.ARCH or problem.dtype == "tf32":
        return
    if problem.dtype == "f32":
        yield from _rows_f32_sm90() if problem.direction == "forward" else ()
        return
    if problem.direction == "backward":
        for padded_head_dim, padded_value_dim in itertools.product(sm90.BACKWARD, repeat=2):
            for tile in sm90.BACKWARD[max(padded_head_dim, padded_value_dim)]:
                if tile.two_kernel or padded_head_dim == padded_value_dim:
                    yield Row("sm90", padded_head_dim, padded_value_dim, tile)
        return
    for padded_head_dim, padded_value_dim in itertools.product(sm90.CLASSES, repeat=2):
        # The output leaves from where the queries were, so both have panels of one width.
        if panel_columns(padded_head_dim) == panel_columns(padded_value_dim):
            for tile in sm90.FORWARD[max(padded_head_dim, padded_value_dim)]:
                yield Row("sm90", padded_head_dim, padded_value_dim, tile)


def _rows_f32_sm90() -> Iterator[Row]:
    for padded_head_dim, padded_value_dim in itertools.product(sm90.FORWARD_F32, repeat=2):
        for tile in sm90.FORWARD_F32[max(padded_head_dim, padded_value_dim)]:
            yield Row("sm90", padded_head_dim, padded_value_dim, tile)


def _spec(problem: Problem, row: Row) -> KernelSpec:
    spec = KernelSpec(
        direction=problem.direction,
        dtype=problem.dtype if problem.dtype in SPEC_DTYPES else "bf16",
        padded_head_dim=row.padded_head_dim,
        padded_value_dim=row.padded_value_dim,
        tile=row.tile,
        mask=mask_kind(problem.masks),
        varlen=problem.varlen,
        broadcast_batch=problem.broadcast_batch,
        segments="segments" in problem.masks,
        boolean="boolean" in problem.masks,
        soft_cap=problem.soft_cap,
        dropout=problem.dropout,
        bias=problem.bias,
        bias_access=bias_access(problem, large_dim=row.padded_head_dim == sm80.LARGE_DIM),
        bias_gradient=bias_gradient(problem, row.family),
        gradients=tuple(name for name in SPEC_GRADIENTS if name in problem.needs_grad),
        split=row.split,
        pack_heads=row.split and pack_heads(problem),
        alignment=16 if row.split or row.family == "sm90" else problem.alignment,
        family=row.family,
    )
    spec = dataclasses.replace(spec, deterministic=sums_in_order(spec, problem))
    return dataclasses.replace(spec, split_q=splits_queries(spec, problem))
