"""The tiles of a kernel, for ``python -m jax_memeff explain --seq``."""

from __future__ import annotations

import argparse
import importlib

from jax_memeff.codegen.features.mask import NO_BOUND
from jax_memeff.codegen.spec import KernelSpec


def grid(spec: KernelSpec, sequence: int) -> str:
    """The number of tiles of a kernel for so many rows, or columns in a backward."""
    by_keys = spec.direction == "backward"
    tile = spec.tile.key if by_keys else spec.tile.query
    rows, heads = ("key", "key heads") if by_keys else ("query", "query heads")
    count = -(-sequence // tile)
    if spec.kernel.splits_keys:
        return f"{count} tiles of {tile} rows; as many splits of the keys as fill the device"
    return f"{count} tiles of {tile} {rows} rows for each of the {heads} and batch indices"


def drawing(options: argparse.Namespace, spec: KernelSpec) -> str:
    """A drawing of the tiles, as far as the flags determine the mask."""
    if spec.kernel.splits_keys:
        return "no drawing: the rows of a tile belong to several heads"
    if options.window == NO_BOUND:
        return "no drawing: pass a bound, such as --window 256"
    # Only drawings and functions need JAX.
    pictures = importlib.import_module("jax_memeff._call.mask.pictures")
    count = pictures.number_of_tiles((options.seq,) * 2, (spec.tile.query, spec.tile.key))
    if count > pictures.MOST_TILES:
        return f"no drawing: it would have {count} tiles; pass a smaller --seq"
    mask_type = importlib.import_module("jax_memeff._call.mask").Mask
    mask = mask_type()
    if options.window is not None:
        mask = mask_type.window(options.window, 0)
    elif options.causal:
        mask = mask_type.causal()
    if options.mask_function is not None:
        named_functions = importlib.import_module("jax_memeff._cuda.named_functions")
        mask &= named_functions.mask(options.mask_function)
    tile = spec.tile.query, spec.tile.key
    unknown = [name for name in ("segments", "boolean") if getattr(options, name)]
    note = f"\nwithout --{' and --'.join(unknown)}, whose arrays are unknown here"
    return f"{mask.picture(options.seq, tile=tile)}{note if unknown else ''}"
