"""CUDA programs of calls with lists of keys: the kernels, and what XLA does before them."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_programs import attention_calls, lower, names_of, types_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, UnsupportedError
from jax_memeff._command.models import of_program

attention: Any = jax_memeff.dot_product_attention
varlen_attention: Any = jax_memeff.varlen_attention
paged_attention: Any = jax_memeff.paged_attention

pytestmark = pytest.mark.usefixtures("hopper")


def shape(*sizes: Any, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def latent(heads: int = 128, rows: int = 40, columns: int = 5000, count: int = 64) -> tuple:
    query, key = shape(2, rows, heads, 576), shape(2, columns, 1, 576)
    return query, key, shape(2, 1, rows, count, dtype=jnp.int32)


def latent_call(query, key, lists, **given: Any):
    mask = Mask.keys(lists, unique_indices=True) & Mask.causal()
    return attention(query, key, None, value_dim=512, mask=mask, **given)


def copies(text: str, elements: int) -> list[str]:
    """The operations whose result has so many elements, but for those that only name dims anew."""

    def size(dims: str) -> int:
        return math.prod(int(size) for size in dims.split("x")[:-1])

    found = re.findall(r"(stablehlo\.\w+)[^\n]*?: \(tensor<(\S+)>\) -> tensor<(\S+)>", text)
    bitcasts = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")
    return [
        operation
        for operation, given, result in found
        if size(result) == elements and not (operation in bitcasts and size(given) == elements)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_latent_calls_take_the_latent_kernel_without_a_copy(heads, fake_compiler):
    given = latent(heads)
    text = lower(latent_call, *given)
    (call,) = attention_calls(text)
    ((spec, arch),) = fake_compiler
    assert (spec.kernel.stem, arch) == ("sm90/latent", "sm_90a")
    assert "page_table" in names_of(call) and "key_lists" not in names_of(call)
    operands, _ = types_of(call)
    assert operands[:3] == [f"1x80x{heads}x576xbf16", *["1x10000x1x576xbf16"] * 2]
    assert not copies(text, 2 * 5000 * 576)


@pytest.mark.parametrize("own_lists", [True, False])
def test_keys_of_several_heads_are_not_copied(own_lists, fake_compiler):
    x = shape(2, 3000, 4, 64)
    lists = shape(2, 4 if own_lists else 1, 3000, 32, dtype=jnp.int32)
    text = lower(
        lambda *x: attention(*x[:3], mask=Mask.keys(x[3])), shape(2, 3000, 8, 64), x, x, lists
    )
    assert not copies(text, 2 * 3000 * 4 * 64)
    (call,) = attention_calls(text)
    pool = "1x24000x1x64xbf16" if own_lists else "1x6000x4x64xbf16"
    assert types_of(call)[0][1] == pool


def test_packed_and_paged_calls(fake_compiler):
    query, key, starts = shape(100, 8, 64), shape(900, 2, 64), shape(8, dtype=jnp.int32)
    lists = shape(100, 2, 32, dtype=jnp.int32)

    def packed(query, key, starts, lists):
        return varlen_attention(query, key, key, starts, starts, 50, 300, mask=Mask.keys(lists))

    def paged(query, pool, table, lengths, lists):
        return paged_attention(query, pool, pool, table, lengths, mask=Mask.keys(lists))

    integers = [shape(*x, dtype=jnp.int32) for x in ((7, 20), (7,), (7, 2, 3, 32))]
    for program, given, size in (
        (packed, (query, key, starts, lists), 900 * 2 * 64),
        (paged, (shape(7, 3, 8, 64), shape(50, 16, 2, 64), *integers), 50 * 16 * 2 * 64),
    ):
        text = lower(program, *given)
        assert len(attention_calls(text)) == 1
        assert not copies(text, size)
    assert all("pages1" in spec.name for spec, _ in fake_compiler)


@pytest.mark.parametrize(
    "call", [latent_call, lambda q, k, x: attention(q, k, k, mask=Mask.keys(x))]
)
def test_a_tangent_is_plain_jax(call, fake_compiler):
    def derivative(query, key, lists):
        with jax_memeff.forward_mode():
            return jax.jvp(lambda *x: call(*x, lists), (query, key), (query, key))

    text = lower(derivative, *latent())
    assert [call.split("@jax_memeff_")[1][:7] for call in attention_calls(text)] == ["forward"]


@pytest.mark.quick
def test_a_backward_is_a_kernel_or_plain_jax(fake_compiler, monkeypatch):
    def loss(query, key, lists):
        return latent_call(query, key, lists).astype(jnp.float32).sum()

    gradient = jax.grad(loss, (0, 1))

    given = latent(16)
    _, backward = attention_calls(lower(gradient, *given))
    assert "@jax_memeff_backward" in backward
    specs = [spec for spec, _ in of_program(gradient, given, ["sm_90a"])]
    assert [spec.kernel.stem for spec in specs] == ["sm90/latent", "sm90/latent_backward"]
    # A tile has whole lists of several rows: keys and values, 2 * 64 * (576 + 512) numbers each.
    tile = "2x1x40x64x576"
    plain = lower(lambda *x: latent_call(*x, implementation="xla"), *given)
    assert not attention_calls(plain) and tile in plain
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80")
    text = lower(jax.grad(lambda *x: loss(*x), (0, 1)), *given)
    (forward,) = attention_calls(text)
    assert "@jax_memeff_forward" in forward and tile in text


def test_values_are_copied_without_a_latent_kernel(fake_compiler, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80")
    given = shape(2, 40, 8, 96), shape(2, 500, 1, 96), latent()[2]

    def call(query, key, lists):
        return attention(query, key, None, value_dim=64, mask=Mask.keys(lists))

    (one,) = attention_calls(lower(call, *given))
    assert types_of(one)[0][1:3] == ["1x1000x1x96xbf16", "1x1000x1x64xbf16"]


X = np.zeros((2, 40, 4, 64), np.float32)
LISTS = np.zeros((2, 4, 40, 3), np.int32)
HEADS = jnp.arange(4.0)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"bias": np.zeros((40, 40), np.float32)}, id="bias", marks=pytest.mark.quick),
        {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
        {"mask": Mask.boolean(np.ones((4, 1, 40), bool))},
        {"mask": Mask.function(lambda b, h, q, k: k % 4 != h)},
        {"score_mod": lambda s, b, h, q, k: s + k},
        {"score_mod": lambda s, b, h, q, k: s * HEADS[h]},
    ],
)
def test_lists_are_bits_where_kernels_need_positions(given, fake_compiler):
    mask = given.get("mask", Mask()) & Mask.keys(LISTS)

    def loss(x):
        return attention(x, x, x, **{**given, "mask": mask}).sum()

    forward, backward = attention_calls(lower(jax.grad(loss), X))
    for call in (forward, backward):
        operands = dict(zip(names_of(call).split(","), types_of(call)[0], strict=False))
        assert operands["boolean"] == "2x4x40x2xui32" and "page_table" not in operands


@pytest.mark.parametrize(
    ("rows", "columns", "way"),
    [
        (200, 3000, "boolean"),
        (200, 12_000, "page_table"),  # each list has few of the keys
        (100, 3000, "page_table"),  # a tile is not full
    ],
)
def test_a_forward_takes_bits_if_rows_share_many_keys(rows, columns, way, fake_compiler):
    query, key = shape(2, rows, 8, 64), shape(2, columns, 4, 64)
    lists = shape(2, 1, rows, 400, dtype=jnp.int32)
    (call,) = attention_calls(
        lower(lambda q, k, x: attention(q, k, k, mask=Mask.keys(x)), query, key, lists)
    )
    assert {"boolean", "page_table"} & {*names_of(call).split(",")} == {way}


@pytest.mark.parametrize("columns", [3000, 30_000])
def test_a_backward_of_short_lists_is_plain_jax(columns, fake_compiler):
    def loss(query, key, lists):
        return attention(query, key, key, mask=Mask.keys(lists)).astype(jnp.float32).sum()

    given = shape(2, 20, 8, 64), shape(2, columns, 4, 64), shape(2, 1, 20, 100, dtype=jnp.int32)
    assert len(attention_calls(lower(jax.grad(loss, (0, 1)), *given))) == (
        2 if columns == 3000 else 1
    )


def test_symbolic_sizes_are_refused():
    (batch,) = jax.export.symbolic_shape("b")
    query, key = (shape(batch, 9, heads, 64) for heads in (4, 2))
    call = jax.jit(lambda q, k: attention(q, k, k, mask=Mask.keys(jnp.zeros((9, 3), jnp.int32))))
    with pytest.raises(UnsupportedError, match="programs for CUDA need static sizes"):
        jax.export.export(call, platforms=["cuda"])(query, key)


def test_a_picture_has_no_tiles_of_lists():
    mask = Mask.keys(LISTS)
    with pytest.raises(ValueError, match=r"arch must be None for a mask with Mask.keys, got 'sm_9"):
        jax_memeff.picture(X, X, X, mask=mask, arch="sm_90a")


def test_scales_of_a_pool(fake_compiler):
    pool = jnp.zeros((9, 16, 2, 64), jnp.float8_e4m3fn)
    query, table = jnp.zeros((2, 1, 4, 64), jnp.bfloat16), jnp.zeros((2, 3), jnp.int32)

    def call(query, **scales):
        mask = Mask.keys(jnp.zeros((1, 5), jnp.int32))
        lengths = jnp.array([40, 3])
        return paged_attention(query, pool, pool, table, lengths, mask=mask, **scales)

    for scales, way in ((jnp.ones(2), False), (jnp.ones((9, 2)), True)):
        (one,) = attention_calls(lower(lambda x, y: call(x, key_scale=y), query, scales))
        assert ("boolean" in names_of(one)) == way


@pytest.mark.parametrize("heads", [1, 4])
def test_the_kernel_of_a_shard(heads, fake_compiler):
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), (AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:4]
    )

    def placed(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    x = placed(X.astype(jnp.bfloat16), "a", None, "b")
    lists = placed(LISTS[:, :heads], "a", "b" if heads > 1 else None)
    with jax.set_mesh(mesh):
        text = lower(lambda x, lists: attention(x, x, x, mask=Mask.keys(lists)), x, lists)
    (call,) = attention_calls(text)
    query, pool = (
        ("1x80x1x64xbf16", "1x80x1x64xbf16") if heads > 1 else ("1x40x2x64xbf16", "1x40x2x64xbf16")
    )
    assert types_of(call)[0][:2] == [query, pool]
