"""A call that is sharded over batch and heads equals the unsharded call and gathers no operand.

The oracle is the same function on one device, which other tests compare with the definition.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropout_bits import kept_by_half
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from several_devices import at, sizes
from sharding_case import (
    DATA,
    DROPOUT_KEY,
    LENGTHS,
    ON_BOTH,
    TENSOR,
    B,
    H,
    K,
    N,
    T,
    gathered,
    loss,
    mesh_of,
    projections,
    put,
    random,
    refused_or_gathered,
    run,
    value_and_grad,
)

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention

HOST = jax.devices("cpu")[:8]

auto_and_explicit = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
on_every_platform = at("devices", cpu=8, cuda=[2, 4])


# --- values, gradients, dropout bits ----------------------------------------------------------


@functools.cache
def unsharded(sizes):
    """Operands, arguments and results on one device, with a bias that is broadcast over the
    batch.
    """
    length = T * sizes.scale
    operands = (*projections(sizes=sizes), random(1, N, length, length, dtype=sizes.dtype))
    features = {
        "is_causal": True,
        "key_value_seq_lengths": LENGTHS * sizes.scale,
        "dropout_rate": 0.5,
        "dropout_key": DROPOUT_KEY,
    }
    function = value_and_grad(functools.partial(loss, **features), *operands)
    return operands, features, jax.tree.map(np.asarray, function(*operands))


@pytest.mark.quick("cpu8-AxisType.Auto")
@auto_and_explicit
@on_every_platform
def test_grouped_heads_bias_lengths_and_dropout(axis_type, devices, assert_close):
    operands, features, want = unsharded(sizes(devices))
    mesh = mesh_of(axis_type, devices)
    specs = (ON_BOTH, ON_BOTH, ON_BOTH, P(None, "tensor"))
    sharded = [put(mesh, array, *spec) for array, spec in zip(operands, specs, strict=True)]
    got, hlo = run(value_and_grad(functools.partial(loss, **features), *operands), *sharded)
    assert_close(got, want, sizes(devices).tolerance)
    assert gathered(hlo) == []
    # Without the rule XLA partitions the blockwise path, too, but no kernel.
    assert ("jax_memeff_digest" in hlo) == (axis_type == AxisType.Auto)
    for gradient, array in zip(got[1], sharded, strict=True):
        assert gradient.sharding.is_equivalent_to(array.sharding, gradient.ndim)


def offsets_of(query):
    """The offsets of a shard, inside ``shard_map``."""
    first, head = (
        jax.lax.axis_index(axis) * size
        for axis, size in zip(("data", "tensor"), (query.shape[0], query.shape[2]), strict=True)
    )
    return Offsets(batch=first, head=head, num_heads=N)


@pytest.mark.parametrize("grad_is", ["outside", "inside"])
@on_every_platform
def test_shard_map_with_offsets(grad_is, devices, assert_close):
    operands, features, want = unsharded(sizes(devices))
    specs = (ON_BOTH, ON_BOTH, ON_BOTH, P(None, "tensor"))

    def local(query, key, value, bias):
        offsets, arguments = offsets_of(query), dict(features)
        lengths = jnp.asarray(arguments.pop("key_value_seq_lengths"))
        lengths = jax.lax.dynamic_slice_in_dim(lengths, offsets.batch, query.shape[0])
        part = loss(
            *(query, key, value, bias),
            key_value_seq_lengths=lengths,
            offsets=offsets,
            **arguments,
        )
        return jax.lax.psum(part, ("data", "tensor"))

    # The transpose of its cast sums the gradient of a replicated operand over "data", once.
    shard = functools.partial(jax.shard_map, mesh=mesh_of(AxisType.Auto, devices), in_specs=specs)
    if grad_is == "outside":
        function = value_and_grad(shard(local, out_specs=P()), *operands)
    else:
        function = jax.jit(shard(jax.value_and_grad(local, (0, 1, 2, 3)), out_specs=(P(), specs)))
    got, hlo = run(function, *operands)
    assert_close(got, want, sizes(devices).tolerance)
    assert gathered(hlo) == []


@pytest.mark.parametrize("mode", [*AxisType])
@at("devices", cpu=8, cuda=[4])
def test_dropout_bits_equal_the_unsharded_run(mode, devices):
    """With equal scores and values of one column each, the output is the keep mask."""
    length, dtype = 64, sizes(devices).dtype
    zeros = np.zeros((B, length, N, length), dtype)
    value = np.broadcast_to(np.eye(length, dtype=dtype)[None, :, None], zeros.shape)
    drop = {"dropout_rate": 0.5, "dropout_key": DROPOUT_KEY}

    def local(query, key, value):
        return dot_product_attention(query, key, value, offsets=offsets_of(query), **drop)

    function = functools.partial(dot_product_attention, **drop)
    mesh = mesh_of(AxisType.Auto if mode == AxisType.Manual else mode, devices)
    if mode == AxisType.Manual:
        function = jax.shard_map(local, mesh=mesh, in_specs=ON_BOTH, out_specs=ON_BOTH)
    out = jax.jit(function)(*(put(mesh, array, *ON_BOTH) for array in (zeros, zeros, value)))
    kept = np.asarray(out).transpose(0, 2, 1, 3) > 0
    np.testing.assert_array_equal(kept, kept_by_half(DROPOUT_KEY, B, N, length))


def test_offsets_of_a_shard_may_be_python_numbers():
    """The bits are those of the upper heads of batch index 2."""
    query, key, value = projections()
    arguments = {"dropout_rate": 0.5, "dropout_key": DROPOUT_KEY}
    whole = dot_product_attention(query, key, value, **arguments)
    parts = query[2:3, :, 2:], key[2:3, :, 1:], value[2:3, :, 1:]
    got = dot_product_attention(*parts, offsets=Offsets(2, 2, N), **arguments)
    np.testing.assert_allclose(got, whole[2:3, :, 2:], rtol=1e-5, atol=1e-6)
    elsewhere = dot_product_attention(*parts, offsets=Offsets(1, 2, N), **arguments)
    assert np.abs(elsewhere - got).max() > 0.1


@pytest.mark.rotating(2)
@auto_and_explicit
def test_every_broadcast_of_bias_and_mask(axis_type, assert_close):
    """Replicated operands are sliced locally; their gradients are summed over all shards."""
    operands = projections()
    shapes = [(1, 1, 1, T), (B, 1, 1, T), (1, N, T, T), (B, N, T, T), (1, 1, T, 1), (B, 1, T, 1)]
    biases = [random(*shape) for shape in shapes]
    allowed = [random(*shape) > -1 for shape in shapes]

    def total(query, key, value, biases):
        return sum(
            loss(query, key, value, bias, mask=mask)
            for bias, mask in zip(biases, allowed, strict=True)
        )

    function = value_and_grad(total, *operands, biases)
    mesh = mesh_of(axis_type, HOST)
    sharded = [put(mesh, array, *ON_BOTH) for array in operands]
    replicated = [put(mesh, bias) for bias in biases]
    got, hlo = run(function, *sharded, replicated)
    assert_close(got, function(*operands, biases))
    local = {(B // DATA, T, N // TENSOR), (B // DATA, T, K // TENSOR)}
    assert not any(shape[:3] in local for shape in gathered(hlo))


@auto_and_explicit
def test_lengths_segments_and_windows(axis_type, assert_close):
    operands = projections()
    ids = np.sort(np.random.default_rng(0).integers(-1, 3, (B, T)))

    def call(query, key, value, ids, lengths):
        mask = Mask.segments(ids, ids) & Mask.lengths(lengths, lengths)
        mask &= Mask.window(3, 5, "bottom_right")
        return dot_product_attention(query, key, value, mask=mask, return_residual=True)

    mesh = mesh_of(axis_type, HOST)
    sharded = [put(mesh, array, *ON_BOTH) for array in operands]
    got, hlo = run(jax.jit(call), *sharded, put(mesh, ids, "data"), put(mesh, LENGTHS))
    assert_close(got, call(*operands, ids, LENGTHS))
    assert gathered(hlo) == []
    out, lse = got
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, ON_BOTH), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, ON_BOTH), 3)


@auto_and_explicit
@at("devices", cpu=8, cuda=[4])
def test_a_key_head_of_all_query_heads_is_replicated(axis_type, devices, assert_close):
    operands = projections(kv_heads=1, sizes=sizes(devices))
    mesh = mesh_of(axis_type, devices)
    specs = (ON_BOTH, P("data"), P("data"))
    sharded = [put(mesh, array, *spec) for array, spec in zip(operands, specs, strict=True)]
    function = value_and_grad(loss, *operands)
    got, hlo = run(function, *sharded)
    assert_close(got, function(*operands), sizes(devices).tolerance)
    assert gathered(hlo) == []


@auto_and_explicit
def test_packed_sequences_shard_their_heads(axis_type, messages, assert_close):
    tokens, starts = 24, np.array([0, 9, 9, 20])
    operands = random(tokens, N, H), random(tokens, K, H), random(tokens, K, H)
    bias = random(3, N, 12, 12)

    def packed(query, key, value, bias):
        return loss(
            *(query, key, value, bias),
            attention=functools.partial(
                jax_memeff.varlen_attention,
                cu_seqlens_q=starts,
                cu_seqlens_k=starts,
                max_seqlen_q=12,
                max_seqlen_k=12,
            ),
            dropout_rate=0.25,
            dropout_key=DROPOUT_KEY,
        )

    mesh = mesh_of(axis_type, HOST)
    sharded = [put(mesh, array, None, "tensor") for array in (*operands, bias)]
    function = value_and_grad(packed, *operands, bias)
    got, hlo = run(function, *sharded)
    assert_close(got, function(*operands, bias))
    assert gathered(hlo) == []
    by_tokens = [*(put(mesh, array, "data") for array in operands), put(mesh, bias)]
    message = r"query of shape .* token dim .* axis 'data'.*shard the heads"
    call = functools.partial(packed)
    refused_or_gathered(axis_type, call, by_tokens, message, messages, assert_close)


@auto_and_explicit
def test_one_array_of_query_key_and_value(axis_type, assert_close):
    qkv = random(B, T, 3, N, H)

    def packed(qkv):
        out = jax_memeff.dot_product_attention_packed(qkv, is_causal=True)
        return jnp.sum(out * jnp.cos(out))

    mesh = mesh_of(axis_type, HOST)
    function = jax.jit(jax.value_and_grad(packed))
    got, hlo = run(function, put(mesh, qkv, "data", None, None, "tensor"))
    assert_close(got, function(qkv))
    assert gathered(hlo) == []


def test_calls_outside_jit(assert_close):
    operands = projections()
    want = dot_product_attention(*operands)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        sharded = [put(mesh_of(axis_type, HOST), array, *ON_BOTH) for array in operands]
        got = dot_product_attention(*sharded)
        assert_close(got, want)
        assert got.sharding.is_equivalent_to(sharded[0].sharding, 4)


def test_key_and_value_without_a_sharding_get_that_of_query():
    """The rule propagates the sharding, also from query heads to key heads."""
    mesh = mesh_of(AxisType.Auto, HOST)
    query, key, value = projections()

    @jax.jit
    def call(query, key, value):
        return dot_product_attention(query, 2 * key, 2 * value)

    _, hlo = run(call, put(mesh, query, *ON_BOTH), key, value)
    assert gathered(hlo) == []
    assert f"f32[{B // DATA},{T},{N // TENSOR},{H + 1}]" in hlo


# --- what cannot be done -------------------------------------------------------------------------

WRONG = {
    "the key's sequence": (
        (P(), P(None, "tensor"), P()),
        r"key of shape .* its sequence dim is sharded over mesh axis 'tensor'.*ring_attention",
    ),
    "the head dim": (
        (P("data", None, None, "tensor"), P("data"), P("data")),
        r"query of shape .* its head dim is sharded over mesh axis 'tensor'; every device needs",
    ),
    "batches that differ": (
        (P("data"), P("data"), P()),
        r"value of shape .* its batch dim must be sharded like query's, over mesh axis 'data', "
        r"got no mesh axis; reshard it to .*'data'.* by jax.sharding.reshard",
    ),
    "heads that differ": (
        (P("data"), P("data", None, "tensor"), P("data")),
        r"key of shape .* its heads must be sharded like query's, over no mesh axis, got",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("specs, message", WRONG.values(), ids=WRONG)
def test_errors_name_the_axis_and_the_remedy(specs, message):
    mesh = mesh_of(AxisType.Explicit, HOST)
    arrays = (random(B, T, N, H), random(B, T, K, H), random(B, T, K, H))
    operands = [put(mesh, x, *spec) for x, spec in zip(arrays, specs, strict=True)]
    with pytest.raises(ValueError, match=f"^{message}"):
        jax.jit(dot_product_attention).lower(*operands)


@pytest.mark.parametrize(
    "specs, message",
    [
        ((P("data"), P(), P()), "key must have the batch size of query, 1, got 4 in shape"),
        ((P("data"), P("data"), P()), "value must have the batch size of query, 1, got 4 in"),
        (
            (P(None, None, "data"), P(), P()),
            "query's number of heads must be a multiple of key's, 2, got 1",
        ),
        ((P(), P(), P(None, None, "tensor")), "value must have the number of heads of key, 2"),
        ((P(), P(None, "data"), P()), "value must have the sequence length of key, 4, got 16"),
    ],
)
def test_errors_inside_shard_map_name_its_axes(specs, message):
    """The messages state local sizes."""
    local = jax.shard_map(
        dot_product_attention,
        mesh=mesh_of(AxisType.Auto, HOST),
        in_specs=specs,
        out_specs=specs[0],
    )
    arrays = (random(B, T, N, H), random(B, T, K, H), random(B, T, K, H))
    remedy = r".* one device of jax.shard_map over \('data', 'tensor'\): shard the batch and"
    with pytest.raises(ValueError, match=message + remedy):
        jax.eval_shape(local, *arrays)


@auto_and_explicit
def test_a_bias_whose_rows_are_sharded(axis_type, messages, assert_close):
    mesh = mesh_of(axis_type, HOST)
    operands = [put(mesh, x, *ON_BOTH) for x in projections()]
    bias = put(mesh, random(N, T, T), None, "data")
    message = r"bias of shape .* its sequence dim must be sharded like query's, .* got .*'data'"
    call = functools.partial(dot_product_attention)
    refused_or_gathered(axis_type, call, [*operands, bias], message, messages, assert_close)


def test_shard_map_over_some_axes(assert_close):
    mesh = mesh_of(AxisType.Auto, HOST)
    operands = projections()
    over_data = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    heads = P(None, None, "tensor")
    nested = jax.shard_map(
        dot_product_attention, in_specs=heads, out_specs=heads, axis_names={"tensor"}
    )
    assert_close(jax.jit(over_data(nested))(*operands), dot_product_attention(*operands))
