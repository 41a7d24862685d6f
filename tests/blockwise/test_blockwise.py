"""The blockwise path against the oracle: every feature, dtype and size, forward and backward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from blockwise_case import (
    ALL,
    EVERYTHING,
    UNOPTIMISED,
    Case,
    boolean,
    lengths,
    make,
    run,
    segments,
)

from jax_memeff._blockwise import forward as blockwise
from jax_memeff._blockwise import tiles as blockwise_tiles
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import Operands

CASES = {
    "plain": Case(),
    "without_dlse": Case(dlse=False),
    "causal": Case(mask=lambda c, r: Mask.causal()),
    "causal_bottom_right_tall": Case(T=65, S=37, mask=lambda c, r: Mask.causal("bottom_right")),
    "window": Case(mask=lambda c, r: Mask.window(9, 4)),
    "window_bottom_right": Case(mask=lambda c, r: Mask.window(20, 3, "bottom_right")),
    "lengths": Case(mask=lengths),
    "lengths_bottom_right": Case(
        mask=lambda c, r: lengths(c, r) & Mask.window(8, 0, "bottom_right")
    ),
    "segments": Case(mask=segments),
    "boolean": Case(mask=boolean("B", "N", "T", "S")),
    "boolean_per_head": Case(mask=boolean("N", "", "S")),
    "bias_full": Case(bias=("B", "N", "T", "S")),
    "bias_per_head": Case(bias=("N", "T", "S")),
    "bias_per_key": Case(bias=("B", "", "", "S"), masked_bias=True),
    "bias_per_head_and_key": Case(bias=("N", "", "S")),
    "bias_per_row": Case(bias=("B", "N", "T", ""), masked_bias=True),
    "bias_scalar": Case(bias=()),
    "bias_masked": Case(bias=("B", "", "T", "S"), masked_bias=True),
    "soft_cap": Case(soft_cap=1.5),
    "dropout": Case(rate=0.2),
    "dropout_position": Case(rate=0.2, position=(16, 48), mask=lambda c, r: Mask.window(60, 20)),
    "negative_scale": Case(scale=-0.7),
    "multi_query": Case(N=4, K=1),
    "no_groups": Case(N=3, K=3, H=5, Hv=3),
    "everything": EVERYTHING,
    "everything_in_blocks_of_16": dataclasses.replace(EVERYTHING, T=64, S=32, Hv=8),
}
SIZES = [(1, 1), (3, 65), (63, 1), (64, 63)]
for T, S in SIZES:
    CASES[f"size_{T}_{S}"] = Case(
        B=1, T=T, S=S, N=2, K=1, H=3, Hv=1, bias=("T", "S"), mask=lambda c, r: Mask.causal()
    )
for dtype in ("float16", "bfloat16", "float64"):
    CASES[f"plain_{dtype}"] = Case(dtype=dtype, H=32, Hv=24)
    CASES[f"everything_{dtype}"] = dataclasses.replace(EVERYTHING, dtype=dtype)
CASES["bias_per_key_bfloat16"] = Case(dtype="bfloat16", bias=("S",))
CASES["bias_float32_bfloat16"] = Case(dtype="bfloat16", bias=("T", "S"), bias_dtype="float32")


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_tiles, "LONGEST_BLOCK", 32)
        yield


@pytest.mark.rotating(5)
@pytest.mark.quick("everything", "causal", "size_3_65")
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name):
    case = CASES[name]
    operands, options, dout, dlse = make(case)
    out, lse, gradients = run(operands, options, dout, dlse)
    narrow = out.dtype.itemsize == 2
    assert out.dtype == case.dtype and lse.dtype == (
        np.float64 if case.dtype == "float64" else np.float32
    )

    want = oracle.answer(operands, options, dout, dlse, np.float32 if narrow else np.float64)
    low = oracle.Answer._make([None] * len(oracle.Answer._fields))
    if narrow:
        low = oracle.answer(operands, options, dout, dlse, jnp.dtype(case.dtype))
    oracle.check("lse", lse, want.lse)
    oracle.check("out", out, want.out, low.out)
    for field in ("query", "key", "value"):
        got, operand = getattr(gradients, field), getattr(operands, field)
        assert got.dtype == operand.dtype
        scale = None
        if case.S == 1:
            # With one key the exact gradient of the scores is 0, and the computed one is rounding
            # error.
            scale = np.abs(operand).astype(np.float64)
        oracle.check(f"d{field}", got, getattr(want, field), getattr(low, field), scale=scale)
    if operands.bias is None:
        assert gradients.bias is None
    else:
        assert gradients.bias.dtype == operands.bias.dtype
        scale = want.bias_scale if 1 in operands.bias.shape else None
        oracle.check("dbias", gradients.bias, want.bias, low.bias, scale=scale)


@pytest.mark.parametrize("block", [16, 256])
def test_blocks_do_not_change_the_bits_that_are_dropped(block, monkeypatch):
    operands, options, dout, dlse = make(EVERYTHING)
    want = run(operands, options, dout, dlse)
    monkeypatch.setattr(blockwise_tiles, "LONGEST_BLOCK", block)
    jax.clear_caches()
    got = run(operands, options, dout, dlse)
    jax.clear_caches()
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.rotating(3)
@pytest.mark.quick("S")
@pytest.mark.parametrize("empty", ["B", "T", "S", "Hv", "H", "N"])
def test_zero_sizes(empty):
    sizes: dict[str, Any] = {empty: 0, "K": 0} if empty == "N" else {empty: 0}
    operands, options, dout, dlse = make(Case(bias=("B", "N", "T", "S"), rate=0.2, **sizes))
    out, lse, gradients = run(operands, options, dout, dlse)
    assert out.shape == dout.shape
    if empty == "S":
        assert not out.any() and (np.asarray(lse) == -np.inf).all()
    for got, operand in zip(gradients[:4], operands[:4], strict=True):
        assert got.shape == operand.shape and np.isfinite(got).all()
    if empty in ("H", "Hv"):
        want = oracle.answer(operands, options, dout, dlse)
        oracle.check("lse", lse, want.lse)
        oracle.check("out", out, want.out)
        oracle.check("dbias", gradients.bias, want.bias)


def test_values_beyond_the_lengths_reach_no_result():
    case = dataclasses.replace(
        EVERYTHING, mask=lambda c, r: lengths(c, r) & Mask.window(None, 0, "bottom_right")
    )
    operands, options, dout, dlse = make(case)
    want = run(operands, options, dout, dlse)
    query_lengths, key_lengths = operands.mask.query_lengths, operands.mask.key_lengths
    assert query_lengths is not None and key_lengths is not None
    query, key, value, bias = (np.array(x) for x in operands[:4])
    for b, (rows, cols) in enumerate(zip(query_lengths, key_lengths, strict=True)):
        for array in (query, dout, dlse):
            array[b, rows:] = np.nan
        key[b, cols:] = value[b, cols:] = np.nan
        bias[b, :, rows:] = bias[b, :, :, cols:] = np.nan
    garbage = operands._replace(query=query, key=key, value=value, bias=bias)
    got = run(garbage, options, dout, dlse)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.rotating(3)
@pytest.mark.quick("segments")
@pytest.mark.parametrize("reason", ["boolean", "bias", "segments", "lengths", "window"])
def test_rows_without_keys(reason):
    mask = {
        "boolean": lambda c, r: Mask.boolean(np.arange(c.T)[:, None] >= 5),
        "segments": lambda c, r: Mask.segments(
            np.where(np.arange(c.T) < 5, -1, 0), np.zeros(c.S, int)
        ),
        "lengths": lambda c, r: Mask.lengths(key=np.array([0, 4])),
        "window": lambda c, r: Mask.causal("bottom_right"),
    }.get(reason)
    case = Case(mask=mask, bias=("T", "S") if reason == "bias" else None, T=70)
    operands, options, dout, dlse = make(case)
    if operands.bias is not None:
        np.asarray(operands.bias)[..., :5, :] = -3e38
    valid = oracle.valid_elements(operands.mask, case.B, case.N, case.T, case.S)
    if operands.bias is not None:
        valid = valid & (np.asarray(operands.bias) > -1e37)
    empty = ~np.any(valid, -1)[:, 0]
    assert empty.any()
    # A loss usually has no finite gradient at a logsumexp of -inf, so NaN must not reach anything.
    dlse[empty] = np.nan
    out, lse, gradients = run(operands, options, dout, dlse)
    assert not np.asarray(out)[empty].any()
    assert (np.asarray(lse)[empty] == -np.inf).all() and np.isfinite(np.asarray(lse)[~empty]).all()
    assert not np.asarray(gradients.query)[empty].any()
    dlse[empty] = 0
    want = oracle.answer(operands, options, dout, dlse)
    for field in ("query", "key", "value"):
        oracle.check(f"d{field}", getattr(gradients, field), getattr(want, field))
    # The gradient at the output must be finite, because it is multiplied by probabilities of 0, and
    # 0 * NaN is NaN. Tiles without valid elements are skipped, and so are batch indices without
    # keys.
    nan = np.array(dout)
    nan[0, 2, 0, 1] = np.nan
    spoiled = run(operands, options, nan, dlse)[2]
    for field in ("query", "key", "value"):
        clean, found = (np.array(getattr(x, field)) for x in (gradients, spoiled))
        place = {"query": np.s_[0, 2, 0], "key": np.s_[0, :, 0], "value": np.s_[0, :, 0, 1]}[field]
        assert np.isnan(found[place]).any() == (reason != "lengths")
        found[place] = clean[place]
        np.testing.assert_allclose(found, clean, atol=1e-6)


@jax.jit(static_argnames="options", compiler_options=UNOPTIMISED)
def backward_of_chunk(operands, options, out, lse, dout):
    return blockwise.backward(operands, options, out, lse, dout, None, ALL)


def test_a_chunk_with_its_position_is_a_slice_of_the_whole():
    case = Case(rate=0.4, mask=lambda c, r: Mask.window(25, 6), T=70)
    operands, options, dout, _ = make(case)
    out, lse, gradients = run(operands, options, dout, None)
    for first, last in ((0, 35), (35, 70)):
        position = Position(jnp.int32(first), jnp.int32(0))
        chunk = operands._replace(query=operands.query[:, first:last], position=position)
        got = run(chunk, options, dout[:, first:last], None)
        np.testing.assert_allclose(got[0], out[:, first:last], atol=1e-6)
        np.testing.assert_allclose(got[1], lse[:, first:last], atol=1e-6)
        np.testing.assert_allclose(got[2].query, gradients.query[:, first:last], atol=2e-6)

    # Chunks of keys, as in ring attention: their backwards take out and lse of the whole.
    dkeys = []
    for first, last in ((0, 16), (16, 65)):
        position = Position(jnp.int32(0), jnp.int32(first))
        keys, values = operands.key[:, first:last], operands.value[:, first:last]
        chunk = operands._replace(key=keys, value=values, position=position)
        dkeys.append(backward_of_chunk(chunk, options, out, lse, dout).key)
    np.testing.assert_allclose(np.concatenate(dkeys, 1), gradients.key, atol=2e-6)


@pytest.mark.quick
def test_skipped_tiles_are_not_computed():
    operands, options, _, _ = make(Case(mask=lambda c, r: Mask.causal(), T=64, S=64))
    # Keys of tiles above the diagonal are NaN, so computing such a tile would give NaN.
    key = np.array(operands.key)
    key[:, 32:] = np.nan
    out, _ = blockwise.forward(operands._replace(key=key), options)
    assert np.isfinite(out[:, :32]).all()


def test_derivatives_of_the_forward_itself():
    """Forward mode and reverse mode through a single tile agree with the backward."""
    operands, options, dout, dlse = make(dataclasses.replace(EVERYTHING, T=20, S=20, B=2))
    operands = operands._replace(mask=Mask.causal())
    _, lse, gradients = run(operands, options, dout, dlse)

    def f(*arrays):
        return blockwise.forward(Operands._make((*arrays, *operands[4:])), options)

    arrays = tuple(jnp.asarray(x) for x in operands[:4])
    cotangents = (jnp.asarray(dout), jnp.where(jnp.isneginf(lse), 0, dlse))
    transposed = jax.jit(
        lambda arrays: jax.vjp(f, *arrays)[1](cotangents), compiler_options=UNOPTIMISED
    )(arrays)
    gradients = gradients[:4]  # there are no sinks
    for got, want in zip(transposed, gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    tangents = tuple(jnp.where(jnp.isneginf(x), 0, jnp.cos(x)) for x in arrays)
    tangent_out, tangent_lse = jax.jit(
        lambda *args: jax.jvp(f, *args)[1], compiler_options=UNOPTIMISED
    )(arrays, tangents)
    np.testing.assert_allclose(
        jnp.vdot(tangent_out, dout) + jnp.vdot(tangent_lse, cotangents[1]),
        sum(jnp.vdot(a, b) for a, b in zip(gradients, tangents, strict=True)),
        rtol=1e-4,
    )


def test_inside_shard_map():
    operands, options, dout, dlse = make(dataclasses.replace(EVERYTHING, N=2))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    per_batch = jax.sharding.PartitionSpec("data")
    everywhere = jax.sharding.PartitionSpec()
    specs = jax.tree.map(lambda x: per_batch, operands)
    assert specs.dropout is not None
    specs = specs._replace(
        dropout=specs.dropout._replace(head_index=everywhere),
        mask=dataclasses.replace(specs.mask, booleans=(everywhere,)),
    )

    @jax.jit(compiler_options=UNOPTIMISED)
    @jax.shard_map(mesh=mesh, in_specs=(specs, per_batch, per_batch), out_specs=per_batch)
    def sharded(operands, dout, dlse):
        out, lse = blockwise.forward(operands, options)
        return out, lse, blockwise.backward(operands, options, out, lse, dout, dlse, ALL)

    want = run(operands, options, dout, dlse)
    got = sharded(operands, dout, dlse)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
