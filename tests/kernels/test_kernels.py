"""The kernels against the oracle, on a GPU. All kernels are compiled first, in parallel."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import case_matrix
import jax
import jax.numpy as jnp
import kernel_cases
import large_bias
import numpy as np
import oracle
import packing
import pytest
import wide_range
from attention_case import Case, passed, run, run_case
from dropout_bits import assert_dropout_bits
from kernel_cases import CAUSAL, WINDOW
from oracle_checks import assert_matches_the_oracle, assert_results_match

import jax_memeff
from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import NeedsGrad, QkvPackedOperands
from jax_memeff._cuda import selection
from jax_memeff._op import primitives, vjp
from jax_memeff.codegen import strategy
from jax_memeff.errors import UnsupportedError

pytestmark = pytest.mark.gpu
CASES = [*kernel_cases.cases(), *case_matrix.cases(), *case_matrix.listed_cases()]
SANITIZED = frozenset(map(str, case_matrix.sanitized_cases()))


def marked(cases):
    """The cases, some with the marker for compute-sanitizer. With ``--dist loadgroup`` the tests of
    a case follow each other in one process and share the oracle's answers.
    """

    def marks(case):
        small = (pytest.mark.sanitizer,) if str(case) in SANITIZED else ()
        return (pytest.mark.xdist_group(str(case)), *small)

    return [pytest.param(case, marks=marks(case)) for case in cases]


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_kernels, selected):
    """Compiles the kernels of the selected cases before the first one runs."""
    jobs = set()
    gradients: dict[Case, set[NeedsGrad | None]] = {}
    for call in selected:
        if case := call.get("case"):
            gradients.setdefault(case, {None, case.needs_grad}).add(call.get("needs_grad"))
    for case, choices in gradients.items():
        operands, _, _ = passed(case, *case.arrays())
        for needs_grad in choices:
            for arch, spec in kernels_of(operands, case.options, needs_grad).items():
                jobs.add((spec, arch))
        with without_splits():
            for arch, spec in selection.kernels(operands, case.options, None).items():
                jobs.add((spec, arch))
    compile_kernels(jobs)


def kernels_of(operands, options, needs_grad):
    """The kernels of a call, by architecture; none for a backward of lists in plain JAX."""
    is_optional = needs_grad is not None and bool(operands.mask.key_lists)
    with contextlib.suppress(*(UnsupportedError,) * is_optional):
        return selection.kernels(operands, options, needs_grad)
    return {}


def without_splits():
    """Disables split-KV, which most cases would use because they are small."""
    return strategy.using(forward=strategy.PLAIN)


@pytest.mark.parametrize("case", marked(CASES), ids=str)
def test_matches_the_oracle(case):
    """Results and all gradients. Ids are sizes: dk and dv of N4K2 are sums over two query heads."""
    assert_matches_the_oracle(case)


@pytest.mark.parametrize(
    "case", marked(case for case in CASES if case.T > 64 or case.packed), ids=str
)
def test_forward_without_splits_matches_the_oracle(case):
    assert_results_match(case, (forward_without_splits(case), None))


def forward_without_splits(case):
    dirty, _, _ = passed(case, *case.arrays())
    # A new function, so that jit does not reuse the program that splits.
    forward = jax.jit(lambda operands: primitives.forward(operands, case.options))
    with without_splits():
        results = forward(jax.tree.map(jnp.asarray, dirty))
    return packing.unpacked_forward(case, results) if case.packed else results


@pytest.mark.parametrize("case", large_bias.gpu_cases(), ids=str)
def test_rows_with_a_large_bias(case):
    in_parts = dataclasses.replace(case, parts=True)
    large_bias.assert_matches(in_parts, run_case(case, *case.arrays()))
    large_bias.assert_matches(case, (forward_without_splits(case), None))


@pytest.mark.parametrize("case", wide_range.cases(), ids=str)
def test_float32_rows_of_any_size(case, monkeypatch):
    out, _ = forward_without_splits(case)
    wide_range.assert_matches(case, out)


@pytest.mark.parametrize(
    "case",
    [Case(B=1, T=2000, S=2048, K=1, H=H, dtype="float32") for H in (64, 128)],
    ids=str,
)
def test_float32_forwards_are_as_precise_as_those_of_others(case, monkeypatch):
    """The error of PyTorch's memory-efficient kernel is 0.8e-6."""
    operands, dout, _ = case.arrays()
    reference = oracle.answer(operands, case.options, dout).out
    out, _ = forward_without_splits(case)
    assert np.linalg.norm(out - reference) <= 0.8e-6 * np.linalg.norm(reference)


@pytest.mark.parametrize("case", kernel_cases.dropout_cases(), ids=str)
def test_dropout_bits_are_those_of_the_contract(case):
    assert_dropout_bits(case)


@pytest.mark.parametrize("dims", ["BNTS", "1NTS", "BN1S", "111S"])
def test_only_the_gradient_of_the_bias(dims):
    """Alone it equals the one computed with the others, and needs no buffer of all scores."""
    case = Case(T=200, S=150, N=4, K=2, bias=dims, dropout=0.2, **CAUSAL)
    operands, dout, dlse = jax.tree.map(jnp.asarray, case.arrays())
    out, lse = primitives.forward(operands, case.options)
    alone, full = (
        primitives.backward(operands, case.options, out, lse, dout, dlse, needs_grad).bias
        for needs_grad in (NeedsGrad(False, False, False, bias=True), case.needs_grad)
    )
    np.testing.assert_allclose(
        np.asarray(alone, np.float32), np.asarray(full, np.float32), atol=2e-2
    )


def test_the_gradient_of_a_broadcast_bias_needs_no_buffer_of_all_scores():
    B, N, T, H = 32, 4, 1024, 64

    def loss(query, key, value, bias):
        out = jax_memeff.dot_product_attention(query, key, value, bias)
        return jnp.sum(out.astype(jnp.float32))

    operand = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, N, T, T), jnp.bfloat16)
    program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(operand, operand, operand, bias).compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < B * N * T * T * 2 / 2


@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, T=1025, S=1023, N=4, K=4, H=128, **CAUSAL),
        Case(B=2, T=1025, S=1023, N=4, K=4, H=320, **CAUSAL),
        # Several work tiles per CTA of the persistent grid, and one buffer of queries.
        Case(B=2, T=2048, S=2048, N=32, K=32, H=192, Hv=128, **CAUSAL),
    ],
    ids=str,
)
def test_repeats_are_bit_equal(case):
    """out, dk and dv are equal in 200 runs; dq is summed by atomics and may differ in its last
    bits.
    """
    operands, dout, dlse = jax.tree.map(jnp.asarray, case.arrays())
    (out, lse), (_, dk, dv, *_) = run(operands, case.options, dout, dlse)
    for _ in range(200):
        again = run(operands, case.options, dout, dlse)
        for ours, first in zip((*again[0], *again[1][1:3]), (out, lse, dk, dv), strict=True):
            assert jnp.array_equal(ours, first)


@pytest.mark.parametrize("H", [72, 7, 66, 100, 301, 328])
@pytest.mark.parametrize("mask", [{}, CAUSAL, WINDOW], ids=["full", "causal", "window"])
def test_operands_inside_larger_buffers(mask, H):
    """Layers of a scan are slices of one buffer, with NaN directly before and after each."""
    case = Case(B=1, T=131, S=77, N=1, K=1, H=H, **mask)
    operands, dout, dlse = case.arrays()
    expected = run(operands, case.options, dout, dlse)

    def surround(array):
        nan = np.full_like(array, np.nan)
        return jnp.asarray(np.stack([nan, array, nan]))

    stacked = [surround(array) for array in (*operands[:3], dout)]

    @jax.jit
    def middle(stacked, index):
        query, key, value, inner_dout = (
            jax.lax.dynamic_index_in_dim(x, index, 0, False) for x in stacked
        )
        inner = operands._replace(query=query, key=key, value=value)
        return run(inner, case.options, inner_dout, dlse)

    got = middle(stacked, jnp.array(1))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert not np.isnan(np.asarray(ours, np.float32)).any()
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=1e-2
        )


@pytest.mark.parametrize("H", [7, 66, 100, 72, 301, 328])
def test_layers_of_a_scan(H):
    """Each layer's operands are slices of one buffer, at any multiple of a row."""
    case = Case(B=1, T=131, S=77, N=1, K=1, H=H)
    layers = 5

    @jax.jit
    def scanned(arrays):
        def layer(carry, arrays):
            operands, dout, dlse = arrays
            return carry, run(operands, case.options, dout, dlse)

        return jax.lax.scan(layer, 0, arrays)[1]

    drawn = [case.arrays(seed) for seed in range(layers)]
    got = scanned(jax.tree.map(lambda *x: jnp.stack(x), *drawn))
    for index, (operands, dout, dlse) in enumerate(drawn):
        expected = run(operands, case.options, dout, dlse)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(
                np.asarray(ours[index], np.float32), np.asarray(theirs, np.float32), atol=1e-2
            )


@pytest.mark.parametrize(("case", "needs_grad"), kernel_cases.frozen_cases(), ids=str)
def test_only_needed_gradients(case, needs_grad, assert_close):
    """A frozen operand changes nothing in the gradients of the others."""
    operands, dout, dlse = jax.tree.map(jnp.asarray, case.arrays())
    out, lse = primitives.forward(operands, case.options)
    full, some = (
        primitives.backward(operands, case.options, out, lse, dout, dlse, wanted)
        for wanted in (case.needs_grad, needs_grad)
    )
    for want, ours, theirs in zip(needs_grad, some, full, strict=True):
        if want:
            ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
            # Sums of atomics differ in their last bits and therefore rarely in the last place of
            # bfloat16, which exceeds 2e-2 from 4 on.
            assert (np.abs(ours - theirs) <= np.maximum(2e-2, 2**-7 * np.abs(theirs))).all()
            assert_close(ours, theirs, tolerance=1e-3)
        else:
            assert not jax.tree.leaves(ours)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"S": 0}, {"B": 0}, {"Hv": 0}], ids=str)
def test_zero_sizes(sizes):
    case = dataclasses.replace(Case(), **sizes)
    operands, dout, dlse = case.arrays()
    (out, lse), gradients = run(operands, case.options, dout, dlse)
    assert out.shape == (case.B, case.T, case.N, case.value_dim)
    assert (np.asarray(out, np.float32) == 0).all()
    if case.S == 0:
        assert (np.asarray(lse) == -np.inf).all()
    for gradient, operand in zip(gradients[:3], operands[:3], strict=True):
        assert gradient.shape == operand.shape


def test_lengths_out_of_range_are_clamped():
    case = Case(T=100, S=90)
    operands, dout, dlse = case.arrays()
    wild = Mask.lengths(jnp.array([-5, 2**30]), jnp.array([2**31 - 1, -(2**31)], jnp.int32))
    tame = Mask.lengths(jnp.array([0, 100]), jnp.array([90, 0]))
    got = run(operands._replace(mask=wild), case.options, dout, dlse)
    expected = run(operands._replace(mask=tame), case.options, dout, dlse)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.array_equal(ours, theirs)


def test_memory_of_large_head_dims():
    """Besides arguments and results there are f32 sums of the gradients, and out for the
    backward.
    """
    case = Case(B=1, T=2048, S=2048, N=2, K=2, H=4096, lse_gradient=False)
    operands, dout, _ = case.arrays()
    program = jax.jit(run, static_argnums=(1,))
    memory = program.lower(operands, case.options, dout, None).compile().memory_analysis()
    assert memory is not None
    elements = dout.size
    assert memory.temp_size_in_bytes < 1.01 * (3 * 4 * elements + 2 * elements)


def test_offsets_past_two_to_the_31():
    """The last head of a query of more than 2^31 elements is read and written at its place."""
    B, T, N, H = 1, 16448, 1024, 128
    head = jax.random.normal(jax.random.key(0), (B, T, 1, H), jnp.bfloat16)
    small = Case(B=B, T=T, S=64, N=1, K=1, H=H)
    key = jax.random.normal(jax.random.key(1), (B, 64, 1, H), jnp.bfloat16)
    expected = jax.jit(lambda q: _forward(q, key, small))(head)
    wide = jax.jit(lambda q: _forward(jnp.broadcast_to(q, (B, T, N, H)), key, small)[:, :, -1:])
    assert B * T * N * H > 2**31
    assert jnp.array_equal(expected, wide(head))


def _forward(query, key, case):
    operands = case.arrays()[0]._replace(query=query, key=key, value=key)
    return primitives.forward(operands, case.options)[0]


@pytest.mark.parametrize(
    "features",
    [{}, CAUSAL, {"H": 128, "dropout": 0.3}, {"bias": "BNTS", **CAUSAL}],
    ids=["plain", "causal", "dropout", "bias"],
)
def test_packed_sequences_have_the_bits_of_padded_ones(features):
    """Compares output, logsumexp and gradients without atomics, of kernels with equal KV blocks.
    Without a mask only the backward of padded sequences begins at different Q blocks, so the
    orders of the sums differ.

    With segment ids the block masks may differ at the end of a sequence, because padded sequences
    have ids beyond it. A block that only one of the kernels processes rescales by almost 1.
    """
    lengths = ((200, 270), (0, 100), (77, 0), (130, 33))
    case = Case(B=4, T=200, S=270, lengths=lengths, **features)
    operands, dout, dlse = case.arrays()
    packed = dataclasses.replace(case, packed=True)
    order = 0.0 if features else 2**-7  # a unit in the last place of bfloat16
    with without_splits():
        padded = run_case(case, operands, dout, dlse)
        (out, lse), (_, dk, dv, dbias, _) = run_case(packed, operands, dout, dlse)
    (padded_out, padded_lse), (_, padded_dk, padded_dv, padded_dbias, _) = padded
    pairs = [(out, padded_out, 0.0), (lse, padded_lse, 0.0), (dk, padded_dk, order)]
    pairs += [(dv, padded_dv, order), *([] if dbias is None else [(dbias, padded_dbias, 0.0)])]
    for ours, theirs, rounding in pairs:
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=rounding, atol=1e-4 * rounding)


@pytest.mark.parametrize("seed", range(20))
def test_any_cu_seqlens_are_safe(seed):
    """Wild values give the results of the blockwise path; buffers have no spare memory at their
    ends.
    """
    rng = np.random.default_rng(seed)
    total_q, total_k, longest, B = 300, 250, int(rng.choice([0, 1, 50, 1000])), 6
    wild = rng.choice([-(2**31), -7, 0, 5, 100, 130, 250, 300, 2**31 - 1], (2, B + 1))
    query, key, value = (
        jnp.asarray(rng.standard_normal((total, 2, 64)), jnp.bfloat16)
        for total in (total_q, total_k, total_k)
    )

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(arrays, cu_seqlens, implementation):
        def loss(query, key, value):
            attention: Any = jax_memeff.varlen_attention
            out, lse = attention(
                query,
                key,
                value,
                *cu_seqlens,
                longest,
                longest,
                is_causal=True,
                return_residual=True,
                implementation=implementation,
            )
            return out.astype(jnp.float32).sum() + jnp.where(lse == -jnp.inf, 0, lse).sum(), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)

    arrays = (query, key, value)
    cu_seqlens = tuple(map(jnp.asarray, wild.astype(np.int32)))
    ours, theirs = (gradients(arrays, cu_seqlens, name) for name in ("cuda", "xla"))
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        got, expected = (np.asarray(x, np.float32) for x in (got, expected))
        np.testing.assert_allclose(got, expected, atol=0.05)
        empty = (expected == 0).all((1, 2))
        assert (got[empty] == 0).all()


@pytest.mark.parametrize("features", [{}, {"H": 72, "N": 3, "K": 3, **WINDOW}], ids=["64", "72"])
@pytest.mark.parametrize("dropout_rate", [0.0, 0.2])
def test_one_array_of_projections(features, dropout_rate):
    """Results equal those of three arrays bit by bit, except dq, which is summed by atomics."""
    case = Case(T=200, S=200, dropout=dropout_rate, **features)
    operands, dout, dlse = jax.tree.map(jnp.asarray, case.arrays())
    expected = run(operands, case.options, dout, dlse)
    qkv = jnp.stack(operands[:3], 2)

    @jax.jit
    def packed(qkv):
        def forward(qkv):
            inputs = QkvPackedOperands(qkv, None, operands.mask, operands.dropout, None)
            return vjp.attention(inputs, case.options)

        results, transpose = jax.vjp(forward, qkv)
        return results, transpose((dout, dlse))[0]

    results, dqkv = packed(qkv)
    dq, dk, dv = jnp.unstack(dqkv, axis=2)
    exact = zip((*results, dk, dv), (*expected[0], *expected[1][1:3]), strict=True)
    for ours, theirs in exact:
        assert jnp.array_equal(ours, theirs)
    np.testing.assert_allclose(
        np.asarray(dq, np.float32), np.asarray(expected[1][0], np.float32), atol=2e-2
    )
