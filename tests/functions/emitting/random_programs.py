"""Programs drawn at random from all operations, constants and kinds of reads."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jax_memeff.codegen.functions.operations import BITCASTS, CONVERSIONS, OPERATIONS
from jax_memeff.codegen.functions.program import INPUTS, CapturedType, Program, Value

# The dims of captured arrays. No two agree in dtype and rank.
ARRAYS = (
    ("float32", (5,)),
    ("bfloat16", (3, 4)),
    ("float16", (2, 3, 4)),
    ("float32", ()),
    ("int32", (7,)),
    ("uint32", (6,)),
    ("int16", (3, 3)),
    ("uint8", (4, 3)),
    ("int8", (3,)),
    ("uint16", (2, 1)),
    ("bool", (2, 5)),
)
READ_TYPES = {"float32": "float32", "bfloat16": "float32", "float16": "float32", "bool": "bool"}
READ_TYPES |= {"uint32": "uint32"}

VMAP = 2  # each captured array has elements for this many batch indices

INFINITY, NAN = math.inf, math.nan
FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 3.0, -7.0, 49.0, 1e-3, -0.125, 1e30, -1e-40, 2.0**126)
INTS = (0, 1, -1, 2, 3, 5, 31, 32, 33, -7, 100, 2**31 - 1, -(2**31))
CONSTANTS: dict[str, tuple[Any, ...]] = {
    "float32": (*FLOATS, -0.0, INFINITY, -INFINITY, NAN),
    "int32": INTS,
    "uint32": tuple(number % 2**32 for number in INTS),
    "bool": (False, True),
}

# Operations that a name and operands of one dtype determine, and all their combinations.
NAMED = [name for name in OPERATIONS if not name.startswith("round")]
EVERY = [(name, dtype) for name in NAMED for dtype in OPERATIONS[name].forms]

PREDICATES = {"eq", "ne", "lt", "le", "gt", "ge", "is_finite"}
ROUNDINGS = (("round", (("rounding_method", 0),)), ("round", (("rounding_method", 1),)))


class RandomProgram:
    """A growing list of values, from which later values are computed."""

    def __init__(self, seed: int, length: int, operations: Sequence[tuple[str, str]] = ()):
        self.random = random.Random(seed)
        self.values: list[Value] = []
        self.literals: list[float | int] = []
        count = self.random.randint(1, 4)
        self.arrays = self.random.sample(ARRAYS, count)
        for name in INPUTS:
            self._append(Value(name, "float32" if name == "score" else "int32"))
        for op, dtype in operations:
            self._grow_operation(op, dtype)
        while len(self.values) < length:
            self._grow()

    def program(self, *, mask: bool) -> Program:
        """The program of a mask function, or of a score function with arbitrary derivatives."""
        captured = tuple(CapturedType(dtype, len(dims)) for dtype, dims in self.arrays)
        plain = Program(tuple(self.values), (0,), captured, tuple(self.literals))
        if mask:
            score = self._append(Value("ne", "bool", (self._pick("float32"), 0)))
            both = Value("and", "bool", (score, self._pick("bool")))
            results = (self._append(both),)
        else:
            count = 2 + len(plain.float_reads)
            results = tuple(self._pick("float32") for _ in range(count))
        return plain._replace(values=tuple(self.values), results=results)

    def _append(self, value: Value) -> int:
        if value in self.values:
            return self.values.index(value)
        self.values.append(value)
        return len(self.values) - 1

    def _pick(self, dtype: str) -> int:
        """A value of this dtype, often a recent one; a constant if there is none."""
        found = [i for i, value in enumerate(self.values) if value.dtype == dtype]
        if not found or self.random.random() < 0.15:
            number = self.random.choice(CONSTANTS[dtype])
            return self._append(Value("constant", dtype, (), (("value", number),)))  # type: ignore
        return self.random.choice(found[-6:] if self.random.random() < 0.7 else found)

    def _grow(self) -> None:
        kind = self.random.random()
        if kind < 0.15:
            self._grow_read()
        elif kind < 0.2:
            dtype = self.random.choice(("float32", "int32"))
            self.literals.append(self.random.choice(CONSTANTS[dtype]))
            params = (("index", len(self.literals) - 1),)
            self._append(Value("literal", dtype, (), params))  # type: ignore
        elif kind < 0.35:
            self._grow_special()
        else:
            op = self.random.choice(NAMED)
            self._grow_operation(op, self.random.choice(tuple(OPERATIONS[op].forms)))

    def _grow_read(self) -> None:
        array = self.random.randrange(len(self.arrays))
        dtype, dims = self.arrays[array]
        mode = self.random.choice(("clip", "fill", "promise"))
        result = READ_TYPES.get(dtype, "int32")
        params: dict[str, Any] = {"array": array, "mode": mode}
        if mode == "fill":
            params["fill_value"] = self.random.choice(CONSTANTS[result])
        indices = [self._index(array, dim) for dim in range(len(dims))]
        self._append(Value("read", result, tuple(indices), tuple(sorted(params.items()))))  # type: ignore

    def _index(self, array: int, dim: int) -> int:
        """An index: any int32, or often one in bounds."""
        index = self._pick("int32")
        if self.random.random() < 0.5:
            return index
        size = self._append(Value("size", "int32", (), (("array", array), ("dim", dim))))
        return self._append(Value("rem", "int32", (index, size)))

    def _grow_special(self) -> None:
        op = self.random.choice(("select_n", "integer_pow", "convert", "bitcast", "round"))
        if op == "select_n":
            dtype = self.random.choice(tuple(CONSTANTS))
            few = self.random.random() < 0.7
            cases = [self._pick(dtype) for _ in range(2 if few else 3)]
            args = (self._pick("bool" if few else "int32"), *cases)
            self._append(Value(op, dtype, args))  # type: ignore
        elif op == "integer_pow":
            dtype = self.random.choice(("float32", "int32", "uint32"))
            power = self.random.randint(-3 if dtype == "float32" else 0, 6)
            self._append(Value(op, dtype, (self._pick(dtype),), (("y", power),)))  # type: ignore
        elif op == "round":
            name, params = self.random.choice(ROUNDINGS)
            self._append(Value(name, "float32", (self._pick("float32"),), params))
        else:
            pairs = CONVERSIONS if op == "convert" else BITCASTS
            source, target = self.random.choice([pair for pair in pairs if pair[0] != pair[1]])
            name = f"{op}_element_type" if op == "convert" else "bitcast_convert_type"
            self._append(Value(name, target, (self._pick(source),)))  # type: ignore

    def _grow_operation(self, op: str, dtype: str) -> None:
        count = 1 + max(i for i in range(3) if f"{{{i}}}" in OPERATIONS[op].forms[dtype])
        args = tuple(self._pick(dtype) for _ in range(count))
        if op == "pow" and self.random.random() < 0.3:
            args = (args[0], self._pick("int32"))
        result = "bool" if op in PREDICATES else dtype
        self._append(Value(op, result, args))  # type: ignore


def captured_arrays() -> dict[tuple[str, tuple[int, ...]], np.ndarray]:
    """An array [VMAP, *dims] for each of ARRAYS, with infinities, NaN and the largest integers."""
    random = np.random.default_rng(5)
    found = {}
    for dtype, dims in ARRAYS:
        shape = (VMAP, *dims)
        if dtype == "bool":
            array = random.integers(0, 2, shape).astype(np.bool_)
        elif np.issubdtype(np.dtype(getattr(ml_dtypes, dtype, dtype)), np.integer):
            info = np.iinfo(dtype)
            array = random.integers(0, 9, shape).astype(dtype)
            array.flat[:: max(array.size // 2, 1)] = info.max
            array.flat[-1] = info.min
        else:
            array = random.normal(size=shape).astype(getattr(ml_dtypes, dtype, dtype))
            if dims:
                array.flat[:4] = [np.inf, np.nan, -0.0, -3.5]
        found[dtype, dims] = array
    return found


def dims_of(program: Program) -> list[tuple[str, tuple[int, ...]]]:
    """Which of ARRAYS a random program captures: no two have dtype and rank in common."""
    by_type = {(dtype, len(dims)): (dtype, dims) for dtype, dims in ARRAYS}
    return [by_type[captured] for captured in program.arrays]


def programs(count: int, seed: int = 0) -> list[Program]:
    """Programs of 10 to 40 values; every fourth is a mask function.

    Two operations of each are taken from EVERY in turn, so seventy programs have all of them.
    """
    made = []
    for index in range(count):
        length = random.Random(f"{seed} {index}").randint(10, 40)
        first = [EVERY[(2 * index + i) % len(EVERY)] for i in range(2)]
        generator = RandomProgram(hash((seed, index)), length, first)
        made.append(generator.program(mask=index % 4 == 3))
    return made
