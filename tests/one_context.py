"""One context of MLIR for all programs that the main thread lowers.

JAX makes one for each program, which takes a third of the time of a program with one operation.
Eager calls lower many of these.
"""

from __future__ import annotations

import threading

from jax._src.interpreters import mlir


def share() -> None:
    """Lets the programs of the main thread share a context from now on.

    The function of JAX is private, so another version may lack it: then nothing changes.

    Hazard: XLA's threads lower programs, too (custom partitioning). A context that belonged to such
    a thread would be destroyed after Python's state of the thread, which is a segmentation fault.
    """
    if (make := getattr(mlir, "make_ir_context", None)) is None:
        return
    context = make()

    def context_of_program():
        return context if threading.get_ident() == threading.main_thread().ident else make()

    mlir.make_ir_context = context_of_program
