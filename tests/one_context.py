"""One context of MLIR for all programs that the main thread lowers.

JAX makes one for each program, which takes a third of the time of a program with one operation.
Eager calls lower many of these.
"""

from __future__ import annotations

import threading

from jax._src.interpreters import mlir
from jaxlib.mlir import ir


def share() -> None:
    """Lets the programs of the main thread share a context from now on.

    The function of JAX is private, so another version may lack it: then nothing changes.

    Hazard: XLA's threads lower programs, too (custom partitioning). A context that belonged to such
    a thread would be destroyed after Python's state of the thread, which is a segmentation fault.

    Hazard: a rule may run an eager operation while it lowers (``jax.random.bits`` does). Copies of
    its program would be inserted into the program that is being lowered, if both had one context.
    """
    if (make := getattr(mlir, "make_ir_context", None)) is None:
        return
    context = make()

    def context_of_program():
        is_main = threading.get_ident() == threading.main_thread().ident
        return context if is_main and ir.Context.current is None else make()

    mlir.make_ir_context = context_of_program
