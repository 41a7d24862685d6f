"""The test matrix: every pair of values of any two features occurs together in some case.

Bugs of combinations are nearly always bugs of pairs (Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing", IEEE TSE 30(6), 2004). A fixed seed draws the
rest of each row, and the rows beyond those that the pairs need.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import oracle
from attention_case import Case
from kernel_cases import CAUSAL, MASKS, WINDOW

from jax_memeff.codegen.features import FEATURES

Row = Mapping[str, Any]

_SIZE = 256
"""The number of rows. The pairs need about half of them."""

# (query, key and value dim): tuned, differently aligned, and large head dims.
_DIMS = (
    (64, 64),
    (128, 128),
    (192, 128),
    (256, 256),
    (72, 72),
    (100, 100),
    (7, 7),
    (1, 1),
    (264, 264),
    (320, 320),
    (512, 64),
    (1000, 1000),
    (4096, 4096),
)

_ATTEMPTS = 50
"""The number of attempts at a row around one pair."""
_SEEDS = 3
"""The number of seeds of masks and biases that are tried for a row."""
_LEAST_ROWS = 0.05
"""The least part of query rows with several valid keys; others have no gradient of their scores."""

# No size has one key: the gradients of its scores cancel to 0, and only rounding is left.
_SIZES = ((1, 77), (20, 77), (65, 129), (257, 96), (128, 128), (129, 129), (200, 200))
_HEADS = ((2, 2), (4, 2), (3, 1))

# The axes that belong to no single feature.
_SHAPES: Row = {
    "dims": _DIMS,
    "sizes": _SIZES,
    "dtype": ("bfloat16", "float16", "float32", "tf32"),
    "layout": ("padded", "lengths", "packed", "projections"),
    "heads": _HEADS,
}
_OTHERS: Row = {
    "negative_scale": (False, True),
    "lse_gradient": (True, False),
    "position": (None, (160, 128), "each"),
}

AXES: Row = dict(
    sorted(
        {
            **_SHAPES,
            **{name: values for feature in FEATURES for name, values in feature.axes},
            **_OTHERS,
        }.items(),
        key=lambda axis: -len(axis[1]),
    )
)
"""The values of each axis, axes with many values first. The first value combines with all
others.
"""

_MASKS = {mask.get("mask_name", "full"): mask for mask in MASKS}


# Values that no call can combine; kernels support all other combinations.
_INEXPRESSIBLE: tuple[Row, ...] = (
    {"sizes": _SIZES[:1], "mask": ("causal",)},  # one key
    {"bias": (None,), "bias_dtype": ("float32",)},
    # In one array query, key and value have the same length, number of heads and dim.
    {"layout": ("projections",), "sizes": tuple((T, S) for T, S in _SIZES if T != S)},
    {"layout": ("projections",), "heads": tuple((N, K) for N, K in _HEADS if N != K)},
    {"layout": ("projections",), "dims": tuple((H, Hv) for H, Hv in _DIMS if Hv != H)},
)


def possible(row: Row) -> bool:
    """Whether a call can have the values of a row, or of a part of one."""
    return not any(
        all(row.get(axis, ()) in values for axis, values in excluded.items())
        for excluded in _INEXPRESSIBLE
    )


def pairs(row: Row) -> set[tuple]:
    """The pairs of a row: (axis, index of its value, other axis, index of its value)."""
    values = [(axis, AXES[axis].index(value)) for axis, value in row.items()]
    return {(*one, *other) for one, other in itertools.combinations(values, 2)}


def all_pairs() -> set[tuple]:
    """Every pair that the matrix must contain."""
    found = set()
    for one, other in itertools.combinations(AXES, 2):
        for values in itertools.product(AXES[one], AXES[other]):
            row = dict(zip((one, other), values, strict=True))
            if possible(row):
                found |= pairs(row)
    return found


@functools.cache
def rows() -> dict[Case, Row]:
    """All rows by their case. Greedy: each row is built around a missing pair, axis by axis, with
    the value that adds the most missing pairs.
    """
    rng = np.random.default_rng(3)
    missing = all_pairs()
    found = {}
    while missing or len(found) < _SIZE:
        described, row = _next(missing, rng)
        missing -= pairs(row)
        found[described] = row
    return found


def _next(missing: set[tuple], rng: np.random.Generator) -> tuple[Case, Row]:
    # Large head dims are slow everywhere, so only as many rows have them as the pairs need.
    start = {"dims": _DIMS[rng.integers(len(_DIMS) - 2)]}
    if missing:
        one, first, other, second = min(missing)
        start = {one: AXES[one][first], other: AXES[other][second]}
    for attempt in range(_ATTEMPTS):
        row = dict(start)
        for axis in AXES:
            if axis not in row:
                row[axis] = _choose(row, axis, set() if attempt else missing, rng)
        row = {axis: row[axis] for axis in AXES}
        if (described := case(row)) is not None:
            return described, row
    raise ValueError(f"expected a call with valid elements, got none of {start}")


def _choose(row: Row, axis: str, missing: set[tuple], rng: np.random.Generator) -> Any:
    """The value with the most missing pairs. Ties are drawn, often as the first value, so that some
    rows have few features, which more kernels serve.
    """

    def gain(value):
        new = AXES[axis].index(value)
        return sum(
            _pair(axis, new, other, AXES[other].index(given)) in missing
            for other, given in row.items()
        )

    values = [value for value in AXES[axis] if possible({**row, axis: value})]
    gains = [gain(value) for value in values]
    if not max(gains) and rng.random() < 0.5:
        return values[0]
    return values[rng.choice(np.flatnonzero(np.equal(gains, max(gains))))]


_ORDER = list(AXES)


def _pair(one: str, first: int, other: str, second: int) -> tuple:
    if _ORDER.index(one) > _ORDER.index(other):
        one, first, other, second = other, second, one, first
    return (one, first, other, second)


def case(row: Row) -> Case | None:
    """The call of a row, with a mask that leaves enough valid elements, or None."""
    described = _described(row)
    for seed in range(_SEEDS):
        drawn = dataclasses.replace(described, mask_seed=seed)
        bias, mask = drawn.draw_bias_and_mask(np.random.default_rng(seed))
        position = drawn.position and drawn.global_position
        valid = oracle.valid_elements(mask, drawn.B, drawn.N, drawn.T, drawn.S, position)
        if bias is not None:
            valid &= bias.astype(np.float32) > -1e37
        if np.mean(valid.sum(-1) > 1) > _LEAST_ROWS:
            return drawn
    return None


def _described(row: Row) -> Case:
    (H, Hv), (T, S), (N, K) = row["dims"], row["sizes"], row["heads"]
    lengths = None
    if row["layout"] in ("lengths", "packed"):
        empty = (T // 2, 0) if row["layout"] == "lengths" else (0, S)
        lengths = ((T, S), empty, (T - T // 3, S // 2))
    blocks = row["segments"] == "in blocks"
    batch = 2 if lengths is None else len(lengths)
    position = row["position"]
    if position == "each":
        position = (160, 0, 48)[:batch], (128, 16, 0)[:batch]
    return Case(
        B=batch,
        T=T,
        S=S,
        N=N,
        K=K,
        H=H,
        Hv=Hv,
        dtype="float32" if row["dtype"] == "tf32" else row["dtype"],
        precision="tf32" if row["dtype"] == "tf32" else "tf32x3",
        **_MASKS[row["mask"]],
        scale=-(H**-0.5) if row["negative_scale"] else None,
        soft_cap=row["soft_cap"],
        lse_gradient=row["lse_gradient"],
        lengths=lengths,
        packed=row["layout"] == "packed",
        projections=row["layout"] == "projections",
        bias=row["bias"],
        bias_dtype=row["bias_dtype"],
        segments=1 if blocks else row["segments"],
        block=30 if blocks else None,
        boolean=row["boolean"],
        dropout=row["dropout"],
        sinks=row["sinks"],
        row_maxima=row["row_maxima"],
        position=position,
        deterministic=row["deterministic"],
    )


def cases() -> list[Case]:
    """The matrix."""
    return list(rows())


def small_cases() -> list[Case]:
    """A few of the rows, with every value of every axis except head dims above 320."""
    return _covering({case: _values(row) for case, row in _small_rows()})


def _small_rows() -> list[tuple[Case, Row]]:
    return [(case, row) for case, row in rows().items() if max(row["dims"]) <= 320]


def _covering(values: Mapping[Case, set[tuple]]) -> list[Case]:
    """A few of the cases, which have all values. Greedy: the case that adds most comes next."""
    missing = set().union(*values.values())
    found = []
    while missing:
        found.append(max(values, key=lambda case: len(missing & values[case])))
        missing -= values[found[-1]]
    return found


def listed_cases() -> list[Case]:
    """Rows with lists of keys, short ones and longer ones than the keys. Each kind of list meets
    every value of every axis, except head dims above 320.
    """
    values = {}
    for index, (own, row) in enumerate(_small_rows()):
        dims = ("BKT", "1KT", "B1T", "11T")[index % 4]
        length = index // 4 % 4
        count = (1, 7, own.S // 2, own.S + 9)[length]
        listed = dataclasses.replace(own, keys=(dims, count))
        values[listed] = {(kind, *value) for kind in (dims, length) for value in _values(row)}
    return _covering(values)


def sanitized_cases() -> list[Case]:
    """The cases for compute-sanitizer: small rows, and plain calls for the Hopper kernels."""
    found = small_cases()
    for H in (64, 128, 256):
        found += [Case(T=130, S=150, H=H, Hv=H), Case(T=150, S=130, H=H, Hv=H, **CAUSAL)]
    return [*found, Case(T=65, S=129, N=4, H=264, Hv=264, dtype="float16", **WINDOW)]


def _values(row: Row) -> set[tuple[str, int]]:
    return {(axis, AXES[axis].index(value)) for axis, value in row.items()}
