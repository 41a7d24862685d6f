"""``jax.vmap`` of the primitives: the mapped axis becomes the outermost part of the batch.

The folded call has ``size * B`` batch elements. What is mapped is reshaped; keys, values, biases
and boolean masks that are not are shared, with gradients too: element b reads element
``(b // divisor) % elements`` of an operand that has fewer (:class:`jax_memeff.options.Divisors`).
The query is repeated, because the output is as large, and so are lengths, segment ids and dropout
state, which are small.
The dropout state is repeated as it is, so an element has the bits of its own call.

Packed sequences are folded into the tokens: those of one element follow those of the one before.

What does not fit goes one element at a time, by ``jax.lax.map``:

- a mapped ``Offsets`` of queries, keys or heads;
- keys, values, biases or masks with a batch of their own, mapped now and not by a vmap inside;
- packed sequences of more than ``MOST_POSITIONS`` tokens together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_memeff._call.options import (
    Divisors,
    DropoutState,
    Operands,
    Options,
    QkvPackedOperands,
)
from jax_memeff._call.sequences import MOST_POSITIONS, Sequences


class _UnfoldableError(Exception):
    """The call with the mapped axis in its batch cannot be described."""


@dataclasses.dataclass(frozen=True)
class _Array:
    """An operand, with the mapped axis in front if it has one."""

    array: jax.Array
    mapped: bool

    @property
    def elements(self) -> int:
        """The size of its own first axis."""
        return self.array.shape[1 if self.mapped else 0]

    def everywhere(self, size: int) -> jax.Array:
        """With the mapped axis, [size, ...]."""
        if self.mapped:
            return self.array
        return jnp.broadcast_to(self.array, (size, *self.array.shape))


class _Fold(NamedTuple):
    """One mapped axis, and the batch that it goes in front of."""

    size: int
    batch: int

    def repeated(self, x: _Array) -> jax.Array:
        """[size * n, ...] of an operand [n, ...]."""
        array = x.everywhere(self.size)
        return array.reshape(self.size * array.shape[1], *array.shape[2:])

    def shared(self, x: _Array, divisor: int) -> tuple[jax.Array, int]:
        """An operand that may have fewer elements than the batch, and its divisor."""
        if not x.mapped:
            return x.array, divisor
        if x.elements == 1:
            return self.repeated(x), self.batch
        if x.elements * divisor != self.batch:
            raise _UnfoldableError
        return self.repeated(x), divisor

    def tokens(self, x: _Array) -> jax.Array:
        """[1, size * tokens, ...] of an operand [1, tokens, ...]."""
        array = x.everywhere(self.size)
        if self.size * array.shape[2] > MOST_POSITIONS:
            raise _UnfoldableError
        return array.reshape(1, self.size * array.shape[2], *array.shape[3:])

    def starts(self, x: _Array, tokens: int) -> jax.Array:
        """Where sequences begin among the folded tokens, of which there are ``tokens``."""
        first = jnp.arange(self.size, dtype=jnp.int32) * (tokens // self.size)
        starts = (x.everywhere(self.size)[:, :-1] + first[:, None]).reshape(-1)
        return jnp.append(starts, starts[:1] + tokens)

    def unfolded(self, result: jax.Array, is_packed: bool) -> jax.Array:
        """[size, n, ...] of a result [size * n, ...], or [1, size * n, ...] with tokens."""
        if is_packed:
            return result.reshape(self.size, 1, result.shape[1] // self.size, *result.shape[2:])
        return result.reshape(self.size, result.shape[0] // self.size, *result.shape[1:])


def rule(
    primitive: Primitive, leaves: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[Sequence[jax.Array], list[int]]:
    """The batching rule of a primitive whose operands are the leaves of ``params["tree"]``."""
    given = [
        _Array(leaf if dim is None else jnp.moveaxis(leaf, dim, 0), dim is not None)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    try:
        results = _folded(primitive, given, **params)
    except _UnfoldableError:
        results = _one_by_one(primitive, given, params)
    return results, [0] * len(results)


def _one_by_one(primitive: Primitive, given: list[_Array], params: Any) -> Sequence[jax.Array]:
    def one(elements: Any) -> Any:
        element = iter(elements)
        return primitive.bind(*(next(element) if x.mapped else x.array for x in given), **params)

    return jax.lax.map(one, [x.array for x in given if x.mapped])


def _folded(
    primitive: Primitive, given: list[_Array], *, tree: Any, options: Options, **params: Any
) -> list[jax.Array]:
    arguments = jax.tree.unflatten(tree, given)
    is_forward = isinstance(arguments, (Operands, QkvPackedOperands))
    operands, *rest = (arguments,) if is_forward else arguments
    size = next(x.array.shape[0] for x in given if x.mapped)
    if size == 0:
        raise _UnfoldableError
    fold = _Fold(size, _batch_of(operands))
    is_packed = isinstance(operands, Operands) and operands.sequences is not None

    folded, options = _folded_operands(fold, operands, options, is_forward=is_forward)
    rows = fold.tokens if is_packed else fold.repeated

    others = [x and _folded_result(fold, x, rows) for x in rest]
    leaves, folded_tree = jax.tree.flatten(folded if is_forward else (folded, *others))
    results = primitive.bind(*leaves, tree=folded_tree, options=options, **params)
    bias_gradient = len(results) - 1 if getattr(params.get("needs_grad"), "bias", False) else None
    return [
        fold.unfolded(result, is_packed and index != bias_gradient)
        for index, result in enumerate(results)
    ]


def _folded_result(fold: _Fold, x: Any, rows: Callable[[_Array], jax.Array]) -> Any:
    """A result or cotangent of the forward, or the tangents of its operands."""
    if isinstance(x, _Array):
        return rows(x)
    given = {name: tangent for name, tangent in x._asdict().items() if tangent}
    return x._replace(
        **{
            name: fold.repeated(tangent) if name == "bias" else rows(tangent)
            for name, tangent in given.items()
        }
    )


def _batch_of(operands: Any) -> int:
    if isinstance(operands, QkvPackedOperands):
        return cast(_Array, operands.query_key_value).elements
    if operands.sequences is None:
        return operands.query.elements
    return operands.sequences.query_lengths.elements


def _bias_gradient(fold: _Fold, operands: Any, divisors: Divisors, is_forward: bool) -> int:
    """``Divisors.bias_gradient``, of which each mapped element has one.

    A forward has none yet: where the bias is not mapped, all elements can have one.
    """
    bias = operands.bias
    if divisors.bias_gradient or bias is None or (is_forward and not bias.mapped):
        return divisors.bias_gradient
    return fold.batch if bias.elements == 1 else 1


def _folded_operands(
    fold: _Fold, operands: Any, options: Options, *, is_forward: bool
) -> tuple[Any, Options]:
    divisors = options.divisors
    if operands.position is not None and any(x.mapped for x in operands.position):
        raise _UnfoldableError
    mask: Any = operands.mask
    repeated = functools.partial(jax.tree.map, fold.repeated)
    changed: dict[str, Any] = {}
    own: dict[str, Any] = {"bias_gradient": _bias_gradient(fold, operands, divisors, is_forward)}

    def share(name: str) -> None:
        array = getattr(operands, name)
        if array is not None:
            changed[name], own[name] = fold.shared(array, getattr(divisors, name))

    share("bias")
    if operands.dropout is not None:
        state = operands.dropout
        if state.head_index.mapped:
            raise _UnfoldableError
        changed["dropout"] = DropoutState(
            fold.repeated(state.key_words), fold.repeated(state.batch_base), state.head_index.array
        )
    if operands.position is not None:
        changed["position"] = jax.tree.map(lambda x: x.array, operands.position)
    booleans = [
        fold.shared(array, divisor)
        for array, divisor in zip(mask.booleans, divisors.of_booleans(mask), strict=True)
    ]
    folded_mask: Any = dataclasses.replace(
        mask,
        query_lengths=repeated(mask.query_lengths),
        key_lengths=repeated(mask.key_lengths),
        booleans=tuple(array for array, _ in booleans),
    )
    own["booleans"] = tuple(divisor for _, divisor in booleans)

    segment_ids = repeated(mask.segment_ids)
    if isinstance(operands, QkvPackedOperands):
        changed["query_key_value"] = fold.repeated(cast(_Array, operands.query_key_value))
    elif operands.sequences is None:
        changed["query"] = fold.repeated(operands.query)
        share("key")
        share("value")
    else:
        changed.update(_folded_tokens(fold, operands))
        segment_ids = jax.tree.map(fold.tokens, mask.segment_ids)
    changed["mask"] = dataclasses.replace(folded_mask, segment_ids=segment_ids)
    options = dataclasses.replace(
        options,
        divisors=divisors._replace(**own),
        batch_axes=(fold.size, *(options.batch_axes or (fold.batch,))),
    )
    return operands._replace(**changed), options


def _folded_tokens(fold: _Fold, operands: Any) -> dict[str, Any]:
    """The operands of packed sequences that have tokens, or say where they are."""
    sequences: Sequences = operands.sequences
    query, key = fold.tokens(operands.query), fold.tokens(operands.key)
    starts: Any = sequences.query_starts, sequences.key_starts
    return {
        "query": query,
        "key": key,
        "value": fold.tokens(operands.value),
        "sequences": dataclasses.replace(
            sequences,
            query_starts=fold.starts(starts[0], query.shape[1]),
            key_starts=fold.starts(starts[1], key.shape[1]),
            query_lengths=fold.repeated(cast(_Array, sequences.query_lengths)),
            key_lengths=fold.repeated(cast(_Array, sequences.key_lengths)),
        ),
    }
