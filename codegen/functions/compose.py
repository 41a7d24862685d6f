"""A soft cap as a part of a score function, so that kernels have one modifier and not two."""

from __future__ import annotations

from .program import Program, Value


def with_soft_cap(program: Program, cap: float) -> Program:
    """``program`` of ``cap * tanh(score / cap)``, with its derivatives if it has any.

    The cap is a literal behind those of the program.

    >>> plain = Program((Value("score", "float32"),), (0,), ())
    >>> [value.op for value in with_soft_cap(plain, 30.0).values]
    ['score', 'literal', 'div', 'tanh', 'mul']
    """
    values = [
        Value("score", "float32"),
        Value("literal", "float32", (), (("index", program.literal_count),)),
        Value("div", "float32", (0, 1)),
        Value("tanh", "float32", (2,)),
        Value("mul", "float32", (1, 3)),
    ]
    capped, places = 4, {value: index for index, value in enumerate(values)}

    def place(value: Value) -> int:
        if value not in places:
            places[value] = len(values)
            values.append(value)
        return places[value]

    moved: list[int] = []
    for value in program.values:
        args = tuple(moved[arg] for arg in value.args)
        moved.append(capped if value.op == "score" else place(value._replace(args=args)))
    results = [moved[result] for result in program.results]
    if len(results) > 1:
        one = place(Value("constant", "float32", (), (("value", 1.0),)))
        slope = place(Value("sub", "float32", (one, place(Value("mul", "float32", (3, 3))))))
        is_one = results[1] == one
        results[1] = slope if is_one else place(Value("mul", "float32", (results[1], slope)))
    return Program(tuple(values), tuple(results), program.arrays, (*program.literals, cap))
