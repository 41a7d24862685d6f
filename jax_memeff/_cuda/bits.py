"""Boolean masks and lists of keys as words of bits, which every kernel reads.

A kernel that gathers listed keys (``key_lists.py``) reads them anew for each row and does not know
their positions. With bits every kernel serves a call with lists, with all features, but computes
the tiles of all keys. That is also the faster way if lists are long, because the rows of a tile
share what they load.
"""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_memeff._call.divisors import broadcastable, of_booleans, with_values
from jax_memeff._call.mask import Mask, block_mask
from jax_memeff._call.mask.conditions import is_beyond_block_masks
from jax_memeff._call.operands import Operands, QkvPackedOperands
from jax_memeff._call.options import Divisors, Options
from jax_memeff._call.sequences import Sequences, sequence_of_tokens

_WORD = 32
"""Columns of a word."""

_LEAST_ROWS = 128
_FORWARD_COLUMNS, _BACKWARD_COLUMNS = 48, 96
"""A forward reads bits if it has at least so many rows, and keys for each listed key of a query
head; a backward if it has so many keys for each listed key. Fewer rows do not share what they load
(docs/tuning/sm90_forward.md).
"""


def words_of(array: jax.Array, columns: int) -> jax.Array:
    """The words of a boolean array, uint32[..., ceil(columns / 32)]; bits beyond the columns are 0.

    Args:
        array: bool[..., columns], or [..., 1] for all columns.

    >>> words_of(jnp.array([[True] * 40, [True] + [False] * 39]), 40).tolist()
    [[4294967295, 255], [1, 0]]
    >>> words_of(jnp.array([[True], [False]]), 33).tolist()
    [[4294967295, 1], [0, 0]]
    """
    count = -(-columns // _WORD)
    bit = lax.shift_left(np.uint32(1), lax.iota(jnp.uint32, _WORD))
    if array.shape[-1] != columns:
        ends = columns - _WORD * np.arange(count)
        every = np.where(ends < _WORD, 2 ** np.minimum(ends, _WORD - 1) - 1, 2**_WORD - 1)
        return jnp.where(array, every.astype(np.uint32), np.uint32(0))
    padding = [(0, 0)] * (array.ndim - 1) + [(0, count * _WORD - columns)]
    padded = jnp.pad(array, padding).reshape(*array.shape[:-1], count, _WORD)
    return jnp.where(padded, bit, np.uint32(0)).sum(-1, dtype=jnp.uint32)


def is_faster(types: Operands, options: Options, is_backward: bool) -> bool:
    """Whether kernels that read bits are the fastest way to compute a call with lists of keys.

    The rival of a forward is a kernel that gathers keys, whose time is that of the entries of all
    lists; that of a backward is plain JAX. Latent attention has kernels that gather in both
    directions and share each key between all heads.
    """
    if options.latent_dim is not None:
        return False
    _, heads, rows, columns = types.scores_shape
    count = types.mask.key_lists[0].indices.shape[3]
    if is_backward:
        return columns <= _BACKWARD_COLUMNS * count
    group = heads // types.key.shape[2]
    return rows >= _LEAST_ROWS and columns * group <= _FORWARD_COLUMNS * count


def in_bits(
    given: Operands | QkvPackedOperands, options: Options
) -> tuple[Operands | QkvPackedOperands, Options]:
    """The same call with bits in place of lists of keys and boolean arrays. Values that are columns
    of the keys become an array of their own.
    """
    if options.latent_dim is not None:
        given, options = with_values(given, options)
    separate = given.separate() if isinstance(given, QkvPackedOperands) else given
    mask, sequences, (batch, heads, rows, columns) = (
        given.mask,
        separate.sequences,
        separate.scores_shape,
    )
    lists = mask.key_lists[0].indices
    lists = lists if sequences is None else jnp.swapaxes(lists, 1, 2)
    bits, divisor = _listed(lists, columns), options.divisors["mask.key_lists.0.indices"]
    # One block mask for all heads that share lists, before their bits are repeated.
    blocks = _block_mask(bits, rows, columns, sequences is not None)
    if bits.shape[1] > 1:
        bits, blocks = (x if x.shape[1] == 1 else _of_heads(x, heads) for x in (bits, blocks))
    if mask.booleans:
        if sequences is None:
            bits, divisor = broadcastable(bits, divisor, batch), 1
        bits = functools.reduce(
            operator.and_,
            _booleans(mask, options.divisors, sequences, (batch, rows, columns)),
            bits,
        )
    if is_beyond_block_masks(mask):  # no block is known to be valid as a whole
        blocks = jnp.where(blocks == block_mask.ALL, np.uint8(block_mask.SOME), blocks)
    dropped = "mask.key_lists.", "mask.booleans."
    operand_divisors = {n: x for n, x in options.divisors.operands if not n.startswith(dropped)}
    operand_divisors |= {"mask.bits": divisor}
    if blocks.shape[0] != 1:
        operand_divisors[f"mask.block_masks.{len(mask.block_masks)}"] = options.divisors[
            "mask.key_lists.0.indices"
        ]
    own_divisors = Divisors.of(operand_divisors, dict(options.divisors.gradients))
    mask = dataclasses.replace(
        mask,
        key_lists=(),
        booleans=(),
        bits=bits,
        block_masks=(*mask.block_masks, blocks),
        beyond_block_masks=False,
    )
    return given._replace(mask=mask), dataclasses.replace(options, divisors=own_divisors)


def _of_heads(x: jax.Array, heads: int) -> jax.Array:
    """An array [b, K, ...] for each query head."""
    return jnp.repeat(x, heads // x.shape[1], 1)


def _listed(lists: jax.Array, columns: int) -> jax.Array:
    """Whether each column is in the list of each row, uint32[b, 1|K, rows, words].

    >>> _listed(jnp.array([[[[33, 0, -1, 40]]]]), 40).tolist()
    [[[[1, 2]]]]
    """
    is_key = (lists >= 0) & (lists < columns)
    bit = lax.shift_left(np.uint32(1), (lists & (_WORD - 1)).astype(jnp.uint32))
    count = -(-columns // _WORD)
    word = jnp.where(is_key, lax.shift_right_logical(lists, jnp.int32(5)), count)
    place = (x[..., None] for x in jnp.ogrid[tuple(map(slice, lists.shape[:3]))])
    table = jnp.zeros((*lists.shape[:3], count), jnp.uint32)
    # The entries of a list are distinct, so a sum sets each bit once.
    return table.at[(*place, word)].add(bit, mode="drop")


def _booleans(
    mask: Mask, divisors: Divisors, sequences: Sequences | None, sizes: tuple[int, int, int]
) -> list[jax.Array]:
    """The words of the boolean arrays of a mask with lists: of the whole batch, or of tokens."""
    batch, rows, columns = sizes
    all_words = []
    for array, divisor in zip(mask.booleans, of_booleans(mask, divisors), strict=True):
        words = words_of(array, columns)
        if sequences is None:
            all_words.append(broadcastable(words, divisor, batch))
            continue
        tokens = mask.key_lists[0].indices.shape[1]
        sequence = sequence_of_tokens(sequences.query_starts, tokens)
        row = jnp.clip(lax.iota(jnp.int32, tokens) - sequences.query_starts[sequence], 0, rows - 1)
        token_words = words[
            sequence if words.shape[0] > 1 else jnp.zeros_like(sequence),
            :,
            row if words.shape[2] > 1 else jnp.zeros_like(row),
        ]
        all_words.append(jnp.swapaxes(token_words, 0, 1)[None])
    return all_words


def _block_mask(bits: jax.Array, rows: int, columns: int, is_packed: bool) -> jax.Array:
    """The block mask of bits, uint8[b, 1|K, Q blocks, KV blocks]. For packed sequences every block
    may have valid elements.

    >>> _block_mask(_listed(jnp.array([[[[0]] * 70]]), 100), 70, 100, False)[0, 0].tolist()
    [[2, 0], [2, 0]]
    """
    size = block_mask.BLOCK
    counts = -(-max(rows, 1) // size), -(-max(columns, 1) // size)
    if is_packed:
        return jnp.full((1, 1, *counts), block_mask.SOME, jnp.uint8)
    more = -bits.shape[2] % size, -bits.shape[3] % (size // _WORD)
    padded = jnp.pad(bits, ((0, 0), (0, 0), (0, more[0]), (0, more[1])))
    tiles = padded.reshape(*bits.shape[:2], counts[0], size, counts[1], size // _WORD)
    zeros, ones = np.uint32(0), np.uint32(2**_WORD - 1)
    some = lax.reduce(tiles, zeros, lax.bitwise_or, (3, 5)) != zeros
    every = lax.reduce(tiles, ones, lax.bitwise_and, (3, 5)) == ones
    return block_mask.levels_of(some, every)
