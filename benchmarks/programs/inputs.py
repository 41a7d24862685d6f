"""The arrays of a cell, the same for every peer."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from user_functions import in_jax

from programs.cells import Cell
from programs.peers import Peer


class Inputs(NamedTuple):
    """Operands of a call and the cotangent of its output; None if a cell has no such array."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cotangent: jax.Array
    bias: jax.Array | None = None
    dropout_key: jax.Array | None = None
    segment_ids: jax.Array | None = None
    mask: jax.Array | None = None
    key_lengths: jax.Array | None = None
    table: jax.Array | None = None
    """The float array that the cell's function reads; its gradient is measured, too."""

    def differentiable(self) -> dict[str, jax.Array]:
        """The operands whose gradients forward+backward computes."""
        names = ("query", "key", "value", "bias", "table")
        named = {name: getattr(self, name) for name in names}
        return {name: array for name, array in named.items() if array is not None}


def make(cell: Cell) -> Inputs:
    """Standard normal arrays in the cell's dtype; zeros would draw less power and run faster."""
    batch, heads, key_heads = cell.batch, cell.heads, cell.key_heads
    rows, columns = cell.query_length, cell.key_length
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape).astype(cell.dtype)

    return Inputs(
        query=normal(batch, rows, heads, cell.head_dim),
        key=normal(batch, columns, key_heads, cell.head_dim),
        value=normal(batch, columns, key_heads, cell.value_dim),
        cotangent=normal(batch, rows, heads, cell.value_dim),
        bias=normal(1, heads, rows, columns) if cell.bias else None,
        dropout_key=jax.random.PRNGKey(1) if cell.dropout else None,
        segment_ids=None if cell.documents is None else _segment_ids(cell, cell.documents),
        mask=None if cell.mask_block is None else _mask(cell, cell.mask_block),
        key_lengths=None if cell.valid_keys is None else jnp.full(batch, cell.valid_keys),
        table=in_jax.table(cell),
    )


def _segment_ids(cell: Cell, documents: int) -> jax.Array:
    ids = jnp.arange(cell.query_length, dtype=jnp.int32) * documents // cell.query_length
    return jnp.broadcast_to(ids, (cell.batch, cell.query_length))


def _mask(cell: Cell, block: int) -> jax.Array:
    """Each row of blocks attends to every fourth column of blocks, with a shift per row."""
    rows, columns = (jnp.arange(n) // block for n in (cell.query_length, cell.key_length))
    return ((rows[:, None] + columns) % 4 == 0)[None, None]


def adapt(inputs: Inputs, peer: Peer, cell: Cell) -> Inputs:
    """Adapt inputs to a peer: cast or scale them, or drop the table."""
    if peer.plain:
        inputs = inputs._replace(table=None)
    if peer.prescaled:
        scaled = inputs.query.astype(jnp.float32) / math.sqrt(cell.head_dim)
        inputs = inputs._replace(query=scaled.astype(cell.dtype))
    if peer.dtype is not None:
        floating = {**inputs.differentiable(), "cotangent": inputs.cotangent}
        inputs = inputs._replace(**{n: a.astype(peer.dtype) for n, a in floating.items()})
    return inputs
