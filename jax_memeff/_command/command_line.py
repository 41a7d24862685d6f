"""The command line itself: the types of its arguments, and its output.

A type makes a value of the text, or refuses it. A command whose output is lost ends with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

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


class OutputError(Exception):
    """Standard output is closed, or it or the file of ``build --output`` takes no more."""


class Output:
    """``sys.stdout`` for a console of ``rich``, with errors that say what to do.

    Characters that its encoding lacks are escaped, as on standard error: a path may be any bytes.
    ``BrokenPipeError`` stays as it is: the reader of the pipe has seen enough, and rich ends the
    command without a message.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None if the shell has closed it, as `>&-` does

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._stream is None:
            raise OutputError(
                "standard output is closed, so nobody sees the result: pass > /dev/null if you do "
                "not need it"
            )
        with _explained():
            try:
                return self._stream.write(text)
            except UnicodeEncodeError as error:  # raised before anything is written
                escaped = text.encode(error.encoding, "backslashreplace")
                return self._stream.write(escaped.decode(error.encoding))

    def flush(self) -> None:
        if self._stream is not None:
            with _explained():
                self._stream.flush()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"cannot write to standard output: {error.strerror}; the output is not complete, so "
            "send it elsewhere"
        ) from error


class Parser(argparse.ArgumentParser):
    """A parser whose help is output like any other; argparse ignores that it cannot be written."""

    def print_help(self, file: Any = None) -> None:
        to = file or Output(sys.stdout)
        to.write(self.format_help())
        to.flush()


def discard() -> None:
    """Send the rest to nowhere; otherwise Python writes it again at exit, with a traceback."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError):  # a stream without a file, as in tests
        to = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), to)
