"""A process of ``parallel.compile_many``: reads pickled sources, writes pickled results.

It does not open the cache: the parent process stores the results, and warns once if it cannot.
"""

from __future__ import annotations

import os
import pickle
import sys

from jax_memeff.codegen.toolchain.compile import compile_uncached
from jax_memeff.errors import CompileError


def main() -> None:
    # Only results may reach the pipe: output of libraries goes to standard error.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (True, compile_uncached(*job))
        except CompileError as error:
            answer = (False, (str(error), error.log, error.versions))
        try:
            pickle.dump(answer, results)
            results.flush()
        except BrokenPipeError:  # the parent was killed
            os._exit(1)


if __name__ == "__main__":
    main()
