"""``Mask.keys``: a row attends to the keys in its list, in every kind of call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from arrays import changed, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import primitives_of

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention
from jax_memeff._api import attention as api
from jax_memeff._blockwise import lists as listed_tiles
from jax_memeff._call.operands import Operands

B, T, S, N, K, H = 2, 22, 30, 4, 2, 8
COUNT = 9
QUERY, KEY, VALUE = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
UNOPTIMISED = {"xla_backend_optimization_level": 0}
varlen_attention: Any = jax_memeff.varlen_attention  # untyped, because arguments are unpacked


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    """Tiles of 8 rows in a plain call: the last of three overlaps the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listed_tiles, "_LARGEST_GATHER", 8 * B * COUNT * K * 2 * H)
        yield


def lists(seed: int = 0, batch: int = B, heads: int = K, rows: int = T, n: int = COUNT) -> Any:
    """Lists with repeated keys, holes, and indices of no key."""
    rng = np.random.default_rng(seed)
    found = rng.integers(-3, S + 3, (batch, heads, rows, n)).astype(np.int32)
    found[0, 0, 0, :4] = [2**31 - 1, -(2**31), 1, 1]
    found[:, :, 5] = -1
    return found


def dense(indices: Any) -> jax.Array:
    return jax.device_put(oracle.listed_elements(np.asarray(indices), B, N, T, S))


def gradients(mask: Any, arrays: Any = (QUERY, KEY, VALUE), **arguments: Any) -> Any:
    """(out, lse), and the gradients of the arrays."""

    def loss(arrays: Any) -> Any:
        out, lse = dot_product_attention(*arrays, mask=mask, return_residual=True, **arguments)
        rows = jnp.where(jnp.isinf(lse), 0, lse)
        return jnp.sum(jnp.sin(out).astype(jnp.float32)) + jnp.sum(rows**2), (out, lse)

    (_, results), found = jax.value_and_grad(loss, has_aux=True)(arrays)
    return results, found


run = jax.jit(gradients, static_argnames=("is_causal",), compiler_options=UNOPTIMISED)


@pytest.mark.rotating(3)
@pytest.mark.quick("BKT")
@pytest.mark.parametrize("shape", [(B, K), (1, K), (B, 1), (1, 1), (K,), ()], ids=["BKT", *"1234T"])
def test_the_elements_of_lists(shape, assert_close):
    indices = lists(1, *((1,) * (2 - len(shape)) + shape)).reshape(*shape, T, COUNT)
    valid = dense(indices)
    mask = Mask.keys(indices)
    np.testing.assert_array_equal(mask.as_array(B, N, T, S), valid)
    assert sorted(mask.kinds()) == ["keys"]
    assert_close(run(mask), run(valid), 1e-6)


@pytest.mark.quick
def test_order_repeats_and_holes_do_not_matter():
    rng = np.random.default_rng(2)
    chosen = rng.permuted(np.tile(np.arange(S), (B, K, T, 1)), axis=3)[..., :COUNT]
    chosen[rng.random(chosen.shape) < 0.3] = -1
    unique = Mask.keys(chosen, unique_indices=True)
    shuffled = rng.permuted(np.concatenate([chosen, chosen[..., ::2], chosen + S + 7], 3), axis=3)
    want = run(dense(chosen))
    for mask in (unique, Mask.keys(chosen), Mask.keys(shuffled), Mask.keys(shuffled.tolist())):
        for got, exact in zip(jax.tree.leaves(run(mask)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, exact, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64])
def test_any_integers(dtype):
    indices = lists(3).clip(-1, S).astype(dtype)  # -1 becomes a large number without sign
    with jax.enable_x64(dtype == np.int64):
        given = indices if dtype == np.int64 else jnp.asarray(indices)
        mask = Mask.keys(given)
        np.testing.assert_array_equal(mask.as_array(B, N, T, S), dense(indices.astype(np.int64)))


def test_lists_longer_than_the_keys_and_empty_ones(assert_close):
    long = lists(4, n=2 * S)
    assert_close(run(Mask.keys(long)), run(dense(long)), 1e-6)
    nothing = np.full((1, 1, T, 3), -1)
    for indices in (nothing[..., :0], nothing):
        (out, lse), found = run(Mask.keys(indices), sinks=None)
        assert not np.any(out) and np.all(np.isneginf(lse))
        assert all(not np.any(x) for x in found)
        (out, lse), _ = run(Mask.keys(indices), sinks=jnp.arange(4.0))
        np.testing.assert_allclose(lse, np.broadcast_to(np.arange(4.0), lse.shape))
        assert not np.any(out)


MASKS = {
    "causal": Mask.causal(),
    "bottom right": Mask.window(9, 2, "bottom_right"),
    "lengths": Mask.lengths(np.array([T, 13]), np.array([21, 0])),
    "lengths, bottom right": Mask.lengths(np.array([T, 13]), np.array([21, 17]))
    & Mask.causal("bottom_right"),
    "segments": Mask.segments(np.arange(T) // 6 - 1, np.arange(S) // 8 - 1),
    "boolean": Mask.boolean(normal(5, B, N, T, S) > -0.5),
    "boolean of columns": Mask.boolean(normal(6, S) > -0.5),
    "function": Mask.function(lambda b, h, q, k: (q + k + b) % 3 <= h),
    "or": Mask.causal() | Mask.boolean(normal(7, B, 1, 1, S) > 0.8),
    "not": ~Mask.window(4, 1),
    "blocks": Mask.kv_blocks(np.array([[0, 2], [1, -1]]), block_size=(16, 8)),
    "lists": Mask.keys(lists(8, 1, K, n=14)),
}


@pytest.mark.rotating(3)
@pytest.mark.quick("causal")
@pytest.mark.parametrize("name", MASKS)
def test_other_masks(name, assert_close):
    indices, other = lists(9), MASKS[name]
    mask = other & Mask.keys(indices)
    valid = dense(indices) & other.as_array(B, N, T, S)
    np.testing.assert_array_equal(mask.as_array(B, N, T, S), valid)
    # Lengths bound rows: the dense call must have them, too.
    rest = Mask(query_lengths=other.query_lengths, key_lengths=other.key_lengths)
    assert_close(run(mask), run(rest & Mask.boolean(valid)), 1e-6)


def test_a_traced_window(assert_close):
    indices = lists(10)

    @functools.partial(jax.jit, compiler_options=UNOPTIMISED)
    def both(left):
        window = Mask.window(left, 0, "bottom_right")
        return [gradients(window & Mask.keys(indices)), gradients(window & Mask.boolean(valid))]

    valid = dense(indices)
    assert_close(*both(jnp.int32(5)), 1e-6)


def everything(mask: Any, arrays: Any) -> Any:
    """(out, lse) of a call with every other feature. Two arrays are captured by functions."""
    table, gates = arrays["table"], arrays["gates"]
    return dot_product_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays["bias"],
        mask & Mask.window(12, 9) & Mask.function(lambda b, h, q, k: (q + k + h) % 5 > 0),
        score_mod=lambda s, b, h, q, k: s * gates[b, k % 7] + table[h, q - k + 40],
        sinks=arrays["sinks"],
        logits_soft_cap=2.0,
        key_value_seq_lengths=jnp.array([S, 19]),
        dropout_rate=0.25,
        dropout_key=jax.random.key(3),
        offsets=Offsets(batch=1, head=3, num_heads=9, query=32, key=16),
        return_residual=True,
    )


ARRAYS = {
    "query": QUERY,
    "key": KEY,
    "value": VALUE,
    "bias": normal(11, 1, N, 1, S),
    "sinks": normal(12, N),
    "table": normal(13, N + 3, 80),
    "gates": normal(14, B + 1, 7),
}


@functools.partial(jax.jit, static_argnames="dims", compiler_options=UNOPTIMISED)
def every_gradient(mask: Any, arrays: Any, dims: str = "1N1S") -> Any:
    sizes = {"B": B, "N": N, "T": T, "S": S, "1": 1}
    arrays = {**arrays, "bias": normal(15, *(sizes[dim] for dim in dims))}

    def loss(arrays):
        out, lse = everything(mask, arrays)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2), (out, lse)

    return jax.value_and_grad(loss, has_aux=True)(arrays)


@pytest.mark.rotating(2)
@pytest.mark.quick("1N1S")
@pytest.mark.parametrize("dims", ["1N1S", "BNTS", "11TS", "B11S", "1NT1", "B1T1"])
def test_every_feature_with_its_gradients(dims, assert_close):
    """Functions and dropout see the position of each key; biases of every broadcast are summed."""
    indices = lists(16)
    got = every_gradient(Mask.keys(indices), ARRAYS, dims)
    assert_close(got, every_gradient(Mask.boolean(dense(indices)), ARRAYS, dims), 3e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype, assert_close):
    indices = lists(17)
    with jax.enable_x64(dtype == "float64"):
        arrays = [x.astype(dtype) for x in (QUERY, KEY, VALUE)]
        got = run(Mask.keys(indices), arrays)
        wide = [x.astype(jnp.float64 if dtype == "float64" else jnp.float32) for x in arrays]
        want = run(Mask.boolean(dense(indices)), wide)
    assert all(x.dtype == dtype for x in (got[0][0], *got[1]))
    tolerance = {"bfloat16": 4e-3, "float16": 6e-4, "float64": 1e-14}[dtype]
    got = jax.tree.map(lambda x: x.astype(np.float64), jax.tree.map(np.asarray, got))
    assert_close(got, want, tolerance)


def test_max_logits_and_precomputed_values(assert_close):
    """Max logits, values that are columns of the keys, and one array of query, key and value."""
    indices = lists(18)
    for mask in (Mask.keys(indices), Mask.boolean(dense(indices))):
        call = functools.partial(dot_product_attention, mask=mask, return_max_logits=True)
        found = jax.jit(call)(QUERY, KEY, VALUE)
        latent = jax.jit(lambda q, k, call=call: call(q, k, None, value_dim=5))(QUERY, KEY)
        if mask.key_lists:
            got = found, latent
    assert_close(got, (found, latent), 1e-6)
    qkv = normal(19, B, T, 3, N, H)
    indices = lists(20, heads=N)
    packed = jax.jit(jax_memeff.dot_product_attention_packed)
    got, want = (
        jax.jit(jax.grad(lambda x, mask: jnp.sum(packed(x, mask=mask) ** 2)))(qkv, mask)
        for mask in (
            Mask.keys(indices),
            oracle.listed_elements(indices, B, N, T, T),
        )
    )
    assert_close(got, want, 2e-6)


def test_keys_that_no_list_has_are_not_read():
    """NaN there, and in keys that a window masks, reaches no result; their gradients are 0."""
    indices = np.where(lists(21) % 3 == 1, -1, lists(21))
    mask = Mask.keys(indices) & Mask.window(8, 0)
    unread = ~np.asarray(mask.as_array(B, N, T, S)).reshape(B, K, N // K, T, S).any((2, 3))
    unread = np.swapaxes(unread, 1, 2)
    assert 0 < unread.mean() < 1
    want = run(mask)
    nan = [jnp.where(unread[..., None], jnp.nan, x) for x in (KEY, VALUE)]
    got = run(mask, (QUERY, *nan))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all((np.asarray(x)[unread] == 0).all() for x in got[1][1:])


def test_packed_sequences(assert_close):
    """A list for each token; its entries count from the first key of the sequence."""
    lengths, indices = [(13, S), (0, 7), (9, 20)], lists(22, 1, K, 30)[0]
    starts = [np.cumsum([1, *x]) for x in zip(*lengths, strict=True)]
    tokens = 30, 60
    query, key, value = (
        normal(seed, x, h, H)
        for seed, x, h in zip((23, 24, 25), (tokens[0], *tokens[1:] * 2), (N, K, K), strict=True)
    )
    by_token = np.ascontiguousarray(np.swapaxes(indices, 0, 1))
    bias = normal(26, 3, 1, T, S)

    @functools.partial(jax.jit, compiler_options=UNOPTIMISED)
    def packed(indices, *arrays):
        def loss(arrays):
            out, lse = varlen_attention(
                *arrays[:3],
                *starts,
                T,
                S,
                arrays[3],
                Mask.keys(indices) & Mask.causal("bottom_right"),
                return_residual=True,
            )
            return jnp.sum(jnp.sin(out)), (out, lse)

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    (_, (out, lse)), found = packed(by_token, query, key, value, bias)
    sums = [np.zeros(x.shape) for x in found]
    for b, (rows, columns) in enumerate(lengths):
        q, k = (
            slice(int(x[b]), int(x[b]) + n) for x, n in zip(starts, (rows, columns), strict=True)
        )
        valid = oracle.listed_elements(indices[:, q], 1, N, rows, columns)

        def loss(arrays, valid=valid, rows=rows, columns=columns, b=b):
            own = arrays[3][b : b + 1, :, :rows, :columns]
            mask = Mask.boolean(valid) & Mask.causal("bottom_right")
            query, key, value = (x[None] for x in arrays[:3])
            out, lse = dot_product_attention(query, key, value, own, mask, return_residual=True)
            return jnp.sum(jnp.sin(out)), (out[0], lse[0])

        (_, want), parts = jax.value_and_grad(loss, has_aux=True)(
            (query[q], key[k], value[k], bias)
        )
        assert_close((out[q], lse[q]), want, 1e-6)
        for total, part, place in zip(sums, parts, (q, k, k, slice(None)), strict=True):
            total[place] += part
    assert_close(found, tuple(x.astype(np.float32) for x in sums), 2e-6)


def test_vmap(assert_close):
    """Over lists, over queries, over keys, and over all of them; twice, too."""
    indices = jnp.stack([lists(seed) for seed in (27, 28, 29)])
    query, key = normal(30, 3, B, T, N, H), normal(31, 3, B, S, K, H)

    def attend(query, key, indices):
        return gradients(Mask.keys(indices), (query, key, VALUE))

    compiled = jax.jit(attend, compiler_options=UNOPTIMISED)
    for axes in ((None, None, 0), (0, None, None), (None, 0, None), (0, 0, 0)):
        given = [
            x if axis == 0 else x[1] for x, axis in zip((query, key, indices), axes, strict=True)
        ]
        want = [
            compiled(*(x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)))
            for i in range(3)
        ]
        vmapped = jax.vmap(attend, axes)
        assert "scan" not in {
            e.primitive.name for e in primitives_of(jax.make_jaxpr(vmapped)(*given).jaxpr)
        }
        got = jax.jit(vmapped, compiler_options=UNOPTIMISED)(*given)
        assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want), 1e-6)
    # The lists of batch indices are broadcast over an outer axis, and the batch over an inner one.
    nested = jax.vmap(jax.vmap(attend, (0, None, None)), (None, None, 0))
    got = jax.jit(nested, compiler_options=UNOPTIMISED)(query, key[0], indices[:, :1])
    want = [[compiled(q, key[0], own[:1]) for q in query] for own in indices]
    want = [jax.tree.map(lambda *x: jnp.stack(x), *row) for row in want]
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want), 1e-6)


@pytest.mark.parametrize("mapped", ["lists", "bias", "both"])
def test_gradients_of_a_bias_under_vmap(mapped, assert_close):
    """A bias that several batch indices share gets one gradient for each index of the vmap."""
    indices = jnp.stack([lists(seed) for seed in (40, 41, 42)])
    biases = normal(43, 3, 1, N, 1, S)

    def gradient(indices, bias):
        def loss(bias):
            mask = Mask.keys(indices)
            return jnp.sum(dot_product_attention(QUERY, KEY, VALUE, bias, mask) ** 2)

        return jax.grad(loss)(bias)

    axes = {"lists": (0, None), "bias": (None, 0), "both": (0, 0)}[mapped]
    given = [x if axis == 0 else x[0] for x, axis in zip((indices, biases), axes, strict=True)]
    got = jax.jit(jax.vmap(gradient, axes), compiler_options=UNOPTIMISED)(*given)
    one = jax.jit(gradient, compiler_options=UNOPTIMISED)
    want = [one(indices[i * (axes[0] == 0)], biases[i * (axes[1] == 0)]) for i in range(3)]
    assert_close(got, jnp.stack(want), 1e-6)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("order", ["tangent", "forward over reverse", "reverse over reverse"])
def test_derivatives_in_both_modes(order, assert_close):
    indices, names = lists(32), ("query", "key", "value", "bias", "table")
    moving = {name: ARRAYS[name] for name in names}
    tangents = {name: normal(33 + i, *ARRAYS[name].shape) for i, name in enumerate(names)}

    def found(mask):
        def loss(moving):
            query, key, value, bias, table = (moving[name] for name in names)
            with jax_memeff.forward_mode():
                out = dot_product_attention(
                    query, key, value, bias, mask, score_mod=lambda s, b, h, q, k: s + table[h, k]
                )
            return jnp.sum(out**3)

        def of_gradient(moving):
            return sum(jnp.vdot(jax.grad(loss)(moving)[name], tangents[name]) for name in names)

        if order == "reverse over reverse":
            return jax.grad(of_gradient)(moving)
        function = loss if order == "tangent" else jax.grad(loss)
        return jax.jvp(function, (moving,), (tangents,))[1]

    compiled = jax.jit(found, compiler_options=UNOPTIMISED)
    mask = Mask.keys(indices) & Mask.lengths(key=np.array([S, 19]))
    valid = dense(indices) & mask.as_array(B, N, T, S)
    assert_close(compiled(mask), compiled(Mask.boolean(valid)), 3e-5)


SHARDINGS = {
    "batch and heads": (P("a", None, "b"), P("a", None, "b"), P("a", "b")),
    "copies of key heads": (P(None, None, ("a", "b")), P(None, None, "a"), P(None, "a")),
    "rows": (P("a", "b"), P("a"), P("a", None, "b")),
}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", SHARDINGS)
def test_sharded(name, axis_type, assert_close):
    specs = SHARDINGS[name]
    mesh = jax.make_mesh((2, 2), ("a", "b"), (axis_type,) * 2, devices=jax.devices("cpu")[:4])

    def attend(indices, *arrays):
        return gradients(Mask.keys(indices) & Mask.causal("bottom_right"), arrays)

    for indices in (lists(34), lists(35, 1, 1)):
        given = indices, QUERY, KEY, VALUE
        want = jax.jit(attend, compiler_options=UNOPTIMISED)(*given)
        of_lists = P(
            *(
                None if size == 1 else own
                for size, own in zip(indices.shape, specs[2], strict=False)
            )
        )
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(given, (of_lists, specs[0], specs[1], specs[1]), strict=True)
        ]
        got = jax.jit(attend, compiler_options=UNOPTIMISED)(*placed)
        assert_close(jax.tree.map(np.asarray, got), want, 1e-6)


DIM = 5


def latent_gradients(query: Any, key: Any, indices: Any, is_latent: bool = True) -> Any:
    """(out, lse), and the gradients of the arrays; values are columns of the keys, or a copy."""
    mask = Mask.keys(indices) & Mask.causal("bottom_right")

    def loss(arrays: Any) -> Any:
        query, key = arrays
        value = (None, DIM) if is_latent else (key[..., :DIM], None)
        out, lse = dot_product_attention(
            query, key, value[0], mask=mask, value_dim=value[1], return_residual=True
        )
        rows = jnp.where(jnp.isinf(lse), 0, lse)
        return jnp.sum(jnp.sin(out)) + jnp.sum(rows**2), (out, lse)

    return jax.value_and_grad(loss, has_aux=True)((query, key))


@pytest.mark.parametrize("axes", [None, (0, None, None), (None, 0, None), (None, None, 0)])
def test_gradients_of_latent_values(axes, assert_close):
    """The gradient of the values is a part of that of the keys, under every ``jax.vmap``."""
    many = (
        normal(50, 3, B, T, N, H),
        normal(51, 3, B, S, K, H),
        jnp.stack([*map(lists, (52, 53, 54))]),
    )
    given = [x[0] for x in many]
    if axes is not None:
        given = [x if axis == 0 else x[0] for x, axis in zip(many, axes, strict=True)]
    found = []
    for is_latent in (True, False):
        function = functools.partial(latent_gradients, is_latent=is_latent)
        mapped = function if axes is None else jax.vmap(function, axes)
        found.append(jax.jit(mapped, compiler_options=UNOPTIMISED)(*given))
    assert_close(*found, 1e-6)


def test_derivatives_of_latent_values(assert_close):
    indices, tangents = lists(55), (normal(56, B, T, N, H), normal(57, B, S, K, H))
    found = []
    for is_latent in (True, False):

        def gradient(query, key, is_latent=is_latent):
            return latent_gradients(query, key, indices, is_latent=is_latent)[1]

        def both(arrays, tangents, gradient=gradient):
            with jax_memeff.forward_mode():
                return jax.jvp(gradient, arrays, tangents)

        found.append(jax.jit(both, compiler_options=UNOPTIMISED)((QUERY, KEY), tangents))
    assert_close(*found, 1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_latent_values(axis_type, assert_close):
    mesh = jax.make_mesh((2, 2), ("a", "b"), (axis_type,) * 2, devices=jax.devices("cpu")[:4])
    given, call = (QUERY, KEY, lists(58)), jax.jit(latent_gradients, compiler_options=UNOPTIMISED)
    want = call(*given)
    specs = P("a", None, "b"), P("a", None, "b"), P("a", "b")
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)
    ]
    assert_close(jax.tree.map(np.asarray, call(*placed)), want, 1e-6)


def test_memory_and_work_are_those_of_the_lists():
    """No array, forward or backward, has the size of the scores, and no product has their work."""
    length, count = 4096, 8
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
    indices = jax.ShapeDtypeStruct((1, 1, length, count), jnp.int32)

    def loss(q, k, v, indices):
        mask = Mask.keys(indices) & Mask.causal()
        return jnp.sum(dot_product_attention(q, k, v, mask=mask) ** 2)

    gradient = jax.grad(loss, (0, 1, 2))
    jaxpr = jax.make_jaxpr(gradient)(x, x, x, indices)
    sizes = [
        v.aval.size
        for e in primitives_of(jaxpr.jaxpr)
        for v in e.outvars
        if hasattr(v.aval, "size")
    ]
    assert max(sizes) == x.size
    memory: Any = jax.jit(gradient).lower(x, x, x, indices).compile().memory_analysis()
    # The loops hold the output and float32 gradients, and a tile of each operand.
    assert memory.temp_size_in_bytes < 16 * x.size * 4 < length * length * 4 / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_does_not_copy_all_keys(dtype):
    """Rows of keys and values are gathered, and widened, tile by tile."""
    row, rows = (jax.ShapeDtypeStruct((4, length, 4, 64), dtype) for length in (1, 8192))
    indices = jax.ShapeDtypeStruct((4, 1, 1, 32), jnp.int32)

    def attend(query, key, value, indices):
        return dot_product_attention(query, key, value, mask=Mask.keys(indices))

    memory: Any = jax.jit(attend).lower(row, rows, rows, indices).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * 2 * rows.size * rows.dtype.itemsize


def drawn(rng: np.random.Generator) -> Any:
    """Random lengths and lists: short ones, with repeats, or whole rows of nothing."""
    indices = rng.integers(-2, S + 2, (B, K, T, COUNT)).astype(np.int32)
    indices[rng.random((B, K, T)) < 0.1] = -1
    indices[np.arange(COUNT) >= rng.integers(0, COUNT + 1, (B, K, T, 1))] = -1
    rows, columns = rng.integers(0, T + 1, B), rng.integers(0, S + 1, B)
    return indices, rows.astype(np.int32), columns.astype(np.int32)


@functools.partial(jax.jit, compiler_options=UNOPTIMISED)
def random_call(indices, rows, columns, dout, dlse, arrays):
    mask = Mask.keys(indices) & Mask.lengths(rows, columns) & Mask.window(15, 6)

    def function(*arrays):
        out, lse = dot_product_attention(*arrays, mask=mask, return_residual=True)
        return out, jnp.where(jnp.isneginf(lse), -1e30, lse)

    (out, lse), transpose = jax.vjp(function, *arrays)
    return out, jnp.where(lse < -1e29, -jnp.inf, lse), *transpose((dout, dlse))


@pytest.mark.quick
def test_three_hundred_random_calls():
    """In one program, against the oracle."""
    rng = np.random.default_rng(36)
    options = api.prepare(QUERY, KEY, VALUE, None, None).options
    for index in range(300):
        indices, rows, columns = drawn(rng)
        arrays = [rng.standard_normal(x.shape, np.float32) for x in (QUERY, KEY, VALUE)]
        dout = rng.standard_normal(QUERY.shape, np.float32)
        dlse = rng.standard_normal(QUERY.shape[:3], np.float32)
        mask = Mask.keys(indices) & Mask.lengths(rows, columns) & Mask.window(15, 6)
        query, key, value = map(jnp.asarray, arrays)
        operands = Operands(query, key, value, None, mask, None, None)
        want = oracle.answer(operands, options, dout, dlse)
        found = random_call(indices, rows, columns, dout, dlse, arrays)
        for got, exact in zip(found, want[:5], strict=True):
            assert exact is not None
            np.testing.assert_allclose(got, exact, rtol=2e-5, atol=5e-5, err_msg=str(index))


# --------------------------------------------------------------------------- what is refused


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Mask.keys(np.zeros((T, 2))), TypeError, "key indices must be integers, got dtype"),
        (lambda: Mask.keys(np.zeros(3, int)), ValueError, r"shape \[B, K, T, n\], where"),
        (lambda: Mask.keys(np.zeros((1,) * 5, int)), ValueError, r"or \[tokens, K, n\]"),
        (
            lambda: Mask.keys(np.zeros((3, 2), int), unique_indices=1),  # type: ignore[arg-type]
            TypeError,
            "unique_indices must be True or False",
        ),
        (lambda: ~Mask.keys(np.zeros((3, 2), int)), ValueError, "cannot be under | or ~"),
        (
            lambda: Mask.causal() | Mask.keys(np.zeros((3, 2), int)),
            ValueError,
            "put all keys of a row into one list",
        ),
    ],
    ids=["floats", "rank 1", "rank 5", "flag", "not", "or"],
)
def test_bad_lists(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((B, K, T + 1, 2), r"shape \[2 or 1, 2 or 1, 22, n\], got shape \(2, 2, 23, 2\)"),
        ((3, K, T, 2), r"shape \[2 or 1, 2 or 1, 22, n\], got shape"),
        ((B, N, T, 2), "lists belong to key heads, so repeat these"),
        ((B, 0, T, 2), "got shape"),
    ],
)
def test_lists_that_do_not_fit_the_call(shape, text):
    with pytest.raises(ValueError, match=f"key indices must have .*{text}"):
        jax.jit(dot_product_attention)(QUERY, KEY, VALUE, mask=Mask.keys(np.zeros(shape, int)))
    with pytest.raises(ValueError, match=r"\[2 or 1, K or 1, 22, n\]|got shape"):
        Mask.keys(np.zeros((B, 3, T, 2), int)).as_array(B, N, T, S)


def test_packed_lists_that_do_not_fit():
    starts = np.array([0, T])
    for shape in ((1, K, T, 2), (T + 1, K, 2), (T, 3, 2)):
        with pytest.raises(
            ValueError, match=r"shape \[22, 2 or 1, n\], a list for each token, got"
        ):
            jax_memeff.varlen_attention(
                QUERY[0],
                KEY[0],
                VALUE[0],
                starts,
                np.array([0, S]),
                T,
                S,
                mask=Mask.keys(np.zeros(shape, int)),
            )


def test_a_ring_refuses_lists():
    mesh = jax.make_mesh((2,), ("ring",), (AxisType.Auto,), devices=jax.devices("cpu")[:2])
    call = functools.partial(
        jax_memeff.ring_attention, mask=Mask.keys(np.zeros((T, 2), int)), axis_name="ring"
    )
    rows = P(None, "ring")
    with pytest.raises(ValueError, match=r"Mask\.keys is not supported in a ring, because"):
        jax.jit(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows))(QUERY, KEY, VALUE)


@pytest.mark.quick
def test_check_reports_values():
    indices = lists(37).clip(-1, S - 1)
    call = functools.partial(jax_memeff.check, QUERY, KEY, VALUE)
    call(mask=Mask.keys(jnp.asarray(indices)))
    bad = changed(jnp.asarray(indices), (1, 0, 3, 2), S)
    with pytest.raises(
        ValueError, match=rf"key indices must be in \[-1, {S}\), got {S} at index \(1, 0, 3, 2\)"
    ):
        call(mask=Mask.causal() & Mask.keys(bad))
    distinct = np.tile(np.arange(COUNT), (B, K, T, 1))
    distinct[..., -2:] = -1
    call(mask=Mask.keys(distinct, unique_indices=True))
    distinct[0, 1, 2, 5] = distinct[0, 1, 2, 0]
    with pytest.raises(
        ValueError, match=r"must be distinct .* got 0 twice in the list at index \(0, 1, 2\)"
    ):
        call(mask=Mask.keys(distinct, unique_indices=True))


def test_pictures_and_blocks():
    indices = lists(38)
    mask = Mask.keys(indices)
    drawn = mask.picture(T, S, tile=(4, 4), batch=1, head=1)
    np.testing.assert_array_equal(drawn.valid, dense(indices)[1, 3])
    tiles = np.pad(drawn.valid, ((0, -T % 4), (0, -S % 4))).reshape(-(-T // 4), 4, -(-S // 4), 4)
    np.testing.assert_array_equal(drawn.classes > 0, tiles.any((1, 3)))
    blocks = (mask & Mask.causal()).blocks(QUERY, KEY)
    assert not blocks.block_masks and blocks.kinds() == {"keys", "top_left"}


def test_symbolic_batch(assert_close):
    scope = jax.export.SymbolicScope()
    shapes = [f"b, {T}, {N}, {H}", f"b, {S}, {K}, {H}", f"b, {K}, {T}, {COUNT}"]
    query, key, indices = (
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(x, scope=scope), dtype)
        for x, dtype in zip(shapes, ("float32", "float32", "int32"), strict=True)
    )
    attend = jax.jit(lambda q, k, i: dot_product_attention(q, k, k, mask=Mask.keys(i)))
    exported = jax.export.export(attend)(query, key, indices)
    given = QUERY, KEY, lists(39)
    assert_close(exported.call(*given), attend(*given), 1e-6)
