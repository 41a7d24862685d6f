"""The table of ``bench``, its advice, and its document."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import jax
from rich.markup import escape
from rich.table import Table

from jax_memeff._command import tables
from jax_memeff._command.bench.measure import OURS, Figure, ratio
from jax_memeff._command.cases.case import Case

_EQUAL = 0.03
"""Speeds that differ by less count as equal."""


def title(case: Case) -> str:
    """The call and the device."""
    device = jax.local_devices()[0]
    path = "kernels" if device.platform != "cpu" else "the path in plain JAX"
    return f"{case.name} on {device.device_kind}; jax-memeff runs {path} there"


def table(figures: Sequence[Figure]) -> Table:
    """A row for each path and direction."""
    found = tables.new_table(
        "path", "direction", "ms", "speedup of jax-memeff", "temporary MiB", "difference", "note"
    )
    ours = {figure.direction: figure for figure in figures if figure.path == OURS}
    for figure in figures:
        own = ours[figure.direction]
        is_compared = figure is not own and figure.samples and own.samples
        found.add_row(
            figure.path,
            figure.direction,
            f"{1e3 * figure.seconds:.4g}" if figure.samples else "",
            f"{ratio(own, figure):.2f}" if is_compared else "",
            "" if figure.temporary_bytes is None else f"{figure.temporary_bytes / 2**20:.1f}",
            "" if figure.difference is None else f"{figure.difference:.1e}",
            escape(figure.reason),
        )
    return found


def advice(figures: Sequence[Figure]) -> list[str]:
    """A line for each direction: how this library compares with the fastest path of ``jax.nn``."""
    directions = dict.fromkeys(figure.direction for figure in figures)
    return [
        f"{direction}: {_advice([f for f in figures if f.direction == direction])}"
        for direction in directions
    ]


def _advice(figures: Sequence[Figure]) -> str:
    (ours,) = (figure for figure in figures if figure.path == OURS)
    others = [figure for figure in figures if figure.path != OURS]
    peers = [figure for figure in others if figure.samples and figure.is_right]
    if not ours.samples:
        return f"jax-memeff cannot run this call: {ours.reason}"
    if not ours.is_right:
        return (
            f"the results of jax-memeff are wrong, they differ by {ours.difference:.1e}: python -m "
            "jax_memeff verify tells more"
        )
    if not peers:
        reasons = dict.fromkeys(
            figure.reason or f"the results of {figure.path} differ by {figure.difference:.1e}"
            for figure in others
        )
        return f"only jax-memeff can run this call here: {'; '.join(reasons)}"
    peer = min(peers, key=lambda figure: figure.seconds)
    speed, memory = ratio(ours, peer), _memory(ours, peer)
    if abs(math.log(speed)) < _EQUAL:
        return f"jax-memeff is as fast as {peer.path}{memory}"
    if speed > 1:
        return f"jax-memeff is {speed:.3g} x as fast as {peer.path}{memory}"
    return f"jax.nn is faster here: {peer.path} is {1 / speed:.3g} x as fast as jax-memeff{memory}"


def _memory(ours: Figure, peer: Figure) -> str:
    if not ours.temporary_bytes or not peer.temporary_bytes:
        return ""
    share = ours.temporary_bytes / peer.temporary_bytes
    return f"; jax-memeff takes {share:.2g} x its temporary memory"


def document(case: Case, figures: Sequence[Figure]) -> dict[str, Any]:
    """The call, the machine and the figures, for JSON."""
    device = jax.local_devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": {"name": device.device_kind, "platform": device.platform},
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax-memeff", "jax", "jaxlib")
        },
        "call": dataclasses.asdict(case),
        "figures": [_record(figure) for figure in figures],
        "advice": advice(figures),
    }


def _record(figure: Figure) -> dict[str, Any]:
    found = dataclasses.asdict(figure)
    if figure.difference is not None and not math.isfinite(figure.difference):
        found["difference"] = None  # JSON has no NaN
    found["seconds"] = figure.seconds if figure.samples else None
    return found | {"is_right": figure.is_right}
