"""The one list of the features of attention.

A feature is one object. Problems, kernel names, configurations, the order of kernels, reasons,
``explain``'s flags, what ``build --all`` compiles, the support table and the axes of the test
matrix are loops over ``FEATURES``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .bias import BIAS, AskedBias, CompiledBias
from .feature import OPERANDS, Feature, Flag, Operand
from .flags import DETERMINISTIC, DROPOUT, POSITIONS, ROW_MAXIMA, SINKS
from .functions import DELTA_FROM_SCORES, FUNCTIONS
from .mask import BOOLEAN, KEYS, LENGTHS, MASK, SEGMENTS
from .pages import PAGES, AskedPages

__all__ = [
    "BIAS",
    "BOOLEAN",
    "BROADCAST_BATCH",
    "BY_NAME",
    "DELTA_FROM_SCORES",
    "DETERMINISTIC",
    "DROPOUT",
    "FEATURES",
    "FUNCTIONS",
    "KEYS",
    "LENGTHS",
    "MASK",
    "NUMBERS",
    "PACKED",
    "PAGES",
    "POSITION",
    "POSITIONS",
    "ROW_MAXIMA",
    "SEGMENTS",
    "SINKS",
    "SOFT_CAP",
    "AskedBias",
    "AskedPages",
    "CompiledBias",
    "Feature",
    "operands",
    "together",
    "without_lists",
]

PACKED = Flag(
    "packed",
    "packed sequences",
    constant="kPacked",
    tag="varlen",
    flag="varlen",
    asked_by=lambda call: call.operands.sequences is not None,
    operands=(
        Operand("query_starts", "B+1", places=("sequences.query_starts",)),
        Operand("key_starts", "B+1", places=("sequences.key_starts",)),
        *LENGTHS.operands,
    ),
    support="packed sequences (`varlen_attention`)",
)

BROADCAST_BATCH = Flag(
    "broadcast_batch",
    "a broadcast batch",
    constant="kBroadcastBatch",
    tag="vmap",
    asked_by=lambda call: call.broadcasts_batch,
    support="keys, values, biases and masks that a `vmap` broadcasts",
)
"""Batch indices share keys, values, a bias or a boolean mask, which happens if ``jax.vmap`` does
not map these. A bias or mask that is broadcast over the whole batch does not need this feature."""

SOFT_CAP = Flag(
    "soft_cap",
    "soft cap",
    constant="kSoftCap",
    tag="softcap",
    asked_by=lambda call: call.options.scaling.soft_cap is not None,
    modifies="scores",
    values=(None, 2.0),
)

FEATURES: tuple[Feature[Any, Any], ...] = (
    MASK,
    LENGTHS,
    PACKED,
    PAGES,
    POSITIONS,
    BROADCAST_BATCH,
    SEGMENTS,
    BOOLEAN,
    KEYS,
    SOFT_CAP,
    FUNCTIONS,
    DROPOUT,
    BIAS,
    SINKS,
    ROW_MAXIMA,
    DELTA_FROM_SCORES,
    DETERMINISTIC,
)
"""In the order of names, configurations and reasons. ``Feature`` documents an entry."""

BY_NAME = {feature.name: feature for feature in FEATURES}
POSITION = {name: position for position, name in enumerate(BY_NAME)}


def together() -> dict[str, Any]:
    """All features at once, as the features of a problem."""
    return {feature.name: feature.together for feature in FEATURES}


def without_lists(asked: Mapping[str, Any], direction: str) -> dict[str, Any]:
    """What lists of keys turn a call into: packed sequences in pages of one key, without the masks,
    which are applied to the lists; or, where kernels need the positions of keys and in backwards of
    separate values, a boolean mask.
    """
    pages = asked.get(PAGES.name, PAGES.off)
    in_bits = direction == "backward" and not pages.is_latent
    if in_bits or any(asked.get(each.name, each.off) != each.off for each in (BIAS, DROPOUT)):
        return {BOOLEAN.name: True}
    masks = (MASK, LENGTHS, SEGMENTS, BOOLEAN)
    off = {each.name: each.off for each in masks}
    return {PACKED.name: True, PAGES.name: pages._replace(size=1), **off}


NUMBERS = tuple(name for feature in FEATURES for name in feature.numbers)
"""The run-time numbers of all features, in their order in the custom call's attribute."""


def operands(asked: Iterable[Feature[Any, Any]] = FEATURES) -> tuple[Operand, ...]:
    """Every array that a call with these features may have, without duplicates."""
    brought = (operand for feature in asked for operand in feature.operands)
    return tuple(dict.fromkeys((*OPERANDS, *brought)))
