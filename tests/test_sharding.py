"""Sharded over the batch and the heads, a call is the unsharded call, and gathers no operand.

The oracle is the same function on one device, whose values other tests compare with their oracle.
"""

from __future__ import annotations

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_memeff
from jax_memeff import Mask, Offsets, UnsupportedError, dot_product_attention, partitioning
from jax_memeff.codegen import compile as compiler

B, T, N, K, H = 4, 16, 4, 2, 8
DATA, TENSOR = 4, 2
ON_BOTH = P("data", None, "tensor")
DROPOUT_KEY = jax.random.key(7)
LENGTHS = np.array([16, 5, 11, 0])

auto_and_explicit = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def mesh_of(axis_type, shape=(DATA, TENSOR)):
    return jax.make_mesh(
        shape, ("data", "tensor"), axis_types=(axis_type,) * 2, devices=jax.devices("cpu")[:8]
    )


def random(*shape):
    seed = int(np.prod(shape)) + 31 * len(shape)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def projections(kv_heads=K):
    return random(B, T, N, H), random(B, T, kv_heads, H), random(B, T, kv_heads, H + 1)


def put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def loss(query, key, value, bias=None, *, attention=dot_product_attention, **arguments):
    """A number that depends on every element of out and lse."""
    out, lse = attention(query, key, value, bias=bias, return_residual=True, **arguments)
    weights = jnp.cos(jnp.arange(out.shape[-1]))
    return jnp.sum(out * out * weights) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) ** 2)


def value_and_grad(function, *operands):
    return jax.jit(jax.value_and_grad(function, tuple(range(len(operands)))))


def run(function, *operands):
    """The results of a function that is compiled for sharded operands, and its HLO."""
    compiled = function.lower(*operands).compile()
    return compiled(*operands), compiled.as_text() or ""


def gathered(hlo):
    """Shapes of the results of all collectives that move arrays rather than sum them."""
    moved = re.findall(r"= (\S+) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", hlo)
    return [tuple(map(int, re.findall(r"\d+", shape.split("[")[1]))) for shape in moved]


# --- values, gradients, dropout bits ----------------------------------------------------------

FEATURES = types.MappingProxyType(
    {
        "is_causal": True,
        "key_value_seq_lengths": LENGTHS,
        "dropout_rate": 0.5,
        "dropout_key": DROPOUT_KEY,
    }
)


@pytest.fixture(scope="module")
def unsharded():
    """With a bias that the batch shares."""
    operands = *projections(), random(1, N, T, T)
    function = value_and_grad(functools.partial(loss, **FEATURES), *operands)
    return operands, jax.tree.map(np.asarray, function(*operands))


@auto_and_explicit
def test_grouped_heads_bias_lengths_and_dropout(axis_type, unsharded, assert_close):
    operands, want = unsharded
    mesh = mesh_of(axis_type)
    specs = (ON_BOTH, ON_BOTH, ON_BOTH, P(None, "tensor"))
    sharded = [put(mesh, array, *spec) for array, spec in zip(operands, specs, strict=True)]
    got, hlo = run(value_and_grad(functools.partial(loss, **FEATURES), *operands), *sharded)
    assert_close(got, want)
    assert gathered(hlo) == []
    # XLA divides the blockwise path without the rule too, but no kernel.
    assert ("jax_memeff_digest" in hlo) == (axis_type == AxisType.Auto)
    for gradient, array in zip(got[1], sharded, strict=True):
        assert gradient.sharding.is_equivalent_to(array.sharding, gradient.ndim)


@pytest.mark.parametrize("grad_is", ["outside", "inside"])
def test_shard_map_with_offsets(grad_is, unsharded, assert_close):
    operands, want = unsharded
    specs = (ON_BOTH, ON_BOTH, ON_BOTH, P(None, "tensor"))

    def local(query, key, value, bias):
        first = jax.lax.axis_index("data") * query.shape[0]
        offsets = Offsets(
            batch=first, head=jax.lax.axis_index("tensor") * query.shape[2], num_heads=N
        )
        arguments = dict(FEATURES)
        lengths = jnp.asarray(arguments.pop("key_value_seq_lengths"))
        lengths = jax.lax.dynamic_slice_in_dim(lengths, first, query.shape[0])
        part = loss(
            *(query, key, value, bias),
            key_value_seq_lengths=lengths,
            offsets=offsets,
            **arguments,
        )
        return jax.lax.psum(part, ("data", "tensor"))

    # A replicated operand's gradient is summed over "data" by the transpose of its cast, once.
    shard = functools.partial(jax.shard_map, mesh=mesh_of(AxisType.Auto), in_specs=specs)
    if grad_is == "outside":
        function = value_and_grad(shard(local, out_specs=P()), *operands)
    else:
        function = jax.jit(shard(jax.value_and_grad(local, (0, 1, 2, 3)), out_specs=(P(), specs)))
    got, hlo = run(function, *operands)
    assert_close(got, want)
    assert gathered(hlo) == []


def test_offsets_of_a_shard_may_be_python_numbers():
    """The bits of the third batch element's upper heads, and no others."""
    query, key, value = projections()
    arguments = {"dropout_rate": 0.5, "dropout_key": DROPOUT_KEY}
    whole = dot_product_attention(query, key, value, **arguments)
    parts = query[2:3, :, 2:], key[2:3, :, 1:], value[2:3, :, 1:]
    got = dot_product_attention(*parts, offsets=Offsets(2, 2, N), **arguments)
    np.testing.assert_allclose(got, whole[2:3, :, 2:], rtol=1e-5, atol=1e-6)
    elsewhere = dot_product_attention(*parts, offsets=Offsets(1, 2, N), **arguments)
    assert np.abs(elsewhere - got).max() > 0.1


@auto_and_explicit
def test_every_broadcast_of_bias_and_mask(axis_type, assert_close):
    """Replicated operands are cut where they are; their gradients are summed over all shards."""
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
    mesh = mesh_of(axis_type)
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

    mesh = mesh_of(axis_type)
    sharded = [put(mesh, array, *ON_BOTH) for array in operands]
    got, hlo = run(jax.jit(call), *sharded, put(mesh, ids, "data"), put(mesh, LENGTHS))
    assert_close(got, call(*operands, ids, LENGTHS))
    assert gathered(hlo) == []
    out, lse = got
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, ON_BOTH), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, ON_BOTH), 3)


@auto_and_explicit
def test_a_key_head_of_all_query_heads_is_replicated(axis_type, assert_close):
    operands = projections(kv_heads=1)
    mesh = mesh_of(axis_type)
    specs = (ON_BOTH, P("data"), P("data"))
    sharded = [put(mesh, array, *spec) for array, spec in zip(operands, specs, strict=True)]
    function = value_and_grad(loss, *operands)
    got, hlo = run(function, *sharded)
    assert_close(got, function(*operands))
    assert gathered(hlo) == []


@auto_and_explicit
def test_packed_sequences_shard_their_heads(axis_type, assert_close):
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

    mesh = mesh_of(axis_type)
    sharded = [put(mesh, array, None, "tensor") for array in (*operands, bias)]
    function = value_and_grad(packed, *operands, bias)
    got, hlo = run(function, *sharded)
    assert_close(got, function(*operands, bias))
    assert gathered(hlo) == []
    with pytest.raises(Exception, match=r"token dim .* axis 'data'.*shard the heads"):
        function(*(put(mesh, array, "data") for array in operands), put(mesh, bias))


@auto_and_explicit
def test_one_array_of_query_key_and_value(axis_type, assert_close):
    qkv = random(B, T, 3, N, H)

    def packed(qkv):
        out = jax_memeff.dot_product_attention_packed(qkv, is_causal=True)
        return jnp.sum(out * jnp.cos(out))

    mesh = mesh_of(axis_type)
    function = jax.jit(jax.value_and_grad(packed))
    got, hlo = run(function, put(mesh, qkv, "data", None, None, "tensor"))
    assert_close(got, function(qkv))
    assert gathered(hlo) == []


def test_calls_outside_jit(assert_close):
    operands = projections()
    want = dot_product_attention(*operands)
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        sharded = [put(mesh_of(axis_type), array, *ON_BOTH) for array in operands]
        got = dot_product_attention(*sharded)
        assert_close(got, want)
        assert got.sharding.is_equivalent_to(sharded[0].sharding, 4)


def test_key_and_value_without_a_sharding_get_that_of_query():
    """The rule propagates it, from heads to heads of groups too."""
    mesh = mesh_of(AxisType.Auto)
    query, key, value = projections()

    @jax.jit
    def call(query, key, value):
        return dot_product_attention(query, 2 * key, 2 * value)

    _, hlo = run(call, put(mesh, query, *ON_BOTH), key, value)
    assert gathered(hlo) == []
    assert f"f32[{B // DATA},{T},{N // TENSOR},{H + 1}]" in hlo


# --- what cannot be done -------------------------------------------------------------------------

WRONG = {
    "the query's sequence": (
        (P(None, "data"), P(), P()),
        r"query of shape .* its sequence dim is sharded over mesh axis 'data'.*ring_attention",
    ),
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
        r"got no mesh axis; reshard it to .*'data'",
    ),
    "heads that differ": (
        (P(None, None, "tensor"), P(), P()),
        r"key of shape .* its heads must be sharded like query's, over mesh axis 'tensor'",
    ),
    "groups that are cut": (
        (P(None, None, "data"), P(), P()),
        r"key of shape .* its heads, 2, cannot be divided by 4, the size of mesh axis 'data'; "
        r"every device needs whole groups of heads.*repeat the heads",
    ),
}


@auto_and_explicit
@pytest.mark.parametrize("specs, message", WRONG.values(), ids=WRONG)
def test_errors_name_the_axis_and_the_remedy(axis_type, specs, message):
    mesh = mesh_of(axis_type)
    arrays = (random(B, T, N, H), random(B, T, K, H), random(B, T, K, H))
    operands = [put(mesh, x, *spec) for x, spec in zip(arrays, specs, strict=True)]
    # XLA passes the text of what its callbacks raise on, in an error of its own.
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.jit(dot_product_attention).lower(*operands).compile()


@auto_and_explicit
def test_a_bias_is_not_gathered_either(axis_type):
    mesh = mesh_of(axis_type)
    operands = [put(mesh, x, *ON_BOTH) for x in projections()]
    bias = put(mesh, random(N, T, T), None, "data")
    message = r"bias of shape .* its sequence dim is sharded over mesh axis 'data'"
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
        jax.jit(dot_product_attention).lower(*operands, bias).compile()


def test_a_batch_that_does_not_divide():
    """Only the compiler makes such shards, of intermediate arrays, by padding them."""
    mesh = mesh_of(AxisType.Auto)

    @jax.jit
    def call(*operands):
        return dot_product_attention(
            *(
                jax.lax.with_sharding_constraint(x[:3], NamedSharding(mesh, ON_BOTH))
                for x in operands
            )
        )

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"3, cannot be divided by 4.*; pad it"):
        call.lower(*projections()).compile()


def test_groups_that_propagation_would_cut():
    mesh = mesh_of(AxisType.Auto)
    query, key, value = projections()
    call = jax.jit(lambda query, key, value: dot_product_attention(query, 2 * key, 2 * value))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"whole groups of heads.*repeat"):
        call.lower(put(mesh, query, None, None, "data"), key, value).compile()


def test_shard_map_over_some_axes(assert_close):
    mesh = mesh_of(AxisType.Auto)
    operands = projections()
    over_data = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.raises(ValueError, match=r"left to the compiler over \['tensor'\].*axis_names"):
        jax.jit(over_data(dot_product_attention)).lower(*operands)

    heads = P(None, None, "tensor")
    nested = jax.shard_map(
        dot_product_attention, in_specs=heads, out_specs=heads, axis_names={"tensor"}
    )
    assert_close(jax.jit(over_data(nested))(*operands), dot_product_attention(*operands))


# --- programs and caches -------------------------------------------------------------------------


def lowered_for_cuda(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def cuda_program(monkeypatch):
    """Lowers attention for CUDA, sharded, with kernels that were not compiled."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80")
    fake = compiler.Compiled(b"", (), (), (), "", 0.0, True)
    monkeypatch.setattr(compiler, "compile", lambda spec, arch: fake)

    def program(axis_type, dtype=jnp.bfloat16, **arguments):
        jax.clear_caches()
        mesh = mesh_of(axis_type)
        operands = [put(mesh, jnp.zeros((B, T, N, 64), dtype), *ON_BOTH)] * 3
        return lowered_for_cuda(functools.partial(dot_product_attention, **arguments), *operands)

    return program


def test_explicit_programs_hold_the_kernel_of_local_shapes(cuda_program):
    text = cuda_program(AxisType.Explicit)
    assert "CustomSPMDPartitioning" not in text  # so that JAX's cache and export work
    assert re.search(r"custom_call @jax_memeff_forward.*tensor<1x16x2x64xbf16>", text)
    assert text == cuda_program(AxisType.Explicit)


def digest(text):
    (found,) = re.findall(r'jax_memeff_digest = "(\w+)"', text)
    return found


def test_partitioned_programs_carry_a_digest_of_all_they_depend_on(cuda_program, monkeypatch):
    program = functools.partial(cuda_program, AxisType.Auto)
    first = digest(program())
    assert digest(program()) == first
    others = {
        digest(program(scale=0.5)),
        digest(program(local_window_size=5)),
        digest(program(local_window_size=6)),
    }
    key = compiler.key
    monkeypatch.setattr(compiler, "key", lambda spec, arch: key(spec, arch) + "another header")
    others.add(digest(program()))
    monkeypatch.setattr(partitioning, "_python_digest", lambda: b"another module")
    others.add(digest(program()))
    assert len(others - {first}) == 5


def test_errors_of_kernels_keep_their_type(cuda_program):
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        with jax.enable_x64(True), pytest.raises(UnsupportedError, match="float64 has no kernel"):
            cuda_program(axis_type, jnp.float64)
        with pytest.raises(UnsupportedError, match="needs a CUDA device"):
            jax.jit(functools.partial(dot_product_attention, implementation="cuda")).lower(
                *(put(mesh_of(axis_type), x, *ON_BOTH) for x in projections())
            )


def test_explicit_programs_can_be_exported(assert_close):
    operands = projections()
    sharded = [put(mesh_of(AxisType.Explicit), array, *ON_BOTH) for array in operands]
    exported = jax.export.export(jax.jit(dot_product_attention))(*sharded)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.nr_devices == 8
    assert_close(jax.jit(loaded.call)(*sharded), dot_product_attention(*operands))


def test_saved_results_are_not_computed_again():
    mesh = mesh_of(AxisType.Explicit)
    operands = [put(mesh, array, *ON_BOTH) for array in projections()]
    policy = jax.checkpoint_policies.save_only_these_names("jax_memeff_out", "jax_memeff_lse")
    saved = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(*operands)
    assert str(saved).count("attention_fwd[") == 1
    again = jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(*operands)
    assert str(again).count("attention_fwd[") == 2
