"""The command line's output. A command whose output is lost ends with an error."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


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
