"""Global positions of row 0 and column 0, for ``Offsets``, shards and the parts of a ring."""

from __future__ import annotations

from .feature import (
    Flag,
    KernelTraits,
    Operand,
    ProblemLike,
)


class Positions(Flag):
    """Only kernels with a ``positional`` feature are compiled with positions.

    Whether there are positions is a compile-time constant, because loading one for each batch index
    costs a forward that draws random bits up to 4 % at head dim 64 (H200).
    """

    def compiled(self, problem: ProblemLike, kernel: KernelTraits) -> bool:
        return problem[self] and problem.is_positional


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
