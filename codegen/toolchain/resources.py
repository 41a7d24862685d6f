"""Registers, spills and shared memory of kernels, read from the log of ``ptxas -v``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_TIMES = re.compile(r"^ptxas info\s*: Compile time = .*\n?", re.MULTILINE)
# The family of ptxas remarks about lost performance, such as serialized WGMMA.
_WARNING = re.compile(r"\(?C75\d\d\)?")


class Resource(NamedTuple):
    """Per-thread registers and spilled bytes of one kernel, and its static shared memory."""

    name: str
    registers: int
    spill_store: int
    spill_load: int
    shared_bytes: int


def parse(log: str, names: Sequence[str]) -> list[Resource]:
    """One ``Resource`` for each of ``names`` that the log mentions, in the order of ``names``.

    >>> log = "Compiling entry function 'k' for 'sm_80'\\nUsed 10 registers, 1024 bytes smem"
    >>> parse(log, ["k"])
    [Resource(name='k', registers=10, spill_store=0, spill_load=0, shared_bytes=1024)]
    """
    # Drop the text before the first entry; names and texts alternate after it.
    parts = _ENTRY.split(log)[1:]
    text_of = dict(zip(parts[::2], parts[1::2], strict=True))
    return [
        Resource(name, _first(_REGISTERS, text), *_spills(text), _first(_SHARED, text))
        for name in names
        if (text := text_of.get(name)) is not None
    ]


def warnings(log: str) -> list[str]:
    """The lines of the log in which ptxas reports lost performance (C75xx)."""
    return [line.strip() for line in log.splitlines() if _WARNING.search(line)]


def without_times(log: str) -> str:
    """The log without the times that ptxas took, so that equal kernels have equal logs.

    >>> without_times("ptxas info    : Compile time = 71.153 ms\\nptxas info    : 0 bytes gmem")
    'ptxas info    : 0 bytes gmem'
    """
    return _TIMES.sub("", log)


def _first(pattern: re.Pattern, text: str) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else 0


def _spills(text: str) -> tuple[int, int]:
    found = _SPILLS.search(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
