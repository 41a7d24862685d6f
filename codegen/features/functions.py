"""The user's functions: of the scores, and of the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..functions.program import Program
from .feature import Feature, Operand

if TYPE_CHECKING:
    from ..problem import Problem
    from ..spec import Kernel


class AskedFunctions(NamedTuple):
    """The programs of a call without the values of their literals, which are run-time parameters:
    calls that differ only in these have one kernel.
    """

    score: Program | None
    mask: Program | None


class Functions(Feature[AskedFunctions | None, None]):
    """Captured arrays have a first dim that ``jax.vmap`` makes, and then the user's own dims."""

    name, title = "functions", "functions of the user"
    off = None
    together = None
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
        Operand(
            "mask_captured",
            "B~ ...",
            places=("mask.captured.*",),
            array_dims="B? ...",
            placement="like query or replicated",
        ),
    )

    def compiled(self, problem: Problem, kernel: Kernel) -> None:
        return None

    def family_reasons(self, problem: Problem) -> list[str]:
        asked = problem[self]
        if asked is None:
            return []
        names = [
            name
            for name, program in zip(("score_mod", "Mask.function"), asked, strict=True)
            if program is not None
        ]
        return [f"{name} has no kernels yet: pass implementation='xla'" for name in names]

    def asked_by(self, call: Any) -> AskedFunctions | None:
        mask, score = call.operands.mask.functions, call.options.score_function
        if score is None and not mask:
            return None
        return AskedFunctions(
            None if score is None else score.structure, mask[0].structure if mask else None
        )


FUNCTIONS = Functions()
