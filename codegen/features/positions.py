"""Global positions of row 0 and column 0: ``Offsets`` of a call, shards, parts of a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dropout import DROPOUT
from .feature import Flag, Operand
from .mask import MASK

if TYPE_CHECKING:
    from ..problem import Problem
    from ..spec import Kernel


class Positions(Flag):
    """Windows and dropout count from them; other kernels are compiled without.

    They are a constant because loading one for each batch index costs the dropout forward up to 4 %
    at head dim 64 (H200).
    """

    def compiled(self, problem: Problem, kernel: Kernel) -> bool:
        return problem[self] and (problem.asks(MASK) or problem.asks(DROPOUT))


POSITIONS = Positions(
    "positions",
    "positions",
    constant="kPositions",
    tag="positions",
    asked_by=lambda call: call.operands.position is not None,
    operands=(
        # Or scalars, which have no dims and are repeated for the kernels.
        Operand("query_position", "B", places=("position.query",)),
        Operand("key_position", "B", places=("position.key",)),
    ),
    support="offsets of shards, one for all batch indices or one for each",
)
POSITIONS.alone = ({"positions": True, "mask": "causal"},)
