"""The types of the command line's arguments: each makes a value of the text, or refuses it."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from jax_memeff.codegen import arch as architectures
from jax_memeff.codegen.features.feature import at_least


def dtype(text: str) -> str:
    """The short name of a dtype, which may have JAX's name.

    >>> dtype("bfloat16"), dtype("f16")
    ('bf16', 'f16')
    """
    return re.sub("^(b?)float(?=(16|32|64)$)", r"\1f", text)


def architecture(text: str) -> str:
    """The name of an architecture."""
    try:
        architectures.capability(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


size = at_least(1)
"""A dim or a length."""


def seconds(text: str) -> float:
    """A time of more than 0 seconds.

    >>> seconds("2.5")
    2.5
    """
    try:
        if 0 < (found := float(text)) < math.inf:
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")


def file_to_write(text: str) -> Path:
    """A file that can be written: a command that runs for minutes says at its start if not."""
    path = Path(text)
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    return path


def add_dims(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the options of the head dims."""
    parser.add_argument(
        "--head-dim", type=size, required=required, help="head dim of query and key"
    )
    parser.add_argument("--value-dim", type=size, help="head dim of value; default: --head-dim")
