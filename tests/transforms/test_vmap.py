"""vmap equals separate calls, and is a single call if its arrays allow it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jaxprs import primitives_of

import jax_memeff
from jax_memeff import Mask, Offsets

SIZE, B, T, S, N, K, H = 3, 2, 5, 7, 4, 2, 8
UNOPTIMISED = {"xla_backend_optimization_level": 0}


ARRAYS = {
    "query": normal(0, SIZE, B, T, N, H),
    "key": normal(1, SIZE, B, S, K, H),
    "value": normal(2, SIZE, B, S, K, H),
    "bias": normal(3, SIZE, B, N, T, S),
    "head_bias": normal(4, SIZE, 1, N, 1, S),
    "mask": normal(5, SIZE, B, 1, T, S) < 1,
    "shared_mask": normal(6, SIZE, 1, 1, T, S) < 1,
    "lengths": jnp.array([[1, 7], [3, 0], [5, 5]]),
    "segments": jnp.array([[0, 0, 1, 1, 1, 2, 2], [0] * 7, [0, 1, 1, 1, 1, 1, 1]]),
    "dropout_key": jax.random.split(jax.random.key(7), SIZE),
    "row": jnp.array([2, 0, 16]),
    "columns": jnp.array([[1, 0], [0, 3], [12, 18]]),
}


def everything(arrays: dict[str, Any]) -> Any:
    """(out, lse) of a call with every array; the two biases are added and the two masks
    combined.
    """
    return jax_memeff.dot_product_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays["bias"] + arrays["head_bias"],
        mask=Mask.boolean(arrays["mask"])
        & Mask.boolean(arrays["shared_mask"])
        & Mask.segments(arrays["segments"][:T], arrays["segments"])
        & Mask.causal("bottom_right"),
        key_value_seq_lengths=arrays["lengths"],
        dropout_rate=0.25,
        dropout_key=arrays["dropout_key"],
        offsets=Offsets(query=arrays["row"], key=arrays["columns"]),
        logits_soft_cap=3.0,
        return_residual=True,
    )


def plain(arrays: dict[str, Any]) -> Any:
    return jax_memeff.dot_product_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays["head_bias"],
        arrays["shared_mask"],
        return_residual=True,
    )


def gradients_of(function: Any) -> Any:
    """The results, and the gradients of a function of them by all float arrays."""

    def gradients(arrays: dict[str, Any]) -> Any:
        floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        def loss(floats: Any) -> Any:
            out, lse = function({**arrays, **floats})
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) ** 2), out

        return jax.grad(loss, has_aux=True)(floats)

    return gradients


@functools.cache
def compiled(function: Any) -> Any:
    return jax.jit(function, compiler_options=UNOPTIMISED)


def run(function: Any, *arguments: Any) -> Any:
    return compiled(function)(*arguments)


def split(names: tuple[str, ...], wanted: Any = ARRAYS) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays, of which the named ones have the mapped axis, and the axes for a vmap."""
    arrays = {name: ARRAYS[name] if name in names else ARRAYS[name][0] for name in wanted}
    return arrays, {name: 0 if name in names else None for name in wanted}


def one_by_one(function: Any, names: tuple[str, ...], arrays: dict[str, Any]) -> Any:
    function = compiled(function)
    elements = [
        function({name: x[i] if name in names else x for name, x in arrays.items()})
        for i in range(SIZE)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *elements)


def names_of(function: Any, *arguments: Any) -> list[str]:
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return [equation.primitive.name for equation in primitives_of(jaxpr)]


# Compiled once: the call of one mapped index does not depend on what is mapped.
every_gradient = gradients_of(everything)


@pytest.mark.rotating(5)
@pytest.mark.quick("value-lengths")
@pytest.mark.parametrize(
    "names",
    [
        ("query",),
        ("key",),
        ("value", "lengths"),
        ("bias",),
        ("head_bias", "shared_mask"),
        ("mask", "segments"),
        ("dropout_key",),
        ("row",),
        ("columns",),
        tuple(ARRAYS),
    ],
    ids="-".join,
)
def test_each_operand(names, assert_close):
    """Each mapped index has the dropout bits of its own call, also in the gradients."""
    arrays, axes = split(names)
    vmapped = jax.vmap(gradients_of(everything), in_axes=(axes,))
    assert "scan" not in names_of(vmapped, arrays)
    assert_close(run(vmapped, arrays), one_by_one(every_gradient, names, arrays), 1e-5)


def call_of(name: str, function: Any, *arguments: Any) -> tuple[list[Any], list[Any]]:
    """The shapes of the operands and results of the only bind of a primitive in a function."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    (call,) = (x for x in primitives_of(jaxpr) if x.primitive.name == name)
    shapes = ([variable.aval.shape for variable in x] for x in (call.invars, call.outvars))
    return next(shapes), next(shapes)


@pytest.mark.quick
@pytest.mark.parametrize("names", [("query",), ("query", "head_bias"), ("query", "shared_mask")])
def test_unmapped_operands_are_not_repeated(names, assert_close):
    wanted = ("query", "key", "value", "head_bias", "shared_mask")
    arrays, axes = split(names, wanted)
    vmapped = jax.vmap(plain, in_axes=(axes,))
    shapes = [
        (SIZE * B, T, N, H),
        (B, S, K, H),
        (B, S, K, H),
        (SIZE if "head_bias" in names else 1, N, 1, S),
        (SIZE if "shared_mask" in names else 1, 1, T, S),
    ]
    assert call_of("attention_fwd", vmapped, arrays)[0] == shapes
    assert_close(run(vmapped, arrays), one_by_one(plain, names, arrays))


def biased(arrays: dict[str, Any]) -> Any:
    return jax_memeff.dot_product_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays["bias"],
        arrays["mask"],
        dropout_rate=0.25,
        dropout_key=arrays["dropout_key"],
        return_residual=True,
    )


BIASED = ("query", "key", "value", "bias", "mask", "dropout_key")


def test_gradients_do_not_repeat_unmapped_operands(assert_close):
    """Each mapped index has its own gradients, inside and outside of ``grad``."""
    arrays, axes = split(("query",), BIASED)
    vmapped = jax.vmap(gradients_of(biased), in_axes=(axes,))
    own = [(SIZE * B, T, N, H), (B, S, K, H), (B, S, K, H), (B, N, T, S)]
    operands, gradients = call_of("attention_bwd", vmapped, arrays)
    assert operands[:4] == own
    assert gradients == [(SIZE * B, *shape[1:]) for shape in own]
    each = one_by_one(gradients_of(biased), ("query",), arrays)
    assert_close(run(vmapped, arrays), each, 1e-5)

    outside = gradients_of(lambda arrays: jax.vmap(biased, in_axes=(axes,))(arrays))
    assert call_of("attention_bwd", outside, arrays)[0][:4] == own
    with jax_memeff.forward_mode():
        assert call_of("attention_bwd", outside, arrays)[0][:4] == own
    summed = {name: x if name == "query" else jnp.sum(x, 0) for name, x in each[0].items()}
    assert_close(run(outside, arrays)[0], summed, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "names",
    [("query",), ("key", "bias"), ("query", "mask", "value"), ("dropout_key",)],
    ids="-".join,
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_read_broadcast_operands_in_place(names, head_dim):
    sizes = {"T": 200, "S": 270, "N": N, "K": K, "H": head_dim, "B": B}
    dims = {"query": "BTNH", "key": "BSKH", "value": "BSKH", "bias": "BNTS"}
    arrays: dict[str, Any] = {
        name: normal(seed, *[SIZE] * (name in names), *(sizes[dim] for dim in dims[name])).astype(
            jnp.bfloat16
        )
        for seed, name in enumerate(dims)
    }
    mask_sizes = [SIZE] * ("mask" in names) + [B, 1, sizes["T"], sizes["S"]]
    arrays["mask"] = normal(5, *mask_sizes) < 1
    arrays["dropout_key"] = ARRAYS["dropout_key"][slice(None) if "dropout_key" in names else 0]
    gradients = gradients_of(biased)
    axes = {name: 0 if name in names else None for name in arrays}
    got = jax.jit(jax.vmap(gradients, in_axes=(axes,)))(arrays)
    want = one_by_one(gradients, names, arrays)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        found, expected = (np.asarray(array, np.float32) for array in (x, y))
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("inner", ["query", "key"])
@pytest.mark.parametrize("outer", ["query", "key"])
def test_nested(inner, outer, assert_close):
    """Keys without a batch dim may be mapped along either of two axes."""
    shapes = {"query": (T, N, H), "key": (S, K, H)}
    sizes = {
        name: [size for size, axis in ((4, outer), (3, inner)) if axis == name] for name in shapes
    }
    query, key = (normal(8, *sizes[name], *shapes[name]) for name in shapes)

    def attend(query: Any, key: Any) -> Any:
        return jax_memeff.dot_product_attention(query, key, key)

    def axes(mapped: str) -> tuple[int | None, int | None]:
        return (0, None) if mapped == "query" else (None, 0)

    vmapped = jax.vmap(jax.vmap(attend, axes(inner)), axes(outer))
    element = compiled(attend)
    elements = jnp.stack(
        [
            jnp.stack([element(*_pick(query, key, inner, outer, i, j)) for j in range(3)])
            for i in range(4)
        ]
    )
    assert "scan" not in names_of(vmapped, query, key)
    assert_close(run(vmapped, query, key), elements)


def _pick(query: Any, key: Any, inner: str, outer: str, i: int, j: int) -> Any:
    arrays = {"query": query, "key": key}
    arrays[outer] = arrays[outer][i]
    arrays[inner] = arrays[inner][j]
    return arrays["query"], arrays["key"]


def test_axes_of_inputs_and_outputs(assert_close):
    query = jnp.moveaxis(ARRAYS["query"], 0, 2)
    key = jnp.moveaxis(ARRAYS["key"], 0, -1)
    vmapped = jax.vmap(
        lambda query, key: jax_memeff.dot_product_attention(query, key, key),
        in_axes=(2, -1),
        out_axes=3,
    )
    arrays = {name: ARRAYS[name] for name in ("query", "key")}
    want = one_by_one(
        lambda x: jax_memeff.dot_product_attention(x["query"], x["key"], x["key"]),
        ("query", "key"),
        arrays,
    )
    assert_close(run(vmapped, query, key), jnp.moveaxis(want, 0, 3))


def test_gradient_of_vmap_and_of_its_gradient(assert_close):
    """The context of forward mode is tested, too, in which the batching rule comes first."""
    queries, key = normal(9, SIZE, T, N, H), normal(10, S, K, H)

    def attend(query: Any, key: Any) -> Any:
        return jax_memeff.dot_product_attention(query, key, key)

    def batched(queries: Any, key: Any) -> Any:
        return attend(queries, jnp.broadcast_to(key, (SIZE, S, K, H)))

    def derivatives(function: Any) -> Any:
        gradient = jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1))

        def of_gradient(*arrays: Any) -> Any:
            return sum(jnp.sum(jnp.cos(x)) for x in gradient(*arrays))

        return lambda *arrays: (gradient(*arrays), jax.grad(of_gradient, (0, 1))(*arrays))

    def vmapped(queries: Any, key: Any) -> Any:
        return jax.vmap(attend, (0, None))(queries, key)

    want = run(derivatives(batched), queries, key)
    assert_close(run(derivatives(vmapped), queries, key), want, 1e-5)
    with jax_memeff.forward_mode():
        assert_close(run(derivatives(vmapped), queries, key), want, 1e-5)


def test_jacobians(assert_close):
    """``jacrev`` maps cotangents, and ``jacfwd`` tangents."""
    query, key, bias = normal(11, 2, 2, 2), normal(12, 3, 2, 2), normal(13, 2, 2, 3)

    def attend(query: Any, bias: Any) -> Any:
        return jax_memeff.dot_product_attention(query, key, key, bias)

    reverse = run(jax.jacrev(attend, (0, 1)), query, bias)
    with jax_memeff.forward_mode():
        assert_close(run(jax.jacfwd(attend, (0, 1)), query, bias), reverse, 1e-5)


PLAIN = ("query", "key", "value", "head_bias", "shared_mask")


def second_derivatives(arrays: dict[str, Any]) -> Any:
    """Second derivatives along the arrays, by forward over reverse and by reverse over reverse."""
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def gradients(floats: Any) -> Any:
        return gradients_of(plain)(arrays | floats)[0]

    def along(floats: Any) -> Any:
        return sum(jnp.vdot(x, arrays[name]) for name, x in gradients(floats).items())

    return jax.jvp(gradients, (floats,), (floats,))[1], jax.grad(along)(floats)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("names", [("query",), ("query", "head_bias")], ids="-".join)
def test_a_bias_of_one_batch_index_has_a_gradient_for_each_mapped_index(names, assert_close):
    """The bias is read in place, and a gradient is the sum over the batch of a mapped index."""
    arrays, axes = split(names, PLAIN)
    for function in (gradients_of(plain), second_derivatives):
        vmapped = jax.vmap(function, in_axes=(axes,))
        assert_close(run(vmapped, arrays), one_by_one(function, names, arrays), 1e-5)
    vmapped = jax.vmap(gradients_of(plain), in_axes=(axes,))
    assert "scan" not in names_of(vmapped, arrays)
    operands, gradients = call_of("attention_bwd", vmapped, arrays)
    assert operands[3] == (SIZE if "head_bias" in names else 1, N, 1, S)
    assert gradients[3] == (SIZE, N, 1, S)

    outside = gradients_of(lambda arrays: jax.vmap(plain, in_axes=(axes,))(arrays))
    each = one_by_one(gradients_of(plain), names, arrays)[0]
    summed = {name: x if name in names else jnp.sum(x, 0) for name, x in each.items()}
    with jax_memeff.forward_mode():
        assert call_of("attention_bwd", outside, arrays)[1][3] == operands[3]
        assert_close(run(outside, arrays)[0], summed, 1e-5)


def test_unfoldable_calls_run_one_by_one(assert_close):
    """The calls have mapped head offsets, or keys that only an outer vmap maps."""

    dropped: Any = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}

    def at(head: Any) -> Any:
        query, key = ARRAYS["query"][0], ARRAYS["key"][0]
        offsets = Offsets(head=head, num_heads=8)
        return jax_memeff.dot_product_attention(query, key, key, offsets=offsets, **dropped)

    heads = jnp.array([0, 1, 4])
    assert "scan" in names_of(jax.vmap(at), heads)
    assert_close(run(jax.vmap(at), heads), jnp.stack([at(head) for head in heads]))

    def inner(key: Any) -> Any:
        def attend(query: Any) -> Any:
            return jax_memeff.dot_product_attention(query, key, key)

        return jax.vmap(attend)(ARRAYS["query"])

    keys = ARRAYS["key"]
    assert "scan" in names_of(jax.vmap(inner), keys)
    assert_close(run(jax.vmap(inner), keys), jnp.stack([inner(key) for key in keys]))


def test_maps_of_size_zero():
    empty = jnp.zeros((0, B, T, N, H))
    out = jax.vmap(lambda q: jax_memeff.dot_product_attention(q, q, q))(empty)
    assert out.shape == empty.shape
    assert np.asarray(out).size == 0
