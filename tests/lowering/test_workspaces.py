"""The workspaces of kernels: arrays of a CUDA program that are neither operands nor results."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_programs import (
    attention_calls,
    loss,
    lower,
    shapes,
    varlen_loss,
    varlen_shapes,
)

from jax_memeff import paged_attention
from jax_memeff.codegen.features import (
    BIAS,
    DETERMINISTIC,
)

pytestmark = pytest.mark.usefixtures("hopper")


def test_partial_results_of_few_queries(fake_compiler):
    """Sizes bound their number, because the device is unknown at lowering."""
    text = lower(loss, *shapes(B=16, T=1, S=8192, N=32, K=8))
    assert 'results = "out,logsumexp,partial_logsumexp,partial_out"' in text
    assert "tensor<4x512xf32>" in text and "tensor<4x512x64xf32>" in text
    assert all(spec.pack_gqa for spec, _ in fake_compiler)
    (entries,) = re.findall(r"entries = dense<\[([^]]*)\]>", text)
    main, combine = np.array(entries.split(", "), int).reshape(-1, 8)[:, 2:4].tolist()
    assert main == [16 * 8, 1]  # CTAs of each split
    assert combine == [16 * 32, 2]  # only with splits
    text = lower(loss, *shapes(B=64, T=1, S=8192, N=64, K=64))  # has enough CTAs without splits
    assert 'results = "out,logsumexp"' in text
    text = lower(loss, *shapes(B=2, T=1, S=64, N=4, K=4))  # one KV block cannot be split
    assert 'results = "out,logsumexp"' in text
    assert all(spec.kernel.splits_keys for spec, _ in fake_compiler)


def test_enough_queries_need_no_partial_results(fake_compiler):
    text = lower(loss, *shapes(B=8, T=2048, S=2048, N=8, K=8))
    assert "partial" not in text
    assert not any(spec.pack_gqa for spec, _ in fake_compiler)


@pytest.mark.parametrize(
    ("arch", "shape", "way", "sums"),
    [
        ("sm_80", (2, 4, 128, 120), "full", None),
        ("sm_80", (1, 4, 128, 120), "common", 4 * 128 * 128),
        ("sm_80", (2, 1, 128, 120), "common", 2 * 128 * 128),
        ("sm_80", (128, 120), "common", 128 * 128),
        ("sm_80", (2, 4, 1, 120), "columns", 2 * 4 * 128),
        ("sm_90a", (2, 4, 128, 120), "full", None),
        ("sm_90a", (1, 4, 128, 120), "dbias_kernel", None),
        ("sm_90a", (120,), "columns", 128),
    ],
    ids=str,
)
def test_bias_gradient_needs_no_more_than_the_bias(
    fake_compiler, monkeypatch, arch, shape, way, sums
):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", arch)
    bias = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def with_bias(bias, *x):
        return loss(*x, bias=bias)

    text = lower(jax.grad(with_bias, (0, 1, 2, 3)), bias, *shapes(S=120))
    forward, backward = (spec for spec, _ in fake_compiler)
    assert (forward[BIAS].bits, forward[BIAS].gradient) == ("16", "none")
    assert (backward[BIAS].bits, backward[BIAS].gradient) == ("16", way)
    assert ("bias_gradient_sum" in text) == (sums is not None)
    if sums is not None:
        assert f"tensor<{sums}xf32>" in text


def test_sums_of_large_head_dims_have_the_size_of_the_gradients(fake_compiler):
    B, T, N, K, H = 2, 2048, 4, 2, 4096
    text = lower(jax.grad(loss, (0, 1, 2)), *shapes(B, T, T, N, K, H))
    calls = [line for line in text.splitlines() if "custom_call @jax_memeff" in line]
    f32 = [[int(n) for n in re.findall(r"tensor<(\d{2,})xf32>", call)] for call in calls]
    queries, keys = B * N * T * H, B * K * T * H
    assert [sum(sizes) for sizes in f32] == [queries, queries + 2 * keys + 2 * B * N * T]
    assert all("large_dim" in spec.kernel.stem for spec, _ in fake_compiler)


def test_large_head_dims_of_one_tile_need_no_sums(fake_compiler):
    text = lower(jax.grad(loss, (0, 1, 2)), *shapes(T=64, S=100, N=2, K=2, H=1032))
    assert "_sum" not in text
    assert "_sum" in lower(jax.grad(loss, (0, 1, 2)), *shapes(T=64, S=100, N=4, K=2, H=1032))


@pytest.mark.parametrize(
    ("shape", "columns"),
    [((2, 4, 128, 120), 0), ((1, 4, 128, 120), 0), ((2, 4, 1, 120), 128), ((120,), 128)],
    ids=str,
)
def test_deterministic_sums(fake_compiler, shape, columns):
    """dq has semaphores; a bias gradient has sums only if the bias is broadcast over rows."""
    bias = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def with_bias(bias, *x):
        return loss(*x, bias=bias, deterministic_backward=True)

    text = lower(jax.grad(with_bias, (0, 1, 2, 3)), bias, *shapes(S=120))
    forward, backward = (spec for spec, _ in fake_compiler)
    assert not forward[DETERMINISTIC] and backward[DETERMINISTIC]
    call = next(line for line in text.splitlines() if "@jax_memeff_backward" in line)
    tiles = -(-120 // backward.tile.key)
    assert f"tensor<{1 + 2 * 2 * tiles}xi32>" in call
    assert ("bias_gradient_sum" in text) == (columns > 0)
    if columns:
        assert f"tensor<{2 * 4 * columns}xf32>" in call


@pytest.mark.parametrize(
    "sizes", [{"B": 4, "T": 2048, "S": 2048, "N": 16, "K": 16}, {"T": 1, "N": 2}]
)
def test_every_kv_block_has_a_semaphore(fake_compiler, sizes):
    gradient = jax.grad(functools.partial(loss, deterministic_backward=True), (0, 1, 2))
    operands = shapes(**sizes)
    call = attention_calls(lower(gradient, *operands))[1]
    (backward,) = (spec for spec, _ in fake_compiler if spec[DETERMINISTIC])
    batch, length, heads, _ = operands[1].shape
    tiles = batch * heads * -(-length // backward.tile.key)
    assert f"tensor<{1 + tiles}xi32>" in call


@pytest.mark.parametrize(("H", "sums"), [(8192, False), (8200, True)])
def test_scores_of_many_columns_are_summed_in_runs(fake_compiler, H, sums):
    text = lower(loss, *shapes(B=2, T=130, S=100, N=4, K=2, H=H))
    ((spec, _),) = fake_compiler
    scores = 2 * 4 * 2 * spec.tile.query * spec.tile.key  # T has two tiles
    assert ('results = "out,logsumexp,score_sum"' in text) == sums
    assert (f"tensor<{scores}xf32>" in text) == sums


def test_split_q_has_room_for_partial_gradients(fake_compiler):
    gradient = jax.grad(loss, (0, 1, 2))
    text = lower(gradient, *shapes(B=1, T=1024, S=1000, N=8, K=8))
    assert [spec.split_q for spec, _ in fake_compiler] == [False, True]
    sums = "query_gradient_sum,query_gradient_states,key_gradient_sum"
    names = f'row_statistics,{sums},semaphores"'
    assert f'results = "query_gradient,key_gradient,value_gradient,{names}' in text
    # Two CTAs for each KV block, with dk and dv of 1024 keys.
    assert f"tensor<2x{8 * 1024 * (64 + 64)}xf32>, tensor<{64}xi32>" in text


def test_deterministic_split_q_has_semaphores_and_counters(fake_compiler):
    def ordered(*operands):
        return loss(*operands, is_causal=True, deterministic_backward=True)

    text = lower(jax.grad(ordered, (0, 1, 2)), *shapes(B=1, T=1024, S=1024, N=8, K=1))
    assert [spec.split_q for spec, _ in fake_compiler] == [False, True]
    # Two CTAs for each of eight KV blocks, with a semaphore each, a ticket and eight counters.
    assert f"tensor<2x{1024 * (64 + 64)}xf32>, tensor<{1 + 2 * 8 + 8}xi32>" in text


def test_float32_forwards_have_room_for_hi_and_lo_parts(fake_compiler):
    text = lower(loss, *shapes(B=5, T=1030, S=1100, N=8, dtype=jnp.float32))
    assert [spec.kernel.stem for spec, _ in fake_compiler] == ["sm90/f16x3_forward"]
    assert 'results = "out,logsumexp,tile_counter,query_hi_lo,key_hi_lo,value_hi_lo"' in text
    # Tiles have 64 queries or 128 keys, with a factor for each row.
    queries, keys = 5 * 8 * 17 * 64 * (64 + 1), 5 * 2 * 9 * 128 * (64 + 1)
    assert f"tensor<{queries}xf32>, tensor<{keys}xf32>, tensor<{keys}xf32>" in text


def test_float32_backwards_have_room_for_hi_and_lo_parts(fake_compiler):
    gradient = jax.grad(loss, (0, 1, 2))
    text = lower(gradient, *shapes(B=5, T=1030, S=1100, N=8, dtype=jnp.float32))
    assert [spec.kernel.family for spec, _ in fake_compiler] == ["sm90", "sm90"]
    names = "row_statistics,query_hi_lo,key_hi_lo,value_hi_lo,out_gradient_hi_lo"
    assert f'results = "query_gradient,key_gradient,value_gradient,{names}"' in text
    # Tiles have 64 rows, with a factor for each; statistics have tiles of 128 queries.
    queries, keys = 5 * 8 * 17 * 64 * (64 + 1), 5 * 2 * 18 * 64 * (64 + 1)
    parts = (2 * 5 * 8 * 9 * 128, queries, keys, keys, queries)
    assert ", ".join(f"tensor<{size}xf32>" for size in parts) in text


def test_workspaces_do_not_depend_on_the_longest_sequence(fake_compiler):
    def types(longest):
        gradient = jax.grad(functools.partial(varlen_loss, longest=longest), (0, 1, 2))
        backward = attention_calls(lower(gradient, *varlen_shapes()))[1]
        return backward.rpartition("->")[2]

    assert types(10) == types(1000)


def paged_shapes(batch: int, pages: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of decode steps of sequences with at most ``pages`` pages of 64 keys."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    pool, integers = shape((batch * pages, 64, 8, 64)), jnp.int32
    table = jax.ShapeDtypeStruct((batch, pages), integers)
    return [shape((batch, 1, 32, 64)), pool, pool, table, jax.ShapeDtypeStruct((batch,), integers)]


def test_each_segment_of_a_batch_invariant_call_has_a_place(fake_compiler):
    call = functools.partial(paged_attention, batch_invariant=True)
    text = lower(call, *paged_shapes(1, 64))
    assert "tensor<16x32xf32>" in text and "tensor<16x32x64xf32>" in text
    assert "partial" not in lower(call, *paged_shapes(64, 64))  # the tiles fill the GPU
    assert "partial" not in lower(call, *paged_shapes(1, 4))  # one segment
    assert "partial" not in lower(call, *paged_shapes(16, 8192))  # 256 MB
    assert all(spec.kernel.splits_keys for spec, _ in fake_compiler)


def test_starts_of_paged_keys_are_not_computed(fake_compiler):
    text = lower(paged_attention, *paged_shapes(2, 8))
    names = re.search(r'[^_]operands = "([^"]*)"', text)
    values = re.search(r"@jax_memeff_forward\(([^)]*)\)", text)
    assert names and values
    value_of = dict(zip(names[1].split(","), values[1].split(", "), strict=True))
    assert value_of["key_starts"] == value_of["query_starts"]
