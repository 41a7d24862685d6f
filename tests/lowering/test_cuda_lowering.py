"""The content of CUDA programs, lowered for CUDA on a machine without a GPU."""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, Offsets, UnsupportedError
from jax_memeff._cuda import lowering as cuda
from jax_memeff.codegen.features import (
    BIAS,
    BOOLEAN,
    BROADCAST_BATCH,
    DETERMINISTIC,
    DROPOUT,
    SEGMENTS,
    VARLEN,
)
from jax_memeff.codegen.features.bias import gradient as bias_gradient


@pytest.fixture(autouse=True)
def _arch(monkeypatch):
    jax.clear_caches()  # jax keeps lowered programs, whose architectures another test chose
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")


def lower(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def shapes(B=2, T=128, S=128, N=4, K=2, H=64, dtype=jnp.bfloat16):
    struct = jax.ShapeDtypeStruct
    return struct((B, T, N, H), dtype), struct((B, S, K, H), dtype), struct((B, S, K, H), dtype)


def loss(query, key, value, **arguments):
    out = jax_memeff.dot_product_attention(query, key, value, **arguments)
    return out.astype(jnp.float32).sum()


def test_the_program_holds_our_calls_and_real_kernels():
    text = lower(jax.grad(loss, (0, 1, 2)), *shapes())
    assert text.count("custom_call @jax_memeff_forward") == 1
    assert text.count("custom_call @jax_memeff_backward") == 1
    images = re.findall(r' sm_90a = "([^"]*)"', text)
    assert len(images) == 2 and all(len(image) > 10_000 for image in images)
    assert "fmha_bwd_bf16_d64_64x128_sm90_postprocess" in text


@pytest.mark.parametrize(
    "names, forwards",
    [(("jax_memeff_out", "jax_memeff_lse"), 1), (("jax_memeff_out",), 2), ((), 2)],
)
def test_what_checkpoint_saves_is_not_launched_again(fake_compiler, names, forwards):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    step = jax.value_and_grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))
    text = lower(step, *shapes())
    assert text.count("custom_call @jax_memeff_forward") == forwards
    assert text.count("custom_call @jax_memeff_backward") == 1


def test_the_program_is_the_same_in_every_lowering(fake_compiler):
    """JAX's persistent cache hits only if it is."""
    first = lower(jax.grad(loss), *shapes())
    jax.clear_caches()
    assert lower(jax.grad(loss), *shapes()) == first


def test_kernels_do_not_depend_on_sizes(fake_compiler):
    rng = np.random.default_rng(0)
    for _ in range(200):
        B, T, S, K, group = (int(x) for x in rng.integers(1, (9, 4000, 4000, 9, 5)))
        lower(jax.grad(loss, (0, 1, 2)), *shapes(B, T, S, K * group, K))
    assert len(fake_compiler) <= 8


def test_few_queries_do_not_make_many_kernels(fake_compiler):
    rng = np.random.default_rng(0)
    for _ in range(200):
        B, T, S, K, group = (int(x) for x in rng.integers(1, (20, 80, 9000, 9, 9)))
        lower(loss, *shapes(B, T, S, K * group, K))
    assert {spec.tile.query for spec, _ in fake_compiler if spec.kernel.splits_keys} == {16, 64}
    assert len(fake_compiler) <= 8


def test_partial_results_of_few_queries(fake_compiler):
    """Their number is bounded by the sizes, because the device is not known."""
    text = lower(loss, *shapes(B=16, T=1, S=8192, N=32, K=8))
    assert 'results = "out,logsumexp,partial_logsumexp,partial_out"' in text
    assert "tensor<4x512xf32>" in text and "tensor<4x512x64xf32>" in text
    assert all(spec.pack_heads for spec, _ in fake_compiler)
    assert "B*K*group_rows/16*splits" in text
    text = lower(loss, *shapes(B=64, T=1, S=8192, N=64, K=64))  # splits enough without any
    assert 'results = "out,logsumexp"' in text
    text = lower(loss, *shapes(B=2, T=1, S=64, N=4, K=4))  # and one tile cannot be split
    assert 'results = "out,logsumexp"' in text
    assert all(spec.kernel.splits_keys for spec, _ in fake_compiler)


def test_enough_queries_need_no_partial_results(fake_compiler):
    text = lower(loss, *shapes(B=8, T=2048, S=2048, N=8, K=8))
    assert "partial" not in text
    assert not any(spec.pack_heads for spec, _ in fake_compiler)


def test_values_do_not_make_kernels(fake_compiler):
    for scale, left in ((0.1, 5), (0.2, 50), (-0.3, 500)):
        lower(lambda *x, s=scale, n=left: loss(*x, scale=s, local_window_size=n), *shapes())
    assert len(fake_compiler) == 1


@pytest.mark.quick
def test_only_needed_gradients_are_results(fake_compiler):
    text = lower(jax.grad(loss, 1), *shapes())
    assert 'results = "key_gradient,row_statistics"' in text
    assert {spec.gradients for spec, _ in fake_compiler} == {(), ("key",)}


@pytest.mark.quick
def test_masks_that_are_arrays_have_block_masks(fake_compiler, monkeypatch):
    """One for the tiles of each kernel, broadcast over heads and batch like the mask."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_86")
    operands = shapes(B=8, T=300, S=300)
    ids = jnp.zeros((8, 300), jnp.int32)
    text = lower(jax.grad(functools.partial(loss, mask=Mask.segments(ids, ids))), *operands)
    for spec, _ in fake_compiler:
        (block_mask,) = spec.block_masks
        assert re.search(rf'operands = "[^"]*segments,[^"]*\b{block_mask.name}\b', text)
    assert "tensor<8x1x3x16xui8>" in text
    mask = Mask.boolean(jnp.ones((1, 4, 300, 1), bool))
    assert "tensor<1x4x3x16xui8>" in lower(functools.partial(loss, mask=mask), *operands)


def test_several_architectures(fake_compiler, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a,compute_80")
    text = lower(loss, *shapes())
    assert 'archs = "sm_90a,compute_80"' in text
    assert [arch for _, arch in fake_compiler] == ["sm_90a", "compute_80"]


@pytest.mark.quick
def test_what_no_kernel_does_raises():
    with pytest.raises(UnsupportedError, match="head_dim is 65537, and the largest") as caught:
        lower(loss, *shapes(H=65537))
    assert "implementation='xla'" in str(caught.value)
    xla = functools.partial(loss, implementation="xla")
    assert "stablehlo" in lower(xla, *shapes(H=65537))


def test_float64_says_what_to_do(x64):
    with pytest.raises(UnsupportedError, match=r"float64 has no kernel.*'xla', or cast"):
        lower(loss, *shapes(dtype="float64"))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(None, "f32"), ("high", "f32"), ("highest", "f32"), ("default", "tf32")],
)
def test_precision_chooses_the_products_of_float32_only(fake_compiler, precision, dtype):
    gradient = jax.grad(functools.partial(loss, precision=precision), (0, 1, 2))
    lower(gradient, *shapes(dtype="float32"))
    lower(gradient, *shapes(dtype="float16"))
    assert [spec.dtype for spec, _ in fake_compiler] == [dtype, dtype, "f16", "f16"]


def test_unknown_devices_are_an_error(monkeypatch):
    monkeypatch.delenv("JAX_MEMEFF_ARCHS")
    if jax.default_backend() == "gpu":
        pytest.skip("the devices of this machine are known")
    with pytest.raises(UnsupportedError, match="set JAX_MEMEFF_ARCHS"):
        lower(loss, *shapes())


def test_too_long_sequences_are_an_error(fake_compiler):
    with pytest.raises(UnsupportedError, match=f"got {2**28 + 1}"):
        lower(loss, *shapes(B=1, T=2**28 + 1))


def test_dropout_is_data_and_its_rate_an_attribute(fake_compiler):
    def gradients(rate, key, *operands):
        return jax.grad(loss, (0, 1, 2))(*operands, dropout_rate=rate, dropout_key=key)

    # The second number is the float32 256 / (256 - threshold).
    for rate, threshold, scale in ((0.1, 26, 0x3F8E7835), (0.5, 128, 0x40000000)):
        text = lower(functools.partial(gradients, rate), jax.random.key(0), *shapes())
        assert text.count("key_words,batch_base,head_index") == 2
        assert text.count(f"numbers = dense<[{threshold}, {scale}]> : tensor<2xi32>") == 2
    assert [spec[DROPOUT] for spec, _ in fake_compiler] == [True, True]


@pytest.mark.parametrize(
    ("arch", "shape", "way", "sums"),
    [
        ("sm_80", (2, 4, 128, 120), "full", None),
        ("sm_80", (1, 4, 128, 120), "shared", 4 * 128 * 128),
        ("sm_80", (2, 1, 128, 120), "shared", 2 * 128 * 128),
        ("sm_80", (128, 120), "shared", 128 * 128),
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
    text = lower(jax.grad(loss, (0, 1, 2)), *shapes(T=64, S=100, N=2, K=2, H=512))
    assert "_sum" not in text
    assert "_sum" in lower(jax.grad(loss, (0, 1, 2)), *shapes(T=64, S=100, N=4, K=2, H=512))


@pytest.mark.parametrize(
    ("shape", "columns"),
    [((2, 4, 128, 120), 0), ((1, 4, 128, 120), 0), ((2, 4, 1, 120), 128), ((120,), 128)],
    ids=str,
)
def test_deterministic_sums(fake_compiler, shape, columns):
    """dq has semaphores; a bias gradient has sums only if it is one row."""
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


def test_a_constant_bias_has_no_gradient(fake_compiler):
    bias = np.zeros((1, 4, 128, 128), np.float32)
    text = lower(jax.grad(lambda *x: loss(*x, bias=bias), (0, 1, 2)), *shapes())
    assert "bias_gradient" not in text
    assert [bias_gradient(spec) for spec, _ in fake_compiler] == ["none", "none"]


def test_several_segments_and_booleans_become_one_operand(fake_compiler):
    mask = (
        Mask.segments(np.zeros(128, int), np.zeros(128, int))
        & Mask.segments(np.zeros((2, 128), int), np.zeros((2, 128), int))
        & Mask.boolean(np.ones((4, 1, 128), bool))
        & Mask.boolean(np.ones((2, 1, 128, 1), bool))
    )
    text = lower(lambda *x: loss(*x, mask=mask), *shapes())
    ((spec, _),) = fake_compiler
    assert spec[SEGMENTS] and spec[BOOLEAN]
    assert "query_segments,key_segments,boolean" in text
    call = next(line for line in text.splitlines() if "@jax_memeff_forward" in line)
    assert call.count("tensor<2x2x128xi32>") == 2
    assert call.count("tensor<2x4x128x128xi1>") == 1


def test_a_boolean_mask_is_not_broadcast(fake_compiler):
    text = lower(lambda *x: loss(*x, mask=np.ones((1, 1, 1, 128), bool)), *shapes())
    call = next(line for line in text.splitlines() if "@jax_memeff_forward" in line)
    assert "tensor<1x1x1x128xi1>" in call


def test_a_bias_per_row_needs_no_kernel_for_its_gradient(fake_compiler):
    bias = jax.ShapeDtypeStruct((1, 4, 128, 1), jnp.bfloat16)
    text = lower(jax.grad(lambda bias, *x: loss(*x, bias=bias)), bias, *shapes())
    assert "jax_memeff_backward" not in text


@pytest.mark.parametrize(
    ("window", "host"),
    [
        ((2**40, 3), (cuda.UNBOUNDED, 3)),
        # With an offset of 2**29 rows this window begins 5 columns before column 0.
        ((2**29 + 5, 0), (2**29 + 5, 0)),
        ((4, -(2**40)), (4, -cuda.UNBOUNDED)),
    ],
)
def test_window_bounds_reach_the_host_up_to_the_range_of_offsets(window, host, fake_compiler):
    text = lower(lambda *x: loss(*x, mask=Mask.window(*window)), *shapes())
    unbounded = cuda.UNBOUNDED
    assert f"windows = dense<[{host[0]}, {host[1]}, {unbounded}, {unbounded}]>" in text


@pytest.mark.parametrize("per_batch_index", [False, True])
def test_positions_reach_the_kernels_as_one_for_each_batch_index(per_batch_index, fake_compiler):
    first = jax.ShapeDtypeStruct((2,) if per_batch_index else (), jnp.int32)

    def positioned(first, *x):
        return loss(*x, is_causal=True, offsets=Offsets(query=first, key=16))

    for call in attention_calls(lower(jax.grad(positioned, 1), first, *shapes())):
        names = names_of(call).split(",")
        operands, _ = types_of(call)
        for name in ("query_position", "key_position"):
            assert operands[names.index(name)] == "2xi32"


def test_mapped_positions_are_one_call(fake_compiler):
    def positioned(first, *x):
        return loss(*x, is_causal=True, offsets=Offsets(query=first))

    first = jax.ShapeDtypeStruct((3,), jnp.int32)
    mapped = jax.vmap(positioned, (0, None, None, None))
    (call,) = attention_calls(lower(mapped, first, *shapes()))
    operands, _ = types_of(call)
    assert operands[names_of(call).split(",").index("query_position")] == "6xi32"


def test_positions_of_packed_sequences(fake_compiler):
    first = jax.ShapeDtypeStruct((7,), jnp.int32)
    text = lower(
        lambda first, *x: varlen_loss(*x, offsets=Offsets(query=first), is_causal=True),
        first,
        *varlen_shapes(sequences=7),
    )
    (call,) = attention_calls(text)
    operands, _ = types_of(call)
    assert operands[names_of(call).split(",").index("query_position")] == "7xi32"


def attention_calls(text):
    return [line for line in text.splitlines() if "@jax_memeff_" in line]


def test_projections_are_read_and_written_in_place(fake_compiler):
    """One operand, one gradient, and no operation that copies either."""
    qkv = jax.ShapeDtypeStruct((2, 128, 3, 4, 64), jnp.bfloat16)

    def packed_loss(qkv):
        out = jax_memeff.dot_product_attention_packed(qkv, is_causal=True)
        return out.astype(jnp.float32).sum()

    text = lower(jax.grad(packed_loss), qkv)
    whole = "tensor<2x128x3x4x64xbf16>"
    forward, backward = attention_calls(text)
    assert 'operands = "query+key+value"' in forward
    assert f": ({whole}) -> (" in forward
    assert 'results = "query_gradient+key_gradient+value_gradient,row_statistics,' in backward
    assert f") -> ({whole}, " in backward
    copies = ("slice", "concatenate", "pad", "transpose", "reshape", "gather", "scatter", "select")
    assert not [name for name in copies if f"stablehlo.{name}" in text]
    # The kernels are those of three arrays.
    lower(jax.grad(functools.partial(loss, is_causal=True), (0, 1, 2)), *shapes(N=4, K=4))
    assert len(fake_compiler) == 2


def test_projections_with_masks_that_are_arrays(fake_compiler, monkeypatch):
    """What XLA computes before the call, it computes from abstract values of JAX alone."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_86")
    ids = jax.ShapeDtypeStruct((8, 300), jnp.int32)
    boolean = jax.ShapeDtypeStruct((8, 1, 300, 1), jnp.bool)

    def packed_loss(qkv, ids, boolean):
        mask = Mask.segments(ids, ids) & Mask.boolean(boolean) & Mask.boolean(boolean[:1])
        out = jax_memeff.dot_product_attention_packed(qkv, mask=mask)
        return out.astype(jnp.float32).sum()

    qkv = jax.ShapeDtypeStruct((8, 300, 3, 4, 64), jnp.bfloat16)
    text = lower(jax.grad(packed_loss), qkv, ids, boolean)
    for spec, _ in fake_compiler:
        (block_mask,) = spec.block_masks
        names = rf'operands = "query\+key\+value,[^"]*segments,boolean,[^"]*\b{block_mask.name}\b'
        assert re.search(names, text)


def test_projections_with_a_bias(fake_compiler):
    qkv = jax.ShapeDtypeStruct((128, 3, 4, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)

    def packed_loss(qkv, bias):
        out = jax_memeff.dot_product_attention_packed(qkv, bias)
        return out.astype(jnp.float32).sum()

    names = 'results = "{}row_statistics,'
    projections = "query_gradient+key_gradient+value_gradient,"
    both = lower(jax.grad(packed_loss, (0, 1)), qkv, bias)
    assert names.format(projections + "bias_gradient,") in both
    assert names.format(projections) in lower(jax.grad(packed_loss), qkv, bias)
    assert 'results = "bias_gradient,' in lower(jax.grad(packed_loss, 1), qkv, bias)


def varlen_shapes(total_q=1000, total_k=900, sequences=7, N=4, K=2, H=64) -> tuple[Any, ...]:
    struct = jax.ShapeDtypeStruct
    query, key = (
        struct((total, heads, H), jnp.bfloat16) for total, heads in ((total_q, N), (total_k, K))
    )
    return query, key, key, *[struct((sequences + 1,), jnp.int32)] * 2


def varlen_loss(*arrays: Any, longest=300, **features: Any):
    attention: Any = jax_memeff.varlen_attention
    out = attention(*arrays, longest, longest, **features)
    return out.astype(jnp.float32).sum()


def test_packed_sequences_are_not_padded(fake_compiler):
    """Nothing but numbers per sequence is computed before the kernels."""
    text = lower(jax.grad(varlen_loss, (0, 1, 2)), *varlen_shapes())
    forward, backward = attention_calls(text)
    assert 'operands = "query,key,value,query_lengths,key_lengths,query_starts,key_starts"' in (
        forward
    )
    assert "longest = dense<300> : tensor<2xi32>" in forward
    assert [spec[VARLEN] for spec, _ in fake_compiler] == [True, True]
    for line in text.splitlines():
        copies = ("slice", "concatenate", "pad", "gather", "scatter", "select", "transpose")
        if any(f"stablehlo.{name}" in line for name in copies):
            assert "bf16" not in line
    tile = next(spec.tile.query for spec, _ in fake_compiler if spec.direction == "backward")
    rows = 4 * (1000 // tile + 7) * tile
    assert f"tensor<{2 * rows}xf32>, tensor<{64 * rows}xf32>" in backward


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
    names = 'row_statistics,query_gradient_sum,key_gradient_sum,semaphores"'
    assert f'results = "query_gradient,key_gradient,value_gradient,{names}' in text
    # Two blocks for each tile, with dk and dv of 1024 keys.
    assert f"tensor<2x{8 * 1024 * (64 + 64)}xf32>, tensor<{1 + 64}xi32>" in text


def test_float32_forwards_have_room_for_hi_and_lo_parts(fake_compiler):
    text = lower(loss, *shapes(B=5, T=1030, S=1100, N=8, dtype=jnp.float32))
    assert [spec.kernel.stem for spec, _ in fake_compiler] == ["fmha_fwd_f16x3_sm90"]
    assert 'results = "out,logsumexp,tile_counter,query_hi_lo,key_hi_lo,value_hi_lo"' in text
    # In tiles of 64 queries and 128 keys, with a factor of each row.
    queries, keys = 5 * 8 * 17 * 64 * (64 + 1), 5 * 2 * 9 * 128 * (64 + 1)
    assert f"tensor<{queries}xf32>, tensor<{keys}xf32>, tensor<{keys}xf32>" in text


def test_workspaces_do_not_depend_on_the_longest_sequence(fake_compiler):
    def types(longest):
        gradient = jax.grad(functools.partial(varlen_loss, longest=longest), (0, 1, 2))
        backward = attention_calls(lower(gradient, *varlen_shapes()))[1]
        return backward.rpartition("->")[2]

    assert types(10) == types(1000)


def test_sequences_do_not_make_kernels(fake_compiler):
    for total, sequences, longest in ((1000, 7, 300), (77, 1, 77), (5000, 300, 0)):
        gradient = jax.grad(functools.partial(varlen_loss, longest=longest), (0, 1, 2))
        lower(gradient, *varlen_shapes(total, total, sequences))
    # Few tiles, as of one short sequence, have a forward of their own.
    directions = [spec.direction for spec, _ in fake_compiler]
    assert sorted(directions) == ["backward", "forward", "forward"]


def test_no_sequence_needs_no_kernel(fake_compiler):
    assert "jax_memeff" not in lower(varlen_loss, *varlen_shapes(sequences=0))


def test_too_many_tokens_are_an_error(fake_compiler):
    with pytest.raises(UnsupportedError, match=f"got {2**28 + 1}"):
        lower(varlen_loss, *varlen_shapes(total_q=2**28 + 1))
    with pytest.raises(UnsupportedError, match=f"got {2**29}"):
        lower(functools.partial(varlen_loss, longest=2**29), *varlen_shapes())


@pytest.mark.parametrize(
    ("S", "dtype", "alignment", "access"),
    [
        (120, jnp.bfloat16, 16, "vectors"),
        (124, jnp.bfloat16, 8, "words"),
        (124, jnp.float32, 16, "vectors"),
        (123, jnp.bfloat16, 2, "words"),
    ],
    ids=str,
)
def test_rows_of_a_bias_decide_how_it_is_read(fake_compiler, S, dtype, alignment, access):
    bias = jax.ShapeDtypeStruct((4, 128, S), dtype)
    text = lower(lambda bias, *x: loss(*x, bias=bias), bias, *shapes(S=S))
    ((spec, _),) = fake_compiler
    assert spec[BIAS].access == access
    assert f"bias_alignment = {alignment} : i32" in text


def shared_operands():
    """Three mapped queries, and unmapped keys, values, biases and masks with a batch of 2."""
    query, key, value = shapes()
    queries = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)
    bias = jax.ShapeDtypeStruct((2, 4, 128, 128), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((2, 1, 128, 128), jnp.bool_)
    return queries, key, value, bias, mask


def vmapped_loss(queries, key, value, bias, mask):
    attend: Any = jax_memeff.dot_product_attention
    out = jax.vmap(lambda query: attend(query, key, value, bias, mask))(queries)
    return out.astype(jnp.float32).sum()


def names_of(call):
    """Of the operands, with divisors."""
    (names,) = re.findall(r'operands = "([^"]*)"', call)
    return names


def types_of(call):
    """Of the operands, and of the results."""
    return [re.findall(r"tensor<([^>]*)>", types) for types in call.split(" : (")[-1].split("->")]


SHARED_TYPES = ["2x128x2x64xbf16", "2x128x2x64xbf16", "2x4x128x128xbf16"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_operands_that_a_vmap_broadcasts_are_not_copied(fake_compiler, monkeypatch, arch):
    """In the forward and in the backward, which has a gradient for each mapped index."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", arch)
    text = lower(jax.grad(vmapped_loss, (0, 1, 2, 3)), *shared_operands())
    forward, backward = attention_calls(text)
    for call in (forward, backward):
        operands, _ = types_of(call)
        *projections, bias = SHARED_TYPES
        assert operands[:5] == ["6x128x4x64xbf16", *projections, "2x1x128x128xi1", bias]
        assert "/" not in names_of(call)
    _, gradients = types_of(backward)
    whole = [name.replace("2x", "6x", 1) for name in SHARED_TYPES]
    assert gradients[:4] == ["6x128x4x64xbf16", *whole]
    for line in text.splitlines():
        if "broadcast_in_dim" in line or "concatenate" in line:
            assert not any(name in line.split("->")[-1] for name in whole)
    assert all(spec[BROADCAST_BATCH] and "_vmap_" in spec.name for spec, _ in fake_compiler)


def test_divisors_of_nested_vmaps(fake_compiler):
    """The outer vmap maps the keys, the inner one the queries."""
    query, key, value = (jax.ShapeDtypeStruct((3, *x.shape[1:]), x.dtype) for x in shapes())
    queries = jax.ShapeDtypeStruct((5, *query.shape[1:]), query.dtype)
    attend: Any = jax_memeff.dot_product_attention

    def mapped(queries, keys, value):
        inner = jax.vmap(attend, (0, None, None))
        return jax.vmap(inner, (None, 0, None))(queries, keys, value[0])

    (call,) = attention_calls(lower(mapped, queries, key, value))
    assert names_of(call).startswith("query,key/5,value")
    operands, _ = types_of(call)
    assert operands[1:3] == ["3x128x2x64xbf16", "1x128x2x64xbf16"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("batch, mapped", [(1, False), (2, False), (2, True)])
def test_a_bias_of_one_batch_index_is_not_copied_for_its_gradients(
    fake_compiler, monkeypatch, arch, batch, mapped
):
    """Each mapped index has one gradient, the sum over its batch."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", arch)
    query, key, value = shapes(B=batch)
    queries = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)
    sizes = (3,) * mapped + (1, 4, 128, 128)
    bias = jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def element(query, key, value, bias):
        return jax.grad(lambda bias: loss(query, key, value, bias=bias))(bias)

    axes = (0, None, None, 0 if mapped else None)
    text = lower(jax.vmap(element, axes), queries, key, value, bias)
    for call in attention_calls(text):
        own = 3 if mapped else 1
        assert types_of(call)[0][3] == f"{own}x4x128x128xbf16"
    assert types_of(call)[1][0] == "3x4x128x128xbf16"
    with_divisor = f",bias/{batch}," if batch > 1 and mapped else ",bias,"
    assert with_divisor in names_of(call)
    assert call.count(f"bias_gradient/{batch}") == (batch > 1)
    for line in text.splitlines():
        assert "broadcast_in_dim" not in line or "x4x128x128x" not in line.split("->")[-1]
    (way,) = {bias_gradient(spec) for spec, _ in fake_compiler} - {"none"}
    assert way == ("full" if batch == 1 else "dbias_kernel" if arch == "sm_90a" else "shared")


def test_masks_with_equal_divisors_stay_broadcast(fake_compiler):
    queries, key, value, _, mask = shared_operands()
    rows = jax.ShapeDtypeStruct((2, 1, 128, 1), jnp.bool_)
    own = jax.ShapeDtypeStruct((3, 2, 1, 1, 128), jnp.bool_)
    attend: Any = jax_memeff.dot_product_attention

    def mapped(*arrays):
        queries, key, value, *shared, own = arrays

        def element(query, mask):
            masks = [Mask.boolean(x) for x in (*shared, mask) if x is not None]
            return attend(query, key, value, mask=functools.reduce(operator.and_, masks))

        return jax.vmap(element)(queries, own)

    for masks, elements in (((mask, rows, None), 2), ((mask, rows, own), 6)):
        (call,) = attention_calls(lower(mapped, queries, key, value, *masks))
        assert types_of(call)[0][3] == f"{elements}x1x128x128xi1"


def test_kernels_are_the_plain_ones_if_nothing_is_broadcast(fake_compiler):
    """A bias that broadcasts over the batch, and a vmap of size 1, use the plain kernels."""
    queries, key, value, _, _ = shared_operands()
    keys, values = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (key, value))
    bias = jax.ShapeDtypeStruct((1, 4, 128, 128), jnp.bfloat16)
    attend: Any = jax_memeff.dot_product_attention
    lower(jax.vmap(attend, (0, 0, 0, None)), queries, keys, values, bias)
    one = jax.ShapeDtypeStruct((1, *queries.shape[1:]), queries.dtype)
    lower(jax.vmap(attend, (0, None, None)), one, key, value)
    assert not any(spec[BROADCAST_BATCH] for spec, _ in fake_compiler)
