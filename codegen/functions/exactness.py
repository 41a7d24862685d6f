"""Which values of a program must have the same bits in every kernel."""

from __future__ import annotations

from jax_memeff.codegen.functions.operations import OPERATIONS
from jax_memeff.codegen.functions.program import Program


def exact_values(program: Program) -> frozenset[int]:
    """The values on which a jump of the function, or the index of a read, depends.

    A rounding error there changes a result by any amount, so they are neither approximated nor
    fused: every kernel that evaluates the function gets the same bits. Jumps of derivatives alone
    choose between one-sided derivatives, as that of ``max`` does, and need no such care.
    """
    reads = {index for index, value in enumerate(program.values) if value.op == "read"}
    decisive = _needed(program, {program.results[0], *reads})
    found: set[int] = set()
    for index in reversed(range(len(program.values))):
        value = program.values[index]
        jumps = value.op in OPERATIONS and OPERATIONS[value.op].discontinuous
        if value.op in ("convert_element_type", "bitcast_convert_type"):
            jumps = value.dtype != "float32" or value.op == "bitcast_convert_type"
        if index in found or (index in decisive and (jumps or index in reads)):
            found.update(value.args)
    return frozenset(found)


def _needed(program: Program, results: set[int]) -> set[int]:
    """Values that results depend on, and themselves."""
    found = set(results)
    for index in reversed(range(len(program.values))):
        if index in found:
            found.update(program.values[index].args)
    return found
