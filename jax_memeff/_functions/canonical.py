"""Turns a graph into a program; equal functions give equal programs."""

from __future__ import annotations

from collections.abc import Sequence

from jax_memeff._functions.graph import Graph
from jax_memeff.codegen.functions.program import CapturedType, Program, ScalarType, Value


def canonical(
    values: Sequence[Value],
    results: Sequence[int],
    arrays: Sequence[CapturedType],
    shapes: Sequence[Sequence[int]] = (),
    literals: Sequence[float | int] = (),
    *,
    also: Sequence[int] = (),
    keep_custom: bool = False,
) -> tuple[Program, tuple[int, ...]]:
    """A program of the values that results need, in the order in which results need them.

    Args:
        arrays, shapes: those of the captured arrays, to which reads refer by index.
        literals: the numbers of ``literal`` values, if there are any already.
        also: values to keep besides those that results need.
        keep_custom: whether ``custom`` values stay; otherwise their first argument replaces them.

    Returns:
        The program, and the indices in ``arrays`` of the arrays that it reads, in its order.
    """
    order = needed(values, (results[0], *also, *results), keep_custom)
    used = dict.fromkeys(
        values[index].param("array") for index in order if values[index].op in ("read", "size")
    )
    place = {array: position for position, array in enumerate(used)}
    lengths = {}
    for array in reversed(used if shapes else ()):
        for dim, length in reversed(list(enumerate(shapes[array]))):
            lengths[length] = (place[array], dim)

    new_values: dict[Value, int] = {}
    new_index: dict[int, int] = {}
    numbers: dict[object, float | int] = {}

    def literal(key: object, number: float | int, dtype: ScalarType) -> Value:
        numbers.setdefault(key, number)
        return Value("literal", dtype, (), (("index", list(numbers).index(key)),))

    for index in order:
        value = values[index]
        if value.op == "custom" and not keep_custom:
            new_index[index] = new_index[value.args[0]]
            continue
        if value.op == "number":
            number = value.param("value")
            if value.dtype == "int32" and number in lengths:
                array, dim = lengths[number]
                value = Value("size", "int32", (), (("array", array), ("dim", dim)))
            else:
                value = literal((value.dtype, number), number, value.dtype)
        elif value.op == "literal":
            old = value.param("index")
            value = literal(old, literals[old], value.dtype)
        elif value.op in ("read", "size"):
            params = tuple((n, place[p] if n == "array" else p) for n, p in value.params)
            value = value._replace(params=params)
        value = value._replace(args=tuple(new_index[arg] for arg in value.args))
        new_index[index] = new_values.setdefault(value, len(new_values))
    program = Program(
        values=tuple(new_values),
        results=tuple(new_index[result] for result in results),
        arrays=tuple(arrays[array] for array in used),
        literals=tuple(numbers.values()),
    )
    return program, tuple(used)


def needed(values: Sequence[Value], results: Sequence[int], keep_custom: bool = False) -> list[int]:
    """The values that results need, each after its arguments."""
    done: dict[int, None] = {}
    for result in results:
        pending = [result]
        while pending:
            index = pending[-1]
            value = values[index]
            args = value.args
            if value.op == "custom" and not keep_custom:
                args = args[:1]
            missing = [arg for arg in reversed(args) if arg not in done]
            if missing:
                pending += missing
            else:
                done[pending.pop()] = None
    return list(done)


def graph_of(program: Program) -> tuple[Graph, list[int]]:
    """A graph of a program's values without ``custom`` ones, and the index of each value in it."""
    graph, place = Graph(), list[int]()
    for value in program.values:
        if value.op == "custom":
            place.append(place[value.args[0]])
            continue
        args = tuple(place[arg] for arg in value.args)
        place.append(graph.add(value.op, value.dtype, args, dict(value.params)))
    return graph, place
