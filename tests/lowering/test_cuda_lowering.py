"""The content of CUDA programs, lowered for CUDA on a machine without a GPU."""

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
    names_of,
    shapes,
    types_of,
)

import jax_memeff
from jax_memeff import Mask, Offsets, UnsupportedError
from jax_memeff._cuda.custom_call import UNBOUNDED
from jax_memeff.codegen.features import (
    BIAS,
    BOOLEAN,
    DROPOUT,
    SEGMENTS,
)
from jax_memeff.codegen.features.bias import gradient as bias_gradient

pytestmark = pytest.mark.usefixtures("hopper")


def test_the_program_holds_our_calls_and_real_kernels():
    text = lower(jax.grad(loss, (0, 1, 2)), *shapes())
    assert text.count("custom_call @jax_memeff_forward") == 1
    assert text.count("custom_call @jax_memeff_backward") == 1
    images = re.findall(r' image = "([^"]*)"', text)
    assert len(images) == 2 and all(len(image) > 10_000 for image in images)
    assert "fmha_bwd_bf16_d64_128x128_sm90_postprocess" in text


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
    """JAX's persistent cache only hits if it is the same."""
    first = lower(jax.grad(loss), *shapes())
    jax.clear_caches()
    assert lower(jax.grad(loss), *shapes()) == first


def test_the_cost_of_a_call_is_unknown_to_xla(fake_compiler):
    """docs/guide/memory.md says so, and how to count. If XLA learns it, the calls can have it."""
    lowered = jax.jit(jax_memeff.dot_product_attention).trace(*shapes()).lower(
        lowering_platforms=("cuda",)
    )  # fmt: skip
    cost = lowered.cost_analysis()
    assert cost is not None and cost["flops"] == -1


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
    rows = {spec.tile.query for spec, _ in fake_compiler if spec.kernel.splits_keys}
    assert rows == {16, 32, 64}
    assert len(fake_compiler) <= 8


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
    """Each tile size has a block mask, which is broadcast over heads and batch like the mask."""
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


@pytest.mark.parametrize(
    ("count", "deterministic", "message"),
    [
        (11, False, r"read 11 arrays, and 11 need gradients; kernels have room for 11 arrays"),
        (6, False, r"read 6 arrays, and 6 need gradients; kernels have room for 11 arrays"),
        (6, True, r"read 6 arrays, and 6 need gradients; kernels have room for 10 arrays"),
    ],
)
def test_kernels_have_room_for_few_arrays_and_gradients(
    fake_compiler, count, deterministic, message
):
    """A forward has room for 11 arrays, a backward for 5 and their gradients."""

    def function(arrays, *x):
        return loss(
            *x,
            score_mod=lambda s, b, h, q, k: s + sum(array[h] for array in arrays),
            deterministic_backward=deterministic,
        )

    def gradient(count):
        return lower(
            jax.grad(function, (0, 1)), [jax.ShapeDtypeStruct((4,), "float32")] * count, *shapes()
        )

    lower(function, [jax.ShapeDtypeStruct((4,), "float32")] * 11, *shapes())
    with pytest.raises(UnsupportedError, match=r"read 12 arrays; kernels have room for 11"):
        lower(function, [jax.ShapeDtypeStruct((4,), "float32")] * 12, *shapes())
    gradient(5)
    with pytest.raises(UnsupportedError, match=message):
        gradient(count)


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

    # The second number is 256 / (256 - threshold) in float32.
    for rate, threshold, scale in ((0.1, 26, 0x3F8E7835), (0.5, 128, 0x40000000)):
        text = lower(functools.partial(gradients, rate), jax.random.key(0), *shapes())
        assert text.count("key_words,batch_base,head_index") == 2
        fields = re.findall(r" fields = dense<\[([^]]*)\]>", text)
        assert len(fields) == 2
        for own in fields:
            rows = np.array(own.split(", "), int).reshape(-1, 3)  # offset, array, number
            numbers = [number for _, array, number in rows if array < 0]
            assert sorted(numbers) == sorted([threshold, scale])
    assert [spec[DROPOUT] for spec, _ in fake_compiler] == [True, True]


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
    assert call.count("tensor<2x4x128x4xui32>") == 1


def test_a_boolean_mask_is_not_broadcast(fake_compiler):
    text = lower(lambda *x: loss(*x, mask=np.ones((1, 1, 1, 128), bool)), *shapes())
    call = next(line for line in text.splitlines() if "@jax_memeff_forward" in line)
    assert "tensor<1x1x1x4xui32>" in call


def test_a_bias_per_row_needs_no_kernel_for_its_gradient(fake_compiler):
    bias = jax.ShapeDtypeStruct((1, 4, 128, 1), jnp.bfloat16)
    text = lower(jax.grad(lambda bias, *x: loss(*x, bias=bias)), bias, *shapes())
    assert "jax_memeff_backward" not in text


@pytest.mark.parametrize(
    ("window", "host"),
    [
        ((2**40, 3), (UNBOUNDED, 3)),
        # With an offset of 2**29 rows this window begins 5 columns before column 0.
        ((2**29 + 5, 0), (2**29 + 5, 0)),
        ((4, -(2**40)), (4, -UNBOUNDED)),
    ],
)
def test_window_bounds_reach_the_host_up_to_the_range_of_offsets(window, host, fake_compiler):
    text = lower(lambda *x: loss(*x, mask=Mask.window(*window)), *shapes())
    assert f"windows = dense<[{host[0]}, {host[1]}, {UNBOUNDED}, {UNBOUNDED}]>" in text


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


@pytest.mark.parametrize(
    ("functions", "read"),
    [
        ({"score_mod": lambda s, b, h, q, k: s + 0.1 * (q - k)}, set()),
        ({"score_mod": lambda s, b, h, q, k: s + 0.1 * h * (q - k)}, {"head"}),
        ({"mask": Mask.function(lambda b, h, q, k: q < 9 * b)}, {"batch"}),
        (
            {
                "score_mod": lambda s, b, h, q, k: s + h,
                "mask": Mask.function(lambda b, h, q, k: jnp.arange(3)[b] < k),
            },
            {"batch", "head"},
        ),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else None,
)
def test_only_indices_that_a_function_reads_are_computed(functions, read, fake_compiler):
    """XLA would compute the others in a kernel each. They are constants of rank 2 instead."""

    gradients = jax.grad(functools.partial(loss, **functions), (0, 1, 2))
    for call in attention_calls(lower(gradients, *shapes(B=3, N=4))):
        types = dict(zip(names_of(call).split(","), types_of(call)[0], strict=True))
        for name, size in (("batch", 3), ("head", 4)):
            expected = f"{size}xi32" if name in read else f"1x{size}xi32"
            assert types[f"function_{name}_index"] == expected
