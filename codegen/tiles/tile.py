"""What a row of the sm80 family's tables says, and what the rows of one architecture belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

LARGE_DIM = 65536
"""The class of head dims above all others, up to this one: a kernel that takes them in steps and
chunks."""

PIECES = "rows that are moved in pieces"
MODIFIERS = ("soft cap", "bias", "dropout", "segments", "a boolean mask", PIECES)
"""What needs registers of its own in the main loop."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """One row: the tile of scores a block works on, its warps, and how many blocks share an SM."""

    query: int
    key: int
    warps: int
    blocks_per_sm: int
    reason: str
    modifiers: tuple[str, ...] = MODIFIERS
    """Which of ``MODIFIERS`` the row also serves, alone and together."""
    masks: tuple[str, ...] = ("none", "causal", "window")
    """The kinds of mask that the row serves."""
    stage_registers: bool = False
    """Whether row statistics and pointers of a forward wait in shared memory during products, where
    the accumulators of scores and output leave no registers for them."""
    key_warps: int = 1
    """Of a split forward: among how many warps (or teams of them) the keys of a tile are shared."""
    stages: int = 1
    """Of a split forward: tiles of keys and values in shared memory."""
    chunk: int = 0
    """Columns of out or of a gradient that a block of a wide kernel computes at a time."""
    query_buffers: int = 2
    """Query tiles of a backward in shared memory; with one, the next is not loaded ahead."""
    spill_bytes: int = 0
    """Bytes a thread may store to local memory, where that was measured to be faster than none."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Architectures that have the same shared memory, and the tiles chosen for them."""

    name: str
    max_shared_bytes: int
    """What one block may have after opting in."""
    forward: Mapping[int, tuple[Tile, ...]]
    backward: Mapping[int, tuple[Tile, ...]]
    split: Mapping[int, tuple[Tile, ...]]
    """Forwards whose keys are split, for few query rows."""
    system_bytes: int = 1024
    """What every block takes for the system beside its own shared memory."""
    dtypes: tuple[str, ...] = ("f16", "bf16", "f32", "tf32")
    """What the tensor cores multiply."""

    def shared_bytes(self, blocks: int) -> int:
        """What each of ``blocks`` blocks on an SM may have."""
        return (self.max_shared_bytes + self.system_bytes) // blocks - self.system_bytes
