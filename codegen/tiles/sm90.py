"""Tiles of the sm90 family: every number that was chosen, with the reason for it.

A row is found by the larger of the two padded head dims. Rows of one entry are tried in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

CLASSES = (64, 96, 128, 192, 256)
"""Padded head dims that kernels are compiled for. The copy engine fills them up with zeros."""

ARCH = "sm_90a"
"""wgmma belongs to this architecture alone; sm_90 without the letter takes the sm80 family."""

WARPGROUP_ROWS = 64
"""Rows of a product that a consumer owns: the height of one wgmma."""

WARPGROUP_THREADS = 128

BASIC_COLUMNS = (8, 16, 32, 64, 96, 128, 192, 256)
"""Columns of a product that CuTe offers without being asked for more."""

PART_COLUMNS = 64
"""Columns of the operands that the kernel for the gradient of a shared bias copies at a time."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """One row: the tile of scores a block works on, and the depth of its rings of buffers."""

    query: int
    key: int
    stages: int
    """Buffers of keys and of values; in a backward of queries and of dO."""
    reason: str
    query_stages: int = 2
    """Buffers of queries in a forward: with two, the next tile's arrive while this one's are
    read."""
    modifiers: tuple[str, ...] = ()
    """Which of ``sm80.MODIFIERS`` the row also serves, alone and together."""
    masks: tuple[str, ...] = ("none", "causal", "window")
    """The kinds of mask that the row serves."""
    consumer_groups: int = 1
    """Consumers that share ``query`` rows of a forward and visit the key tiles in turn, for where
    tiles are few. It divides ``stages``."""
    sequential: bool = False
    """Whether a consumer of a float32 forward computes scores when the product with the values of
    the visit before has ended: registers of the one are then those of the other."""
    two_kernel: bool = False
    """A backward in two kernels: one owns ``query`` queries and visits ``key`` keys at a time, the
    other owns ``key`` keys."""
    spill_bytes: int = 0
    """Bytes a thread may store to local memory, where that was measured to be faster than none."""

    @property
    def chunk(self) -> int:
        """No row walks its columns in chunks; see ``sm80.Tile``."""
        return 0

    @property
    def blocks_per_sm(self) -> int:
        """The registers of an SM are dealt out to one block."""
        return 1


_MODIFIERS = ("soft cap", "bias", "dropout", "segments")

_CONSUMER_GROUPS = Tile(
    64,
    128,
    4,
    "two consumers share 64 rows: 128 blocks for 1024 queries of 8 heads, with half of the visits",
    query_stages=1,
    modifiers=(*_MODIFIERS, "a boolean mask"),
    consumer_groups=2,
)
_NARROW_CONSUMER_GROUPS = dataclasses.replace(
    _CONSUMER_GROUPS, key=64, reason="as 64; a team has two buffers of its own"
)

FORWARD: Mapping[int, tuple[Tile, ...]] = {
    64: (
        _CONSUMER_GROUPS,
        Tile(
            192,
            128,
            2,
            "three consumers read K and V a third less often: 510 TFLOP/s at T 8192 on an H200, "
            "with two 428",
            modifiers=("soft cap", "dropout"),
            masks=("none", "causal"),
        ),
        Tile(
            128,
            128,
            2,
            "with three consumers a window and a boolean mask spill",
            modifiers=(*_MODIFIERS, "a boolean mask"),
        ),
    ),
    96: (_NARROW_CONSUMER_GROUPS, Tile(128, 128, 2, "as 128", modifiers=_MODIFIERS)),
    128: (
        _NARROW_CONSUMER_GROUPS,
        Tile(128, 128, 2, "192 KB: two buffers of everything", modifiers=_MODIFIERS),
        Tile(128, 64, 2, "a bias of 32 bits takes 36 KB, and 68 above", modifiers=_MODIFIERS),
    ),
    192: (
        Tile(
            128,
            96,
            2,
            "S 48 and O 96 registers a thread",
            query_stages=1,
            modifiers=tuple(name for name in _MODIFIERS if name != "bias"),
        ),
        Tile(
            128,
            64,
            2,
            "a warp copies rows of the bias whose vectors divide its lanes",
            query_stages=1,
            modifiers=_MODIFIERS,
        ),
    ),
    256: (
        Tile(
            128,
            80,
            2,
            "224 KB: 692 TFLOP/s at T 8192 on an H200, with 64 keys 638; causal 619, but at T 512 "
            "320, with 64 keys 334",
            query_stages=1,
            modifiers=("dropout",),
            masks=("none",),
            spill_bytes=32,
        ),
        Tile(
            128,
            64,
            2,
            "room for a bias; S 32 and O 128 registers a thread",
            query_stages=1,
            modifiers=_MODIFIERS,
        ),
    ),
}

_F32_MODIFIERS = (*_MODIFIERS, "a boolean mask")
_F32_128 = (
    Tile(
        128,
        64,
        2,
        "198 KB; the producers spill",
        query_stages=1,
        modifiers=("soft cap", "dropout"),
        spill_bytes=8,
    ),
    Tile(
        128,
        64,
        2,
        "a boolean mask spills 250 bytes, and modifiers together",
        query_stages=1,
        modifiers=_F32_MODIFIERS,
        sequential=True,
    ),
    Tile(
        128,
        64,
        1,
        "a bias takes 36 KB more, and spills 200 bytes",
        query_stages=1,
        modifiers=_F32_MODIFIERS,
        sequential=True,
    ),
)

FORWARD_F32: Mapping[int, tuple[Tile, ...]] = {
    64: (
        Tile(128, 128, 2, "200 KB", modifiers=("dropout",), masks=("none", "causal")),
        Tile(
            128,
            128,
            2,
            "a window, a soft cap and segment ids spill up to 60 bytes, a boolean mask 560",
            modifiers=_F32_MODIFIERS,
            sequential=True,
        ),
        Tile(
            128,
            64,
            2,
            "a bias takes 36 KB, and 68 above",
            modifiers=_F32_MODIFIERS,
        ),
    ),
    96: _F32_128,
    128: _F32_128,
}
"""Of f32 in products of f16."""

_TWO_KERNEL = Tile(
    128,
    64,
    2,
    "dq takes 128 registers a thread, as do dk and dv of 64 keys; 226 KB at head dim 256",
    modifiers=("soft cap", "dropout", "segments", "a boolean mask"),
    two_kernel=True,
)
_TWO_KERNEL_BIAS = dataclasses.replace(
    _TWO_KERNEL,
    reason="lanes load the bias for dq; for dk and dv it has a buffer, at head dim 256 one of P's",
    modifiers=("dropout", "bias"),
)

BACKWARD: Mapping[int, tuple[Tile, ...]] = {
    64: (
        Tile(
            64,
            128,
            2,
            "with 128 queries S and dP take 128 registers a thread, and 26 spill",
            modifiers=_MODIFIERS,
        ),
        Tile(
            64,
            128,
            2,
            "with a boolean mask the kernel for the gradient of a shared bias spills",
            modifiers=("soft cap", "dropout", "segments", "a boolean mask"),
        ),
    ),
    128: (
        Tile(
            64,
            128,
            2,
            "dk and dv take 128 registers a thread, S and dP 64; a soft cap spills one more",
            modifiers=("soft cap", "bias", "dropout"),
            spill_bytes=4,
        ),
        Tile(
            64,
            128,
            2,
            "with dropout, too, a soft cap spills 72",
            modifiers=("soft cap", "segments"),
        ),
        Tile(64, 128, 2, "as 64", modifiers=("bias", "dropout", "segments")),
        Tile(64, 128, 2, "as 64", modifiers=("dropout", "segments", "a boolean mask")),
    ),
    192: (_TWO_KERNEL, _TWO_KERNEL_BIAS),
    256: (
        dataclasses.replace(_TWO_KERNEL, modifiers=("dropout", "segments", "a boolean mask")),
        dataclasses.replace(
            _TWO_KERNEL,
            reason="the derivative of a soft cap takes 32 registers; with dropout 24 spill",
            modifiers=("soft cap", "segments"),
        ),
        _TWO_KERNEL_BIAS,
    ),
}


@dataclasses.dataclass(frozen=True)
class KeyBuffers:
    """Buffers of the kernel of a divided backward that owns keys; dS has two."""

    visit: int
    """Of queries, and of dO."""
    probability: int


KEY_BUFFERS = (KeyBuffers(3, 2), KeyBuffers(3, 1), KeyBuffers(2, 2), KeyBuffers(2, 1))
"""The first that fits is taken. Of two buffers dK and dV read one until the next visit begins, and
that waits for its queries: at head dims (192, 128) a third saves 11 % of the kernel's time."""

LARGEST_ONE_KERNEL_DIM = max(dim for dim, tiles in BACKWARD.items() if not tiles[0].two_kernel)
"""The largest head dim with one kernel for all gradients."""
