"""Functions together with features that change their indices, types or masks: kernels on the
emulated machine against dense JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention

B, T, S, N, K, H = 2, 70, 90, 4, 2, 64


class Corner(NamedTuple):
    """A call, its definition, and the arrays of both."""

    ours: Callable[..., jax.Array]
    defined: Callable[..., jax.Array]
    arrays: tuple[jax.Array, ...]


def drawn(*shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    numbers = np.random.default_rng(sum(shape)).standard_normal(shape)
    return jnp.asarray(scale * numbers, dtype)


def dense(
    qkv: Sequence[jax.Array],
    function: Any,
    valid: Any,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> jax.Array:
    """The output of dense attention; ``first`` has the user's indices of the first element."""
    query, key, value = (x.astype(jnp.float32) for x in qkv)
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, 2) for x in (key, value))
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision=highest) * query.shape[3] ** -0.5
    if function is not None:
        sizes = zip(scores.shape, first, strict=True)
        index = jnp.meshgrid(*(jnp.arange(size) + start for size, start in sizes), indexing="ij")
        flat = (x.ravel() for x in (scores, *index))
        scores = jax.vmap(function)(*flat).reshape(scores.shape)
    weights = jnp.where(valid, jax.nn.softmax(jnp.where(valid, scores, -1e30)), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value, precision=highest)


def causal(rows: int, columns: int, ahead: int = 0) -> jax.Array:
    return jnp.arange(columns) <= jnp.arange(rows)[:, None] + ahead


def three(heads: int = N, key_heads: int = K, rows: int = T, columns: int = S, dim: int = H) -> Any:
    return (
        drawn(B, rows, heads, dim),
        drawn(B, columns, key_heads, dim),
        drawn(B, columns + 1, key_heads, dim)[:, 1:],
    )


def packed_projections() -> Corner:
    def function(table):
        return lambda s, b, h, q, k: s + table[h, q - k + 150]

    def ours(qkv, table):
        score_mod = function(table)
        return jax_memeff.dot_product_attention_packed(qkv, score_mod=score_mod, is_causal=True)

    def defined(qkv, table):
        return dense(jnp.unstack(qkv, axis=2), function(table), causal(T, T))

    return Corner(ours, defined, (drawn(B, T, 3, N, H), drawn(N, 400, dtype=jnp.float32)))


def offsets() -> Corner:
    place = Offsets(query=100, key=40, batch=3, head=2, num_heads=9)

    def function(table):
        return lambda s, b, h, q, k: s + table[h, b] * (q - k) / 50

    def ours(*arrays):
        *qkv, table = arrays
        return dot_product_attention(*qkv, score_mod=function(table), is_causal=True, offsets=place)

    def defined(*arrays):
        *qkv, table = arrays
        return dense(qkv, function(table), causal(T, S, 60), (3, 2, 100, 40))

    return Corner(ours, defined, (*three(), drawn(9, 8, dtype=jnp.float32)))


def offsets_of_functions_alone() -> Corner:
    """Only the functions count from the positions; the mask has no window."""
    place = Offsets(query=100, key=40)
    mask = Mask.function(lambda b, h, q, k: (q * k) % 7 != h)

    def function(table):
        return lambda s, b, h, q, k: s + table[h] * jnp.sin(q * k / 500)

    def ours(*arrays):
        *qkv, table = arrays
        return dot_product_attention(*qkv, score_mod=function(table), mask=mask, offsets=place)

    h, q, k = jnp.ix_(jnp.arange(N), jnp.arange(100, 100 + T), jnp.arange(40, 40 + S))

    def defined(*arrays):
        *qkv, table = arrays
        return dense(qkv, function(table), (q * k) % 7 != h, (0, 0, 100, 40))

    return Corner(ours, defined, (*three(), drawn(N, dtype=jnp.float32)))


def every_mask() -> Corner:
    ids = jnp.broadcast_to(jnp.repeat(jnp.arange(3), 40)[:S], (B, S))
    allowed = jnp.asarray(np.random.default_rng(1).random((1, 1, T, S)) < 0.7)
    of_elements = Mask.function(lambda b, h, q, k: (q + k) % 2 == h % 2) | Mask.window(5, 5)
    mask = Mask.segments(ids[:, :T], ids) & Mask.boolean(allowed) & of_elements

    b, h, q, k = jnp.ix_(*map(jnp.arange, (B, N, T, S)))
    valid = (ids[b, q] == ids[b, k]) & allowed & (((q + k) % 2 == h % 2) | (jnp.abs(q - k) <= 5))
    return Corner(
        lambda *qkv: dot_product_attention(*qkv, mask=mask),
        lambda *qkv: dense(qkv, None, valid),
        three(),
    )


def decoding() -> Corner:
    lengths = jnp.array([700, 333])

    def function(slopes):
        return lambda s, b, h, q, k: s + slopes[h] * (k - q)

    def ours(*arrays):
        *qkv, slopes = arrays
        return dot_product_attention(
            *qkv, score_mod=function(slopes), key_value_seq_lengths=lengths
        )

    def defined(*arrays):
        *qkv, slopes = arrays
        valid = jnp.arange(700) < lengths[:, None, None, None]
        return dense(qkv, function(slopes), valid)

    slopes = drawn(8, dtype=jnp.float32, scale=0.01)
    return Corner(ours, defined, (*three(8, 2, 3, 700), slopes))


def two_head_dims() -> Corner:
    def function(gain):
        return lambda s, b, h, q, k: jnp.tanh(s) * gain[h]

    query, key, _ = three(2, 2, dim=192)
    arrays = query, key, drawn(B, S, 2, 128), drawn(2, dtype=jnp.float32)
    return Corner(
        lambda q, k, v, gain: dot_product_attention(q, k, v, score_mod=function(gain)),
        lambda q, k, v, gain: dense((q, k, v), function(gain), True),
        arrays,
    )


def dtypes_of_arrays() -> Corner:
    rng = np.random.default_rng(2)
    table = jnp.asarray(rng.integers(-100, 100, (N, 200)), jnp.int8)
    flags = jnp.asarray(rng.random(S) < 0.5)
    groups = jnp.asarray(rng.integers(0, 5, T), jnp.uint16)

    def function(s, b, h, q, k):
        shift = table[h, q - k + 90] / 100 + jnp.where(flags[k], 1.0, -1.0)
        return s + shift + groups[q].astype(jnp.float32)

    return Corner(
        lambda *qkv: dot_product_attention(*qkv, score_mod=function),
        lambda *qkv: dense(qkv, function, True),
        three(),
    )


def infinite_and_nan() -> Corner:
    """The function masks by -inf, where its derivative is NaN."""

    def ours(s, b, h, q, k):
        return jnp.where(k > q, -jnp.inf, s * jnp.sqrt((q - k).astype(s.dtype)))

    def defined(s, b, h, q, k):
        return s * jnp.sqrt(jnp.maximum(q - k, 0).astype(s.dtype))

    return Corner(
        lambda *qkv: dot_product_attention(*qkv, score_mod=ours),
        lambda *qkv: dense(qkv, defined, causal(T, S)),
        three(),
    )


def traced_window() -> Corner:
    """A traced window that ends at the lengths, beside a function."""
    lengths = jnp.array([60, 90])

    def ours(left, *qkv):
        mask = Mask.window(left.astype(int), 5, "bottom_right")
        mask &= Mask.function(lambda b, h, q, k: (q + k) % 3 != h)
        return dot_product_attention(*qkv, mask=mask, key_value_seq_lengths=lengths)

    def defined(left, *qkv):
        b, h, q, k = jnp.ix_(*map(jnp.arange, (B, N, T, S)))
        distance = k - q - (lengths[b] - T)
        valid = (distance >= -left) & (distance <= 5) & (k < lengths[b]) & ((q + k) % 3 != h)
        return dense(qkv, None, valid)

    return Corner(ours, defined, (jnp.float32(20), *three()))


def mapped_window() -> Corner:
    """Two mapped calls with a window each, like layers in one scan."""

    def ours(left, *qkv):
        attend = lambda left: dot_product_attention(*qkv, mask=Mask.window(left, 0))  # noqa: E731
        return jax.vmap(attend)(left.astype(int))

    def defined(left, *qkv):
        distance = jnp.arange(S) - jnp.arange(T)[:, None]
        valid = [(distance >= -bound) & (distance <= 0) for bound in (3, 50)]
        return jnp.stack([dense(qkv, None, each) for each in valid])

    return Corner(ours, defined, (jnp.array([3.0, 50.0]), *three()))


def rounding() -> Corner:
    """Every element is valid, but none would be if the block mask added 0.1 and 0.3 first."""
    numbers = np.random.default_rng(3).uniform(0.5, 2, 20 * S).astype(np.float32)
    first, second = np.float32(0.1), np.float32(0.3)
    sums = numbers + first + second
    chosen = np.flatnonzero(sums != numbers + (first + second))[:S]
    weights, wanted = jnp.asarray(numbers[chosen]), jnp.asarray(sums[chosen])

    def valid(b, h, q, k):
        return weights[k] + first + second == wanted[k]

    return Corner(
        lambda *qkv: dot_product_attention(*qkv, mask=Mask.function(valid)),
        lambda *qkv: dense(qkv, None, True),
        three(),
    )


CORNERS: dict[str, tuple[Callable[[], Corner], str]] = {
    "packed projections": (packed_projections, "sm_90a"),
    "offsets": (offsets, "sm_80"),
    "offsets of functions alone": (offsets_of_functions_alone, "sm_90a"),
    "every mask": (every_mask, "sm_90a"),
    "decoding": (decoding, "sm_90a"),
    "two head dims": (two_head_dims, "sm_90a"),
    "dtypes of arrays": (dtypes_of_arrays, "sm_80"),
    "infinite and nan": (infinite_and_nan, "sm_90a"),
    "traced window": (traced_window, "sm_90a"),
    "mapped window": (mapped_window, "sm_80"),
    "rounding": (rounding, "sm_80"),
}


def value_and_gradients(function: Any, arrays: Any) -> jax.stages.Lowered:
    """A jitted function that returns the output and the gradients of all arrays."""

    def both(*arrays: jax.Array) -> Any:
        out, transpose = jax.vjp(function, *arrays)
        return out, transpose(drawn(*out.shape).astype(out.dtype))

    return jax.jit(both).lower(*arrays)


def run(program: jax.stages.Lowered, arrays: Any) -> Any:
    return jax.tree.map(np.asarray, program.compile()(*arrays))


def lower(name: str) -> jax.stages.Lowered:
    """Runs in the process of ``machine``."""
    corner, arch = CORNERS[name]
    emulator.configure(arch)
    ours, _, arrays = corner()
    return value_and_gradients(ours, arrays)


def results(name: str) -> Any:
    """Runs in the process of ``machine``."""
    corner, arch = CORNERS[name]
    program = emulator.lowered(lower, name)
    emulator.configure(arch)
    return run(program, corner().arrays)


@pytest.fixture(scope="module")
def lowered(machine, selected):
    """Lowers the programs of all cases before the first one runs."""
    calls = [(call["name"],) for call in selected]
    machine.submit(emulator.lower_together, lower, calls).result(timeout=600)


@pytest.mark.rotating(5)
@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("name", CORNERS)
def test_kernels_of_functions(name, machine, assert_close):
    found = machine.submit(results, name).result(timeout=600)
    _, defined, arrays = CORNERS[name][0]()
    assert_close(found, run(value_and_gradients(defined, arrays), arrays), 2e-2)
