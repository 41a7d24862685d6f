"""``jax.vmap`` of the primitives: the mapped axis becomes the outermost part of the batch.

The folded call has ``size * B`` batch indices. The dims of an operand in the table
``_call/operands.py`` decide how it is folded:

- an operand with a divisor (key, value, bias, boolean mask, lists of keys) is not copied if it is
  not mapped: batch index b reads index ``(b // divisor) % indices`` of it
  (:class:`jax_memeff._call.options.Divisors`);
- other operands with a batch are repeated: the query, because the output is as large anyway;
  lengths, segment ids, mapped positions and the keys of random bits, because they are small. Each
  mapped call has its own random bits;
- tokens of packed sequences are appended to those of the previous mapped index;
- a pool of pages is not copied if it is not mapped. If it is, the pages of each mapped index are
  appended to those of the previous one, and table entries are shifted accordingly.

In these cases the call runs once per mapped index, in a ``jax.lax.map``:

- an operand without a batch is mapped: ``Offsets`` of heads;
- a key, value, bias or mask whose batch comes from an outer vmap alone is mapped now;
- the scales of a pool of pages are mapped, but the pool is not;
- packed sequences have more than ``MOST_POSITIONS`` tokens together;
- the batch or the mapped axis is empty.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_memeff._call.divisors import may_sum_gradient
from jax_memeff._call.operands import (
    Item,
    Operands,
    QkvPackedOperands,
    differentiable,
    gradients_needed,
    is_packed,
    items,
    mapped,
    named_arrays,
    pages_of,
    replaced,
)
from jax_memeff._call.options import Divisors, Options
from jax_memeff._call.sequences import MOST_POSITIONS
from jax_memeff._compat import Primitive


class _UnfoldableError(Exception):
    """No single call with the mapped axis in its batch can compute this."""


@dataclasses.dataclass(frozen=True)
class _Array:
    """An operand, with the mapped axis in front if it has one."""

    array: jax.Array
    mapped: bool

    @property
    def indices(self) -> int:
        """The size of its first axis, not counting the mapped one."""
        return self.array.shape[1 if self.mapped else 0]

    @property
    def has_dims(self) -> bool:
        """Whether it has dims other than the mapped axis."""
        return self.array.ndim > self.mapped

    def everywhere(self, size: int) -> jax.Array:
        """The array with the mapped axis, [size, ...]."""
        if self.mapped:
            return self.array
        return jnp.broadcast_to(self.array, (size, *self.array.shape))


class _Fold(NamedTuple):
    """One mapped axis, which goes in front of the batch."""

    size: int
    batch: int

    def repeated(self, x: _Array) -> jax.Array:
        """[size * n, ...] of an operand [n, ...]."""
        array = x.everywhere(self.size)
        return array.reshape(self.size * array.shape[1], *array.shape[2:])

    def repeated_scalar(self, x: _Array) -> jax.Array:
        """[size * batch] of a mapped scalar."""
        # Not jnp.repeat, whose gather moves sharded positions between devices.
        return jnp.broadcast_to(x.array[:, None], (self.size, self.batch)).reshape(-1)

    def kept(self, x: _Array, divisor: int) -> tuple[jax.Array, int]:
        """An operand with a divisor in the folded call, and its new divisor."""
        if not x.mapped:
            return x.array, divisor
        if x.indices == 1:
            return self.repeated(x), self.batch
        if x.indices * divisor != self.batch:
            raise _UnfoldableError
        return self.repeated(x), divisor

    def table(self, x: _Array, pages: int) -> jax.Array:
        """The tables of the folded calls, [size * B, ...], each with its own ``pages`` pages.

        Entries outside the pool of a call become -1, so that they do not hit another call's page.
        """
        table = x.everywhere(self.size)
        first_pages = jnp.arange(self.size, dtype=table.dtype).reshape(-1, 1, 1) * pages
        table = jnp.where((table >= 0) & (table < pages), table + first_pages, -1)
        return table.reshape(self.size * table.shape[1], table.shape[2])

    def tokens(self, x: _Array) -> jax.Array:
        """[1, size * tokens, ...] of an operand [1, tokens, ...]."""
        array = x.everywhere(self.size)
        if self.size * array.shape[2] > MOST_POSITIONS:
            raise _UnfoldableError
        return array.reshape(1, self.size * array.shape[2], *array.shape[3:])

    def starts(self, x: _Array, tokens: int) -> jax.Array:
        """The first token of each sequence among the folded tokens; ``tokens`` is their number."""
        first = jnp.arange(self.size, dtype=jnp.int32) * (tokens // self.size)
        starts = (x.everywhere(self.size)[:, :-1] + first[:, None]).reshape(-1)
        return jnp.append(starts, starts[:1] + tokens)

    def unfolded(self, result: jax.Array, has_tokens: bool) -> jax.Array:
        """[size, n, ...] of a result [size * n, ...], or of tokens [1, size * n, ...]."""
        if has_tokens:
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
        are_mapped = tuple(x.mapped for x in given)
        results = _one_by_one([x.array for x in given], are_mapped, primitive, **params)
    return results, [0] * len(results)


# Outside of jit each call would trace the loop anew, and JAX would compile it again.
@functools.partial(
    jax.jit, static_argnames=("are_mapped", "primitive", "tree", "options", "needs_grad")
)
def _one_by_one(
    leaves: list[jax.Array], are_mapped: tuple[bool, ...], primitive: Primitive, **params: Any
) -> Sequence[jax.Array]:
    pairs = list(zip(leaves, are_mapped, strict=True))

    def one(arrays: Any) -> Any:
        mapped_arrays = iter(arrays)
        values = (next(mapped_arrays) if is_mapped else leaf for leaf, is_mapped in pairs)
        return primitive.bind(*values, **params)

    return jax.lax.map(one, [leaf for leaf, is_mapped in pairs if is_mapped])


def _folded(
    primitive: Primitive, given: list[_Array], *, tree: Any, options: Options, **params: Any
) -> list[jax.Array]:
    arguments = jax.tree.unflatten(tree, given)
    is_forward = isinstance(arguments, (Operands, QkvPackedOperands))
    operands, *rest = (arguments,) if is_forward else arguments
    size = next(x.array.shape[0] for x in given if x.mapped)
    packed = is_packed(operands)
    # Calls with an empty batch have nothing to join, and divisors of it would be 0.
    if size == 0 or _batch_of(operands) == 0:
        raise _UnfoldableError
    fold = _Fold(size, _batch_of(operands))

    folded = mapped(lambda item: _folded_array(fold, item, operands, options.divisors), operands)
    options = _folded_options(fold, operands, options, is_forward=is_forward)
    rows = fold.tokens if packed else fold.repeated

    others = [x and _folded_result(fold, x, operands, rows) for x in rest]
    leaves, folded_tree = jax.tree.flatten(folded if is_forward else (folded, *others))
    results = primitive.bind(*leaves, tree=folded_tree, options=options, **params)
    have_tokens = [packed] * len(results)
    if "needs_grad" in params:
        gradient_names = gradients_needed(operands, params["needs_grad"])
        have_tokens = [_has_tokens(name, operands) for name in gradient_names]
    return [
        fold.unfolded(result, tokens) for result, tokens in zip(results, have_tokens, strict=True)
    ]


def _has_tokens(name: str, operands: Any) -> bool:
    """Whether the first two dims of an operand, and of its gradient, are [1, tokens]."""
    return differentiable(operands)[name].named_dims(is_packed(operands))[0] == "one"


def _folded_result(fold: _Fold, x: Any, operands: Any, rows: Callable[[_Array], jax.Array]) -> Any:
    """A result or cotangent of the forward, or the tangents of its operands."""
    if isinstance(x, _Array):
        return rows(x)
    folded = {
        name: fold.tokens(tangent) if _has_tokens(name, operands) else fold.repeated(tangent)
        for name, tangent in named_arrays(x).items()
    }
    return replaced(x, folded)


def _batch_of(operands: Any) -> int:
    if isinstance(operands, QkvPackedOperands):
        return operands.query_key_value.indices  # type: ignore[attr-defined]
    if operands.sequences is None:
        return operands.query.indices
    return operands.sequences.query_lengths.indices


def _folded_array(fold: _Fold, item: Item, operands: Any, divisors: Divisors) -> jax.Array:
    """One operand of the folded call."""
    array: _Array = item.array
    packed = is_packed(operands)
    dims = item.operand.named_dims(packed)
    if item.operand.may_lack_batch(packed):
        return fold.kept(array, divisors[item.name])[0]
    if pages_of(operands) is not None and item.name in _POOL:
        return _folded_pool(fold, item, operands)
    if dims == ("starts",):
        tokens = operands.query if item.name == "sequences.query_starts" else operands.key
        return fold.starts(array, fold.size * tokens.array.shape[2 if tokens.mapped else 1])
    if dims[:1] == ("one",):
        return fold.tokens(array)
    if dims[:1] in (("batch",), ("sequences",)) and (array.mapped or array.has_dims):
        return fold.repeated(array) if array.has_dims else fold.repeated_scalar(array)
    if array.mapped:
        raise _UnfoldableError
    return array.array


_POOL = (
    "key",
    "value",
    "sequences.key_starts",
    "pages.table",
    "pages.key_scale",
    "pages.value_scale",
)
"""The operands that are folded differently if keys and values are in pages."""


def _folded_pool(fold: _Fold, item: Item, operands: Any) -> jax.Array:
    """One of ``_POOL`` in the folded call."""
    array: _Array = item.array
    is_mapped = operands.key.mapped or operands.value.mapped
    pages = operands.key.array.shape[2 if operands.key.mapped else 1] // operands.pages.page_size
    if item.name == "sequences.key_starts":  # not read
        return jnp.zeros(fold.size * fold.batch + 1, jnp.int32)
    if item.name == "pages.table":
        return fold.table(array, pages) if is_mapped else fold.repeated(array)
    if not is_mapped:
        if array.mapped:
            raise _UnfoldableError
        return array.array
    if item.name in ("pages.key_scale", "pages.value_scale"):
        if array.array.shape[-3] == 1 and not array.mapped:
            return array.array
        each = array.everywhere(fold.size)
        of_pages = jnp.broadcast_to(each, (*each.shape[:2], pages, *each.shape[3:]))
        return of_pages.reshape(1, fold.size * pages, *each.shape[3:])
    return fold.tokens(array)


def _folded_options(fold: _Fold, operands: Any, options: Options, *, is_forward: bool) -> Options:
    divisors, packed = options.divisors, is_packed(operands)
    of_operands, sums = {}, {}
    for item in items(operands):
        if not item.operand.may_lack_batch(packed):
            continue
        of_operands[item.name] = fold.kept(item.array, divisors[item.name])[1]
        if item.operand.has_gradient and may_sum_gradient(item.name, operands):
            sums[item.name] = _summed_gradient(fold, item, divisors, is_forward)
    return dataclasses.replace(
        options,
        divisors=Divisors.of(of_operands, sums),
        batch_axes=(fold.size, *(options.batch_axes or (fold.batch,))),
    )


def _summed_gradient(fold: _Fold, item: Item, divisors: Divisors, is_forward: bool) -> int:
    """The number of batch indices over which a gradient is summed, within one mapped call.

    For a forward it is undecided: if the operand is not mapped, the sum may cover the whole batch.
    """
    together = divisors.of_gradient(item.name)
    if together or (is_forward and not item.array.mapped):
        return together
    return fold.batch if item.array.indices == 1 else 1
