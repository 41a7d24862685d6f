"""A process of ``parallel.compile_many``: reads pickled jobs, writes pickled results."""

from __future__ import annotations

import os
import pickle
import sys

from jax_memeff.codegen.toolchain.compile import compile
from jax_memeff.errors import CompileError


def main() -> None:
    # Only results may reach the pipe: what a library prints goes to the standard error stream.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (True, compile(*job))
        except CompileError as error:
            answer = (False, (str(error), error.log, error.versions))
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    main()
