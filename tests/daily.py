"""Samples of what takes long to compile or to trace. They change every day.

``JAX_MEMEFF_CLOSURE=2026-11-23`` repeats the samples of that day, and ``JAX_MEMEFF_CLOSURE=all``
takes everything, which is due before a release. The header of a run of pytest shows the choice.
"""

from __future__ import annotations

import datetime
import os
import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")

# Processes that this one starts inherit the choice: those of pytest-xdist must collect the same
# tests, also at midnight.
CHOICE = os.environ.setdefault("JAX_MEMEFF_CLOSURE", datetime.date.today().isoformat())
EVERYTHING = CHOICE == "all"
try:
    TODAY = None if EVERYTHING else datetime.date.fromisoformat(CHOICE).toordinal()
except ValueError:
    raise ValueError(
        f"JAX_MEMEFF_CLOSURE must be a date such as 2026-11-23, or all, got {CHOICE!r}"
    ) from None
MESSAGE = f"JAX_MEMEFF_CLOSURE={CHOICE}"


def generator(name: str, days: int = 1) -> random.Random:
    """A generator that depends on the name of a sample and on the day. With ``days`` it is the same
    for so many days in a row.
    """
    return random.Random(f"{name} {CHOICE if TODAY is None or days == 1 else TODAY // days}")


def day_of(name: str) -> int | None:
    """The day that the cases of a test count, which differs from test to test. When the first parts
    of all tests fell on the same day, a run took a fifth longer than on the day before.
    """
    return None if TODAY is None else TODAY + zlib.crc32(name.encode())


def is_due(index: int, count: int, parts: int, today: int | None = TODAY) -> bool:
    """Whether case ``index`` of ``count`` belongs to today's part, of ``parts``. Every case is due
    once in ``parts`` days. Neighbours stay together, because they share compiled programs.

    >>> [[index for index in range(9) if is_due(index, 9, 3, today)] for today in range(3)]
    [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    """
    neighbours = max(1, count // (4 * parts))
    return today is None or index // neighbours % parts == today % parts


def part(values: Sequence[Value], parts: int) -> list[Value]:
    """Today's part of the values. The parts of successive days together have all of them."""
    return [value for index, value in enumerate(values) if is_due(index, len(values), parts)]


def drawn(name: str, values: Sequence[Value], count: int = 1) -> list[Value]:
    """``count`` of the values, in their order, or all of them."""
    if EVERYTHING:
        return list(values)
    chosen = sorted(generator(name).sample(range(len(values)), count))
    return [values[index] for index in chosen]
