"""Checks of pools, tables, lengths and scales, and the tokens of each sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_memeff._api.arguments import max_seqlen
from jax_memeff._api.arrays import ArrayArgument, checked, paged
from jax_memeff._call import values
from jax_memeff._call.mask import checks
from jax_memeff._call.sequences import clamped, sequence_of_tokens


class Rows(NamedTuple):
    """The new tokens of each sequence among all tokens of the query."""

    ends: jax.Array
    """int32[B]: one past the last token of each sequence."""
    given: jax.Array
    """int32[B]: the number of tokens that the call gives to each sequence."""
    lengths: jax.Array
    """int32[B]: the number of valid keys, including new ones."""
    first: jax.Array
    """int32[]: the first token of the first sequence."""

    def places(self, tokens: int) -> tuple[jax.Array, jax.Array]:
        """The sequence of each token, arbitrary for a token in none, and the token's distance from
        the end of that sequence's tokens, int32[tokens]. There must be a sequence."""
        sequence = sequence_of_tokens(jnp.append(self.first, self.ends), tokens)
        return sequence, self.ends[sequence] - jnp.arange(tokens, dtype=jnp.int32)

    def counts(self, longest: int) -> jax.Array:
        """int32[B]: the number of given tokens that exist in the sequence; these are the last."""
        return jnp.minimum(jnp.minimum(self.given, self.lengths), longest)


def checked_pages(
    given: Mapping[str, Any], new: tuple[ArrayArgument, ...]
) -> tuple[dict[str, Any], dict[str, int]]:
    """The arrays of a call with pages by name, and the sizes of their dims.

    The table is int32, and its entries outside the pool are negative or too large. New tokens are
    ``[tokens, heads, dim]``.

    Args:
        given: the user's arguments; others are ignored.
        new: the rows of the arrays of new tokens.
    """
    has_starts = given["query_starts"] is not None
    layout = paged(new, has_starts)
    arrays, sizes, _ = checked(layout, **{row.name: given[row.name] for row in layout.rows})
    _check_pool(arrays["key_pages"], arrays["page_table"])
    arrays["page_table"] = _int32_table(arrays["page_table"])
    if not has_starts:
        rows = sizes["B"] * sizes["T"]
        if rows > values.INT32_MAX:
            raise ValueError(
                f"{new[0].name} must have at most {values.INT32_MAX} tokens together, got "
                f"{sizes['B']} sequences of {sizes['T']} tokens; split the call"
            )
        for row in new:
            if (x := arrays[row.name]) is not None:
                arrays[row.name] = with_leading(row.name, x, 2, (rows,))
    return arrays, sizes


def scale_of_pages(scale: jax.Array | None) -> jax.Array | None:
    """A scale of :func:`checked_pages` as float32[1, 1|pages, K, 1]."""
    if scale is None:
        return None
    return scale.reshape(1, scale.shape[0] if scale.ndim == 2 else 1, scale.shape[-1], 1)


def _check_pool(key_pages: jax.Array, table: Any) -> None:
    """Check that int32 can count the keys of the pool and of a row of the table."""
    pages, page_size, *_ = key_pages.shape
    if pages * page_size > values.INT32_MAX:
        raise ValueError(
            f"key_pages must have at most {values.INT32_MAX} keys together, got {pages} pages of "
            f"{page_size} keys in shape {key_pages.shape}; use several pools"
        )
    if table.shape[1] * page_size > values.INT32_MAX:
        raise ValueError(
            f"page_table must have at most {values.INT32_MAX} keys in a row, got {table.shape[1]} "
            f"pages of {page_size} keys in shape {tuple(table.shape)}"
        )


def _int32_table(table: Any) -> jax.Array:
    if isinstance(table, jax.Array) and table.dtype == jnp.int32:
        return table  # clipping would launch a kernel, and any negative entry is invalid
    return jnp.asarray(values.clipped(table, -1, values.INT32_MAX))


def lengths(value: Any, batch: int, longest: int) -> jax.Array:
    """``kv_lengths`` as int32[B] in [0, longest]."""
    array = checks.lengths("kv_lengths", value, batch, longest)
    # Starts are computed from the lengths, so every device needs all of them.
    return gathered(jnp.asarray(values.clipped(array, 0, longest)))


def unclipped_lengths(value: Any) -> jax.Array | None:
    """``kv_lengths`` as they are, int32[B] on the device; None if they are anything else."""
    array = values.integers("kv_lengths", value)
    if isinstance(array, jax.Array) and array.dtype == jnp.int32:
        return gathered(array)
    return None


def rows(
    query_starts: Any, lengths: jax.Array, tokens: int, each: int | None, longest: int
) -> Rows:
    """The tokens of each sequence.

    Args:
        query_starts: integers [B + 1]; None if every sequence has ``each`` tokens.
        lengths: int32[B].
        tokens: the number of tokens.
        each: T, or None.
        longest: an upper bound on the new tokens of a sequence.
    """
    batch = lengths.shape[0]
    if each is not None:
        ends = jnp.arange(1, batch + 1, dtype=jnp.int32) * each
        return Rows(ends, jnp.full(batch, each, jnp.int32), lengths, jnp.int32(0))
    if values.is_host(query_starts):
        _starts_in_range(query_starts, tokens, longest)
    bounds = clamped(jnp.asarray(query_starts), tokens)
    starts = lax.cummax(bounds)[:-1]
    # Not the next start: XLA would compute two prefix maxima for each element of a fusion.
    ends = jnp.maximum(starts, bounds[1:])
    return Rows(ends, ends - starts, lengths, bounds[0])


def _starts_in_range(starts: np.ndarray, tokens: int, longest: int) -> None:
    for index, start in enumerate(map(int, starts)):
        before = int(starts[index - 1]) if index else 0
        if not 0 <= start <= tokens:
            raise ValueError(
                f"query_starts must be in [0, {tokens}], the number of tokens, got {start} at "
                f"index {index}"
            )
        if start < before:
            raise ValueError(
                f"query_starts must not decrease, got {start} after {before} at index {index}"
            )
        if index and start - before > longest:
            raise ValueError(
                "max_query_length must be at least the number of queries of every sequence, got "
                f"{longest}, and sequence {index - 1} has {start - before}"
            )


def max_query_length(value: Any, tokens: int, each: int | None) -> int:
    """An upper bound on the queries of a sequence: T, or the user's with ``query_starts``."""
    if each is None:
        if value is None:
            return tokens
        return min(max_seqlen("max_query_length", value), tokens)
    if value is not None:
        raise ValueError(
            f"max_query_length must be None without query_starts, got {value!r:.80}: every "
            f"sequence has {each} queries, and rows before its first token give 0"
        )
    return each


def with_leading(name: str, x: jax.Array, count: int, dims: tuple[int, ...]) -> jax.Array:
    """Reshape the leading dims of ``x``, which may be sharded over explicit mesh axes.

    JAX does not infer the sharding of such a reshape. Tokens are sharded like their sequences.

    Args:
        name: the name of the array in messages.
        x: the array.
        count: the number of leading dims to replace.
        dims: the new leading dims.

    Raises:
        ValueError: a replaced dim is sharded and cannot keep its sharding.
    """
    aval = jax.typeof(x)
    spec = aval.sharding.spec
    shape = (*dims, *x.shape[count:])
    if all(axes is None for axes in spec):
        return x.reshape(shape)
    first, *others = spec[:count]
    # A dim of size 1 is on an axis of size 1, which shards nothing.
    is_split = first is not None and x.shape[0] != 1
    if any(axes is not None for axes in others) or (is_split and dims[0] == 1):
        raise _refused(name, x)
    kept = PartitionSpec(first, *[None] * (len(dims) - 1), *spec[count:])
    return lax.reshape(x, shape, out_sharding=aval.sharding.update(spec=kept))


def require_whole_pages(name: str, pool: jax.Array) -> None:
    """Raise ``ValueError`` if an explicit mesh axis shards the pages of a pool."""
    if any(axes is not None for axes in jax.typeof(pool).sharding.spec[:2]):
        raise _refused(name, pool)


def _refused(name: str, x: jax.Array) -> ValueError:
    return ValueError(
        f"{name} of shape {x.shape} is sharded as {jax.typeof(x).sharding.spec}: over explicit "
        "mesh axes only sequences and heads may be sharded; give every device pages of its own "
        "inside jax.shard_map"
    )


def gathered(x: jax.Array) -> jax.Array:
    """``x`` gathered along its first dim, if an explicit mesh axis shards that dim."""
    sharding = jax.typeof(x).sharding
    if not sharding.spec or sharding.spec[0] is None:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(None, *sharding.spec[1:])))
