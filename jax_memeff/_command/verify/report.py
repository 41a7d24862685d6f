"""The report of ``verify``: Markdown for an issue, and a document that ``benchmarks/`` reads."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable
from typing import Any

from jax_memeff._command.cases.case import Case
from jax_memeff._command.verify.parent import Record

_PEERS = {"memeff_cuda": "jax-memeff", "jax_cudnn": "jax.nn cuDNN", "jax_xla": "jax.nn XLA"}
_DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}


def markdown(record: Record, driver: str, seconds: float) -> str:
    """The whole report."""
    states = [outcome["state"] for outcome in record.outcomes.values()]
    counts = ", ".join(
        f"{states.count(state)} {state}" for state in ("passed", "failed", "no kernel")
    )
    machine = record.machine
    facts = {
        "GPU": f"{machine.get('name', 'unknown')}, kernels for {machine.get('arch', 'none')}",
        **machine.get("toolchain", {}),
        "driver": driver or "unknown",
        "versions": ", ".join(f"{k} {v}" for k, v in machine.get("versions", {}).items()),
        "date": f"{_today()}, {seconds:.0f} s",
    }
    parts = [f"### jax_memeff verify: {counts}", _table(["", ""], [list(x) for x in facts.items()])]
    if record.broken:
        parts.append(f"**Stopped**: {record.broken}")
    header = ["case", "state", "largest error / allowed", "blockwise path"]
    header += [f"ms, {title}" for title in _DIRECTIONS.values()]
    rows = [_row(case, outcome) for case, outcome in record.outcomes.items()]
    if rows:
        parts.append(_table(header, rows))
    for case, outcome in record.outcomes.items():
        if outcome["state"] != "passed":
            text = "\n".join(outcome["text"])
            parts.append(f"`{case.name}`: {outcome['state']}\n\n```\n{text}\n```")
    return "\n\n".join(parts)


def document(record: Record, driver: str) -> dict[str, Any]:
    """The results in the form of ``benchmarks/results``."""
    machine = record.machine
    measured = {
        peer
        for outcome in record.outcomes.values()
        for times in outcome.get("seconds", {}).values()
        for peer in times
    }
    peers = {name: label for name, label in _PEERS.items() if name in measured}
    cells = [_cell(case, outcome, peers) for case, outcome in record.outcomes.items()]
    return {
        "date": _today(),
        "device": {
            "name": machine.get("name"),
            "platform": machine.get("platform"),
            "driver": driver or None,
        },
        "versions": machine.get("versions", {}),
        "toolchain": machine.get("toolchain", {}),
        "method": {"clock": "host clock, batches of launches"},
        "peers": peers,
        "broken": record.broken,
        "cells": cells,
    }


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _row(case: Case, outcome: dict[str, Any]) -> list[str]:
    errors = outcome.get("errors", {})
    row = [f"`{case.name}`", outcome["state"]]
    row += [_worst(errors.get(path, [])) for path in ("kernels", "blockwise")]
    for direction in _DIRECTIONS:
        times = outcome.get("seconds", {}).get(direction, {})
        own = [f"{1e3 * statistics.median(x):.3g}" for p, x in times.items() if p == "memeff_cuda"]
        peers = [
            f"{_PEERS[p]} {1e3 * statistics.median(x):.3g}"
            for p, x in times.items()
            if p != "memeff_cuda"
        ]
        row.append(", ".join(own + peers))
    return row


def _worst(errors: list[Any]) -> str:
    """The result that is the nearest to its limit."""
    if not errors:
        return ""
    name, error, allowed = max(errors, key=lambda x: x[1] / x[2] if x[2] else x[1])
    return f"{name} {error:.2g} / {allowed:.2g}"


def _cell(case: Case, outcome: dict[str, Any], peers: Iterable[str]) -> dict[str, Any]:
    """The results of a case; a direction that was timed has a record for each of ``peers``."""
    results = {}
    for direction, times in outcome.get("seconds", {}).items():
        medians = {peer: statistics.median(samples) for peer, samples in times.items()}
        results[direction] = {
            peer: _measured(case, direction, times[peer], medians[peer], min(medians.values()))
            if peer in medians
            else {"error": "not timed"}
            for peer in peers
        }
    return {
        "name": case.name,
        "group": "verify",
        "state": outcome["state"],
        "text": outcome["text"],
        "errors": outcome.get("errors", {}),
        "results": results,
    }


def _measured(
    case: Case, direction: str, samples: list[float], seconds: float, best: float
) -> dict[str, Any]:
    pairs = case.B * case.N * case.T * case.keys_of_row * (0.5 if case.causal else 1.0)
    flops = 2.0 * pairs * (case.H + case.value_dim) * (1.0 if direction == "forward" else 3.5)
    element = 4 if case.dtype == "float32" else 2
    moved = element * case.B * case.S * case.K * (case.H + case.value_dim)
    return {
        "seconds": seconds,
        "samples": samples,
        "spread": (max(samples) - min(samples)) / seconds,
        "tflops": flops / seconds / 1e12,
        "bytes_per_second": moved / seconds,
        "ratio_to_best": best / seconds,
    }


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
