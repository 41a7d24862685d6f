"""Packed sequences on the blockwise path equal separate calls, whatever is between them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from attention_case import Case
from kernel_cases import BOTTOM_RIGHT, CAUSAL, WINDOW
from oracle_checks import assert_matches_the_oracle

import jax_memeff
from jax_memeff import Mask, Offsets
from jax_memeff._call.sequences import starts_and_lengths

LENGTHS = ((40, 50), (0, 7), (13, 0), (17, 20))
SIZES: Any = {"B": 4, "T": 40, "S": 50, "H": 16, "lengths": LENGTHS, "packed": True}
CASES = (
    Case(**SIZES, dtype="float32"),
    Case(**SIZES, dtype="float32", Hv=24, lse_gradient=False, **CAUSAL),
    Case(**SIZES, dtype="float32", N=4, K=2, soft_cap=2.0, segments=2, **BOTTOM_RIGHT),
    Case(**SIZES, dtype="float32", bias="BNTS", boolean=("BNTS",), dropout=0.3),
    Case(**SIZES, dtype="float32", bias="1NTS", dropout=0.3, position=(16, 37), **WINDOW),
    Case(**SIZES, dtype="float32", bias="BN1S"),
    Case(**SIZES, dtype="float32", bias="BNT1", **BOTTOM_RIGHT),
    Case(**SIZES, dtype="float32", bias="1NT1"),
    Case(**SIZES, dtype="float32", bias="1111"),
    Case(**SIZES, N=4, K=1, bias="11TS", dropout=0.1, **CAUSAL),
    Case(**SIZES, dtype="float16", bias="111S", bias_dtype="float32"),
)


@pytest.mark.rotating(3)
@pytest.mark.quick("B4T40S50N4K2H16v16-float32-bottom_right-softcap-packed-2segments")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case):
    """Tokens between the sequences are NaN, and their gradients are 0."""
    assert_matches_the_oracle(case)


QUERY = normal(1, 30, 4, 8)
KEY = normal(2, 26, 2, 8)
VALUE = normal(3, 26, 2, 12)
STARTS_Q = np.array([2, 12, 12, 19, 30])
STARTS_K = np.array([0, 5, 9, 20, 25])
DROPOUT: Any = {"dropout_rate": 0.4, "dropout_key": jax.random.key(7)}


def varlen(query, key, value, *arguments: Any, **features: Any):
    """(out, lse)"""
    arguments = arguments or (STARTS_Q, STARTS_K, 11, 11)
    attention: Any = jax_memeff.varlen_attention
    return attention(query, key, value, *arguments, **features, return_residual=True)


def loss(*arrays, **features):
    out, lse = varlen(*arrays, **features)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse))


def padded(query, key, value, starts_q, starts_k, longest, **features):
    """The results of ``dot_product_attention`` with lengths, packed again."""

    def batch(array, starts):
        rows = [array[a : min(b, a + longest)] for a, b in itertools.pairwise(starts)]
        return jnp.stack(
            [jnp.pad(row, ((0, longest - len(row)), (0, 0), (0, 0))) for row in rows]
        ), np.array([len(row) for row in rows])

    (query, rows), (key, columns), (value, _) = (
        batch(query, starts_q),
        batch(key, starts_k),
        batch(value, starts_k),
    )
    return jax_memeff.dot_product_attention(
        query,
        key,
        value,
        query_seq_lengths=rows,
        key_value_seq_lengths=columns,
        **features,
        return_residual=True,
    ), rows


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "features",
    [
        {"is_causal": True, "logits_soft_cap": 3.0},
        {"local_window_size": (3, 1), "scale": -0.4},
        {"mask": Mask.window(6, 0, "bottom_right"), **DROPOUT},
        {"mask": np.tri(11, dtype=bool), "offsets": Offsets(batch=3, head=2, num_heads=9)}
        | DROPOUT,
        {"bias": normal(4, 4, 1, 11, 11)},
    ],
    ids=["causal", "window", "bottom_right_dropout", "boolean_offsets", "bias"],
)
def test_equals_the_padded_call(features):
    """Dropout bits are equal, too: a sequence is a batch index, and positions count within it."""
    out, lse = map(np.asarray, varlen(QUERY, KEY, VALUE, **features))
    (padded_out, padded_lse), rows = jax.tree.map(
        np.asarray,
        jax.jit(lambda q, k, v: padded(q, k, v, STARTS_Q, STARTS_K, 11, **features))(
            QUERY, KEY, VALUE
        ),
    )
    in_sequence = np.zeros(30, bool)
    for b, (start, length) in enumerate(zip(STARTS_Q[:-1], rows, strict=True)):
        in_sequence[start : start + length] = True
        np.testing.assert_allclose(out[start : start + length], padded_out[b, :length], atol=1e-5)
        np.testing.assert_allclose(lse[start : start + length], padded_lse[b, :length], atol=1e-5)
    assert not in_sequence[:2].any() and in_sequence[2:].all()
    assert (out[:2] == 0).all() and (lse[:2] == -jnp.inf).all()


@pytest.mark.parametrize("seed", range(3))
def test_any_cu_seqlens_have_one_meaning(seed):
    """A sequence covers [clip(cu[i]), clip(max(cu[i + 1], cu[i]))), but at most ``longest`` tokens.

    If values decreased, two sequences would share tokens. A start therefore counts as the largest
    value before it, and sequences stay apart and in order.
    """
    rng = np.random.default_rng(seed)
    tokens, longest = 100, 60
    for _ in range(50):
        cu_seqlens = rng.integers(-30, 150, rng.integers(1, 9)).astype(np.int32)
        if rng.random() < 0.5:
            cu_seqlens = np.sort(cu_seqlens)
        starts, lengths = starts_and_lengths(jnp.asarray(cu_seqlens), longest, tokens)
        first, end = cu_seqlens[:-1], np.maximum(cu_seqlens[1:], cu_seqlens[:-1])
        before = np.maximum.accumulate(cu_seqlens)[:-1]
        in_order = first == before
        first, end = (np.clip(x, 0, tokens) for x in (first, end))
        np.testing.assert_array_equal(np.asarray(starts)[:-1][in_order], first[in_order])
        np.testing.assert_array_equal(
            np.asarray(lengths)[in_order], np.minimum(end - first, longest)[in_order]
        )
        ends = np.asarray(starts)[:-1] + np.asarray(lengths)
        assert (np.asarray(lengths) >= 0).all()
        assert (np.asarray(starts)[1:-1] >= ends[:-1]).all() and (ends <= tokens).all()


def test_lengths_of_a_mask_shorten_sequences():
    mask = Mask.lengths(query=np.array([4, 0, 7, 9]), key=np.array([5, 1, 11, 2]))
    out, lse = varlen(QUERY, KEY, VALUE, mask=mask & Mask.causal("bottom_right"))
    first, _ = varlen(
        QUERY[2:6], KEY[:5], VALUE[:5], [0, 4], [0, 5], 4, 5, mask=Mask.causal("bottom_right")
    )
    np.testing.assert_allclose(out[2:6], first, atol=1e-6)
    assert (out[6:12] == 0).all() and (lse[6:12] == -jnp.inf).all()
    last, _ = varlen(
        QUERY[19:28],
        KEY[20:22],
        VALUE[20:22],
        [0, 9],
        [0, 2],
        9,
        2,
        mask=Mask.causal("bottom_right"),
    )
    np.testing.assert_allclose(out[19:28], last, atol=1e-6)


def test_segment_ids_are_per_token():
    """Sequences equal segments of one sequence if no feature counts positions."""
    ids_q = np.searchsorted(STARTS_Q, np.arange(30), "right") - 1
    ids_k = np.searchsorted(STARTS_K, np.arange(26), "right") - 1
    out, lse = varlen(QUERY, KEY, VALUE, [2, 30], [0, 25], 28, 25, mask=Mask.segments(ids_q, ids_k))
    expected = varlen(QUERY, KEY, VALUE)
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)
    both = varlen(QUERY, KEY, VALUE, mask=Mask.segments(ids_q[None], ids_k[None]))
    np.testing.assert_allclose(both[0], expected[0], atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32"])
def test_any_integer_dtype(dtype):
    query = jnp.concatenate([jnp.full((300, 4, 8), jnp.nan), QUERY])
    starts = STARTS_Q.astype(dtype)
    long = varlen(query, KEY, VALUE, jnp.asarray(starts + np.array(98, dtype)), STARTS_K, 11, 11)
    assert jnp.isnan(long[0]).any()  # starts count from token 0, so NaN is read
    short = varlen(QUERY, KEY, VALUE, jnp.asarray(starts), STARTS_K.astype(dtype), 11, 11)
    np.testing.assert_array_equal(short[0], varlen(QUERY, KEY, VALUE)[0])


@pytest.mark.parametrize(
    ("wild", "longest", "defined"),
    [
        ([-5, 12, 12, 19, 99], 30, [0, 12, 12, 19, 30]),
        ([2, 12, 7, 19, 30], 30, [2, 12, 12, 19, 30]),
        ([9, 3, 5, 30, 1], 30, [9, 9, 9, 30, 30]),
        ([2**31 - 1, 0, -(2**31), 4, 5], 30, [30, 30, 30, 30, 30]),
        ([0, 0, 0, 0, 0], 30, [0, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_wild_values_are_defined(wild, longest, defined):
    """Values are clamped to the tokens, and never below an earlier value."""
    wild = jnp.array(wild, jnp.int32)
    got = varlen(QUERY, QUERY, QUERY, wild, wild, longest, longest, is_causal=True)
    expected = varlen(QUERY, QUERY, QUERY, defined, defined, longest, longest, is_causal=True)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_sequences_longer_than_the_longest_end_there():
    starts = jnp.array([0, 13, 20, 30])
    out, lse = varlen(QUERY, QUERY, QUERY, starts, starts, 10, 8, mask=Mask.causal("bottom_right"))
    for start, rows in ((0, 10), (13, 7), (20, 10)):
        columns = min(rows, 8)
        expected, _ = varlen(
            QUERY[start : start + rows],
            QUERY[start : start + columns],
            QUERY[start : start + columns],
            [0, rows],
            [0, columns],
            rows,
            columns,
            mask=Mask.causal("bottom_right"),
        )
        np.testing.assert_allclose(out[start : start + rows], expected, atol=1e-6)
    assert (out[10:13] == 0).all() and (lse[10:13] == -jnp.inf).all()


def test_under_jit_grad_vmap_and_checkpoint(assert_close):
    arrays = (QUERY, KEY, VALUE)

    def gradients(query, key, value, starts_q, starts_k, function=loss):
        def inner(*arrays):
            return function(*arrays, starts_q, starts_k, 11, 11, is_causal=True, **DROPOUT)

        return jax.grad(inner, (0, 1, 2))(query, key, value)

    expected = gradients(*arrays, STARTS_Q, STARTS_K)
    starts = (jnp.asarray(STARTS_Q), jnp.asarray(STARTS_K))
    jitted = jax.jit(gradients)
    assert_close(jitted(*arrays, *starts), expected)

    def checkpointed(*arguments, **features):
        return jax.checkpoint(lambda *x: loss(*x, *arguments[3:], **features))(*arguments[:3])

    assert_close(
        jax.jit(lambda *x: gradients(*x, function=checkpointed))(*arrays, *starts), expected
    )
    other = jnp.array([0, 3, 9, 19, 30])
    batched = jax.jit(jax.vmap(gradients, (None, None, None, 0, None)))(
        *arrays, jnp.stack([starts[0], other]), starts[1]
    )
    for index, starts_q in enumerate((STARTS_Q, other)):
        one = jitted(*arrays, jnp.asarray(starts_q), starts[1])
        assert_close(jax.tree.map(lambda x, i=index: np.asarray(x)[i], batched), one)


def test_one_program_for_all_lengths():
    traces = []

    @jax.jit
    def call(starts):
        traces.append(starts)
        return varlen(QUERY, QUERY, QUERY, starts, starts, 30, 30)

    for starts in ([0, 30, 30], [4, 9, 20]):
        call(jnp.array(starts))
    assert len(traces) == 1


def test_float64(x64):
    arrays = [np.asarray(x, np.float64) for x in (QUERY, KEY, VALUE)]
    out, lse = varlen(*arrays, STARTS_Q.astype(np.int64), STARTS_K, 11, 11)
    assert out.dtype == lse.dtype == jnp.float64
    np.testing.assert_allclose(out, varlen(QUERY, KEY, VALUE)[0], atol=1e-5)


@pytest.mark.parametrize("columns", ["full", 1])
@pytest.mark.parametrize(
    ("total_q", "total_k", "starts", "longest"),
    [
        (0, 5, [0, 0], 3),
        (5, 0, [0, 0, 0], 3),
        (5, 5, [0], 3),
        (5, 5, [2, 2, 2], 0),
        (5, 5, [0, 0], 5),
    ],
)
def test_nothing_to_do(total_q, total_k, starts, longest, columns):
    starts = np.array(starts)

    def run(query, key, value, bias):
        return varlen(query, key, value, starts, starts, longest, longest, bias)

    last = longest if columns == "full" else columns
    shapes = (total_q, 4, 8), (total_k, 2, 8), (total_k, 2, 3), (len(starts) - 1, 1, longest, last)
    arrays = [np.ones(shape, np.float32) for shape in shapes]

    @jax.jit
    def results(*arrays):
        (out, lse), transpose = jax.vjp(run, *arrays)
        return out, lse, transpose((out + 1, jnp.ones_like(lse)))

    out, lse, gradients = jax.tree.map(np.asarray, results(*arrays))
    assert out.shape == (total_q, 4, 3) and (out == 0).all()
    assert lse.shape == (total_q, 4) and (lse == -np.inf).all()
    for gradient, array in zip(gradients, arrays, strict=True):
        assert gradient.shape == array.shape and (gradient == 0).all()


def test_memory_does_not_grow_with_the_number_of_sequences():
    """Memory holds the tokens and one padded sequence, never a padded batch."""
    struct = jax.ShapeDtypeStruct
    tokens = struct((4096, 1, 8), jnp.float32)

    def temporary_bytes(sequences):
        starts = struct((sequences + 1,), jnp.int32)

        def run(x, starts):
            return jax.grad(lambda x: loss(x, x, x, starts, starts, 512, 512))(x)

        analysis: Any = jax.jit(run).lower(tokens, starts).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporary_bytes(1024) < temporary_bytes(8) + 64 * 1024


@pytest.mark.rotating(3)
@pytest.mark.parametrize("columns", ["T1", "TS", "1S", "11"])
def test_longest_may_exceed_the_tokens(columns, assert_close):
    """Bias and boolean masks have the shape of the longest, and so has the bias gradient."""
    shape = [40 if dim == "T" else 35 if dim == "S" else 1 for dim in columns]
    bias = normal(4, 4, 1, *shape)
    mask = Mask.boolean(np.random.default_rng(0).random((40, 35)) < 0.8)

    def run(rows, cols):
        def value(query, bias):
            parts = bias[:, :, :rows, :cols], Mask.boolean(mask.booleans[0][:rows, :cols])
            return loss(query, KEY, VALUE, STARTS_Q, STARTS_K, rows, cols, *parts, **DROPOUT)

        return jax.jit(jax.value_and_grad(value, (0, 1)))(QUERY, bias)

    assert_close(run(40, 35), run(11, 11))


def test_memory_does_not_grow_with_the_longest_sequence():
    """There are 10 tokens, but ``longest`` allows 10 million for a sequence."""
    x, starts = jnp.ones((10, 2, 8)), jnp.array([0, 4, 10])

    def bytes_of(longest, transform):
        def run(x, bias):
            return loss(x, x, x, starts, starts, longest, longest, bias, is_causal=True)

        compiled = jax.jit(transform(run)).lower(x, jnp.ones((2, 2, 1, 1))).compile()
        analysis: Any = compiled.memory_analysis()
        return analysis.temp_size_in_bytes

    def hessian(run):
        return lambda *x: jax.jvp(jax.grad(run, (0, 1)), x, x)

    for transform in (lambda run: run, lambda run: jax.grad(run, (0, 1)), hessian):
        assert bytes_of(10_000_000, transform) <= bytes_of(10, transform) + 1024


@pytest.mark.parametrize("use_sinks", [False, True], ids=["", "sinks"])
def test_no_sequences(use_sinks):
    """One start and no sequence: every token belongs to none, under ``jax.vmap``, too."""
    tokens, starts = jnp.ones((3, 5, 4, 8)), jnp.zeros(1, int)
    sinks = jnp.ones(4) if use_sinks else None

    @jax.jit
    def results(tokens):
        def loss(tokens, sinks):
            arrays = tokens, tokens, tokens, starts, starts
            out, lse = jax_memeff.varlen_attention(*arrays, 5, 5, sinks=sinks, return_residual=True)
            return out.sum(), (out, lse)

        wanted = (0, 1) if use_sinks else 0
        return jax.grad(loss, wanted, has_aux=True)(tokens, sinks)

    for found in (results(tokens[0]), jax.vmap(results)(tokens)):
        gradients, (out, lse) = found
        assert not any(x.any() for x in (out, *jax.tree.leaves(gradients)))
        assert (lse == -jnp.inf).all()
