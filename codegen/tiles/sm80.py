"""Tiles of the sm80 family: every number that was chosen, with the reason for it.

A row is found by the part of the table (how much shared memory a block may have) and by the larger
of the two padded head dims. Rows of one entry are tried in order.
"""

from __future__ import annotations

import dataclasses

from jax_memeff.codegen import arch as archs
from jax_memeff.codegen.tiles import sm75
from jax_memeff.codegen.tiles.tile import LARGE_DIM, Part, Tile

CLASSES = (32, 64, 96, 128, 192, 256)
"""Padded head dims that kernels are compiled for; a dim takes the smallest that holds it."""

TUNED_DIMS = (
    (32, 32),
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (LARGE_DIM, LARGE_DIM),
)
"""(head_dim, value_dim) classes that ``build --all`` compiles; (192, 128) is multi-head latent
attention. Other pairs take the tile of the larger class."""

FIRST_CAPABILITY = 75
"""ldmatrix, and mma.sync in the fragments that every kernel of the family uses, begin with sm_75;
compilers of CUDA 13 know nothing older."""

_NO_BOOLEAN = ("soft cap", "bias", "dropout", "segments")
_NO_SOFT_CAP = ("bias", "dropout", "segments")

_FORWARD_64 = (
    Tile(128, 128, 4, 2, "48 KB: two blocks per SM everywhere", modifiers=()),
    Tile(
        128, 64, 4, 2, "half the score accumulators: with 128 keys soft cap, bias and dropout spill"
    ),
)
_FORWARD_96 = (
    Tile(128, 64, 4, 2, "54 KB: two blocks per SM; parked, or it spills", stage_registers=True),
    Tile(64, 64, 4, 2, "54 KB with a 32-bit bias"),
)
_FORWARD_128 = (
    Tile(
        128,
        64,
        4,
        2,
        "70 KB: two blocks; parked, or it spills; with bias 260 TFLOP/s, 64x64 213, at T 2048 on "
        "an H200",
        modifiers=_NO_BOOLEAN,
        stage_registers=True,
    ),
    Tile(64, 64, 4, 2, "half the accumulators: with 128 queries a boolean mask spills"),
)
_FORWARD_192 = Tile(128, 64, 8, 1, "96 KB: one block per SM, so 8 warps to hide latency")


def _split(
    query: int, key: int, warps: int, blocks: int, key_warps: int, stages: int, reason: str
) -> Tile:
    return Tile(query, key, warps, blocks, reason, key_warps=key_warps, stages=stages)


# Of splits with one key warp for each warp no block waits for another warp of its own; 64 rows need
# the registers of two warps. Copies in flight hide the latency of the memory: some 64 KB for an SM.
_SPLIT_16x128 = _split(16, 128, 4, 2, 4, 3, "hd 64: 4.3 TB/s on an H200, as with 3 or 4 blocks")
_SPLIT_16x64 = _split(16, 64, 4, 2, 4, 3, "hd 128: 4.46 TB/s on an H200; 2 stages 4.06")
_SPLIT_64x128 = _split(
    64, 128, 4, 2, 2, 2, "hd 64: 134 us for T 32 of S 4096 on an H200, 64x256 154"
)
_SPLIT_64x64 = (
    dataclasses.replace(
        _split(64, 64, 4, 2, 2, 3, "hd 128: 4.28 TB/s on an H200, 8 warps 3.71"), modifiers=()
    ),
    _split(64, 64, 8, 1, 2, 3, "with 4 warps soft cap, bias and dropout spill"),
)
_LARGE_DIM_FORWARD = (
    Tile(
        128,
        256,
        8,
        1,
        "162 KB: 256 keys halve the passes over the sums of out",
        modifiers=(),
        chunk=256,
        spill_bytes=24,
    ),
    Tile(
        128,
        128,
        8,
        1,
        "98 KB; half the score accumulators, as modifiers need",
        chunk=256,
        spill_bytes=16,
    ),
)

_LARGE_DIM_BACKWARD = (
    Tile(
        128,
        128,
        8,
        1,
        "130 KB of 163 KB: square, as S and dP read both operands",
        modifiers=(),
        chunk=256,
        spill_bytes=24,
    ),
    Tile(
        64,
        128,
        8,
        1,
        "97 KB; with 128 queries modifiers spill up to 900 bytes, here pointers, between products",
        chunk=256,
        spill_bytes=24,
    ),
)

_SM80 = Part(
    name="sm_80, sm_87",
    max_shared_bytes=163 * 1024,
    forward={
        32: _FORWARD_64,
        64: _FORWARD_64,
        96: _FORWARD_96,
        128: _FORWARD_128,
        192: (_FORWARD_192,),
        256: (
            Tile(128, 64, 8, 1, "128 KB; two blocks of 96 KB would not fit", modifiers=()),
            Tile(128, 32, 8, 1, "with 64 keys soft cap spills"),
        ),
        LARGE_DIM: _LARGE_DIM_FORWARD,
    },
    backward={
        32: (
            Tile(128, 128, 8, 1, "as 64: a square tile reads dQ least often", modifiers=()),
            Tile(64, 128, 8, 1, "as 64 with modifiers"),
        ),
        64: (
            Tile(128, 128, 8, 1, "144 KB of 163 KB with two query tiles", modifiers=()),
            Tile(64, 128, 8, 1, "with 128 queries soft cap spills 220 bytes"),
        ),
        96: (Tile(64, 128, 8, 1, "as 128: the long key tile halves the passes over dQ"),),
        128: (
            Tile(64, 128, 8, 1, "144 KB of 163 KB; 128 queries need 240 KB", modifiers=()),
            Tile(64, 64, 8, 1, "with 128 keys soft cap, bias and dropout spill 24 bytes"),
        ),
        192: (Tile(64, 64, 8, 1, "136 KB of 163 KB"),),
        256: (Tile(32, 64, 8, 1, "120 KB of 163 KB; 64 query rows would need 176 KB"),),
        LARGE_DIM: _LARGE_DIM_BACKWARD,
    },
    split={
        32: (_SPLIT_16x128, _SPLIT_64x128),
        64: (
            _split(16, 128, 4, 2, 4, 2, "66 KB: two blocks per SM"),
            _SPLIT_64x128,
        ),
        96: (_SPLIT_16x64, _split(64, 64, 4, 1, 2, 3, "84 KB of 163 KB")),
        128: (
            _split(16, 64, 4, 2, 4, 2, "68 KB: two blocks per SM"),
            _split(64, 64, 4, 1, 2, 3, "112 KB of 163 KB"),
        ),
        192: (
            _split(16, 64, 4, 1, 4, 3, "150 KB of 163 KB"),
            _split(64, 64, 8, 1, 2, 2, "120 KB of 163 KB"),
        ),
        256: (
            _split(16, 64, 4, 1, 4, 2, "136 KB of 163 KB"),
            _split(64, 64, 8, 1, 2, 2, "160 KB of 163 KB"),
        ),
    },
)

_SM86 = Part(
    name="sm_86, sm_89, sm_120, sm_121",
    max_shared_bytes=99 * 1024,
    forward={
        32: (*_FORWARD_64, Tile(128, 32, 4, 2, "with a bias: two blocks in 100 KB")),
        64: (*_FORWARD_64, Tile(128, 32, 4, 2, "with a bias: two blocks in 100 KB")),
        96: (
            Tile(128, 32, 4, 2, "36 KB: the short key tile keeps two blocks in 100 KB"),
            Tile(64, 32, 4, 2, "with a 32-bit bias: two blocks in 100 KB"),
        ),
        128: (
            Tile(128, 32, 4, 2, "48 KB: the short key tile keeps two blocks in 100 KB"),
            Tile(64, 32, 4, 2, "with a bias: two blocks in 100 KB"),
        ),
        192: (Tile(64, 64, 4, 1, "72 KB of 99 KB"),),
        256: (
            Tile(64, 64, 4, 1, "96 KB of 99 KB", modifiers=()),
            Tile(64, 32, 4, 1, "with 64 keys soft cap spills"),
        ),
        LARGE_DIM: (_LARGE_DIM_FORWARD[1],),
    },
    backward={
        32: (Tile(64, 128, 8, 1, "as 64"),),
        64: (
            Tile(64, 128, 8, 1, "89 KB of 99 KB; 128 query rows would need 144 KB"),
            Tile(64, 64, 8, 1, "with a bias: 66 or 75 KB of 99 KB"),
        ),
        96: (Tile(64, 64, 8, 1, "76 KB of 99 KB; 128 keys would need 116 KB"),),
        128: (
            Tile(64, 64, 8, 1, "97 KB of 99 KB"),
            Tile(32, 64, 8, 1, "with a bias: 69 or 74 KB of 99 KB"),
        ),
        192: (
            Tile(32, 64, 8, 1, "92 KB of 99 KB; 64 query rows would need 136 KB"),
            Tile(32, 32, 4, 1, "with a 32-bit bias: 70 KB of 99 KB"),
        ),
        256: (Tile(32, 32, 4, 1, "84 KB of 99 KB; 64 keys need 120 KB; 4 warps share 32x32"),),
        LARGE_DIM: (_LARGE_DIM_BACKWARD[1],),
    },
    split={
        32: (
            _split(16, 128, 4, 1, 4, 3, "49 KB of 99 KB"),
            _split(64, 128, 4, 1, 2, 2, "36 KB of 99 KB"),
        ),
        64: (
            _split(16, 128, 4, 1, 4, 2, "66 KB of 99 KB"),
            _split(64, 128, 4, 1, 2, 2, "72 KB of 99 KB"),
        ),
        96: (
            _split(16, 64, 4, 1, 4, 3, "75 KB of 99 KB"),
            _split(64, 64, 4, 1, 2, 3, "84 KB of 99 KB"),
        ),
        128: (
            _split(16, 64, 4, 1, 4, 2, "68 KB of 99 KB"),
            _split(64, 64, 4, 1, 2, 2, "80 KB of 99 KB"),
        ),
        192: (
            _split(16, 32, 2, 1, 2, 3, "78 KB of 99 KB; with 64 keys two stages need 102 KB"),
            _split(64, 32, 8, 1, 2, 2, "72 KB of 99 KB"),
        ),
        256: (
            _split(16, 32, 2, 1, 2, 2, "72 KB of 99 KB"),
            _split(64, 32, 8, 1, 2, 2, "96 KB of 99 KB"),
        ),
    },
)

_SM90 = Part(
    name="sm_90, sm_100, sm_103, sm_110",
    max_shared_bytes=227 * 1024,
    forward={
        **_SM80.forward,
        256: (
            Tile(64, 64, 4, 2, "96 KB: two blocks hide each other's softmax", modifiers=()),
            Tile(64, 32, 4, 2, "with 64 keys soft cap spills"),
        ),
    },
    backward={
        **_SM80.backward,
        64: (
            _SM80.backward[64][0],
            Tile(
                64,
                64,
                4,
                2,
                "with bias, forward+backward 180 TFLOP/s at T 2048 on an H200; 64x128 with eight "
                "warps 168",
                modifiers=_NO_BOOLEAN,
            ),
            _SM80.backward[64][1],
        ),
        128: (
            Tile(64, 128, 8, 1, "145 KB of 227 KB", modifiers=_NO_SOFT_CAP, masks=("none",)),
            Tile(
                64,
                64,
                4,
                2,
                "causal forward+backward 266 TFLOP/s at T 2048 on an H200, 64x128 254: less waste "
                "at the diagonal",
                modifiers=_NO_SOFT_CAP,
                masks=("causal", "window"),
            ),
            Tile(64, 64, 8, 1, "with 128 keys soft cap beside a bias spills, and a boolean mask"),
        ),
        256: (
            Tile(
                64,
                64,
                8,
                1,
                "with its spills 253 TFLOP/s, forward+backward at T 2048 on an H200; 32x64, which "
                "has none, 223",
                spill_bytes=64,
            ),
        ),
        LARGE_DIM: _LARGE_DIM_BACKWARD,
    },
    split={
        32: (_SPLIT_16x128, _SPLIT_64x128),
        64: (_SPLIT_16x128, _SPLIT_64x128),
        96: (_SPLIT_16x64, *_SPLIT_64x64),
        128: (_SPLIT_16x64, *_SPLIT_64x64),
        192: (
            _split(16, 64, 4, 1, 4, 4, "198 KB of 227 KB"),
            _split(64, 64, 8, 1, 2, 3, "168 KB of 227 KB; with 4 warps 32 rows each spill"),
        ),
        256: (
            _split(16, 64, 4, 1, 4, 3, "4.5 TB/s on an H200, as with 2 stages"),
            _split(64, 64, 8, 1, 2, 3, "224 KB of 227 KB; with 4 warps 32 rows each spill"),
        ),
    },
)

_BY_CAPABILITY = {
    75: sm75.PART,
    80: _SM80,
    87: _SM80,
    90: _SM90,
    100: _SM90,
    103: _SM90,
    110: _SM90,
}


def part(arch: str) -> Part:
    """The part of the table that serves ``arch``.

    An architecture that is not listed gets the tiles of 99 KB: what every GPU from sm_80 on gives a
    block.

    >>> part("sm_90a").max_shared_bytes // 1024, part("sm_89").max_shared_bytes // 1024
    (227, 99)
    """
    return _BY_CAPABILITY.get(archs.capability(arch), _SM86)
