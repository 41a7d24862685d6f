"""The arrays of a call, as pytrees, one table that describes them, and their gradients.

Code that handles operands without computing on them loops over :data:`OPERANDS`: batching,
sharding, gradients, the buffers of the custom call. A new operand needs a field in
:class:`Operands`, an entry in its feature (codegen/features), which makes its row, and the code
that computes with it. Gradients go by name: which may exist, and which are needed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Position
from jax_memeff._call.sequences import Pages, Sequences
from jax_memeff.codegen import features
from jax_memeff.codegen.features.feature import Placement


class DropoutState(NamedTuple):
    """The inputs of an element's keep bit other than its row and column."""

    key_words: jax.Array
    """uint32[B, 2]: the two words of the Philox key, per batch index."""
    batch_base: jax.Array
    """uint32[B]: ``batch index * number of query heads``."""
    head_index: jax.Array
    """uint32[N]: the query head index added to ``batch_base``."""


class FunctionState(NamedTuple):
    """The inputs of the user's functions other than score, row and column."""

    batch_index: jax.Array
    """int32[B]: the user's index of each batch index, or of each packed sequence."""
    head_index: jax.Array
    """int32[N]: the user's index of each query head."""


class Operands(NamedTuple):
    """The arrays of a call; a pytree. An absent operand is None.

    With packed ``sequences``, B is their number, query, key and value are [1, tokens, ...], and
    segment ids [1, tokens]. The mask then has no lengths, because the sequences have them.
    """

    query: jax.Array
    """[B, T, N, H]"""
    key: jax.Array
    """[B, S, K, H], or with fewer batch indices: :class:`jax_memeff._call.options.Divisors`"""
    value: Any
    """[B, S, K, Hv], likewise; None if ``Options.latent_dim`` says which columns of the keys they
    are, as in padded calls with lists of keys"""
    bias: jax.Array | None
    """[1|B, 1|N, 1|T, 1|S], likewise, of the query's dtype or float32"""
    mask: Mask
    dropout: DropoutState | None
    position: Position | None
    sequences: Sequences | None = None
    sinks: jax.Array | None = None
    """[1|B, N], or with fewer batch indices, of the dtype of the logsumexp"""
    functions: FunctionState | None = None
    """Present if the call has a score function or a mask function."""
    captured: tuple[jax.Array, ...] = ()
    """The arrays that ``Options.score_function`` reads, in the order of ``Program.arrays``:
    [1|B, ...], or with fewer batch indices. ``jax.vmap`` adds the first dim, unseen by the user."""
    pages: Pages | None = None
    """Present if key and value are pools of pages; ``sequences`` is then present, too."""

    @property
    def value_dim(self) -> int:
        """Hv"""
        if self.pages is not None and self.pages.latent_dim is not None:
            return self.pages.latent_dim
        return self.value.shape[3]

    @property
    def columns(self) -> int:
        """The number of keys; without packed sequences, of each batch index."""
        return self.key.shape[1] if self.pages is None else self.pages.longest_key

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """(B, N, T, S)"""
        batch, rows, heads, _ = self.query.shape
        if self.sequences is None:
            return batch, heads, rows, self.columns
        batch = self.sequences.query_starts.shape[0] - 1
        return batch, heads, self.sequences.longest_query, self.sequences.longest_key


class QkvPackedOperands(NamedTuple):
    """``Operands`` of a call whose query, key and value are one array."""

    query_key_value: jax.Array
    """[B, T, 3, N, H]"""
    bias: jax.Array | None
    mask: Mask
    dropout: DropoutState | None
    position: Position | None
    sinks: jax.Array | None = None
    functions: FunctionState | None = None
    captured: tuple[jax.Array, ...] = ()

    @property
    def pages(self) -> None:
        """Such a call has none."""

    def separate(self) -> Operands:
        """The same call with three arrays."""
        query, key, value = (self.query_key_value[:, :, index] for index in range(3))
        others = self._asdict()
        del others["query_key_value"]
        return Operands(query, key, value, **others)


AnyOperands = Operands | QkvPackedOperands


def is_packed(operands: Any) -> bool:
    """Whether the sequences are packed."""
    return getattr(operands, "sequences", None) is not None


def pages_of(operands: Any) -> Pages | None:
    """The pages of a call if its keys and values are in pages, else None."""
    return getattr(operands, "pages", None)


def batch_of(operands: Any) -> int:
    """B, for operands whose leaves have a shape."""
    if isinstance(operands, QkvPackedOperands):
        return operands.query_key_value.shape[0]
    return operands.scores_shape[0]


NO_BUFFER = ""


@dataclasses.dataclass(frozen=True)
class OperandRow:
    """A row of :data:`OPERANDS`: what an operand has, whatever its shape."""

    path: str
    """Its path in the operands; ``*`` is any index of a tuple."""
    buffer: str
    """The name of its buffer in the custom call (ffi/src). Several arrays may share one buffer;
    :data:`NO_BUFFER` marks an operand that is not passed to it."""
    dims: tuple[str, ...]
    """The names of its dims. ``batch|1`` may have size 1; the operand is then broadcast."""
    packed_dims: tuple[str, ...]
    """The names with packed sequences: tokens, and sequences as the batch."""
    has_gradient: bool = False
    has_divisor: bool = False
    """Whether it may have fewer batch indices than the batch after a ``jax.vmap`` that does not map
    it (:class:`jax_memeff._call.options.Divisors`)."""
    placement: Placement = "internal"
    """The accepted shardings of the user's array; internal arrays are made by the call itself."""

    def named_dims(self, is_packed: bool) -> tuple[str, ...]:
        """The names of its dims in a call; ``...`` stands for any number of dims."""
        return self.packed_dims if is_packed else self.dims

    def may_lack_batch(self, is_packed: bool) -> bool:
        """Whether it has a divisor in this call; tokens have none."""
        return self.has_divisor and self.named_dims(is_packed)[0] != "one"


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


def _rows_of(operand: features.Operand) -> Iterator[OperandRow]:
    """One row for each path of an operand in the code generator's table."""
    dims = _dims(operand.array_dims or operand.dims.replace("~", ""))
    if operand.packed_dims is None:
        packed_dims = tuple(dim.replace("batch", "sequences") for dim in dims)
    else:
        packed_dims = _dims(operand.packed_dims)
    for path in operand.places or (operand.role,):
        yield OperandRow(
            path,
            operand.role,
            dims,
            packed_dims,
            operand.has_gradient,
            operand.broadcast_by_vmap,
            operand.placement,
        )


def _dims(names: str) -> tuple[str, ...]:
    """``("batch|1", "heads")`` for ``"B? N"``, without ``pairs``, whose ids are separate arrays."""
    dims = (
        _DIM_NAMES.get(name.rstrip("?"), name.rstrip("?")) + "|1" * name.endswith("?")
        for name in names.split()
    )
    return tuple(dim for dim in dims if dim != "pairs")


_QKV_PACKED_DIMS = ("batch", "positions", "slots", "heads", "head_dim")

OPERANDS: tuple[OperandRow, ...] = (
    OperandRow(
        "query_key_value",
        "query+key+value",
        _QKV_PACKED_DIMS,
        _QKV_PACKED_DIMS,
        has_gradient=True,
        placement="like query",
    ),
    OperandRow(
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


def row_of(path: str) -> OperandRow | None:
    """The row of a path, if it has one."""
    return _ROWS[path][1] if path in _ROWS else None


class Item(NamedTuple):
    """One array of a call."""

    operand: OperandRow
    name: str
    """Its path with indices, the key of ``Divisors``: ``mask.booleans.1``."""
    title: str
    """Its name in messages: ``mask.booleans[1]``."""
    array: Any


def items(operands: Any) -> list[Item]:
    """The arrays of a call in the order of ``jax.tree.leaves``; the leaves may be of any kind.

    >>> import jax.numpy as jnp
    >>> from jax_memeff._call.mask import Mask
    >>> from jax_memeff._call.operands import Operands
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


def _operand(path: Any) -> OperandRow:
    parts = _name(path).split(".")
    # The first number indexes a tuple of any length. A second one selects an element of a pair.
    place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if place is not None:
        parts[place] = "*"
    return _ROWS[".".join(parts)][1]


class NeedsGrad(NamedTuple):
    """The gradients that the backward computes; others are not allocated.

    If query, key and value are one array, it has one gradient, and the first three are equal.
    """

    query: bool
    key: bool
    value: bool
    bias: bool
    sinks: bool = False
    captured: tuple[bool, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The gradients that are needed; those of captured arrays are ``captured.0`` and so on."""
        *fields, captured = self._asdict().items()
        needed_by_name = dict(fields)
        needed_by_name |= {captured_name(index): needed for index, needed in enumerate(captured[1])}
        return tuple(name for name, needed in needed_by_name.items() if needed)


class Gradients(NamedTuple):
    """Gradients in the operands' own shapes and dtypes; None if not needed."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None
    bias: jax.Array | None
    sinks: jax.Array | None = None
    captured: tuple[jax.Array | None, ...] = ()


class QkvPackedGradients(NamedTuple):
    """Gradients of ``QkvPackedOperands``; None if not needed."""

    query_key_value: jax.Array | None
    bias: jax.Array | None
    sinks: jax.Array | None = None
    captured: tuple[jax.Array | None, ...] = ()


AnyGradients = Gradients | QkvPackedGradients


def captured_name(index: int) -> str:
    """The name of a captured array: its path in the operands."""
    return f"captured.{index}"


def array_of(tree: Any, name: str) -> Any:
    """The array with this name in operands, gradients or ``NeedsGrad``.

    >>> array_of(NeedsGrad(True, True, True, False, captured=(False, True)), "captured.1")
    True
    """
    field, *index = name.split(".")
    value = getattr(tree, field)
    return value[int(index[0])] if index else value


def named_arrays(tree: Any) -> dict[str, Any]:
    """The arrays of gradients by name, without those that are None."""
    arrays = {name: x for name, x in tree._asdict().items() if name != "captured"}
    arrays |= {captured_name(index): x for index, x in enumerate(tree.captured)}
    return {name: x for name, x in arrays.items() if x is not None}


def replaced(tree: Any, arrays: dict[str, Any]) -> Any:
    """Operands or gradients with other arrays, given by name."""
    captured = list(tree.captured)
    fields = {}
    for name, x in arrays.items():
        field, *index = name.split(".")
        if index:
            captured[int(index[0])] = x
        else:
            fields[field] = x
    return tree._replace(captured=tuple(captured), **fields)


def differentiable(operands: Any) -> dict[str, OperandRow]:
    """The operands that can have a gradient, present or not, in the order of the gradients.

    Captured arrays of integers are among them; their gradients are never needed.
    """
    rows = {}
    for field in type(operands)._fields:
        if field == "captured":
            names = map(captured_name, range(len(operands.captured)))
            rows |= dict.fromkeys(names, row_of("captured.*"))
        elif (row := row_of(field)) and row.has_gradient:
            rows[field] = row
    return rows


def gradients_needed(operands: Any, needs_grad: NeedsGrad) -> list[str]:
    """The names of ``attention_bwd``'s results, in their order."""
    needed = set(needs_grad.names)
    return [
        name
        for name in differentiable(operands)
        if ("query" if name == "query_key_value" else name) in needed
        and array_of(operands, name) is not None
    ]


def needs_grad_of(operands: Any, needed: Iterable[str]) -> NeedsGrad:
    """The inverse of :func:`gradients_needed`."""
    needed_names = set(needed)
    if isinstance(operands, QkvPackedOperands) and "query_key_value" in needed_names:
        needed_names |= {"query", "key", "value"}
    *fields, _ = NeedsGrad._fields
    captured = (captured_name(index) in needed_names for index in range(len(operands.captured)))
    return NeedsGrad(*(name in needed_names for name in fields), captured=tuple(captured))


def gradients_of(operands: Any, given: dict[str, Any] | None = None) -> Any:
    """Named gradients of the operands, ``AnyGradients``; the others are None."""
    kind: Any = QkvPackedGradients if isinstance(operands, QkvPackedOperands) else Gradients
    none = dict.fromkeys(kind._fields) | {"captured": (None,) * len(operands.captured)}
    return replaced(kind(**none), given or {})


def gradients_from(results: Iterable[Any], operands: Any, needs_grad: NeedsGrad) -> AnyGradients:
    """The results of ``attention_bwd``, by name."""
    gradient_names = gradients_needed(operands, needs_grad)
    return gradients_of(operands, dict(zip(gradient_names, results, strict=True)))
