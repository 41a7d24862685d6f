"""Tiles of the sm80 family for 32-bit elements, which take twice the shared memory of 16-bit ones.

Rows are found as in ``sm80``: by the part of the table and the larger of the two padded head dims.
Figures are TFLOP/s at T 8192 on an H200, in three TF32 products.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax_memeff.codegen.tiles import sm80
from jax_memeff.codegen.tiles.sm80 import LARGE_DIM, Tile

_Rows = Mapping[int, tuple[Tile, ...]]

_FORWARD_256 = Tile(64, 16, 4, 1, "100 KB; parked, or it spills", stage_registers=True)
_BACKWARD_64_SHORT = Tile(
    32, 64, 4, 2, "forward+backward 62 without a spill, 3 blocks of 168 registers 63"
)

_LARGE_DIM_FORWARD = Tile(128, 128, 8, 1, "130 KB; chunks of 256 columns spill 48 bytes", chunk=128)
_LARGE_DIM_BACKWARD = Tile(
    64, 128, 8, 1, "113 KB; with 128 queries modifiers spill up to 220 bytes", chunk=128
)

_FORWARD: _Rows = {
    32: (
        Tile(128, 64, 4, 2, "32 KB: two blocks everywhere", modifiers=()),
        Tile(128, 32, 4, 2, "with 64 keys all modifiers together spill 76 bytes"),
    ),
    64: (Tile(128, 32, 4, 2, "67 without a spill; 64 keys spill 460 bytes, 66"),),
    96: (Tile(64, 32, 4, 2, "48 KB: two blocks everywhere; 128 queries spill 100 bytes"),),
    128: (Tile(64, 32, 4, 2, "64 KB: two blocks; 128 queries spill 196 bytes"),),
    192: (
        Tile(
            64,
            16,
            4,
            2,
            "76 KB: two blocks; parked, or dropout and bias spill",
            stage_registers=True,
        ),
    ),
    256: (Tile(64, 16, 4, 2, "100 KB: two blocks; parked, or it spills", stage_registers=True),),
    LARGE_DIM: (_LARGE_DIM_FORWARD,),
}

_SM80: Mapping[str, _Rows] = {
    "forward": {
        **_FORWARD,
        192: (
            *_FORWARD[192],
            Tile(64, 16, 4, 1, "with a bias two blocks do not fit", stage_registers=True),
        ),
        256: (_FORWARD_256,),
    },
    "backward": {
        32: (
            Tile(64, 64, 4, 2, "73 KB: two blocks"),
            Tile(32, 64, 4, 2, "with a bias 64 query rows leave room for one block"),
        ),
        64: (
            _BACKWARD_64_SHORT,
            Tile(32, 64, 4, 1, "with a bias two blocks do not fit"),
        ),
        96: (
            Tile(64, 64, 8, 1, "153 KB of 163 KB"),
            Tile(32, 64, 4, 1, "with a bias 64 query rows need 171 KB"),
        ),
        128: (Tile(32, 64, 8, 1, "128 KB of 163 KB; 64 query rows need 192 KB"),),
        192: (Tile(32, 32, 4, 1, "128 KB of 163 KB; 64 keys need 184 KB"),),
        256: (
            Tile(
                32,
                32,
                4,
                1,
                "136 KB of 163 KB; two query tiles need 168 KB",
                query_buffers=1,
                spill_bytes=8,
            ),
        ),
        LARGE_DIM: (_LARGE_DIM_BACKWARD,),
    },
}

_SM86: Mapping[str, _Rows] = {
    "forward": {
        **_FORWARD,
        64: (
            *_FORWARD[64],
            Tile(64, 32, 4, 2, "with a bias 128 queries leave room for one block"),
        ),
        96: (
            *_FORWARD[96],
            Tile(64, 32, 4, 1, "with a bias two blocks do not fit"),
        ),
        128: (Tile(64, 32, 4, 1, "64 KB of 99 KB"),),
        192: (
            Tile(
                64,
                16,
                4,
                1,
                "76 KB of 99 KB; parked, or dropout and bias spill",
                stage_registers=True,
            ),
        ),
        256: (
            Tile(64, 16, 4, 1, "96 KB of 99 KB, which leaves no place to park", spill_bytes=32),
            Tile(32, 16, 2, 1, "with a bias 64 queries need 102 KB"),
        ),
        LARGE_DIM: (Tile(128, 64, 8, 1, "82 KB of 99 KB; 128 keys need 130 KB", chunk=128),),
    },
    "backward": {
        32: (Tile(64, 64, 4, 1, "73 KB of 99 KB"),),
        64: (Tile(32, 64, 4, 1, "73 KB of 99 KB; 64 query rows need 113 KB"),),
        96: (Tile(32, 32, 4, 1, "68 KB of 99 KB; 64 keys need 100 KB"),),
        128: (Tile(32, 32, 4, 1, "88 KB of 99 KB"),),
        # Four warps need 32x32 elements of scores, and these 104 KB at 192 columns: the wide
        # kernels serve them.
        LARGE_DIM: (Tile(64, 64, 8, 1, "65 KB of 99 KB; 128 keys need 113 KB", chunk=128),),
    },
}

_SM90: Mapping[str, _Rows] = {
    "forward": _FORWARD,
    "backward": {
        **_SM80["backward"],
        64: (
            Tile(
                64,
                64,
                4,
                2,
                "forward+backward 67 with a spill, 113 KB: two blocks; 8 warps 59, 64x128 64",
                modifiers=(),
                spill_bytes=40,
            ),
            _BACKWARD_64_SHORT,
        ),
        128: (
            Tile(64, 64, 8, 1, "forward+backward 62; 32x64 59, 32x32 in 2 blocks 60", modifiers=()),
            Tile(32, 64, 8, 1, "with 64 query rows soft cap spills 28 bytes"),
        ),
        192: (Tile(32, 64, 8, 1, "184 KB of 227 KB"),),
        256: (Tile(32, 32, 4, 1, "168 KB of 227 KB", spill_bytes=24),),
    },
}

_BY_PART = {"sm_80, sm_87": _SM80, "sm_86, sm_89, sm_120, sm_121": _SM86}


def rows(part: sm80.Part, direction: str, padded_dim: int) -> tuple[Tile, ...]:
    """The rows of a padded head dim, in the order they are tried; none where only the wide kernels
    fit.

    >>> rows(sm80.part("sm_90a"), "forward", 64)[0].query
    128
    """
    return _BY_PART.get(part.name, _SM90)[direction].get(padded_dim, ())
