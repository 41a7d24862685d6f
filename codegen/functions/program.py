"""A user's function of one score, or of one element of a mask, as a list of scalar operations.

``jax_memeff._functions`` makes programs from JAX functions and evaluates them in JAX. The emitter
in this folder prints them as CUDA source. A program holds no arrays and no numbers of the call:
two traces of one function are equal, and functions that differ in a number have one structure.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

ScalarType = Literal["float32", "int32", "uint32", "bool", "float64", "int64", "uint64"]
"""The types of values. Only the blockwise path has those of 64 bits."""

INPUTS = ("score", "batch", "head", "query", "key")
"""The inputs of a program in the order of a score function's arguments; a mask has no score."""


class Value(NamedTuple):
    """One scalar of a program.

    ``op`` is one of :data:`INPUTS`, ``"constant"``, ``"literal"``, ``"size"``, ``"read"``, or the
    name of an elementwise ``lax`` primitive with its semantics and its order of arguments
    (``select_n`` takes predicate, case_false, case_true). ``convert_element_type`` converts to
    ``dtype``. The parameters are, by ``op``:

    - constant: ``value``, a number that belongs to the structure. NaN is always ``math.nan``, the
      object, so that equal programs compare equal.
    - literal: ``index`` into ``Program.literals``.
    - size: ``array`` and ``dim``, the length (int32) of a dim of a captured array. If the array is
      sharded it is the length of the whole array.
    - read: ``array``, ``mode`` (``"clip"``, ``"fill"`` or ``"promise"``) and, with ``"fill"``,
      ``fill_value``. One int32 index per dim of the array; negative ones do not count from the end.
      Promises are not trusted: a kernel evaluates the function in masked lanes too, so
      ``"promise"`` clips.
    """

    op: str
    dtype: ScalarType
    args: tuple[int, ...] = ()
    """Indices of earlier values."""
    params: tuple[tuple[str, Any], ...] = ()
    """Sorted by name, and hashable."""

    def param(self, name: str) -> Any:
        """The value of a parameter; ``KeyError`` if there is none."""
        return dict(self.params)[name]

    def __reduce__(self):
        return _restored_value, tuple(self)


def _restored_value(op, dtype, args, params) -> Value:
    """A value from its pickle, which does not keep the identity of NaN."""
    same_nan = (
        (name, math.nan if isinstance(value, float) and math.isnan(value) else value)
        for name, value in params
    )
    return Value(op, dtype, args, tuple(same_nan))


class CapturedType(NamedTuple):
    """The type of an array that a function closes over."""

    dtype: str
    """The dtype in memory: also ``"bfloat16"``, ``"float16"``, ``"int8"``, ``"uint8"``, ..."""
    ndim: int
    """The number of dims of the user's array."""


class Program(NamedTuple):
    """A user's function: hashable, and equal to that of the same function traced again.

    >>> alibi = Program(
    ...     (
    ...         Value("score", "float32"),
    ...         Value("head", "int32"),
    ...         Value("read", "float32", (1,), (("array", 0), ("mode", "clip"))),
    ...         Value("add", "float32", (0, 2)),
    ...         Value("constant", "float32", (), (("value", 1.0),)),
    ...     ),
    ...     results=(3, 4, 4),
    ...     arrays=(CapturedType("float32", 1),),
    ... )
    >>> alibi.reads, sorted(alibi.dependence(3))
    ((2,), ['head', 'score'])
    """

    values: tuple[Value, ...]
    """In topological order; equal values appear once, and unused ones not at all."""
    results: tuple[int, ...]
    """``results[0]`` is the function. A score function continues with its derivatives with respect
    to the score and to each of ``float_reads``, in that order. The result of a mask function is a
    bool."""
    arrays: tuple[CapturedType, ...]
    literals: tuple[float | int, ...] = ()
    """The numbers that kernels take as run-time parameters."""

    @property
    def structure(self) -> Program:
        """The program without the values of its literals: it determines the emitted source."""
        return self._replace(literals=())

    @property
    def literal_count(self) -> int:
        """The number of literals, which ``structure`` keeps."""
        indices = [value.param("index") for value in self.values if value.op == "literal"]
        return max(indices, default=-1) + 1

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that are elements of captured arrays."""
        return tuple(i for i, value in enumerate(self.values) if value.op == "read")

    @property
    def float_reads(self) -> tuple[int, ...]:
        """The reads for which a score function has derivatives."""
        return tuple(i for i in self.reads if self.values[i].dtype.startswith("float"))

    def dependence(self, value: int) -> frozenset[str]:
        """The inputs that a value depends on, through the indices of reads too."""
        found: set[str] = set()
        pending, seen = [value], {value}
        while pending:
            current = self.values[pending.pop()]
            if current.op in INPUTS:
                found.add(current.op)
            pending += (fresh := set(current.args) - seen)
            seen |= fresh
        return frozenset(found)
