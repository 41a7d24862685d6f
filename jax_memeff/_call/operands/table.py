"""One table that describes the arrays of a call.

Code that handles operands without computing on them loops over :data:`OPERANDS`: batching,
sharding, gradients, the buffers of the custom call. A new operand needs a field in ``arrays``, an
entry in its feature (codegen/features), which makes its row, and the code that computes with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jax_memeff.codegen import features
from jax_memeff.codegen.features.feature import Placement

NO_BUFFER = ""


@dataclasses.dataclass(frozen=True)
class Operand:
    """The properties of an operand that do not depend on its shape."""

    path: str
    """Its path in the operands; ``*`` is any index of a tuple."""
    buffer: str
    """The name of its buffer in the custom call (ffi/src). Several arrays may share one buffer;
    :data:`NO_BUFFER` marks an operand that is not passed to it."""
    dims: tuple[str, ...]
    """The names of its dims. ``batch|1`` may have size 1; the operand is then broadcast."""
    varlen_dims: tuple[str, ...]
    """The names with packed sequences: tokens, and sequences as the batch."""
    has_gradient: bool = False
    has_divisor: bool = False
    """Whether it may have fewer batch indices than the batch after a ``jax.vmap`` that does not map
    it (:class:`jax_memeff._call.options.Divisors`)."""
    placement: Placement = "internal"
    """The accepted shardings of the user's array; internal arrays are made by the call itself."""

    def named_dims(self, is_varlen: bool) -> tuple[str, ...]:
        """The names of its dims in a call; ``...`` stands for any number of dims."""
        return self.varlen_dims if is_varlen else self.dims

    def may_lack_batch(self, is_varlen: bool) -> bool:
        """Whether it has a divisor in this call; tokens have none."""
        return self.has_divisor and self.named_dims(is_varlen)[0] != "one"


_DIM_NAMES = {
    "1": "one",
    "2": "words",
    "B": "batch",
    "B+1": "starts",
    "H": "head_dim",
    "Hv": "value_dim",
    "K": "key_heads",
    "N": "heads",
    "S": "columns",
    "T": "rows",
}


def _rows_of(operand: features.Operand) -> Iterator[Operand]:
    """One row for each path of an operand in the code generator's table."""
    dims = _dims(operand.array_dims or operand.dims.replace("~", ""))
    if operand.packed_dims is None:
        varlen_dims = tuple(dim.replace("batch", "sequences") for dim in dims)
    else:
        varlen_dims = _dims(operand.packed_dims)
    for path in operand.places or (operand.role,):
        yield Operand(
            path,
            operand.role,
            dims,
            varlen_dims,
            operand.has_gradient,
            operand.broadcast_by_vmap,
            operand.placement,
        )


def _dims(names: str) -> tuple[str, ...]:
    """``("batch|1", "heads")`` for ``"B? N"``, without ``pairs``, whose ids are separate arrays."""
    found = (
        _DIM_NAMES.get(name.rstrip("?"), name.rstrip("?")) + "|1" * name.endswith("?")
        for name in names.split()
    )
    return tuple(dim for dim in found if dim != "pairs")


_QKV_PACKED_DIMS = ("batch", "positions", "slots", "heads", "head_dim")

OPERANDS: tuple[Operand, ...] = (
    Operand(
        "query_key_value",
        "query+key+value",
        _QKV_PACKED_DIMS,
        _QKV_PACKED_DIMS,
        has_gradient=True,
        placement="like query",
    ),
    Operand(
        "mask.block_masks.*",
        NO_BUFFER,
        ("batch|1", "heads|1", "q_blocks", "kv_blocks"),
        ("batch|1", "heads|1", "q_blocks", "kv_blocks"),
        has_divisor=True,
    ),
    *itertools.chain.from_iterable(map(_rows_of, features.operands())),
)
"""In the order of the buffers of the custom call."""

_ROWS = {operand.path: (row, operand) for row, operand in enumerate(OPERANDS)}


def row_of(path: str) -> Operand | None:
    """The row of a path, if it has one."""
    return _ROWS[path][1] if path in _ROWS else None


class Item(NamedTuple):
    """One array of a call."""

    operand: Operand
    name: str
    """Its path with indices, the key of ``Divisors``: ``mask.booleans.1``."""
    title: str
    """Its name in messages: ``mask.booleans[1]``."""
    array: Any


def items(operands: Any) -> list[Item]:
    """The arrays of a call in the order of ``jax.tree.leaves``; the leaves may be of any kind.

    >>> import jax.numpy as jnp
    >>> from jax_memeff._call.mask import Mask
    >>> from jax_memeff._call.operands.arrays import Operands
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> mask = Mask.causal() & Mask.lengths(key=jnp.array([3]))
    >>> [item.name for item in items(Operands(x, x, x, None, mask, None, None))]
    ['query', 'key', 'value', 'mask.key_lengths']
    """
    return [
        Item(_operand(path), _name(path), jax.tree_util.keystr(path).lstrip("."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(operands)
    ]


def in_table_order(operands: Any) -> list[Item]:
    """:func:`items` in the order of :data:`OPERANDS`."""
    return sorted(items(operands), key=lambda item: _ROWS[item.operand.path][0])


def mapped(function: Any, operands: Any, *others: Any) -> Any:
    """``function(item, *others)`` for each array, in a tree with the operands' structure."""
    structure = jax.tree.structure(operands)
    trees = [structure.flatten_up_to(other) for other in others]
    return structure.unflatten(map(function, items(operands), *trees))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _operand(path: Any) -> Operand:
    parts = _name(path).split(".")
    # The first number indexes a tuple of any length. A second one selects an element of a pair.
    place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if place is not None:
        parts[place] = "*"
    return _ROWS[".".join(parts)][1]
