"""Auto axes: whatever the compiler shards, the call runs, and the log says what is gathered.

The reference is ``jax.nn`` on one device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_case import gathered, mesh_of, projections, put, random, run

import jax_memeff.flax
from jax_memeff import Mask, dot_product_attention

HOST = jax.devices("cpu")[:8]
B, T, N, H = 4, 16, 4, 8
IDS = np.repeat(np.arange(T)[None] // 7, B, 0)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
constrained = jax.lax.with_sharding_constraint
of_jax = jax.nn.dot_product_attention


def arrays(batch=B, rows=T, heads=N, columns=None):
    columns = columns or rows
    shape = batch, columns, heads, H
    return random(batch, rows, heads, H), random(*shape), random(*shape) + 1


def of_segments(attention, query, key, value, ids):
    if attention is dot_product_attention:
        return attention(query, key, value, mask=Mask.segments(ids, ids))
    return attention(query, key, value, mask=ids[:, None, :, None] == ids[:, None, None, :])


def gradients(function):
    def loss(*operands):
        return jnp.sum(function(*operands) ** 2)

    return jax.grad(loss, (0, 1, 2))


TRANSFORMED = {
    "call": lambda function: function,
    "gradients": gradients,
    "checkpoint": lambda function: gradients(jax.checkpoint(function)),
    "scan": lambda function: (
        lambda query, *others: jax.lax.scan(
            lambda carry, _: (function(carry, *others), None), query, length=2
        )[0]
    ),
}
transformed = pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)


# --- meshes ------------------------------------------------------------------------------------


def constrained_call(attention, spec, query, key, value):
    return attention(*(constrained(x, spec) for x in (query, key, value)), is_causal=True)


@transformed
def test_constraints_in_the_mesh_of_set_mesh(transform, assert_close):
    """No argument is on the mesh, and the constraints do not name it."""
    operands, spec = arrays(), P("data", None, "tensor")
    call = functools.partial(constrained_call, dot_product_attention, spec)
    with jax.set_mesh(mesh_of(AUTO, HOST)):
        got, hlo = run(jax.jit(transform(call)), *operands)
    assert "jax_memeff_digest" in hlo
    want = jax.jit(transform(functools.partial(of_jax, is_causal=True)))(*operands)
    assert_close(got, want, 2e-6)


def test_types_of_arguments_in_the_mesh_of_set_mesh(assert_close):
    call = jax.jit(functools.partial(constrained_call, dot_product_attention, P("data")))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays()]
    with jax.set_mesh(mesh_of(AUTO, HOST)):
        compiled = call.lower(*types).compile()
    assert f"f32[1,{T},{N},{H}]" in (compiled.as_text() or "")
    assert_close(compiled(*arrays()), of_jax(*arrays(), is_causal=True))


def test_a_module_that_was_made_before_the_mesh(assert_close):
    layer = nnx.MultiHeadAttention(
        N, N * H, decode=False, rngs=nnx.Rngs(0), attention_fn=jax_memeff.flax.attention_fn
    )
    reference = nnx.clone(layer)
    reference.attention_fn = nnx.dot_product_attention
    x = random(B, T, N * H)

    @nnx.jit
    def call(layer, x):
        return layer(constrained(x, P("data")))

    with jax.set_mesh(mesh_of(AUTO, HOST)):
        got = call(layer, x)
    assert_close(got, reference(jnp.asarray(x)), 2e-6)


def test_spmd_axis_name_of_vmap(assert_close):
    """The constraint inside the map has the mapped dim sharded, too."""
    mesh = mesh_of(AUTO, HOST)
    heads = NamedSharding(mesh, P(None, None, "tensor"))
    operands = [np.stack([x] * 4) for x in arrays(batch=2)]

    def call(query, key, value):
        return dot_product_attention(constrained(query, heads), key, value)

    mapped = jax.jit(jax.vmap(call, spmd_axis_name="data"))
    got, hlo = run(mapped, *(put(mesh, x, "data") for x in operands))
    assert gathered(hlo) == []
    assert_close(got, jax.vmap(of_jax)(*operands))


MIXED = {
    "replicated": (P(), P()),
    "explicit batch": (P("a"), P("a")),
    "automatic heads": (P("a", None, "b"), P("a", None, "b")),
    "automatic batch": (P(("a", "b")), P(("a", "b"))),
    "explicit rows": (P(None, "a", "b"), P(None, None, "b")),
}


@transformed
@pytest.mark.parametrize("specs", MIXED.values(), ids=MIXED)
def test_explicit_and_automatic_axes(transform, specs, assert_close):
    query, *others = arrays(batch=8)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(EXPLICIT, AUTO), devices=HOST)
    placed = [put(mesh, query, *specs[0]), *(put(mesh, x, *specs[1]) for x in others)]
    with jax.set_mesh(mesh):
        got, hlo = run(jax.jit(transform(dot_product_attention)), *placed)
    assert "jax_memeff_digest" in hlo
    for x in gathered(hlo):  # the compiler may gather a result, but no operand of the call
        assert x[0] in (8, 4) or x == ()
    assert_close(got, jax.jit(transform(of_jax))(query, *others), 2e-6)


def test_explicit_axes_keep_their_errors_beside_automatic_ones():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(EXPLICIT, AUTO), devices=HOST)
    query, key, value = (put(mesh, x, None, "a") for x in arrays())
    with pytest.raises(ValueError, match="its sequence dim is sharded over mesh axis 'a'"):
        jax.eval_shape(dot_product_attention, query, key, value)


def test_two_meshes_in_a_program(messages, assert_close):
    """The axes of one mesh end inside those of the other."""
    devices = HOST[:6]
    meshes = [
        jax.make_mesh(shape, ("a", "b"), axis_types=(AUTO,) * 2, devices=devices)
        for shape in ((2, 3), (3, 2))
    ]
    query, key, value = arrays(batch=6)

    @jax.jit
    def call(query, key, value):
        key, value = (
            constrained(x, NamedSharding(meshes[1], P(None, None, "a"))) for x in (key, value)
        )
        return dot_product_attention(query, key, value)

    got = call(put(meshes[0], query, "a"), key, value)
    assert_close(got, of_jax(query, key, value))
    (message,) = messages()
    assert "it is not sharded over the mesh of the other operands" in message


# --- sizes and shardings that the compiler chooses ------------------------------------------------

UNEVEN = {
    "batch 6 over 4": ({"batch": 6}, P("data"), "its batch dim, 6, cannot be divided by 4"),
    "batch 3 over 4": ({"batch": 3}, P("data"), "its batch dim, 3, cannot be divided by 4"),
    "6 heads over 4": ({"heads": 6}, P(None, None, "data"), "its heads, 6, cannot be divided"),
    "77 rows over 4": ({"rows": 77}, P(None, "data"), "sequence dim, 77, cannot be divided"),
}


@pytest.mark.parametrize("sizes, spec, message", UNEVEN.values(), ids=UNEVEN)
def test_sizes_that_the_devices_do_not_divide(sizes, spec, message, messages, assert_close):
    operands = arrays(**sizes)
    sharding = NamedSharding(mesh_of(AUTO, HOST), spec)

    def call(attention, query, key, value):
        query = constrained(query, sharding)
        if len(spec) != 2:  # every device needs all keys
            key, value = (constrained(x, sharding) for x in (key, value))
        return jnp.tanh(attention(query, key, value))

    got = jax.jit(gradients(functools.partial(call, dot_product_attention)))(*operands)
    assert_close(got, jax.jit(gradients(functools.partial(call, of_jax)))(*operands), 2e-6)
    (text,) = messages()
    assert message in text and text.count("mesh axis 'data'") == 1
    assert text.startswith(f"dot_product_attention at {__file__}:")


def test_a_message_is_logged_once_for_each_call(messages):
    mesh = mesh_of(AUTO, HOST)

    def call(query, key, value):
        query = constrained(query, NamedSharding(mesh, P("data")))
        outs = [dot_product_attention(query, key, value)]
        for _ in range(2):
            outs.append(dot_product_attention(query, key, value + outs[-1]))
        return sum(outs)

    operands = arrays(batch=6)
    jax.jit(call).lower(*operands).compile()
    jax.jit(lambda *operands: call(*operands)).lower(*operands).compile()
    texts = messages()
    assert len(texts) == 2
    # Each device gets the half of the query that it computes, in float32.
    assert f": each device gathers {6 * T * N * H * 4 // 2:,} bytes. query of" in texts[0]


def test_key_heads_that_the_devices_do_not_divide(messages, assert_close):
    """The query stays divided over all of them."""
    query, (key, value) = arrays()[0], (x[:, :, :2] for x in arrays()[1:])
    heads = NamedSharding(mesh_of(AUTO, HOST), P(None, None, "data"))

    @jax.jit
    def call(*operands):
        return jnp.tanh(dot_product_attention(*(constrained(x, heads) for x in operands)))

    got, hlo = run(call, query, key, value)
    assert_close(got, jnp.tanh(of_jax(query, key, value)))
    assert f"f32[{B},{T},1,{H}]" in hlo
    (text,) = messages()
    assert "query" not in text
    assert "key of shape (4, 16, 2, 8): its heads, 2, cannot be divided by 4, the size of " in text


@pytest.mark.parametrize("shape, heads", [((2, 4), 6), ((1, 8), 12)], ids=["6 over 4", "12 over 8"])
def test_heads_of_a_sharded_projection(shape, heads, messages, assert_close):
    """The compiler shards the heads over a part of the mesh axis, and they stay there."""
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AUTO,) * 2, devices=HOST)
    x, weights = random(B, T, 32), random(32, heads * H)

    def call(attention, x, weights):
        heads_of = (x @ weights).reshape(B, T, heads, H)
        return attention(heads_of, heads_of, heads_of).sum(-1)

    placed = put(mesh, x, "data"), put(mesh, weights, None, "model")
    got, hlo = run(jax.jit(functools.partial(call, dot_product_attention)), *placed)
    assert_close(got, call(of_jax, x, weights), 2e-6)
    assert f"f32[{B // shape[0]},{T},{heads // min(shape[1], 4) if heads == 12 else 3},{H}]" in hlo
    assert messages() == []


def test_dropout_of_rows_that_stay_divided_in_part(messages):
    """64 rows over 8 devices: 16 rows on each of 4."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AUTO,), devices=HOST)
    zeros, value = np.zeros((1, 64, 1, H), np.float32), np.eye(64, dtype=np.float32)[None, :, None]

    @jax.jit
    def kept(query, key, value):
        key_of_dropout = jax.random.key(0)
        return dot_product_attention(
            query, key, value, dropout_rate=0.5, dropout_key=key_of_dropout
        )

    want = np.asarray(kept(zeros, zeros, value)) > 0
    got, hlo = run(kept, put(mesh, zeros, None, "rows"), zeros, value)
    np.testing.assert_array_equal(np.asarray(got) > 0, want)
    assert "f32[1,1,1,16,64]" in hlo  # the scores of a device
    assert "with dropout every device needs a multiple of 16 rows, got 64 rows" in messages()[0]


SEGMENTS = {
    "scan": TRANSFORMED["scan"],
    "checkpoint": TRANSFORMED["checkpoint"],
    "computed ids": lambda function: lambda *operands: function(*operands[:3], operands[3] // 2),
}


@pytest.mark.parametrize("placed", ["on the mesh", "elsewhere"])
@pytest.mark.parametrize("transform", SEGMENTS.values(), ids=SEGMENTS)
def test_sharded_rows_and_one_array_of_ids(transform, placed, assert_close):
    """The ids of the keys are those of the rows, so the compiler shards them alike."""
    mesh = jax.make_mesh((2, 4), ("data", "rows"), axis_types=(AUTO,) * 2, devices=HOST)
    query, key, value = arrays()
    sharded = put(mesh, query, "data", "rows"), put(mesh, key, "data"), put(mesh, value, "data")
    ids = put(mesh, IDS, "data") if placed == "on the mesh" else IDS
    got = jax.jit(transform(functools.partial(of_segments, dot_product_attention)))(*sharded, ids)
    want = jax.jit(transform(functools.partial(of_segments, of_jax)))(query, key, value, IDS)
    assert_close(got, want, 2e-6)


GATHERED = {
    "keys": (P("data"), P("data", "model"), P("data"), "or use jax_memeff.ring_attention"),
    "ids": (P("data"), P("data"), P("data", "model"), "constrain it to P('data', None) by jax.lax"),
    "head dim": (P("data", None, None, "model"), P("data"), P("data"), "shard the batch or the"),
    "heads of the keys": (P("data"), P("data", None, "model"), P("data"), "got mesh axis 'model'"),
    "batch of the keys": (
        P("model"),
        P("data"),
        P("model"),
        "like query's, over mesh axis 'model'",
    ),
}


@pytest.mark.parametrize("of_query, of_keys, of_ids, message", GATHERED.values(), ids=GATHERED)
def test_what_a_device_needs_whole_is_gathered(
    of_query, of_keys, of_ids, message, messages, assert_close
):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO,) * 2, devices=HOST)
    query, key, value = arrays()
    sharded = put(mesh, query, *of_query), put(mesh, key, *of_keys), put(mesh, value, *of_keys)

    def call(attention):
        return jax.jit(gradients_and_out(functools.partial(of_segments, attention)))

    got = call(dot_product_attention)(*sharded, put(mesh, IDS, *of_ids))
    assert_close(got, call(of_jax)(query, key, value, IDS), 2e-6)
    (text,) = messages()
    assert message in text and "stride" not in text


def gradients_and_out(function):
    def loss(query, key, value, ids):
        out = function(query, key, value, ids)
        return jnp.sum(out**2), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


# --- inside shard_map ---------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["dot_product_attention", "ring_attention"])
def test_axes_that_shard_map_leaves_to_the_compiler(function, messages, assert_close):
    mesh = jax.make_mesh((2, 4), ("sequence", "model"), axis_types=(AUTO,) * 2, devices=HOST)
    query, key, value = arrays()
    if function == "ring_attention":
        spec = P(None, "sequence")
        local = functools.partial(jax_memeff.ring_attention, axis_name="sequence")
    else:
        spec, local = P("sequence"), dot_product_attention
    over_one = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"sequence"}
    )
    got = jax.jit(gradients(over_one))(*(put(mesh, x, *spec) for x in (query, key, value)))
    assert_close(got, jax.jit(gradients(of_jax))(query, key, value), 2e-6)
    assert "inside jax.shard_map it is left to the compiler over mesh axis 'model'" in messages()[0]


# --- programs for other devices -------------------------------------------------------------------


def types_over(mesh):
    sharding = NamedSharding(mesh, P("data"))
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in projections()]


@pytest.mark.parametrize("axis_type", [*AxisType])
def test_lowering_for_an_abstract_mesh(axis_type, assert_close):
    types = (AUTO if axis_type == AxisType.Manual else axis_type,) * 2
    mesh = AbstractMesh((4, 2), ("data", "tensor"), axis_types=types)
    function = dot_product_attention
    if axis_type == AxisType.Manual:
        spec = P("data")
        function = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    lowered = jax.jit(function).trace(*types_over(mesh)).lower(lowering_platforms=("cpu",))
    assert ("CustomSPMDPartitioning" in lowered.as_text()) == (axis_type == AUTO)
    if axis_type != AUTO:
        exported = jax.export.export(jax.jit(function), platforms=("cpu",))(*types_over(mesh))
        assert exported.nr_devices == 8


@pytest.mark.parametrize("kind", [AbstractMesh, jax.make_mesh])
def test_export_of_automatic_axes_says_what_to_do(kind):
    mesh = kind((4, 2), ("data", "tensor"), axis_types=(AUTO,) * 2)
    with pytest.raises(ValueError, match=r"cannot be exported.*axes explicit .*jax.shard_map"):
        jax.export.export(jax.jit(dot_product_attention), platforms=("cpu",))(*types_over(mesh))
