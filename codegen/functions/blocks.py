"""The blocks of rows and columns inside which a mask function is constant."""

from __future__ import annotations

from jax_memeff.codegen.functions.program import Program


def block_sizes(program: Program, axis: str) -> frozenset[int]:
    """The numbers by which a function divides rows (``"query"``) or columns (``"key"``).

    Lists of KV blocks contain such divisions, and so does ``table[q // 64, k // 64]``. The function
    is constant in a tile that lies inside one block.

    >>> from jax_memeff.codegen.functions.program import Value
    >>> number = Value("constant", "int32", (), (("value", 64),))
    >>> values = Value("query", "int32"), number, Value("div", "int32", (0, 1))
    >>> sorted(block_sizes(Program(values, (2,), ()), "query"))
    [64]
    """
    found = set()
    for value in program.values:
        if value.op not in ("div", "shift_right_arithmetic") or value.dtype != "int32":
            continue
        divided, number = value.args
        constant = program.values[number]
        if constant.op == "constant" and program.dependence(divided) == {axis}:
            size = constant.param("value")
            found.add(size if value.op == "div" else 2**size)
    return frozenset(size for size in found if size > 1)
