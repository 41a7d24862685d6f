"""The tiles of the forward with split keys, by GPU and padded head dim."""

from __future__ import annotations

import dataclasses

from jax_memeff.codegen import gpu
from jax_memeff.codegen.kernels.bases.families import MmaTables, MmaTile


@dataclasses.dataclass(frozen=True)
class Tile(MmaTile):
    """A row of the tables below."""

    key_warps: int = 1
    """The number of warps, or groups of warps, that divide the keys of a tile."""
    stages: int = 1
    """The stages of keys and values in shared memory."""


def _split(
    query: int,
    key: int,
    warps: int,
    blocks: int,
    key_warps: int,
    stages: int,
    reason: str,
) -> Tile:
    return Tile(query, key, warps, blocks, reason, key_warps=key_warps, stages=stages)


# Nothing for sm_75 was measured: see fmha_fwd_sm80.py.
_SM75 = {
    32: (
        _split(16, 128, 4, 1, 4, 2, "33 KB"),
        _split(64, 128, 4, 1, 2, 2, "36 KB"),
    ),
    64: (
        _split(16, 64, 4, 1, 4, 2, "34 KB; 128 keys need 66 KB"),
        _split(64, 64, 4, 1, 2, 2, "40 KB"),
    ),
    96: (
        _split(16, 64, 4, 1, 4, 2, "51 KB"),
        _split(64, 64, 4, 1, 2, 2, "60 KB"),
    ),
    128: (
        _split(16, 32, 2, 1, 2, 2, "36 KB; 64 keys need 68 KB"),
        _split(64, 32, 8, 1, 2, 2, "48 KB; with 4 warps 32 rows each spill"),
    ),
    192: (
        _split(16, 32, 2, 1, 2, 2, "54 KB"),
        _split(64, 16, 4, 1, 1, 2, "48 KB"),
    ),
    256: (
        _split(64, 16, 4, 1, 1, 2, "64 KB, all there is, and 16 rows need no less for two warps"),
    ),
}

# If each warp has its own keys, no warp waits for another; 64 rows need the registers of two warps.
# About 64 KB of copies in flight per SM hide the memory latency.
_16x128 = _split(16, 128, 4, 2, 4, 3, "hd 64: 4.3 TB/s on an H200, as with 3 or 4 blocks")
_16x64 = _split(16, 64, 4, 2, 4, 3, "hd 128: 4.46 TB/s on an H200; 2 stages 4.06")
_64x128 = _split(64, 128, 4, 2, 2, 2, "hd 64: 134 us for T 32 of S 4096 on an H200, 64x256 154")
# For a few draft tokens: every warp has all rows, so no other warp reads its keys from shared
# memory, and fewer rows are padding. Not measured.
_32x128 = _split(32, 128, 4, 2, 4, 3, "hd 64: 98 KB for each of two blocks")
_32x64 = _split(32, 64, 4, 2, 4, 3, "hd 128: 104 KB for each of two blocks")
_64x64 = (
    dataclasses.replace(
        _split(64, 64, 4, 2, 2, 3, "hd 128: 4.28 TB/s on an H200, 8 warps 3.71"), modifiers=()
    ),
    _split(64, 64, 8, 1, 2, 3, "with 4 warps soft cap, bias and random bits spill"),
)

_SM80 = {
    32: (_16x128, _64x128),
    64: (_split(16, 128, 4, 2, 4, 2, "66 KB: two blocks per SM"), _64x128),
    96: (_16x64, _split(64, 64, 4, 1, 2, 3, "84 KB of 163 KB")),
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
}

_SM86 = {
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
}

_SM90 = {
    32: (_16x128, _32x128, _64x128),
    64: (_16x128, _32x128, _64x128),
    96: (_16x64, _32x64, *_64x64),
    128: (_16x64, _32x64, *_64x64),
    192: (
        _split(16, 64, 4, 1, 4, 4, "198 KB of 227 KB"),
        _split(64, 64, 8, 1, 2, 3, "168 KB of 227 KB; with 4 warps 32 rows each spill"),
    ),
    256: (
        _split(16, 64, 4, 1, 4, 3, "4.5 TB/s on an H200, as with 2 stages"),
        _split(64, 64, 8, 1, 2, 3, "224 KB of 227 KB; with 4 warps 32 rows each spill"),
    ),
}

TILES: MmaTables = {
    gpu.SM75: _SM75,
    gpu.SM80: _SM80,
    gpu.SM86: _SM86,
    gpu.SM90: _SM90,
}
TILES_F32: MmaTables = {}

# A tile of float8 keys and values has half the bytes, and its columns are multiples of 64 bytes.
# Nothing for GPUs other than sm_90 was measured.
_SM75_FLOAT8 = {
    64: (
        _split(16, 128, 4, 1, 4, 2, "34 KB"),
        _split(64, 128, 4, 1, 2, 2, "40 KB"),
    ),
    128: (
        _split(16, 64, 4, 1, 4, 2, "36 KB"),
        _split(64, 32, 8, 1, 2, 2, "32 KB"),
    ),
    192: (
        _split(16, 64, 4, 1, 4, 2, "54 KB"),
        _split(64, 16, 4, 1, 1, 2, "36 KB"),
    ),
    256: (_split(64, 16, 4, 1, 1, 2, "48 KB"),),
}

_SM80_FLOAT8 = {
    64: (
        _split(16, 128, 4, 2, 4, 3, "50 KB: two blocks per SM"),
        _split(64, 128, 4, 2, 2, 2, "40 KB: two blocks per SM"),
    ),
    128: (
        _split(16, 128, 4, 2, 4, 2, "68 KB: two blocks per SM"),
        _split(64, 64, 4, 1, 2, 4, "80 KB of 163 KB"),
    ),
    192: (
        _split(16, 64, 4, 2, 4, 3, "78 KB: two blocks per SM"),
        _split(64, 64, 8, 1, 2, 3, "96 KB of 163 KB"),
    ),
    256: (
        _split(16, 64, 4, 2, 4, 2, "72 KB: two blocks per SM"),
        _split(64, 64, 8, 1, 2, 3, "128 KB of 163 KB"),
    ),
}

_SM86_FLOAT8 = {
    64: (
        _split(16, 128, 4, 1, 4, 3, "50 KB of 99 KB"),
        _split(64, 128, 4, 1, 2, 2, "40 KB of 99 KB"),
    ),
    128: (
        _split(16, 128, 4, 1, 4, 2, "68 KB of 99 KB"),
        _split(64, 64, 4, 1, 2, 3, "64 KB of 99 KB"),
    ),
    192: (
        _split(16, 64, 4, 1, 4, 3, "78 KB of 99 KB"),
        _split(64, 32, 8, 1, 2, 3, "60 KB of 99 KB"),
    ),
    256: (
        _split(16, 64, 4, 1, 4, 2, "72 KB of 99 KB"),
        _split(64, 32, 8, 1, 2, 2, "64 KB of 99 KB"),
    ),
}

# At head dim 128 and 128 keys a CTA of four warps alone on its SM took 1.17 us for a tile on an
# H200 (3.6 TB/s), because its warps wait for their own instructions. The launcher often starts one
# CTA per SM, which is enough to saturate memory, so a CTA has eight warps.
_SM90_FLOAT8 = {
    64: (
        _split(16, 256, 8, 1, 8, 5, "162 KB of 227 KB"),
        _split(64, 128, 4, 2, 2, 3, "56 KB: two blocks per SM"),
    ),
    128: (
        _split(16, 256, 8, 1, 8, 3, "196 KB of 227 KB"),
        dataclasses.replace(_split(64, 64, 4, 2, 2, 4, "80 KB: two blocks per SM"), modifiers=()),
        _split(64, 64, 8, 1, 2, 4, "80 KB; for modifiers, as with 16 bits"),
    ),
    192: (
        _split(16, 128, 8, 1, 8, 4, "198 KB of 227 KB"),
        _split(64, 64, 8, 1, 2, 4, "120 KB of 227 KB"),
    ),
    256: (
        _split(16, 128, 8, 1, 8, 3, "200 KB of 227 KB"),
        _split(64, 64, 8, 1, 2, 4, "160 KB of 227 KB"),
    ),
}

# Batch-invariant results, by padded dim: keys of a KV block, CTAs per SM, stages. A warp has its
# own rows and all keys, so outputs of a segment need no merge. Above head dim 128 the sum of the
# segments, which is used once per 256 keys, spills.
_INVARIANT_SIZES = {
    gpu.SM75: {32: (128, 1, 2), 64: (64, 1, 2), 96: (64, 1, 2), 128: (32, 1, 2)}
    | dict.fromkeys((192, 256), (16, 1, 2)),
    gpu.SM80: {32: (128, 2, 3), 64: (128, 2, 2), 96: (64, 1, 3), 128: (64, 1, 3)}
    | dict.fromkeys((192, 256), (64, 1, 2)),
    gpu.SM86: {32: (128, 1, 2), 64: (128, 1, 2), 96: (64, 1, 3), 128: (64, 1, 2)}
    | dict.fromkeys((192, 256), (32, 1, 2)),
    gpu.SM90: {32: (128, 2, 3), 64: (128, 2, 3), 96: (64, 2, 4), 128: (64, 2, 3)}
    | dict.fromkeys((192, 256), (64, 1, 3)),
}
# In a decode step one warp of that tile has rows. Here each warp has all 16 rows, and takes whole
# segments: warps and stages by padded dim.
_INVARIANT_DECODE = {gpu.SM90: {32: (4, 3), 64: (3, 2), 96: (4, 2), 128: (3, 2)}}


def _invariant_tiles(own: gpu.Gpu, dim: int) -> tuple[Tile, ...]:
    """Both tiles have the same KV blocks, because the bits depend on these."""
    key, blocks, stages = _INVARIANT_SIZES[own][dim]
    tiles = (_split(64, key, 4, blocks, 1, stages, "no merge of key warps"),)
    if dim not in _INVARIANT_DECODE.get(own, {}):
        return tiles
    warps, stages = _INVARIANT_DECODE[own][dim]
    return _split(16, key, warps, 1, warps, stages, "a warp takes whole segments"), *tiles


TILES_INVARIANT: MmaTables = {
    own: {dim: _invariant_tiles(own, dim) for dim in sizes}
    for own, sizes in _INVARIANT_SIZES.items()
}

TILES_FLOAT8: MmaTables = {
    gpu.SM75: _SM75_FLOAT8,
    gpu.SM80: _SM80_FLOAT8,
    gpu.SM86: _SM86_FLOAT8,
    gpu.SM90: _SM90_FLOAT8,
}
