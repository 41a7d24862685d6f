"""Checks of pools, tables, lengths and scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._api import argument_arrays, argument_numbers
from jax_memeff._api.paged.shapes import gathered, with_leading
from jax_memeff._call import values
from jax_memeff._call.mask import checks
from jax_memeff._call.sequences import clamped, sequence_of_tokens
from jax_memeff.codegen.features.pages import MULTIPLE

FLOAT8 = "float8_e4m3fn"
POOL_DTYPES = ("bfloat16", "float16", FLOAT8, "float32", "float64")


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


def pools(key_pages: Any, value_pages: Any) -> tuple[jax.Array, jax.Array | None]:
    """The pools of keys and of values, [pages, page_size, K, H]; None for latent values."""
    named = {"key_pages": key_pages}
    if value_pages is not None:
        named["value_pages"] = value_pages
    arrays = {name: jnp.asarray(values.array(name, value)) for name, value in named.items()}
    for name, array in arrays.items():
        if array.ndim != 4:
            dim = "H" if name == "key_pages" else "Hv"
            raise ValueError(
                f"{name} must have rank 4, [pages, page_size, K, {dim}], got shape {array.shape}"
            )
        if array.dtype.name not in POOL_DTYPES:
            raise TypeError(
                f"{name} must be one of {', '.join(POOL_DTYPES)}, got {array.dtype}; cast it"
            )
    static_sizes(**arrays)
    key = arrays["key_pages"]
    if key.shape[1] == 0 or key.shape[1] % MULTIPLE:
        raise ValueError(
            f"key_pages must have a page size that is a multiple of {MULTIPLE}, got "
            f"{key.shape[1]} in shape {key.shape}"
        )
    keys = key.shape[0] * key.shape[1]
    if keys > values.INT32_MAX:
        raise ValueError(
            f"key_pages must have at most {values.INT32_MAX} keys together, got {key.shape[0]} "
            f"pages of {key.shape[1]} keys in shape {key.shape}; use several pools"
        )
    value = arrays.get("value_pages")
    if value is None:
        return key, None
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value_pages must have the pages, page size and heads of key_pages, {key.shape[:3]}, "
            f"got {value.shape[:3]} in shape {value.shape}"
        )
    if value.dtype != key.dtype:
        raise TypeError(
            f"value_pages must have the dtype of key_pages, {key.dtype}, got {value.dtype}"
        )
    return key, value


def static_sizes(**arrays: jax.Array) -> None:
    """Raise ``UnsupportedError`` if ``jax.export`` has made a size of these arrays symbolic."""
    values.require_static(
        {name: array.shape for name, array in arrays.items()},
        where="paged calls need static sizes",
        remedy="export a program for each size, or one for the largest: lengths may be 0",
    )


def table(value: Any, key_pages: jax.Array) -> jax.Array:
    """The table as int32[B, max_pages]; entries outside the pool are negative or too large."""
    array = values.integers("page_table", value)
    if array.ndim != 2:
        raise ValueError(
            f"page_table must have rank 2, [B, max_pages], got shape {tuple(array.shape)}"
        )
    static_sizes(page_table=array)
    longest = array.shape[1] * key_pages.shape[1]
    if longest > values.INT32_MAX:
        raise ValueError(
            f"page_table must have at most {values.INT32_MAX} keys in a row, got {array.shape[1]} "
            f"pages of {key_pages.shape[1]} keys in shape {tuple(array.shape)}"
        )
    if isinstance(array, jax.Array) and array.dtype == jnp.int32:
        return array  # clipping would launch a kernel, and any negative entry is invalid
    return jnp.asarray(values.clipped(array, -1, values.INT32_MAX))


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


def tokens(
    names: tuple[str, ...],
    arrays: tuple[jax.Array, ...],
    query_starts: Any,
    batch: int,
    dims: str,
) -> tuple[jax.Array, ...]:
    """New tokens as [tokens, heads, dim]; flattens [B, T, heads, dim].

    Args:
        names: the names of the arrays in messages.
        arrays: new queries, or new keys and values.
        query_starts: the user's argument; None if the arrays have a batch dim.
        batch: B, the rows of the table.
        dims: the names of the last two dims in messages.
    """
    for name, array in zip(names, arrays, strict=True):
        values.require_countable(name, array.shape)
        if query_starts is None and (array.ndim != 4 or array.shape[0] != batch):
            raise ValueError(
                f"{name} must have shape [B, T, {dims}] with B = {batch}, the rows of page_table, "
                f"got {array.shape}; pass query_starts for sequences that follow one another"
            )
        if query_starts is not None and array.ndim != 3:
            raise ValueError(
                f"{name} must have shape [tokens, {dims}], because query_starts is given, got "
                f"{array.shape}"
            )
        if array.shape[:-2] != arrays[0].shape[:-2]:
            raise ValueError(
                f"{name} must have the tokens of {names[0]}, {arrays[0].shape[:-2]}, got "
                f"{array.shape[:-2]} in shape {array.shape}"
            )
    if query_starts is not None:
        return arrays
    rows = batch * arrays[0].shape[1]
    if rows > values.INT32_MAX:
        raise ValueError(
            f"{names[0]} must have at most {values.INT32_MAX} tokens together, got {batch} "
            f"sequences of {arrays[0].shape[1]} tokens; split the call"
        )
    return tuple(
        with_leading(name, array, 2, (rows,)) for name, array in zip(names, arrays, strict=True)
    )


def rows(
    query_starts: Any, lengths: jax.Array, tokens: int, each: int | None, longest: int
) -> Rows:
    """The tokens of each sequence.

    Args:
        query_starts: the user's argument, [B + 1]; None if every sequence has ``each`` tokens.
        lengths: int32[B].
        tokens: the number of tokens.
        each: T, or None.
        longest: an upper bound on the new tokens of a sequence.
    """
    batch = lengths.shape[0]
    if each is not None:
        ends = jnp.arange(1, batch + 1, dtype=jnp.int32) * each
        return Rows(ends, jnp.full(batch, each, jnp.int32), lengths, jnp.int32(0))
    array = values.integers("query_starts", query_starts)
    if array.shape != (batch + 1,):
        raise ValueError(
            f"query_starts must have shape [B + 1] = [{batch + 1}], one more than page_table has "
            f"rows, got shape {tuple(array.shape)}"
        )
    if values.is_host(array):
        _starts_in_range(array, tokens, longest)
    bounds = clamped(jnp.asarray(array), tokens)
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


def max_query_length(value: Any, query_starts: Any, tokens: int, each: int | None) -> int:
    """An upper bound on the queries of a sequence: T, or the user's with ``query_starts``."""
    if each is None:
        if value is None:
            return tokens
        return min(argument_numbers.max_seqlen("max_query_length", value), tokens)
    if value is not None:
        raise ValueError(
            f"max_query_length must be None without query_starts, got {value!r:.80}: every "
            f"sequence has {each} queries, and rows before its first token give 0"
        )
    return each


def scale(name: str, value: Any, pages: jax.Array | None) -> jax.Array | None:
    """The scale of a float8 pool as float32[1, 1|pages, K, 1]."""
    if value is None:
        return None
    of = f"{name.split('_')[0]}_pages"
    if pages is None:
        raise ValueError(
            f"{name} must be None without {of}, got an array: key_scale also scales the values"
        )
    if pages.dtype.name != FLOAT8:
        raise ValueError(
            f"{name} must be None, because {of} is {pages.dtype} and only {FLOAT8} has scales; "
            "got an array"
        )
    array = jnp.asarray(values.array(name, value))
    if array.dtype != np.float32:
        raise TypeError(f"{name} must be float32, got {array.dtype}; pass .astype('float32')")
    count, _, heads, _ = pages.shape
    if array.shape not in ((heads,), (count, heads)):
        raise ValueError(
            f"{name} must have shape [K] = [{heads}] or [pages, K] = [{count}, {heads}], got "
            f"{array.shape}"
        )
    return array.reshape(1, count if array.ndim == 2 else 1, heads, 1)


def query(value: Any, key_pages: jax.Array) -> jax.Array:
    """The query, which has the dtype of the pool unless the pool is float8."""
    array = jnp.asarray(values.array("query", value))
    argument_arrays.float_dtype("query", array)
    static_sizes(query=array)
    if key_pages.dtype not in (array.dtype, FLOAT8):
        raise TypeError(
            f"key_pages must have the dtype of query, {array.dtype}, or {FLOAT8}, got "
            f"{key_pages.dtype}; cast the query"
        )
    if array.ndim < 2 or array.shape[-1] != key_pages.shape[-1]:
        raise ValueError(
            f"query must have the head dim of key_pages, {key_pages.shape[-1]}, got shape "
            f"{array.shape}"
        )
    heads, key_heads = array.shape[-2], key_pages.shape[2]
    if (heads != 0) if key_heads == 0 else (heads % key_heads != 0):
        raise ValueError(
            f"query's number of heads must be a multiple of key_pages', {key_heads}, got {heads} "
            f"in shape {array.shape}"
        )
    return array
