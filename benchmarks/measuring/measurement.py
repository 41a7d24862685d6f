"""The options of every measurement, and the head of its result file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from measuring import machine

CLOCK = "host clock, batches of launches minus one launch; see benchmarks/README.md"


def add_options(parser: argparse.ArgumentParser, kind: str, timed: str) -> None:
    """Add ``--output``, ``--rounds``, ``--batch-ms`` and ``--commit``.

    Args:
        parser: the parser of a command.
        kind: the end of the default file's name, as ``documents.default_path`` has it.
        timed: the noun for what a batch repeats, as in "batches of each peer".
    """
    parser.add_argument("--output", type=Path, help=f"default: results/<device>-{kind}.json")
    parser.add_argument("--rounds", type=int, default=5, help=f"batches of each {timed}")
    parser.add_argument("--batch-ms", type=float, default=30.0, help="length of a batch")
    parser.add_argument("--commit", help="our commit, if the checkout has no git")


def head(options: argparse.Namespace) -> dict[str, Any]:
    """The date, the device, the versions and the method of a measurement with these options."""
    return {
        **machine.facts(options.commit),
        "method": {
            "rounds": options.rounds,
            "batch_ms": options.batch_ms,
            "clock": CLOCK,
        },
    }
