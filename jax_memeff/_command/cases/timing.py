"""The clock of ``verify`` and ``bench``: programs take turns, in batches of launches."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_BATCH_SECONDS = 0.02
_MOST_LAUNCHES = 500
_SLOW_SECONDS = 1.0


def interleaved(
    launches: Mapping[str, Callable[[], Any]], *, seconds: float, least: int, most: int
) -> dict[str, list[float]]:
    """Seconds of a call of each program, in ``least`` to ``most`` rounds in which each has its
    turn, for about ``seconds`` in all.

    A turn is a batch of launches, because the host takes part of the time of a short one: the times
    of small calls are those of the host. The order changes from round to round, so that no program
    always comes after the same one.
    """

    def timed(name: str, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            results = launches[name]()
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / count

    counts = {}
    total = 0.0
    for name in launches:
        once = timed(name, 1)
        if once < _SLOW_SECONDS:  # the first launches record command buffers
            timed(name, 1)
            once = timed(name, 1)
        counts[name] = min(_MOST_LAUNCHES, max(1, math.ceil(_BATCH_SECONDS / once)))
        total += counts[name] * once
    rounds = min(most, max(least, int(seconds / total))) if launches else 0
    samples: dict[str, list[float]] = {name: [] for name in launches}
    orders = itertools.cycle(itertools.permutations(launches))
    for order in itertools.islice(orders, rounds):
        for name in order:
            samples[name].append(timed(name, counts[name]))
    return samples
