"""Dropout whose keep bits depend only on the key, the head and the position.

The random byte of element (row r, column c) of head index ``bh = b * N + n`` is a function of
(key, bh, r, c) only, so every tile size, shard and implementation drops the same elements::

    ctr  = ( (r>>4)<<2 | (r>>1)&3 ,  (c>>4)<<2 | (c>>1)&3 ,  bh ,  0 )
    w    = philox4x32_7(ctr, key)[ 2*(r&1) + (c&1) ]
    byte = (w >> 8*( 2*((r>>3)&1) + ((c>>3)&1) )) & 255
    keep = byte >= T

One call of the generator serves 16 elements of a 16 x 16 block. The generator is Philox4x32 of
Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11), with 7 rounds,
the fewest that pass BigCrush there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from jax_memeff import _compat as compat
from jax_memeff._call import values
from jax_memeff._call.offsets import Index, Offsets
from jax_memeff._call.operands import DropoutState, Operands
from jax_memeff._call.options import RANDOM_BLOCK, Options
from jax_memeff._call.values import static_number

_THREEFRY = "threefry2x32"
_RBG = ("rbg", "unsafe_rbg")
"""JAX's generators whose keys have four words."""

_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def canonical(
    arguments: Mapping[str, Any], batch: int, num_heads: int, offsets: Offsets | None
) -> tuple[int, DropoutState | None]:
    """The threshold and the state of a call; the state is None if nothing is dropped.

    Args:
        arguments: all of ``CommonArguments``.
        batch: B, the batch size of this call.
        num_heads: N, the number of query heads of this call.
        offsets: those of the call.

    Raises:
        ValueError, TypeError: as ``dot_product_attention`` says.
    """
    byte, key = threshold(checked_rate(arguments["dropout_rate"])), arguments["dropout_key"]
    if key is None:
        if byte == 0:
            return 0, None
        raise ValueError(
            "dropout_key must be given when dropout_rate > 0: expected a jax.random key, got None; "
            "pass dropout_key=jax.random.key(seed) or dropout_rate=0.0"
        )
    _require_key(key)
    return byte, _state(key, batch, num_heads, offsets) if byte else None


def checked_rate(value: Any) -> float:
    """The rate of a call: a static number in [0, 1)."""
    rate = static_number(
        "dropout_rate", value, "pass a Python number (jax.jit's static_argnames helps)"
    )
    if not 0.0 <= rate < 1.0:
        raise ValueError(
            f"dropout_rate must be in [0, 1), got {rate}; the largest rate is {255 / 256}, and 0.0 "
            "drops nothing"
        )
    return rate


@values.takes_objects
def threshold(rate: float) -> int:
    """The threshold T, ``floor(256 * rate + 0.5)``: an element is dropped if its byte is below.

    Raises:
        TypeError: ``rate`` is not a number, or is traced.
        ValueError: ``rate`` is not in [0, 1], or is above 0 and rounds to never or to always.

    >>> threshold(0.1), threshold(0.0)
    (26, 0)
    """
    if not isinstance(rate, float):
        rate = static_number("dropout_rate", rate, "pass a Python number")
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout_rate: expected a number in [0, 1), got {rate}")
    byte = math.floor(256 * rate + 0.5)
    if byte == 0 and rate > 0:
        raise ValueError(
            f"dropout_rate: rates are multiples of 1/256 and {rate} rounds to 0; "
            f"the nearest valid rates are 0.0 and {1 / 256}"
        )
    if byte == 256:
        raise ValueError(
            f"dropout_rate: rates are multiples of 1/256 and {rate} rounds to 1, "
            f"which drops everything; the nearest valid rate is {255 / 256}"
        )
    return byte


@values.takes_objects
def realised_rate(rate: float) -> float:
    """The actual probability of dropping an element: ``threshold(rate) / 256``.

    Raises:
        TypeError: ``rate`` is not a number, or is traced.
        ValueError: the rate cannot be realised, as in ``threshold``.

    >>> realised_rate(0.1)
    0.1015625
    """
    return threshold(static_number("rate", rate, "pass a Python number")) / 256


def _multiply_wide(constant: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """High and low words of a 32 x 32 bit product, without 64-bit integers (they need x64)."""
    high, low = jnp.uint32(constant >> 16), jnp.uint32(constant & 0xFFFF)
    x_high, x_low = x >> 16, x & 0xFFFF
    middle = high * x_low + (low * x_low >> 16)
    carry = (middle & 0xFFFF) + low * x_high
    return high * x_high + (middle >> 16) + (carry >> 16), jnp.uint32(constant) * x


def philox4x32_7(counter: Words, key: tuple[jax.Array, jax.Array]) -> Words:
    """Philox4x32 with 7 rounds (Salmon et al., SC'11, section 3.3), elementwise.

    Args:
        counter: four uint32 arrays whose shapes broadcast.
        key: two uint32 arrays whose shapes broadcast with the counter's.

    Returns:
        Four uint32 arrays of the broadcast shape.

    >>> zero = jnp.uint32(0)
    >>> [f"{int(word):08x}" for word in philox4x32_7((zero,) * 4, (zero,) * 2)]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_wide(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply_wide(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(_KEY_INCREMENTS[0]), k1 + jnp.uint32(_KEY_INCREMENTS[1])
    return c0, c1, c2, c3


def _covering_blocks(start: int | jax.Array, size: int) -> tuple[int | jax.Array, int]:
    """First block and number of blocks that cover ``size`` positions from ``start``."""
    slack = start % RANDOM_BLOCK if isinstance(start, int) else RANDOM_BLOCK - 1
    return start // RANDOM_BLOCK, -(-(slack + size) // RANDOM_BLOCK)


def _counters(first_block: int | jax.Array, blocks: int) -> jax.Array:
    """The generator's counters for ``blocks`` blocks of one axis: four per block."""
    first = jnp.asarray(first_block).astype(jnp.uint32)
    return first * jnp.uint32(4) + lax.iota(jnp.uint32, 4 * blocks)


@values.takes_objects
def keep_mask(
    state: DropoutState,
    threshold: int,
    row_start: int | jax.Array,
    col_start: int | jax.Array,
    rows: int,
    cols: int,
) -> jax.Array:
    """Whether each element of a tile is kept.

    The generator runs once per 16 elements of the 16 x 16 blocks that overlap the tile. If the
    starts are Python integers and multiples of 16, these blocks are the fewest.

    Args:
        state: the inputs of the generator other than row and column.
        threshold: T, the result of :func:`threshold`.
        row_start: global row of the tile's first row; ``int`` or int32[], not negative.
        col_start: global column of the tile's first column; likewise.
        rows: height of the tile.
        cols: width of the tile.

    Returns:
        bool[B, N, rows, cols], true if the element is kept.

    Raises:
        TypeError: ``state`` is not the result of :func:`state`, or a number is not an integer.
        ValueError: a number is out of range.
    """
    if not isinstance(state, DropoutState):
        raise TypeError(
            f"state must be the result of jax_memeff.dropout.state, got {type(state).__name__}"
        )
    values.size("threshold", threshold, most=256)
    for name, size in (("rows", rows), ("cols", cols)):
        values.size(name, size)
    for name, start in (("row_start", row_start), ("col_start", col_start)):
        if not isinstance(start, jax.Array):
            values.size(name, start)
        elif start.shape != () or not jnp.issubdtype(start.dtype, jnp.integer):
            raise TypeError(f"{name} must be one integer, got {start.dtype} of shape {start.shape}")
    first_row_block, row_blocks = _covering_blocks(row_start, rows)
    first_col_block, col_blocks = _covering_blocks(col_start, cols)
    row_counter = _counters(first_row_block, row_blocks)[None, None, :, None]
    col_counter = _counters(first_col_block, col_blocks)[None, None, None, :]
    head_counter = (state.batch_base[:, None] + state.head_index[None, :])[:, :, None, None]
    key = state.key_words[:, :, None, None, None]
    words = philox4x32_7(
        (row_counter, col_counter, head_counter, jnp.zeros_like(head_counter)),
        (key[:, 0], key[:, 1]),
    )
    # Within a block, row = 8 * upper + 2 * pair + parity; likewise for columns. The counters encode
    # the pairs, and the parities select the word, so the words interleave to runs of 8 by 8.
    runs = jnp.stack([jnp.stack(words[:2], -1), jnp.stack(words[2:], -1)], 3)
    batch, heads = head_counter.shape[:2]
    runs = runs.reshape(batch, heads, row_blocks, 8, col_blocks, 8)
    kept = [(runs >> 8 * byte & 0xFF) >= threshold for byte in range(4)]
    # (upper row, upper column) selects the byte, and places the run of 8 by 8 within the block.
    bits = jnp.stack([jnp.stack(kept[:2], -2), jnp.stack(kept[2:], -2)], 3)
    bits = bits.reshape(batch, heads, RANDOM_BLOCK * row_blocks, RANDOM_BLOCK * col_blocks)
    if bits.shape[2:] == (rows, cols):
        return bits
    bits = lax.dynamic_slice_in_dim(bits, row_start % RANDOM_BLOCK, rows, 2)
    return lax.dynamic_slice_in_dim(bits, col_start % RANDOM_BLOCK, cols, 3)


def kept(
    operands: Operands,
    options: Options,
    row: int | jax.Array,
    col: int | jax.Array,
    shape: tuple[int, int],
) -> jax.Array | None:
    """Whether each element of a tile is kept, bool[B, N, rows, cols]; None without dropout.

    Args:
        operands: those of the call.
        options: those of the call.
        row: index of the tile's first row in the arrays of the call, int or int32[].
        col: likewise for its first column.
        shape: the numbers of rows and columns of the tile.
    """
    state, position = operands.dropout, operands.position
    if not options.dropout_threshold or state is None:
        return None
    if position is not None:
        row, col = row + position.query, col + position.key
    if not (jnp.ndim(row) or jnp.ndim(col)):
        return keep_mask(state, options.dropout_threshold, row, col, *shape)

    def one(words: jax.Array, base: jax.Array, row: jax.Array, col: jax.Array) -> jax.Array:
        own = DropoutState(words[None], base[None], state.head_index)
        return keep_mask(own, options.dropout_threshold, row, col, *shape)[0]

    starts = (jnp.broadcast_to(start, state.batch_base.shape) for start in (row, col))
    return jax.vmap(one)(state.key_words, state.batch_base, *starts)


def kept_at(
    operands: Operands, options: Options, row: jax.Array, col: jax.Array
) -> jax.Array | None:
    """Whether each element is kept, with the generator run once for each; None without dropout.

    Args:
        operands: those of the call.
        options: those of the call.
        row, col: int32, global rows and columns, not negative; they broadcast to
            [B, K, N / K, rows, n].

    Returns:
        bool[B, K, N / K, rows, n]
    """
    state = operands.dropout
    if not options.dropout_threshold or state is None:
        return None
    row, col = (x.astype(jnp.uint32) for x in (row, col))
    heads = state.head_index.reshape(1, operands.key.shape[2], -1, 1, 1)
    words = philox4x32_7(
        (
            (row >> 4) << 2 | (row >> 1) & 3,
            (col >> 4) << 2 | (col >> 1) & 3,
            state.batch_base.reshape(-1, 1, 1, 1, 1) + heads,
            jnp.uint32(0),
        ),
        (
            state.key_words[:, 0].reshape(-1, 1, 1, 1, 1),
            state.key_words[:, 1].reshape(-1, 1, 1, 1, 1),
        ),
    )
    is_odd_row, is_odd_col = row & 1 == 1, col & 1 == 1
    word = jnp.where(
        is_odd_row,
        jnp.where(is_odd_col, words[3], words[2]),
        jnp.where(is_odd_col, words[1], words[0]),
    )
    byte = 2 * ((row >> 3) & 1) + ((col >> 3) & 1)
    return (word >> 8 * byte & 0xFF) >= options.dropout_threshold


def _require_key(value: Any) -> None:
    """Raise unless the value is a single typed or legacy JAX random key.

    Raises:
        TypeError: it is not a key.
        ValueError: it is an array of keys, or a legacy key whose size is not the default's.
    """
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"dropout_key must be a jax.random key, got {type(value).__name__}; pass "
            f"{f'jax.random.key({value})' if isinstance(value, int) else 'jax.random.key(seed)'}"
        )
    typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not typed and value.dtype != np.uint32:
        raise TypeError(
            "dropout_key must be a key of jax.random.key or jax.random.PRNGKey (uint32), got an "
            f"array of dtype {value.dtype}; pass jax.random.key(seed)"
        )
    # A legacy key is one row of words, as many as its generator has: two for threefry.
    if value.ndim != (0 if typed else 1):
        raise ValueError(
            f"dropout_key must be one key, got an array of keys of shape {value.shape}; use "
            "jax.vmap for one key per batch index"
        )
    if not typed:
        # The options of jax.config have no types.
        words = _legacy_shape(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
        if value.shape != words:
            raise ValueError(
                f"dropout_key must have shape {words}, as jax.random.PRNGKey makes them, got shape "
                f"{value.shape}; pass jax.random.key(seed)"
            )


@functools.cache
def _legacy_shape(generator: str) -> tuple[int, ...]:
    """The shape of legacy keys; ``generator`` is the default one."""
    del generator
    # jax.eval_shape caches by function, without regard to the default generator.
    return jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape


def key_words(dropout_key: jax.Array) -> jax.Array:
    """The generator's key, uint32[2], of a typed or legacy JAX random key."""
    generator = jax.random.key_impl(dropout_key)
    if generator not in (_THREEFRY, *_RBG):
        return jax.random.bits(dropout_key, (2,), "uint32")
    # JAX's checker of reused keys counts only uses of the key itself.
    jax.random.bits(dropout_key, (1,), "uint32")
    words = jax.random.key_data(dropout_key)
    if generator in _RBG:
        # The bits of these generators depend on the backend, and under jax.vmap on the first key
        # only.
        return compat.threefry_2x32(words[:2], words[2:])
    # The first two of jax.random.bits, which change if jax_threefry_partitionable is off.
    counters = np.array([0, 0, 0, 1], np.uint32)
    high, low = jnp.split(compat.threefry_2x32(words, counters), 2)
    return high ^ low


@values.takes_objects
def state(
    dropout_key: jax.Array, batch: int, num_heads: int, offsets: Offsets | None = None
) -> DropoutState:
    """The inputs of the generator for one call, except rows and columns.

    Args:
        dropout_key: a typed or legacy JAX random key.
        batch: B, the batch size of this call.
        num_heads: N, the number of query heads of this call.
        offsets: the global index of this call's first batch index and head; None is 0 for both.

    Raises:
        TypeError: ``dropout_key`` is not a key, a size is not a Python integer, or ``offsets`` is
            not an ``Offsets``.
        ValueError: there are several keys, or a size is negative or beyond int32.

    >>> state(jax.random.key(0), 2, 4).batch_base
    Array([0, 4], dtype=uint32)
    """
    _require_key(dropout_key)
    for name, size in (("batch", batch), ("num_heads", num_heads)):
        if not export.is_symbolic_dim(size):
            values.size(name, size)
    if not isinstance(offsets, Offsets | None):
        raise TypeError(
            f"offsets must be jax_memeff.Offsets or None, got {offsets!r:.80}; pass "
            "jax_memeff.Offsets(batch=..., head=...)"
        )
    return _state(dropout_key, batch, num_heads, offsets)


def _state(
    dropout_key: jax.Array, batch: int, num_heads: int, offsets: Offsets | None
) -> DropoutState:
    """The same as :func:`state`, for checked arguments."""
    offsets = Offsets() if offsets is None else offsets
    global_heads = num_heads if offsets.num_heads is None else offsets.num_heads

    def unsigned(x: Index) -> jax.Array:
        # Head indices wrap modulo 2**32, and so do these casts. Host values fit int32.
        return jnp.asarray(x, jnp.int32).astype(jnp.uint32)

    return DropoutState(
        key_words=jnp.broadcast_to(key_words(dropout_key)[None, :], (batch, 2)),
        batch_base=(unsigned(offsets.batch) + lax.iota(jnp.uint32, batch)) * unsigned(global_heads),
        head_index=unsigned(offsets.head) + lax.iota(jnp.uint32, num_heads),
    )


def broadcast(operands: Operands) -> Operands:
    """The same call with the bits of batch index 0 and head 0 for every batch index and head."""
    own = operands.dropout
    if own is None:
        return operands
    same = own._replace(
        batch_base=jnp.zeros_like(own.batch_base), head_index=jnp.zeros_like(own.head_index)
    )
    return operands._replace(dropout=same)
