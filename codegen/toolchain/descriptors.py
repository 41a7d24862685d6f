"""File descriptors: a process that has no more of them finds no part of the toolchain.

The hazard is that a search then ends without a result, and the user is told to install what is
installed. A library or an extension module that cannot be opened looks absent, so ``require_one``
comes before that conclusion. ``importlib.metadata`` takes a directory that it cannot list for an
empty one, and remembers that, so ``require_one`` comes before it is called.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from jax_memeff.errors import CompileError

IN_LOGS = os.strerror(errno.EMFILE)
"""How compilers and linkers report it."""


def advice() -> str:
    """The limit of this process, and what to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or hard == resource.RLIM_INFINITY:
        raise_it = "raise the limit in the shell that starts it: ulimit -n 1024"
    else:
        raise_it = "the hard limit is the same, so raise it where the session or the container "
        raise_it += "gets it (/etc/security/limits.conf, docker run --ulimit nofile=1024)"
    return f"This process may have {soft} files open at once, and needs more: {raise_it}"


def require_one() -> None:
    """Raise ``OSError`` if this process cannot open another file."""
    os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn the ``OSError`` of a process without descriptors into a ``CompileError`` with advice."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise CompileError(f"error: {error}", {}, advice()) from error
