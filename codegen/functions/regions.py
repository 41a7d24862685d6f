"""Regions in which values of a program are constant: diagonals of the scores, and blocks.

``table[head, query - key]`` is read at one element per diagonal, so a kernel sums its gradient
along diagonals.
"""

from __future__ import annotations

from jax_memeff.codegen.functions.program import Program

# The coefficients of query and key in a value that is affine in them, up to terms without either.
# Modulo 2**32, because int32 wraps around.
Slopes = tuple[int, int]


def constant_along_diagonals(program: Program) -> tuple[bool, ...]:
    """For each value, whether it depends on query and key through their difference alone.

    A value that depends on neither is constant, too; one that depends on the score is not. Values
    are recognized if they are made of ``query - key``, or of sums of multiples of both that cancel:

    >>> from jax_memeff.codegen.functions.program import Value
    >>> subtract = Value("sub", "int32", (0, 1))
    >>> values = (Value("query", "int32"), Value("key", "int32"), subtract)
    >>> constant_along_diagonals(Program(values, (2,), ()))
    (False, False, True)
    """
    constant: list[bool] = []
    slopes = _all_slopes(program)
    for value, own in zip(program.values, slopes, strict=True):
        cancels = own is not None and sum(own) % 2**32 == 0
        composed = all(constant[arg] for arg in value.args)
        is_input = value.op in ("query", "key", "score")
        constant.append(cancels or (composed and not is_input))
    return tuple(constant)


def diagonal_reads(program: Program) -> frozenset[int]:
    """The ``float_reads`` that depend on query and key, and only through their difference."""
    constant = constant_along_diagonals(program)
    return frozenset(
        read
        for read in program.float_reads
        if constant[read] and {"query", "key"} <= program.dependence(read)
    )


def indices_of_columns(program: Program, read: int) -> tuple[int, ...]:
    """The dims of an array whose index in this read differs between the columns of a row.

    These indices are recognized as sums that contain a multiple of the key. Rounded, clipped and
    absolute ones may be the same for several columns.

    >>> from jax_memeff.codegen.functions.program import CapturedType, Value
    >>> subtract = Value("sub", "int32", (1, 2))
    >>> read = Value("read", "float32", (0, 3), (("array", 0), ("mode", "clip")))
    >>> inputs = Value("head", "int32"), Value("query", "int32"), Value("key", "int32")
    >>> indices_of_columns(
    ...     Program((*inputs, subtract, read), (4,), (CapturedType("float32", 2),)), 4
    ... )
    (1,)
    """
    slopes = _all_slopes(program)
    found = (slopes[_before_wrapping(program, index)] for index in program.values[read].args)
    return tuple(dim for dim, own in enumerate(found) if own is not None and own[1] % 2**32)


def adds_along_diagonals(program: Program) -> bool:
    """Whether a score function adds to its score a number that is the same along each diagonal.

    >>> from jax_memeff.codegen.functions.program import Value
    >>> score = Value("score", "float32")
    >>> subtract = Value("sub", "int32", (1, 2))
    >>> difference = Value("convert_element_type", "float32", (3,))
    >>> total = Value("add", "float32", (0, 4))
    >>> inputs = score, Value("query", "int32"), Value("key", "int32")
    >>> adds_along_diagonals(Program((*inputs, subtract, difference, total), (5,), ()))
    True
    """
    total = program.values[program.results[0]]
    if total.op != "add":
        return False
    constant = constant_along_diagonals(program)
    return any(
        program.values[score].op == "score" and constant[other]
        for score, other in (total.args, total.args[::-1])
    )


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
            if value.op == "div":
                found.add(size)
            elif 0 <= size < 31:  # wider shifts move all bits out
                found.add(2**size)
    return frozenset(size for size in found if size > 1)


def _before_wrapping(program: Program, index: int) -> int:
    """The index to which JAX adds the size of the dim if it is negative, or the index itself."""
    value = program.values[index]
    if value.op == "select_n":
        test, own, *others = value.args
        predicate, wrapped = program.values[test], program.values[others[0]]
        if (
            (predicate.op, predicate.args[0]) == ("lt", own)
            and (wrapped.op, wrapped.args[0]) == ("add", own)
            and program.values[wrapped.args[1]].op == "size"
        ):
            return own
    return index


def _all_slopes(program: Program) -> list[Slopes | None]:
    slopes: list[Slopes | None] = []
    for index in range(len(program.values)):
        slopes.append(_slopes(program, index, slopes))
    return slopes


def _slopes(program: Program, index: int, slopes: list[Slopes | None]) -> Slopes | None:
    """None for a value that is not known to be affine."""
    value = program.values[index]
    if value.op == "query":
        return 1, 0
    if value.op == "key":
        return 0, 1
    if not program.dependence(index) & {"query", "key", "score"}:
        return 0, 0
    operands = [slopes[arg] for arg in value.args]
    if value.dtype not in ("int32", "uint32") or None in operands:
        return None
    known = [operand for operand in operands if operand is not None]
    if value.op in ("add", "sub"):
        sign = 1 if value.op == "add" else -1
        (a, b), (c, d) = known
        return a + sign * c, b + sign * d
    if value.op == "neg":
        return -known[0][0], -known[0][1]
    if value.op == "convert_element_type":
        return known[0]  # an integer of 32 bits, because a float is never affine
    if value.op == "mul":
        for factor, other in ((0, 1), (1, 0)):
            number = program.values[value.args[factor]]
            if number.op == "constant":
                times = number.param("value")
                return known[other][0] * times, known[other][1] * times
    return None
