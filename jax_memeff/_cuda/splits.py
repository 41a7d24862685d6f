"""How far a forward may split its keys, known before the device is: codegen/support.py says when.

The launcher (ffi/src/launch_split.cc) chooses the number of splits for the device, and this the
most that the program has room for.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
from jax.core import ShapedArray

from jax_memeff._call.operands import Operands
from jax_memeff.codegen.spec import KernelSpec

_MOST_BLOCKS = 512
"""With so many blocks the largest GPUs have a few for each SM."""


def partial_results(avals: Operands, specs: Iterable[KernelSpec]) -> dict[str, ShapedArray]:
    """f32 logsumexps and outputs of the splits, for the kernel that makes the most of them.

    Empty where no kernel splits the keys, or none more than once.
    """
    batch, queries, heads, _ = avals.query.shape
    specs = list(specs)
    splits = max(_most_splits(avals, spec) for spec in specs)
    if splits <= 1:
        return {}
    rows = (splits, batch * heads * queries)
    padded_value_dim = max(spec.padded_value_dim for spec in specs)
    float32 = jnp.dtype(jnp.float32)
    return {
        "partial_logsumexp": ShapedArray(rows, float32),
        "partial_out": ShapedArray((*rows, padded_value_dim), float32),
    }


def _most_splits(avals: Operands, spec: KernelSpec) -> int:
    if not spec.split:
        return 1
    batch, queries, heads, _ = avals.query.shape
    keys, key_heads = avals.key.shape[1:3]
    tile_heads = key_heads if spec.pack_heads else heads
    rows = queries * heads // max(1, tile_heads)
    blocks = batch * tile_heads * -(-rows // spec.tile.query)
    return min(_MOST_BLOCKS // max(1, blocks), -(-keys // spec.tile.key))
