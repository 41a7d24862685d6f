"""The user's functions of scores and of the mask, and the delta that their gradients need.

``delta`` is the row sum that a backward subtracts from dP; gradients of captured arrays ask for it
in more digits than the output has.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax_memeff.codegen.functions import emit
from jax_memeff.codegen.functions.program import CapturedType, Program, Value
from jax_memeff.codegen.functions.regions import adds_along_diagonals, diagonal_reads
from jax_memeff.codegen.functions.sums import (
    FIXED_POINT_BITS,
    MOST_STRIPS,
    Sum,
    read_sums,
)

from ..launch import MOST_ARRAYS, MOST_DIMS, CapturedArray
from .feature import (
    Constant,
    CppType,
    Feature,
    KernelTraits,
    Operand,
    ProblemLike,
    SpecLike,
    SupportRow,
)
from .pages import PAGES


class AskedDelta(NamedTuple):
    """Delta as the sum of ``P * dP`` over each row."""

    has_sinks: bool
    """Whether rows have sinks; else the probabilities of a row sum to 1."""


class DeltaFromScores(Feature[AskedDelta | None, AskedDelta | None]):
    """A kernel of its own takes delta from the scores, before the main kernel. Only gradients of
    captured arrays ask for it (jax_memeff/_call/functions.py), so it has no flag and no axis.
    """

    name, title = "delta_from_scores", "delta from the scores"
    off = None
    together = None

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> AskedDelta | None:
        return problem[self]

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        compiled = spec[self]
        return {} if compiled is None else {"kNormalizesDelta": not compiled.has_sinks}

    def gradient_tag(self, compiled: AskedDelta | None) -> str:
        if compiled is None:
            return ""
        return "deltasinks" if compiled.has_sinks else "delta"

    def sort_key(self, compiled: AskedDelta | None) -> tuple:
        return () if compiled is None else (1, *compiled)

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        if spec[self] is not None and not spec.kernel.sums_function_gradients:
            return ["it takes delta from the rounded output"]
        return []

    def words(self, asked: AskedDelta | None) -> str:
        return self.title

    def asked_by(self, call: Any) -> AskedDelta | None:
        return call.delta_from_scores


DELTA_FROM_SCORES = DeltaFromScores()


_ELEMENT_BYTES = {"bool": 1, "uint8": 1, "float16": 2, "bfloat16": 2}
_SCALAR_TYPES = ("float32", "int32", "uint32", "bool")
"""The types that values have in kernels."""

_ARGUMENTS = {
    "score": "score_mod (or a traced scale)",
    "mask": "Mask.function (or | or ~ of masks)",
}
"""The user's arguments from which programs are made."""

_FUNCTION_FLAGS = {"score": "score, b, h, q, k", "mask": "b, h, q, k"}

_SAME_SCORE = Program(
    (Value("score", "float32"), Value("constant", "float32", (), (("value", 1.0),))), (0, 1), ()
)

_LISTED = Program(
    (
        Value("query", "int32"),
        Value("key", "int32"),
        Value("read", "bool", (0, 1), (("array", 0), ("mode", "clip"))),
    ),
    (2,),
    (CapturedType("bool", 2),),
)


class AskedFunctions(NamedTuple):
    """The programs of a call without the values of their literals, which are run-time parameters:
    calls that differ only in literals share one kernel.
    """

    score: Program | None
    mask: Program | None
    bounds: tuple[str, ...] = ()
    """The buffers after those of the mask's captured arrays: one number for each batch index."""
    gradients: tuple[int, ...] = ()
    """The captured arrays of the score function whose gradients the kernels sum."""
    fixed_point: bool = False
    """Whether the kernels sum them in fixed point, so that the order does not matter."""
    strips: int = MOST_STRIPS
    """The largest number of sums that may pass through the shared memory of a kernel."""

    @property
    def read_sums(self) -> tuple[Sum, ...]:
        """How the gradient for each read of the score function is summed."""
        if self.score is None or not self.gradients:
            return ()
        return read_sums(self.score, self.gradients, self.strips)

    @property
    def programs(self) -> dict[str, Program]:
        """The programs that are present, by their names in kernels."""
        programs = {"score": self.score, "mask": self.mask}
        return {name: program for name, program in programs.items() if program is not None}


class Functions(Feature[AskedFunctions | None, AskedFunctions | None]):
    """Captured arrays have a first dim that ``jax.vmap`` adds, followed by the user's own dims."""

    name, title = "functions", "user functions"
    off = None
    together = None
    modifies = "scores"
    positional = True
    per_head = True
    operands = (
        Operand("function_batch_index", "B", places=("functions.batch_index",)),
        Operand("function_head_index", "N", places=("functions.head_index",)),
        Operand(
            "captured",
            "B~ ...",
            places=("captured.*",),
            array_dims="B? ...",
            has_gradient=True,
            placement="like query or replicated",
        ),
        # Or scalars, without dims: traced bounds are part of the mask's function.
        Operand("window_left", "B", places=("mask.traced_windows.*.left",)),
        Operand("window_right", "B", places=("mask.traced_windows.*.right",)),
        Operand(
            "mask_captured",
            "B~ ...",
            places=("mask.captured.*",),
            array_dims="B? ...",
            placement="like query or replicated",
        ),
    )

    support = (
        SupportRow(
            "functions of scores and masks (`score_mod`, `Mask.function`)",
            ({"functions": AskedFunctions(_SAME_SCORE, None)},),
        ),
        SupportRow(
            "lists of KV blocks (`Mask.kv_blocks`)",
            ({"functions": AskedFunctions(None, _LISTED)},),
        ),
    )

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> AskedFunctions | None:
        asked = problem[self]
        if asked is None or not asked.gradients:
            return asked
        return asked._replace(strips=kernel.strips_of_sums(problem.arch))

    def constants(self, spec: SpecLike) -> Mapping[str, Constant | CppType]:
        compiled = spec[self] or AskedFunctions(None, None)
        names = [array.name for array in spec.captured_arrays]
        constants: dict[str, Constant | CppType] = {}
        arrays = names.index("function_head_index") + 1 if compiled.programs else 0
        literals = 0
        for name in ("score", "mask"):
            title, program = name.capitalize(), compiled.programs.get(name)
            constants[f"k{title}Function"] = program is not None
            if program is not None:
                constants[f"{title}Function"] = CppType(f"memeff::function::{title}Program")
                constants[f"k{title}Captured"], constants[f"k{title}Literals"] = arrays, literals
                arrays += len(program.arrays)
                literals += program.literal_count
        constants["kFunctionGradient"] = bool(compiled.gradients)
        if compiled.gradients:
            constants["kFixedPointSums"] = compiled.fixed_point
            constants["kFixedPointBits"] = FIXED_POINT_BITS
            constants["CapturedGradients"] = CppType("memeff::function::CapturedGradients")
        return constants

    def source(self, spec: SpecLike) -> str:
        compiled = spec[self]
        if compiled is None:
            return ""
        structs = (
            emit.source(program, f"{name.capitalize()}Program", precise=_is_precise(spec))
            for name, program in compiled.programs.items()
        )
        return "\n".join([emit.INCLUDES, *structs, _gradients(spec, compiled)])

    def captured_arrays(self, spec: SpecLike) -> tuple[CapturedArray, ...]:
        compiled = spec[self]
        if compiled is None:
            return ()
        return (
            CapturedArray("function_literals"),
            CapturedArray("function_batch_index"),
            CapturedArray("function_head_index"),
            *_arrays("captured", () if compiled.score is None else compiled.score.arrays),
            *_mask_arrays(compiled),
            *((CapturedArray("captured_scale"),) if compiled.fixed_point else ()),
            *(_gradient(compiled, index) for index in compiled.gradients),
        )

    def tag(self, compiled: AskedFunctions | None, kernel: KernelTraits) -> str:
        return "" if compiled is None else f"function{_digest(compiled)}"

    def sort_key(self, compiled: AskedFunctions | None) -> tuple:
        return ("" if compiled is None else _digest(compiled),)

    def separates_heads(self, problem: ProblemLike) -> bool:
        """A row of a block mask belongs to one head. Paged calls have no block mask."""
        return problem.asks(self) and not problem.asks(PAGES)

    def is_linear(self, spec: SpecLike) -> bool:
        """Whether there is a score function that is linear in the difference of key and query."""
        score = (spec[self] or AskedFunctions(None, None)).score
        return score is not None and emit.is_linear(score, precise=_is_precise(spec))

    def diagonal_reads(self, spec: SpecLike) -> int:
        """The number of reads of the score function that are constant along diagonals."""
        score = (spec[self] or AskedFunctions(None, None)).score
        return 0 if score is None else len(diagonal_reads(score))

    def adds_along_diagonals(self, spec: SpecLike) -> bool:
        """Whether the score function, if there is one, adds a number that is the same along a
        diagonal.
        """
        score = (spec[self] or AskedFunctions(None, None)).score
        return score is None or adds_along_diagonals(score)

    def is_light(self, spec: SpecLike) -> bool:
        """Whether the functions take few registers: a score function adds a number that is the same
        along a diagonal, gradients are summed along diagonals, and a mask function reads no array.
        """
        compiled = spec[self] or AskedFunctions(None, None)
        sums_along_diagonals = set(compiled.read_sums) <= {Sum.NONE, Sum.DIAGONAL}
        reads_no_array = compiled.mask is None or not compiled.mask.arrays
        return self.adds_along_diagonals(spec) and sums_along_diagonals and reads_no_array

    def needs_registers(self, spec: SpecLike) -> bool:
        """Whether the functions take registers in the main loop. A mask function takes none in a
        paged kernel that classifies whole tiles, because few tiles take the branch that evaluates
        it. A score function takes none if ``Kernel.adds_score_function``.
        """
        compiled = spec[self] or AskedFunctions(None, None)
        is_decided = spec.kernel.decides_mask_tiles and spec[PAGES].size > 0
        modifies_scores = compiled.score is not None and not spec.kernel.adds_score_function(spec)
        return modifies_scores or (compiled.mask is not None and not is_decided)

    def needs_block_mask(self, compiled: AskedFunctions | None) -> bool:
        return compiled is not None and compiled.mask is not None

    def family_reasons(self, problem: ProblemLike) -> list[str]:
        asked = problem[self]
        if asked is None:
            return []
        reasons = []
        for name, program in asked.programs.items():
            title = _ARGUMENTS[name]
            wide = {value.dtype for value in program.values} - set(_SCALAR_TYPES)
            if wide:
                reasons.append(
                    f"{title} computes with {', '.join(sorted(wide))}; kernels compute with 32 "
                    "bits: cast captured arrays and NumPy numbers, or pass implementation='xla'"
                )
            most = max((array.ndim for array in program.arrays), default=0)
            if most > MOST_DIMS - 1:
                reasons.append(
                    f"{title} reads an array with {most} dims; kernels read at most "
                    f"{MOST_DIMS - 1}: reshape it, or pass implementation='xla'"
                )
        arrays = sum(len(program.arrays) for program in asked.programs.values())
        # The table of arrays also has literals, the indices of batch and heads, and the scale of
        # deterministic sums. Sinks and delta may follow.
        room = MOST_ARRAYS - 5 - asked.fixed_point
        if arrays + len(asked.gradients) > room:
            gradients = f", and {len(asked.gradients)} need gradients" if asked.gradients else ""
            reasons.append(
                f"functions read {arrays} arrays{gradients}; kernels have room for {room} arrays "
                "and gradients together: stack some arrays, or pass implementation='xla'"
            )
        return reasons

    def reasons(self, spec: SpecLike, problem: ProblemLike) -> list[str]:
        compiled = spec[self]
        if compiled != self.compiled(problem, spec.kernel):
            return ["it is compiled with other functions"]
        if compiled is not None and compiled.gradients and not spec.kernel.sums_function_gradients:
            return ["it does not sum gradients of captured arrays"]
        return []

    def asked_by(self, call: Any) -> AskedFunctions | None:
        return call.functions

    def words(self, asked: AskedFunctions | None) -> str:
        return " and ".join(f"a {name} function" for name in (asked.programs if asked else ()))

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Flags for functions, which ``from_flags`` does not read: tracing them needs JAX."""
        for name, arguments in _FUNCTION_FLAGS.items():
            parser.add_argument(
                f"--{name}-function",
                metavar="MODULE:NAME",
                help=f"a function of ({arguments}), which may read arrays of its module",
            )


def _is_precise(spec: SpecLike) -> bool:
    """Hazard: approximate differences depend on the position of a row in its tile."""
    return spec.dtype in ("f32", "tf32") or spec[PAGES].is_invariant


def _arrays(role: str, types: Iterable[CapturedType]) -> Iterator[CapturedArray]:
    for index, array in enumerate(types):
        yield CapturedArray(f"{role}{index}", _ELEMENT_BYTES.get(array.dtype, 4))


def _gradient(functions: AskedFunctions, index: int) -> CapturedArray:
    """The sums for a captured array: words of 64 bits if they are in fixed point."""
    alignment = 8 if functions.fixed_point else 4
    return CapturedArray(f"captured{index}_gradient", alignment, zeroed=True)


def _mask_arrays(functions: AskedFunctions) -> Iterator[CapturedArray]:
    if functions.mask is not None:
        tested_arrays = len(functions.mask.arrays) - len(functions.bounds)
        yield from _arrays("mask_captured", functions.mask.arrays[:tested_arrays])
        yield from (CapturedArray(name) for name in functions.bounds)


def _gradients(spec: SpecLike, functions: AskedFunctions) -> str:
    """A struct with the index of each captured array's gradient in the table of arrays, and with
    how the gradient of each read is summed."""
    if not functions.gradients or functions.score is None:
        return ""
    places = {array.name: place for place, array in enumerate(spec.captured_arrays)}
    gradient_places = (
        str(places.get(f"captured{index}_gradient", -1))
        for index in range(len(functions.score.arrays))
    )
    ways = (f"ReadSum::{read_sum.value}" for read_sum in functions.read_sums)
    return (
        "namespace memeff::function {\n\nstruct CapturedGradients {\n"
        f"  static constexpr int kArrays[] = {{{', '.join(gradient_places)}}};\n"
        f"  static constexpr ReadSum kSums[] = {{{', '.join(ways)}}};\n}};\n\n}}\n"
    )


def _digest(functions: AskedFunctions) -> str:
    """Eight letters that identify the programs in names of kernels. If two digests collide, the
    sources of the kernels still differ."""
    return hashlib.sha256(repr(functions).encode()).hexdigest()[:8]


FUNCTIONS = Functions()
