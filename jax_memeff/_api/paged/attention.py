"""Attention over keys and values in a pool of pages.

In the user's windows and functions, a row is the position of the query's token in its sequence. The
rows of a call are only the new tokens; their positions follow from the lengths.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_memeff._api.arguments import (
    CommonArguments,
    PagedArguments,
    in_full,
    latent_dim,
    with_defaults,
)
from jax_memeff._api.arrays import PAGED_QUERY
from jax_memeff._api.call import AttentionCall, canonical
from jax_memeff._api.paged import arguments as checks
from jax_memeff._call.mask import Mask, Window
from jax_memeff._call.mask.conditions import (
    AnyMask,
    Conditions,
    TracedWindow,
    common_list,
    intersection,
)
from jax_memeff._call.mask.expression import Frame, compiled
from jax_memeff._call.offsets import MOST_POSITION, Offsets, Position
from jax_memeff._call.operands import Operands
from jax_memeff._call.sequences import INVARIANT_COLUMNS, Pages, Sequences
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
            must be 1, 2, 4, 8 or a multiple of 16.
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
            rows of a boolean array and of lists are the queries of the sequence, their columns are
            positions. Lengths and segment ids raise an error, under ``|`` and ``~`` too. Pass a
            tree of draft tokens as a function.
        offsets: Where the sequences begin in larger ones, for windows and functions: ``query`` and
            ``key`` are added to the positions of queries and keys, so a part of the keys, such as a
            prefix that sequences share, can be merged with the others
            (:func:`jax_memeff.merge_attention`). By default both are 0.
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
    outputs = paged.call.run(with_residual=True)
    out, lse = (checks.with_leading("query", x, 1, paged.rows) for x in outputs)
    return (out, lse) if with_residual else out


class Paged(NamedTuple):
    """A valid call, and the dims of the user's tokens."""

    call: AttentionCall[Operands]
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
    given = {"query": query, "key_pages": key_pages, "value_pages": value_pages}
    arrays, sizes = checks.checked_pages({"page_table": page_table, **given, **named}, PAGED_QUERY)
    key_pages, value_pages, table = (
        arrays[name] for name in ("key_pages", "value_pages", "page_table")
    )
    batch, max_pages, page_size = sizes["B"], sizes["max_pages"], sizes["page_size"]
    tokens, starts, each = arrays["query"], arrays["query_starts"], sizes.get("T")
    longest = checks.max_query_length(named["max_query_length"], len(tokens), each)
    lengths = checks.lengths(kv_lengths, batch, max_pages * page_size)
    rows = checks.rows(starts, lengths, len(tokens), each, longest)
    key_scale, value_scale = (
        checks.scale_of_pages(arrays[name]) for name in ("key_scale", "value_scale")
    )
    pool_names = ("key_pages", "value_pages")
    has_values = value_pages is not None
    values_dim = latent_dim(named["value_dim"], has_values, sizes["H"], pool_names)

    if isinstance(named["mask"], Mask):
        _require_possible(named["mask"])
    scores_shape = (batch, sizes["N"], longest, max_pages * page_size)
    shared = {name: x for name, x in named.items() if name in CommonArguments.__annotations__}
    options, combined, others = canonical(
        tokens.dtype,
        sizes["H"],
        scores_shape,
        sizes["K"],
        None,
        named["mask"],
        with_defaults(CommonArguments, shared),
        tokens=(len(tokens), len(tokens)) if each is None else None,
    )
    if is_invariant:
        more = _padded_pages(max_pages, page_size, INVARIANT_COLUMNS) - max_pages
        table = jnp.pad(table, ((0, 0), (0, more)), constant_values=-1)
    counts = rows.counts(longest)
    columns = table.shape[1] * page_size
    offsets = named["offsets"]
    combined = _with_token_lists(combined, scores_shape, is_ragged=each is None)
    combined, position = _canonical_mask(combined, rows, counts, scores_shape, columns, offsets)
    if others["functions"] is not None or offsets is not None:
        others["position"] = position
    else:
        combined = _by_rows(combined, longest)

    given = None if combined.traced_windows else checks.unclipped_lengths(kv_lengths)
    if given is not None and 0 < columns == max_pages * page_size:
        # Lengths are clamped where keys are read, to the columns of a table that may be padded.
        # Without columns nothing reads them, but a row with a sink exists only within its length.
        lengths = given
    if given is not None and each == 1 and others["position"] is None:
        sequences = _of_step(lengths, columns)
    else:
        sequences = _of_rows(rows, counts, lengths, len(tokens), longest, columns)
    operands = Operands(
        query=tokens[None],
        key=_as_rows(key_pages),
        value=_as_rows(key_pages if value_pages is None else value_pages),
        mask=combined,
        **others,
        sequences=sequences,
        pages=Pages(
            table,
            key_scale,
            value_scale,
            page_size,
            values_dim,
            each,
            is_invariant,
        ),
    )
    rows_shape = (len(tokens),) if each is None else (batch, each)
    return Paged(AttentionCall(operands, options, batched=False), rows_shape)


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


def _with_token_lists(mask: Mask, scores_shape: tuple[int, int, int, int], is_ragged: bool) -> Mask:
    """The mask with one list of keys for each token, as in a canonical mask of packed sequences."""
    batch, _, rows, columns = scores_shape
    key_lists = common_list(mask.key_lists, columns, is_packed=is_ragged)
    if key_lists and not is_ragged:
        indices = jnp.swapaxes(key_lists[0].indices, 1, 2)
        indices = jnp.broadcast_to(indices, (batch, *indices.shape[1:]))
        indices = checks.with_leading("key indices", indices, 2, (batch * rows,))[None]
        key_lists = (dataclasses.replace(key_lists[0], indices=indices),)
    return dataclasses.replace(mask, key_lists=key_lists)


def _canonical_mask(
    mask: Mask,
    rows: checks.Rows,
    counts: jax.Array,
    scores_shape: tuple[int, int, int, int],
    columns: int,
    offsets: Offsets | None,
) -> tuple[Mask, Position]:
    """The canonical mask in terms of positions, and those of row 0 and key 0 of each sequence."""
    batch, _, longest, own_columns = scores_shape
    mask = _by_position(mask).canonical(batch, longest, own_columns)
    given = jnp.minimum(rows.given, longest)
    mask = _shifted(mask, batch, given - counts, columns)
    offsets = Offsets() if offsets is None else offsets
    first_row, first_column = (jnp.broadcast_to(x, batch) for x in offsets.position())
    first_row = jnp.minimum(first_row, MOST_POSITION - rows.lengths)
    # The user's row 0 is at a negative position if a sequence has fewer tokens than queries.
    users = Position(first_row + rows.lengths - given, first_column)
    frame = Frame(counts, rows.lengths, offsets.batch, offsets.head, users)
    return compiled(mask, frame), Position(first_row + rows.lengths - counts, first_column)


def _as_rows(pages: jax.Array) -> jax.Array:
    """A pool as [1, pages * page_size, K, H], without a copy."""
    return checks.with_leading("key_pages", pages, 2, (1, pages.shape[0] * pages.shape[1]))


def _require_possible(mask: Conditions) -> None:
    """Raise for conditions that paged calls do not take: lengths, computed blocks, segment ids.

    They are wrong under ``|`` and ``~``, too, so those masks are also checked.

    Raises:
        ValueError: names the condition and its replacement.
    """
    if {"query_lengths", "key_lengths"} & mask.kinds():
        raise ValueError(
            "mask must not have lengths, because kv_lengths are the lengths of sequences; got "
            "Mask.lengths: pass shorter kv_lengths, or Mask.function"
        )
    if mask.block_masks:
        raise ValueError(
            "mask must not have computed blocks, because rows are positions in a sequence; got "
            "mask.blocks(query, key): pass the mask itself"
        )
    if mask.segment_ids:
        raise ValueError(
            "mask must not have segment ids, because a row of a pool belongs to no fixed sequence; "
            "got Mask.segments: pass Mask.function(lambda b, h, q, k: ids[b, q] == ids[b, k])"
        )
    for other in mask.excluded:
        _require_possible(other)


def _by_position(mask: AnyMask) -> AnyMask:
    """The same mask in terms of positions: the diagonal of every window starts at position 0.

    This includes windows under ``|`` and ``~``.
    """
    return dataclasses.replace(
        mask,
        top_left=intersection(mask.top_left, mask.bottom_right),
        bottom_right=None,
        traced_windows=tuple(
            TracedWindow(window.left, window.right, "top_left") for window in mask.traced_windows
        ),
        excluded=tuple(map(_by_position, mask.excluded)),
    )


def _by_rows(mask: Mask, longest_query: int) -> Mask:
    """A mask of :func:`_by_position` without functions, in terms of the new tokens.

    The diagonal ends at the last token. A single new token is the last one of its sequence, so it
    needs no right bound.
    """
    window = mask.top_left
    if window is not None and longest_query == 1 and (window.right or 0) >= 0:
        window = Window(window.left, None)
    if window == Window(None, None):
        window = None
    return dataclasses.replace(mask, top_left=None, bottom_right=window)


def _shifted(mask: Mask, batch: int, first: jax.Array, columns: int) -> Mask:
    """The mask with its boolean arrays shifted, so that row 0 is the sequence's first token.

    Lists of blocks, and arrays under ``|`` and ``~``, keep the user's rows: they become one
    function, which computes these rows from positions.

    Args:
        mask: a canonical mask.
        batch: B.
        first: int32[B], the number of rows before each sequence's first token.
        columns: the number of columns, to which arrays are padded with False.
    """

    def one(array: jax.Array) -> jax.Array:
        _, heads, rows, array_columns = array.shape
        if rows == 1:
            return array
        array = jnp.broadcast_to(array, (batch, heads, rows, array_columns))
        of_rows = jnp.arange(rows, dtype=jnp.int32)[None] + first[:, None]
        # Rows after the last one belong to no token.
        return jnp.take_along_axis(array, of_rows[:, None, :, None], 2, mode="clip")

    mask = _with_columns(mask, columns)
    return dataclasses.replace(mask, booleans=tuple(map(one, mask.booleans)))


def _with_columns(mask: AnyMask, columns: int) -> AnyMask:
    """The mask with its boolean arrays, those under ``~`` too, padded to so many columns."""

    def one(array: jax.Array) -> jax.Array:
        array_columns = array.shape[3]
        if array_columns in (1, columns):
            return array
        return jnp.pad(array, [(0, 0)] * 3 + [(0, columns - array_columns)])

    return dataclasses.replace(
        mask,
        booleans=tuple(map(one, mask.booleans)),
        excluded=tuple(_with_columns(other, columns) for other in mask.excluded),
    )


def _padded_pages(max_pages: int, page_size: int, columns: int) -> int:
    """The smallest number of pages >= ``max_pages`` whose keys are a multiple of ``columns``.

    >>> _padded_pages(5, page_size=48, columns=256)
    16
    """
    multiple = math.lcm(page_size, columns) // page_size
    return -(-max_pages // multiple) * multiple
