"""The user's functions of scores, compiled into the main loops."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..functions import emit
from ..launch import CapturedArray
from .feature import Constant, CppType, Feature

if TYPE_CHECKING:
    from ..functions.program import Program
    from ..problem import Problem
    from ..spec import Kernel, KernelSpec


_STRUCT = "ScoreProgram"


class ScoreFunction(Feature["Program | None", "Program | None"]):
    """``score_mod``: a program without the values of its literals, so that functions that differ in
    them share a kernel."""

    name, title = "score_function", "a function of scores"
    off = None
    together = None
    per_head = True
    modifier = True

    def check(self, asked: Program | None) -> None:
        pass

    def compiled(self, problem: Problem, kernel: Kernel) -> Program | None:
        return problem[self]

    def constants(self, spec: KernelSpec) -> Mapping[str, Constant | CppType]:
        found: dict[str, Constant | CppType] = {"kScoreFunction": spec[self] is not None}
        if spec[self] is not None:
            found["Function"] = CppType(f"memeff::function::{_STRUCT}")
            names = [array.name for array in spec.captured_arrays]
            found["kFirstCapturedArray"] = names.index("head_index") + 1
        return found

    def captured_arrays(self, spec: KernelSpec) -> tuple[CapturedArray, ...]:
        program = spec[self]
        if program is None:
            return ()
        return (
            CapturedArray("function_literals", "*"),
            CapturedArray("batch_index", "B"),
            CapturedArray("head_index", "N"),
            *(
                CapturedArray(f"captured{index}", " ".join(["B~", *"*" * array.ndim]), 1)
                for index, array in enumerate(program.arrays)
            ),
        )

    def source(self, spec: KernelSpec) -> str:
        if (program := spec[self]) is None:
            return ""
        text = emit.source(program, _STRUCT, precise=spec.dtype in ("f32", "tf32"))
        return emit.INCLUDES + "\n" + text

    def tag(self, compiled: Program | None, kernel: Kernel) -> str:
        return "" if compiled is None else f"function{digest(compiled)}"

    def sort_key(self, compiled: Program | None) -> tuple:
        return ("" if compiled is None else digest(compiled),)

    def reasons(self, spec: KernelSpec, problem: Problem) -> list[str]:
        return []

    def asked_by(self, call: object) -> Program | None:
        return None


def digest(program: Program) -> str:
    """Eight letters that name a program in kernel names."""
    return hashlib.sha256(repr(program).encode()).hexdigest()[:8]


SCORE_FUNCTION = ScoreFunction()
