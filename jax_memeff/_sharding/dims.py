"""The names of the dims of a call's arrays, as sharding sees them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jax_memeff._call.operands.arrays import QkvPackedOperands, batch_of, is_varlen, pages_of
from jax_memeff._call.operands.table import Operand, items, mapped
from jax_memeff._call.options import Options

EVEN = {"query_tokens": "even_tokens", "sequences": "even_sequences"}
"""The names of dims of sequences with the same number of rows each, which may be sharded."""


def batch_names(axes: int) -> tuple[str, ...]:
    """The names of the axes of a batch: those that ``jax.vmap`` added, and the call's own.

    >>> batch_names(3)
    ('vmap0', 'vmap1', 'batch')
    """
    return (*(f"vmap{axis}" for axis in range(axes - 1)), "batch")


def dims(operands: Any) -> Any:
    """A tree like the operands, with the names of each array's dims in a string.

    A broadcast dim of size 1 is named ``one``, and so is a single key head.
    """
    return mapped(lambda item: named_dims(item.operand, item.array.shape, operands), operands)


def named_dims(operand: Operand, shape: tuple[int, ...], operands: Any) -> str:
    """The names of the dims of an operand with this shape."""
    names = operand.named_dims(is_varlen(operands)) if shape else ()
    if names[-1:] == ("...",):
        # The dims of an array that the user's function reads: every device needs all of them.
        names = (*names[:-1], *["captured"] * (len(shape) - len(names) + 1))
    named = itertools.starmap(_named, zip(names, shape, strict=True))
    return _shardable(" ".join(named), operands)


def even_tokens(operands: Any) -> int | None:
    """The query rows of each sequence of a paged call if sequences may be sharded, else None.

    They may be sharded if all have the same number of rows, and no operand is shared by several
    sequences, as can happen under ``jax.vmap``.
    """
    pages = pages_of(operands)
    if pages is None or pages.tokens_each is None:
        return None
    batch = batch_of(operands)
    is_even = batch > 1 and all(
        item.array.shape[0] in (1, batch)
        for item in items(operands)
        if item.array.shape and item.operand.varlen_dims[0].startswith("sequences")
    )
    return pages.tokens_each if is_even else None


def _shardable(names: str, operands: Any) -> str:
    """The names of dims. Sequences and tokens have other names if they may be sharded. The tokens
    of a pool always have a name of their own.
    """
    renamed = {} if pages_of(operands) is None else {"key_tokens": "pool_tokens"}
    if even_tokens(operands) is not None:
        renamed |= EVEN
    return " ".join(renamed.get(name, name) for name in names.split())


def _named(dim: str, size: int) -> str:
    if size == 1 and (dim.endswith("|1") or dim == "key_heads"):
        return "one"
    return dim.removesuffix("|1")


def result_dims(operands: Any) -> tuple[str, str]:
    """The names of the dims of out and lse."""
    if is_varlen(operands):
        return (
            _shardable("one query_tokens heads value_dim", operands),
            _shardable("one query_tokens heads", operands),
        )
    return "batch rows heads value_dim", "batch rows heads"


def forward_dims(operands: Any, options: Options) -> tuple[str, ...]:
    """The names of the dims of all results of a forward; row maxima have those of lse."""
    out, lse = result_dims(operands)
    return (out, lse, lse) if options.row_maxima else (out, lse)


def heads_of(operands: Any) -> tuple[int, int]:
    """The numbers of query heads and of key heads."""
    if isinstance(operands, QkvPackedOperands):
        heads = operands.query_key_value.shape[3]
        return heads, heads
    return operands.query.shape[2], operands.key.shape[2]


def divides_groups(heads: int, key_heads: int, mesh_axes: Sequence[int]) -> bool:
    """Whether the heads on a device are whole groups, or part of one, over any of the mesh axes.

    Args:
        heads: the number of query heads, K * G.
        key_heads: K.
        mesh_axes: the sizes of the mesh axes.

    >>> divides_groups(12, 6, (2, 3)), divides_groups(12, 6, (4,))
    (True, False)
    """
    counts = {1}
    for size in mesh_axes:
        counts |= {count * size for count in counts}
    return all(
        key_heads % count == 0 or count % key_heads == 0 for count in counts if heads % count == 0
    )
