"""Programs of known functions. As a script it rewrites their sources in tests/golden."""

from __future__ import annotations

from pathlib import Path

from jax_memeff.codegen.functions import emit
from jax_memeff.codegen.functions.program import CapturedType, Program, Value

GOLDEN = Path(__file__).parents[2] / "golden"


def constant(dtype, number) -> Value:
    return Value("constant", dtype, (), (("value", number),))


# score + slopes[head] * (key - query), differentiated; head counts from the end if it is negative
ALIBI = Program(
    (
        Value("score", "float32"),
        Value("head", "int32"),
        Value("query", "int32"),
        Value("key", "int32"),
        constant("int32", 0),
        Value("lt", "bool", (1, 4)),
        Value("size", "int32", (), (("array", 0), ("dim", 0))),
        Value("add", "int32", (1, 6)),
        Value("select_n", "int32", (5, 1, 7)),
        Value("read", "float32", (8,), (("array", 0), ("mode", "promise"))),
        Value("sub", "int32", (3, 2)),
        Value("convert_element_type", "float32", (10,)),
        Value("mul", "float32", (9, 11)),
        Value("add", "float32", (0, 12)),
        constant("float32", 1.0),
    ),
    results=(13, 14, 11),
    arrays=(CapturedType("float32", 1),),
)

# 50 * tanh(score / 50) + table[head, query - key + 7], with the derivative of the cap
TABLE = Program(
    (
        Value("score", "float32"),
        Value("head", "int32"),
        Value("query", "int32"),
        Value("key", "int32"),
        constant("float32", 50.0),
        Value("div", "float32", (0, 4)),
        Value("tanh", "float32", (5,)),
        Value("literal", "float32", (), (("index", 0),)),
        Value("mul", "float32", (7, 6)),
        Value("sub", "int32", (2, 3)),
        Value("literal", "int32", (), (("index", 1),)),
        Value("add", "int32", (9, 10)),
        Value("read", "float32", (1, 11), (("array", 0), ("fill_value", 0.0), ("mode", "fill"))),
        Value("add", "float32", (8, 12)),
        constant("float32", 1.0),
        Value("mul", "float32", (6, 6)),
        Value("sub", "float32", (14, 15)),
        Value("mul", "float32", (7, 16)),
        Value("div", "float32", (17, 4)),
    ),
    results=(13, 18, 14),
    arrays=(CapturedType("bfloat16", 2),),
    literals=(50.0, 7),
)

# The bool documents[query] == documents[key], or key < prefix[batch]
DOCUMENTS = Program(
    (
        Value("query", "int32"),
        Value("key", "int32"),
        Value("batch", "int32"),
        Value("read", "int32", (0,), (("array", 0), ("mode", "clip"))),
        Value("read", "int32", (1,), (("array", 0), ("mode", "clip"))),
        Value("eq", "bool", (3, 4)),
        Value("read", "int32", (2,), (("array", 1), ("mode", "clip"))),
        Value("lt", "bool", (1, 6)),
        Value("or", "bool", (5, 7)),
    ),
    results=(8,),
    arrays=(CapturedType("int32", 1), CapturedType("int16", 1)),
)

# Files of tests/golden, their programs, and whether the functions are precise.
SOURCES = {
    "function_alibi.txt": (ALIBI, True),
    "function_table.txt": (TABLE, False),
    "function_documents.txt": (DOCUMENTS, True),
}


def source(name: str) -> str:
    """The text of a file of tests/golden."""
    program, precise = SOURCES[name]
    return emit.source(program, "ScoreFunction", precise=precise)


if __name__ == "__main__":
    for name in SOURCES:
        (GOLDEN / name).write_text(source(name))
