"""Tiles of the sm80 family on sm_75: 64 KB of shared memory, no cp.async, f16 alone.

Copies pass registers here and a warp waits for its own, so two blocks share an SM where that fits,
or eight warps: they hide each other's waits. For the same reason nothing is loaded ahead. 1024
threads an SM have 64 registers, and the 256 of these rows all they can address. Nothing here was
measured.
"""

from __future__ import annotations

from jax_memeff.codegen.tiles.tile import LARGE_DIM, Part, Tile


def _backward(query: int, key: int, warps: int, blocks: int, reason: str) -> Tile:
    return Tile(query, key, warps, blocks, reason, query_buffers=1)


def _split(query: int, key: int, warps: int, key_warps: int, reason: str) -> Tile:
    return Tile(query, key, warps, 1, reason, key_warps=key_warps, stages=2)


_FORWARD = {
    32: (
        Tile(128, 64, 4, 2, "16 KB"),
        Tile(128, 32, 4, 2, "with a bias 64 keys leave room for one block"),
    ),
    64: (
        Tile(128, 64, 4, 2, "32 KB: two blocks"),
        Tile(64, 32, 4, 2, "with a bias 64 keys leave room for one block"),
    ),
    96: (
        Tile(64, 32, 4, 2, "24 KB: two blocks"),
        Tile(64, 32, 4, 1, "with a 32-bit bias two blocks do not fit"),
    ),
    128: (
        Tile(64, 32, 4, 2, "32 KB: two blocks"),
        Tile(128, 32, 8, 1, "with a bias two blocks do not fit"),
        Tile(64, 32, 4, 1, "with a 32-bit bias 128 queries need 68 KB"),
    ),
    192: (Tile(64, 32, 4, 1, "48 KB; 128 queries leave room for 16 keys"),),
    256: (
        Tile(64, 32, 4, 1, "64 KB, all there is"),
        Tile(64, 16, 4, 1, "with a bias 32 keys need 68 KB"),
    ),
    LARGE_DIM: (Tile(64, 64, 8, 1, "41 KB; 128 keys need 65 KB", chunk=128),),
}

_BACKWARD = {
    32: (
        _backward(64, 128, 8, 1, "57 KB: the long key tile halves the passes over dQ"),
        _backward(64, 64, 8, 1, "with a bias 128 keys need 73 KB"),
    ),
    64: (
        _backward(64, 64, 8, 1, "49 KB"),
        _backward(32, 64, 8, 1, "with a 32-bit bias 64 queries need 67 KB"),
    ),
    96: (
        _backward(32, 32, 4, 2, "28 KB: two blocks"),
        _backward(32, 32, 4, 1, "with a bias two blocks do not fit"),
    ),
    128: (
        _backward(32, 64, 8, 1, "56 KB"),
        _backward(32, 32, 4, 1, "with a 32-bit bias 64 keys need 65 KB"),
    ),
    192: (_backward(32, 32, 4, 1, "52 KB"),),
    256: (),  # 32x32, the least that four warps can share, needs 68 KB: the wide kernels serve it
    LARGE_DIM: (Tile(64, 64, 8, 1, "49 KB", chunk=128),),
}

_SPLIT = {
    32: (
        _split(16, 128, 4, 4, "33 KB"),
        _split(64, 128, 4, 2, "36 KB"),
    ),
    64: (
        _split(16, 64, 4, 4, "34 KB; 128 keys need 66 KB"),
        _split(64, 64, 4, 2, "40 KB"),
    ),
    96: (
        _split(16, 64, 4, 4, "51 KB"),
        _split(64, 64, 4, 2, "60 KB"),
    ),
    128: (
        _split(16, 32, 2, 2, "36 KB; 64 keys need 68 KB"),
        _split(64, 32, 8, 2, "48 KB; with 4 warps 32 rows each spill"),
    ),
    192: (
        _split(16, 32, 2, 2, "54 KB"),
        _split(64, 16, 4, 1, "48 KB"),
    ),
    256: (_split(64, 16, 4, 1, "64 KB, all there is, and 16 rows need no less for two warps"),),
}

PART = Part(
    name="sm_75",
    max_shared_bytes=64 * 1024,
    forward=_FORWARD,
    backward=_BACKWARD,
    split=_SPLIT,
    system_bytes=0,
    dtypes=("f16",),
)
