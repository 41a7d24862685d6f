"""The clock: times the programs of one cell in alternation."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from random import Random
from typing import Any, Protocol

MIN_LAUNCHES = 2
MAX_LAUNCHES = 2000
WARM_UP_LAUNCHES = 3
"""The first launches are slow, because XLA records command buffers during them."""
LAUNCHES_TO_ESTIMATE = 3
"""Timed one by one for the length of a batch."""
MAX_ATTEMPTS = 10
"""A batch is timed again, up to so many times, while something else interrupts its first launch."""


class Program(Protocol):
    """Something whose launch makes the device execute ``calls`` calls, one after the other."""

    calls: int

    def launch(self) -> None:
        """Enqueue the calls; may return before the device has executed them."""
        ...

    def wait(self) -> None:
        """Return when the device has finished everything that was enqueued."""
        ...


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: one mean for each batch."""

    samples: tuple[float, ...]
    launches: int
    """Launches of the program in a batch."""
    calls: int
    """Calls in one launch."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(slowest batch - fastest batch) / median."""
        return (max(self.samples) - min(self.samples)) / self.seconds

    def record(self) -> dict[str, Any]:
        """The entry of a result file, without what depends on the problem."""
        return {
            "seconds": self.seconds,
            "spread": self.spread,
            "samples": self.samples,
            "calls_per_launch": self.calls,
            "launches_per_batch": self.launches,
        }


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a peer has no figure."""

    reason: str

    def record(self) -> dict[str, Any]:
        """The entry of a result file."""
        return {"error": self.reason}


_TOO_SHORT = Failure("its batches take no more time than one launch: lengthen them")


def first_line(error: BaseException) -> str:
    """The type of an exception and the first line of its text, kept short.

    A first line that only announces what follows is followed by it.

    >>> first_line(ValueError("no such kernel\\nand a long story"))
    'ValueError: no such kernel'
    >>> first_line(ValueError("no kernel fits:\\n  - float64"))
    'ValueError: no kernel fits: - float64'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}"[:300]


def _seconds(program: Program, launches: int) -> float:
    """Seconds from the first launch to the end of the last one; the device is idle before."""
    start = time.perf_counter()
    for _ in range(launches):
        program.launch()
    program.wait()
    return time.perf_counter() - start


def _sample(program: Program, launches: int) -> float:
    """Seconds per call in a batch of launches that follow another one; 0.0 if it is too short.

    Both terms contain the host's work for the first launch, for which the device waits, and the
    wait at the end. XLA has more of that work than the replay of a CUDA graph. A launch that takes
    longer alone than with its batch was interrupted by another process and says nothing.
    """
    for _ in range(MAX_ATTEMPTS):
        alone = _seconds(program, 1)
        batch = _seconds(program, 1 + launches) - alone
        if batch > 0:
            return batch / (launches * program.calls)
    return 0.0


def measure(
    programs: Mapping[str, Program], *, rounds: int, batch_seconds: float, seed: str = ""
) -> dict[str, Timing | Failure]:
    """Times the programs alternately, for ``rounds`` rounds.

    A batch of each program lasts about ``batch_seconds``, and at least two launches. Each round has
    an order of its own, drawn from ``seed``, so that no program always follows the same one: its
    predecessor determines how warm the chip is and how much power it may draw. Give each cell its
    own seed: with one order for all cells, a few rounds would favour the same programs in every
    cell. A program that raises is left out from then on.
    """
    failures: dict[str, Failure] = {}
    launches: dict[str, int] = {}
    for name, program in programs.items():
        try:
            _seconds(program, WARM_UP_LAUNCHES)
            # The least of several: one launch that the system interrupts would shorten all batches.
            alone = min(_seconds(program, 1) for _ in range(LAUNCHES_TO_ESTIMATE))
            fitting = math.ceil(batch_seconds / alone)
            launches[name] = min(MAX_LAUNCHES, max(MIN_LAUNCHES, fitting))
        except Exception as error:
            failures[name] = Failure(first_line(error))

    samples: dict[str, list[float]] = {name: [] for name in launches}
    order = list(launches)
    random = Random(seed)
    for _ in range(rounds):
        for name in random.sample(order, len(order)):
            if name in failures:
                continue
            try:
                samples[name].append(_sample(programs[name], launches[name]))
            except Exception as error:
                failures[name] = Failure(first_line(error))
    outcomes: dict[str, Timing | Failure] = dict(failures)
    for name in order:
        if name in failures:
            continue
        timing = Timing(tuple(samples[name]), launches[name], programs[name].calls)
        outcomes[name] = timing if timing.seconds > 0 else _TOO_SHORT
    return outcomes
