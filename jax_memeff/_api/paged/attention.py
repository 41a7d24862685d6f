"""Attention over keys and values in a pool of pages."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_memeff._api import argument_numbers
from jax_memeff._api.arguments import CommonArguments, PagedArguments, in_full, with_defaults
from jax_memeff._api.canonical import Call, common
from jax_memeff._api.paged import arguments as checks
from jax_memeff._api.paged import masks
from jax_memeff._api.paged.shapes import with_leading
from jax_memeff._call.mask import Mask
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands.arrays import Operands
from jax_memeff._call.pages import INVARIANT_COLUMNS, Pages
from jax_memeff._call.sequences import Sequences
from jax_memeff._call.values import flag, takes_objects


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike | None,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    return_residual: Literal[False] = False,
    **arguments: Unpack[PagedArguments],
) -> jax.Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike | None,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    return_residual: Literal[True],
    **arguments: Unpack[PagedArguments],
) -> tuple[jax.Array, jax.Array]: ...


@in_full
@takes_objects
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike | None,
    page_table: ArrayLike,
    kv_lengths: ArrayLike,
    *,
    return_residual: bool = False,
    **arguments: Unpack[PagedArguments],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute exact attention for the new tokens of B sequences with keys and values in pages.

    Key j of sequence b is row ``j % page_size`` of page ``page_table[b, j // page_size]``. The new
    tokens are the last of their sequence: the last query of sequence b is at position
    ``kv_lengths[b] - 1``, and its key and value must already be in the pool
    (:func:`jax_memeff.append_to_pages`). One call may mix sequences with any number of new tokens:
    whole prompts, chunks of prompts and single decode steps. Sequences may share pages.

    Args:
        query: ``[B, T, N, H]``, T new tokens of each sequence; or with ``query_starts``
            ``[tokens, N, H]``; in float16, bfloat16, float32 or float64. N must be a multiple of K.
        key_pages: ``[pages, page_size, K, H]`` in query's dtype or float8_e4m3fn. The page size
            must be a multiple of 16.
        value_pages: ``[pages, page_size, K, Hv]`` in the dtype of ``key_pages``. If None, the first
            ``value_dim`` columns of the keys are the values (latent attention).
        page_table: ``[B, max_pages]`` integers. Entries beyond a sequence's length are never read.
        kv_lengths: ``[B]`` integers, the number of tokens of each sequence, including the new ones.
        query_starts: ``[B + 1]`` integers: sequence b owns queries ``query_starts[b]`` up to
            ``query_starts[b + 1]`` (exclusive). Later tokens belong to no sequence.
        max_query_length: With ``query_starts``, an upper bound on the queries of any sequence, a
            Python integer; by default the number of tokens. Without it, a call of decode steps
            also needs the kernels and the workspace for prompts.
        scale: The factor of the scores, by default ``1/sqrt(H)``.
        is_causal: Whether to mask keys after a query's position, by default True.
        local_window_size: A query at position p attends to the keys from ``p - left`` to
            ``p + right``.
        logits_soft_cap: As in :func:`jax_memeff.dot_product_attention`.
        sinks: Likewise, ``[N]``.
        score_mod: Likewise, a function of (score, b, h, q, k); b is the sequence, and q and k are
            positions in it.
        mask: Likewise, a ``Mask`` or a boolean array that broadcasts to [B, N, T, S] with
            ``S = max_pages * page_size``. Windows and functions use positions in the sequence. The
            rows of a boolean array and of lists of blocks are the queries of the sequence, their
            columns are positions. Lengths and segment ids raise an error, under ``|`` and ``~``
            too. Pass a tree of draft tokens as a function.
        key_scale: ``[K]`` or ``[pages, K]`` float32, only for float8: the keys are ``key_pages``
            times this.
        value_scale: Likewise for values.
        value_dim: The number of value columns if ``value_pages`` is None, a Python integer.
        batch_invariant: Make the bits of a token's result depend only on its query, keys, values
            and position, not on the other sequences, the placement of pages, or how many new tokens
            its sequence has in this call. Such calls are slower.
        return_residual: Whether to return the logsumexp too.
        implementation: None selects the kernels on CUDA and plain JAX elsewhere. ``"cuda"`` and
            ``"xla"`` select that path, or raise an error.

    Returns:
        The output ``[B, T, N, Hv]`` or ``[tokens, N, Hv]`` in query's dtype and, on request, the
        logsumexp ``[B, T, N]`` or ``[tokens, N]`` in f32 (f64 for f64 inputs). Tokens of no
        sequence, and the first rows of a sequence that has fewer tokens than rows, have output 0
        and logsumexp -inf.

    Raises:
        ValueError: A shape, a static value, or a length or start in a NumPy array is wrong.
        TypeError: A dtype is wrong, or a value that must be static is traced.
        jax_memeff.UnsupportedError: No CUDA kernel supports the call; or the call is
            differentiated, for which :func:`jax_memeff.varlen_attention` is the replacement.

    Entries of ``page_table`` and values of device arrays never raise. Lengths are clamped to
    [0, S]. A page outside the pool is not read, and its keys are masked. ``query_starts`` are
    clamped like ``cu_seqlens_q`` of ``varlen_attention``. :func:`jax_memeff.check` reports such
    values. No element beyond the lengths affects a result, not even NaN. Nor does one that comes
    before the window of every query of its sequence, if the window's left bound is not traced.

    >>> import jax, jax.numpy as jnp, jax_memeff
    >>> key_pages, value_pages = jnp.zeros((2, 8, 16, 1, 32))  # 8 pages of 16 keys
    >>> table = jnp.array([[5, 0], [2, 7]])
    >>> lengths = jnp.array([20, 3])  # the tokens of two sequences; both have a new one
    >>> key, value, query = jax.random.normal(jax.random.key(0), (3, 2, 1, 1, 32))
    >>> key_pages, value_pages = jax_memeff.append_to_pages(
    ...     key_pages, value_pages, key, value, table, lengths
    ... )
    >>> out = jax_memeff.paged_attention(query, key_pages, value_pages, table, lengths)
    >>> out.shape, bool(jnp.all(value_pages[0, 3] == value[0, 0]))
    ((2, 1, 1, 32), True)
    """
    with_residual = flag("return_residual", return_residual)
    paged = prepare(query, key_pages, value_pages, page_table, kv_lengths, **arguments)
    found = paged.call.run(with_residual=True)
    out, lse = (with_leading("query", x, 1, paged.rows) for x in found)
    return (out, lse) if with_residual else out


class Paged(NamedTuple):
    """A valid call, and the dims of the user's tokens."""

    call: Call[Operands]
    rows: tuple[int, ...]
    """(B, T) or (tokens,)"""


def prepare(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    kv_lengths: Any,
    **arguments: Unpack[PagedArguments],
) -> Paged:
    """Check the arguments of ``paged_attention`` and convert them to canonical form.

    Raises:
        ValueError, TypeError: the errors of ``paged_attention``.
    """
    named = with_defaults(PagedArguments, arguments)
    is_invariant = flag("batch_invariant", named["batch_invariant"])
    key_pages, value_pages = checks.pools(key_pages, value_pages)
    query = checks.query(query, key_pages)
    table = checks.table(page_table, key_pages)
    batch, max_pages = table.shape
    page_size, starts = key_pages.shape[1], named["query_starts"]
    (tokens,) = checks.tokens(("query",), (query,), starts, batch, "N, H")
    each = query.shape[1] if starts is None else None
    longest = checks.max_query_length(named["max_query_length"], starts, len(tokens), each)
    lengths = checks.lengths(kv_lengths, batch, max_pages * page_size)
    rows = checks.rows(starts, lengths, len(tokens), each, longest)
    latent_dim = argument_numbers.latent_dim(
        named["value_dim"],
        value_pages is not None,
        key_pages.shape[3],
        ("key_pages", "value_pages"),
    )
    key_scale, value_scale = (
        checks.scale(name, named[name], pool)
        for name, pool in (("key_scale", key_pages), ("value_scale", value_pages))
    )

    scores = (batch, query.shape[-2], longest, max_pages * page_size)
    shared = {name: x for name, x in named.items() if name in CommonArguments.__annotations__}
    options, combined, arrays = common(
        query.dtype,
        query.shape[-1],
        scores,
        None,
        named["mask"],
        with_defaults(CommonArguments, shared),
    )
    masks.require_possible(combined)
    if is_invariant:
        more = masks.padded_pages(max_pages, page_size, INVARIANT_COLUMNS) - max_pages
        table = jnp.pad(table, ((0, 0), (0, more)), constant_values=-1)
    counts = rows.counts(longest)
    columns = table.shape[1] * page_size
    combined, position = _canonical_mask(combined, rows, counts, scores, columns)
    if arrays["functions"] is not None:
        arrays["position"] = position
    else:
        combined = masks.by_rows(combined, longest)

    given = None if combined.traced_windows else checks.unclipped_lengths(kv_lengths)
    if given is not None and 0 < columns == max_pages * page_size:
        # Lengths are clamped where keys are read, to the columns of a table that may be padded.
        # Without columns nothing reads them, but a row with a sink exists only within its length.
        lengths = given
    if given is not None and each == 1 and arrays["functions"] is None:
        sequences = _of_step(lengths, columns)
    else:
        sequences = _of_rows(rows, counts, lengths, len(tokens), longest, columns)
    operands = Operands(
        query=tokens[None],
        key=_as_rows(key_pages),
        value=_as_rows(key_pages if value_pages is None else value_pages),
        mask=combined,
        **arrays,
        sequences=sequences,
        pages=Pages(
            table,
            key_scale,
            value_scale,
            page_size,
            latent_dim,
            each,
            is_invariant,
        ),
    )
    return Paged(Call(operands, options, batched=False), query.shape[:-2])


def _of_step(lengths: jax.Array, columns: int) -> Sequences:
    """The sequences of a decode step, with one row each. A row without a token is a gap.

    XLA would launch two or three kernels of 2 µs each for clipped lengths, counts and starts, but
    the attention of a small step takes only 10 µs. So starts are constants. The number of tokens is
    the length clamped to 1, and both lengths are clamped where they are read.
    """
    starts = jnp.asarray(np.arange(lengths.shape[0] + 1, dtype=np.int32))
    return Sequences(starts, starts, lengths, lengths, 1, columns)


def _of_rows(
    rows: checks.Rows,
    counts: jax.Array,
    lengths: jax.Array,
    tokens: int,
    longest: int,
    columns: int,
) -> Sequences:
    """The sequences of a call with ``counts`` rows each among ``tokens`` query rows."""
    starts = rows.ends - counts
    first = starts[0] if counts.size else rows.first
    # Rows before a sequence's first token are a gap after the previous sequence.
    starts = jnp.append(starts, first + tokens)
    return Sequences(starts, jnp.zeros_like(starts), counts, lengths, longest, columns)


def _canonical_mask(
    mask: Mask,
    rows: checks.Rows,
    counts: jax.Array,
    scores: tuple[int, int, int, int],
    columns: int,
) -> tuple[Mask, Position]:
    """The canonical mask in terms of positions, and the position of row 0 of each sequence."""
    batch, _, longest, own_columns = scores
    mask = masks.by_position(mask).canonical(batch, longest, own_columns)
    given = jnp.minimum(rows.given, longest)
    mask = masks.shifted(mask, batch, given - counts, columns)
    first_column = jnp.zeros(batch, jnp.int32)
    # The user's row 0 is at a negative position if a sequence has fewer tokens than queries.
    users = Position(rows.lengths - given, first_column)
    compiled_mask = compiled(mask, Frame(counts, rows.lengths, position=users))
    return compiled_mask, Position(rows.lengths - counts, first_column)


def _as_rows(pages: jax.Array) -> jax.Array:
    """A pool as [1, pages * page_size, K, H], without a copy."""
    return with_leading("key_pages", pages, 2, (1, pages.shape[0] * pages.shape[1]))
