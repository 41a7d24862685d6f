"""The ordered table of kernels, and the choice from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from jax_memeff.codegen.problem import DIRECTIONS, Problem
from jax_memeff.codegen.spec import (
    SPEC_DTYPES,
    SPEC_GRADIENTS,
    BiasGradient,
    KernelSpec,
    MaskKind,
)
from jax_memeff.codegen.support import (
    bias_gradient,
    bias_per_row,
    family_reasons,
    mask_kind,
    spec_reasons,
    unsupported_reasons,
)
from jax_memeff.codegen.tiles import sm80
from jax_memeff.errors import UnsupportedError

_ALL_DIMS = tuple(itertools.product(sm80.CLASSES, repeat=2))



class _Features(NamedTuple):
    """What changes the source beside direction, dtype, dims and gradients: fields of a spec."""

    mask: MaskKind = "none"
    segments: bool = False
    boolean: bool = False
    soft_cap: bool = False
    dropout: bool = False
    bias: Literal["16", "32"] | None = None
    bias_per_row: bool = True
    bias_gradient: BiasGradient = "none"

    @classmethod
    def of(cls, problem: Problem) -> _Features:
        return cls(
            mask_kind(problem.masks),
            "segments" in problem.masks,
            "boolean" in problem.masks,
            problem.soft_cap,
            problem.dropout,
            problem.bias,
            bias_per_row(problem),
            bias_gradient(problem),
        )


# Plain, each feature alone, all together. A window includes causal, so "all" needs no third mask.
_FEATURE_SETS = (
    _Features(),
    _Features(mask="causal"),
    _Features(mask="window"),
    _Features(segments=True),
    _Features(boolean=True),
    _Features(soft_cap=True),
    _Features(dropout=True),
    _Features(bias="16", bias_gradient="full"),
    _Features(bias="16", bias_gradient="shared"),
    _Features(bias="16", bias_per_row=False, bias_gradient="columns"),
    _Features(bias="32", bias_gradient="shared"),
    _Features("window", True, True, True, True, bias="32", bias_gradient="shared"),
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
    dtypes: Iterable[str] = SPEC_DTYPES,
    dims: Iterable[tuple[int, int]] = sm80.TUNED_DIMS,
) -> Iterator[KernelSpec]:
    """Specs times {plain, each feature alone, all features} for ``arch``, in a fixed order.

    ``dims`` are pairs (head_dim, value_dim), padded to their classes. This is what
    ``python -m jax_memeff build --all`` compiles.

    >>> len(list(closure("sm_80", dtypes=["bf16"], dims=[(64, 64)])))
    23
    """
    specs = [
        spec
        for direction, dtype, (head_dim, value_dim), features in itertools.product(
            DIRECTIONS, dtypes, dims, _FEATURE_SETS
        )
        for spec in _specs(
            arch, direction, dtype, sm80.padded(head_dim), sm80.padded(value_dim), features
        )
    ]
    yield from sorted(set(specs), key=lambda spec: spec.sort_key)


def table(arch: str) -> str:
    """The closure of ``arch`` as aligned text, one kernel per line; a golden file in the tests."""
    lines = [f"{'kernel':<58} {'threads':>7} {'blocks/SM':>9} {'shared bytes':>12}"]
    for spec in closure(arch):
        lines.append(
            f"{spec.name:<58} {spec.threads:>7} {spec.tile.blocks_per_sm:>9} "
            f"{spec.shared_bytes:>12}"
        )
    return "\n".join(lines) + "\n"


def _table(problem: Problem) -> list[KernelSpec]:
    dtype = problem.dtype if problem.dtype in SPEC_DTYPES else "bf16"
    specs = [
        spec
        for head_class, value_class in _ALL_DIMS
        for spec in _specs(
            problem.arch,
            problem.direction,
            dtype,
            head_class,
            value_class,
            _Features.of(problem),
            tuple(name for name in SPEC_GRADIENTS if name in problem.wants),
        )
    ]
    return sorted(specs, key=lambda spec: spec.sort_key)


def _specs(
    arch, direction, dtype, head_class, value_class, features, gradients=SPEC_GRADIENTS
) -> list[KernelSpec]:
    part = sm80.part(arch)
    tiles = part.forward if direction == "forward" else part.backward
    if direction == "forward":
        gradients, features = (), features._replace(bias_gradient="none")
    return [
        KernelSpec(
            direction,
            dtype,
            head_class,
            value_class,
            tile,
            gradients=gradients,
            **features._asdict(),
        )
        for tile in tiles[max(head_class, value_class)]
    ]
