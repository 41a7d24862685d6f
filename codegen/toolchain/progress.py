"""A line on a terminal while a kernel is compiled: the first call of a program takes seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from jax_memeff import config

_shown = threading.Lock()


@contextlib.contextmanager
def line(text: str) -> Iterator[None]:
    """Show ``text`` and the seconds that have passed; the line disappears at the end.

    It is shown only if standard error is a terminal that takes all characters, and
    ``JAX_MEMEFF_PROGRESS`` is not 0. A thread that compiles while another thread's line is shown
    has none.
    """
    is_wanted = config.progress() and _is_terminal(sys.stderr)
    if not is_wanted or not _shown.acquire(blocking=False):
        yield
        return
    try:
        with _display(text):
            yield
    finally:
        _shown.release()


def _is_terminal(stream: Any) -> bool:
    """Whether ``stream``, which any object may have replaced, is a terminal for the line."""
    try:
        return stream.isatty() and (stream.encoding or "utf-8").lower().startswith("utf")
    except (AttributeError, ValueError):  # it has only ``write``; or it is closed
        return False


def _display(text: str) -> contextlib.AbstractContextManager[object]:
    # Imported here: a process whose kernels are all in the cache does not need it.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    display = Progress(
        SpinnerColumn(),
        # The seconds come first, because a narrow terminal cuts the end of the line.
        TextColumn(
            "{task.elapsed:.0f} s {task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        ),
        console=Console(stderr=True),
        transient=True,
        # The user's program may itself have replaced both streams.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    display.add_task(text)
    return display
