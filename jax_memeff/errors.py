"""The typed errors of the package. Bad arguments raise ``ValueError`` or ``TypeError``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class UnsupportedError(Exception):
    """The library does not support the call; ``reasons`` lists why, one sentence each.

    ``summary`` is the first line of the message; by default it says that no kernel fits.

    >>> raise UnsupportedError(["float64 has no kernel", "pass implementation='xla'"])
    Traceback (most recent call last):
    ...
    jax_memeff.errors.UnsupportedError: no kernel fits this call:
      - float64 has no kernel
      - pass implementation='xla'
    """

    def __init__(self, reasons: Sequence[str], summary: str = "no kernel fits this call"):
        self.reasons = tuple(reasons)
        self.summary = summary
        lines = [f"{summary}:", *(f"  - {reason}" for reason in self.reasons)]
        super().__init__("\n".join(lines))

    def __reduce__(self):
        return type(self), (self.reasons, self.summary)


class CompileError(Exception):
    """NVRTC rejected a generated kernel, or could not be run.

    ``log`` is the compiler's full log; ``versions`` maps each part (driver, NVRTC, headers) to its
    version or, if a part is missing, each place that was searched to its value. The message shows
    the first error in the log, ``versions``, and what to do.
    """

    def __init__(self, log: str, versions: Mapping[str, str], advice: str = ""):
        self.log = log
        self.versions = dict(versions)
        lines = [line for line in log.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
        message = [f"a kernel did not compile: {first.strip() or 'the compiler printed nothing'}"]
        message += [f"  {part}: {version}" for part, version in self.versions.items()]
        if advice:
            message.append(advice)
        super().__init__("\n".join(message))
        self._advice = advice

    def __reduce__(self):
        # The compiler runs in worker processes, which send its errors back pickled.
        return type(self), (self.log, self.versions, self._advice)


class OutOfPagesError(RuntimeError):
    """A :class:`jax_memeff.PagePool` has too few free pages. The pool is unchanged.

    ``needed`` is the number of requested pages, ``available`` the number of free ones.
    """

    def __init__(self, needed: int, available: int):
        self.needed, self.available = needed, available
        short = needed - available
        super().__init__(
            f"the pool is {short} page{'s' * (short != 1)} short, with {needed} needed and "
            f"{available} free: free a sequence, or wait until one ends"
        )

    def __reduce__(self):
        return type(self), (self.needed, self.available)
