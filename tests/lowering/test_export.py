"""Exported programs, on a machine without a GPU."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, UnsupportedError
from jax_memeff.flax import attention_fn

B, T, S, N, K, H = 3, 20, 24, 4, 2, 8
ATTENTION: Any = jax_memeff.dot_product_attention
VARLEN: Any = jax_memeff.varlen_attention
DIAGONALS = Mask.function(lambda b, h, q, k: (q + k + b) % 3 > 0)


@pytest.fixture(autouse=True)
def _archs(monkeypatch):
    jax.clear_caches()  # jax caches lowered programs, maybe for the architectures of another test
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_90a")


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def draw(struct, sizes: dict[str, int], seed: int):
    """Random values of a shape, with numbers for its symbolic sizes."""
    dims = [sizes[str(size)] if str(size) in sizes else int(size) for size in struct.shape]
    if struct.dtype == jnp.int32:
        return jax.random.randint(jax.random.key(seed), dims, 1, T)
    return jax.random.normal(jax.random.key(seed), dims, struct.dtype)


def export(function, *operands, platforms=("cpu",), **settings):
    return jax.export.export(jax.jit(function), platforms=platforms, **settings)(*operands)


def gradients(function, *argnums):
    """The gradients of a sum that weighs every element differently."""

    def scalar(*operands):
        out = function(*operands)
        return jnp.vdot(out, jnp.cos(jnp.arange(out.shape[-1]) + 0 * out))

    return jax.grad(scalar, argnums)


# ------------------------------------------------------------------------- another process


def test_a_fresh_process_runs_what_was_exported(tmp_path, fake_compiler):
    """One program has only the blockwise path, the other also has kernels for CUDA."""
    function = gradients(functools.partial(ATTENTION, is_causal=True), 0, 1, 2)
    operands = [shape(B, T, heads, H, dtype=jnp.bfloat16) for heads in (N, K, K)]
    portable = export(function, *operands)
    both = export(
        function,
        *operands,
        platforms=("cpu", "cuda"),
        disabled_checks=jax_memeff.export_disabled_checks(),
    )
    assert both.mlir_module().count("custom_call @jax_memeff_") == 2
    assert portable.mlir_module().count("custom_call") == 0
    (tmp_path / "portable").write_bytes(portable.serialize())
    (tmp_path / "both").write_bytes(both.serialize())
    inputs = [draw(operand, {}, seed) for seed, operand in enumerate(operands)]
    np.savez(tmp_path / "inputs.npz", *[np.asarray(x, np.float32) for x in inputs])
    # The first program needs only jax; the second needs its custom calls to be registered.
    program = """
        import sys, jax, numpy as np
        from pathlib import Path
        folder = Path(sys.argv[1])
        inputs = [x.astype("bfloat16") for x in np.load(folder / "inputs.npz").values()]
        first = jax.export.deserialize((folder / "portable").read_bytes()).call(*inputs)
        assert "jax_memeff" not in sys.modules
        import jax_memeff
        jax_memeff.register_targets()
        second = jax.export.deserialize((folder / "both").read_bytes()).call(*inputs)
        results = [np.asarray(x, np.float32) for x in (*first, *second)]
        np.savez(folder / "results.npz", *results)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    results = list(np.load(tmp_path / "results.npz").values())
    expected = [np.asarray(x, np.float32) for x in jax.jit(function)(*inputs)]
    for got, want in zip(results, expected * 2, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_kernels_of_every_architecture_are_in_the_program(fake_compiler):
    operand = shape(B, 128, N, 64, dtype=jnp.bfloat16)
    exported = export(
        gradients(ATTENTION, 0),
        operand,
        operand,
        operand,
        platforms=("cuda",),
        disabled_checks=jax_memeff.export_disabled_checks(),
    )
    program = jax.export.deserialize(exported.serialize())
    assert program.platforms == ("cuda",)
    text = program.mlir_module()
    assert text.count('archs = "sm_80,sm_90a"') == 2
    for call in ("jax_memeff_forward", "jax_memeff_backward"):
        assert f"custom_call @{call}" in text


def gradients_and_tangents(*arrays):
    with jax_memeff.forward_mode():
        return gradients(ATTENTION, 0)(*arrays), jax.jvp(ATTENTION, arrays, arrays)


def test_jax_requires_every_custom_call_to_be_acknowledged(fake_compiler, monkeypatch):
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")  # the only one with a kernel for tangents
    operand = shape(B, 128, N, 64, dtype=jnp.bfloat16)
    for check in jax_memeff.export_disabled_checks():
        others = [x for x in jax_memeff.export_disabled_checks() if x != check]
        with pytest.raises(ValueError, match=check.is_custom_call() or "a custom call"):
            export(
                gradients_and_tangents,
                operand,
                operand,
                operand,
                platforms=("cuda",),
                disabled_checks=others,
            )


# --------------------------------------------------------------------------- symbolic sizes


def everything(query, key, value, bias, lengths):
    mask = Mask.lengths(key=lengths) & Mask.causal("bottom_right")
    attention = functools.partial(ATTENTION, mask=mask)
    return gradients(attention, 0, 1, 2, 3)(query, key, value, bias)


def dropped(query, key, value):
    return ATTENTION(query, key, value, dropout_rate=0.5, dropout_key=jax.random.key(7))


def packed(query, key, value, starts):
    return VARLEN(query, key, value, starts, starts, 20, 20, is_causal=True)


def symbolic_operands(*extra: tuple[str, Any]):
    scope = jax.export.SymbolicScope()
    dtype = jnp.float32
    named = [(f"b, {T}, {N}, {H}", dtype), *[(f"b, {S}, {K}, {H}", dtype)] * 2, *extra]
    return [shape(*jax.export.symbolic_shape(text, scope=scope), dtype=d) for text, d in named]


def assert_same_results(program, function, *inputs):
    def run(f):
        return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*inputs)

    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(compare, run(program.call), run(function))


def test_symbolic_batch():
    operands = symbolic_operands((f"b, {N}, {T}, {S}", jnp.float32), ("b", jnp.int32))
    program = jax.export.deserialize(export(everything, *operands).serialize())
    inputs = [draw(operand, {"b": 3}, seed) for seed, operand in enumerate(operands)]
    assert_same_results(program, everything, *inputs)


def test_symbolic_batch_with_dropout():
    operands = symbolic_operands()
    inputs = [draw(operand, {"b": 2}, seed) for seed, operand in enumerate(operands)]
    assert_same_results(export(dropped, *operands), dropped, *inputs)


def test_symbolic_number_of_tokens_and_sequences():
    tokens, sequences = jax.export.symbolic_shape("t, n")
    operand = shape(tokens, N, H)
    program = export(packed, *[operand] * 3, shape(sequences + 1, dtype=jnp.int32))
    inputs = [draw(operand, {"t": 45}, seed) for seed in range(3)]
    inputs.append(jnp.array([3, 20, 22, 22, 41], jnp.int32))
    assert_same_results(program, packed, *inputs)


def test_a_symbolic_number_of_sequences_that_may_be_zero_is_an_error():
    tokens, starts = jax.export.symbolic_shape("t, n")
    operand = shape(tokens, N, H)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must have at least 2 .* pass n \+ 1, or"):
        export(packed, *[operand] * 3, shape(starts, dtype=jnp.int32))


def test_symbolic_batch_with_an_offset_for_each_index():
    def shifted(query, key, value, first):
        offsets = jax_memeff.Offsets(query=first)
        return ATTENTION(query, key, value, is_causal=True, offsets=offsets)

    operands = symbolic_operands(("b", jnp.int32))
    inputs = [draw(operand, {"b": 2}, seed) for seed, operand in enumerate(operands)]
    assert_same_results(export(shifted, *operands), shifted, *inputs)


def test_symbolic_batch_of_flax():
    operands = symbolic_operands()
    inputs = [draw(operand, {"b": 2}, seed) for seed, operand in enumerate(operands)]
    assert_same_results(export(attention_fn, *operands), attention_fn, *inputs)


@pytest.mark.parametrize("shapes", [("2, t, 4, 8", "2, 9, 4, 8"), ("2, 9, n, 8", "2, 9, n, 8")])
def test_other_symbolic_sizes_are_an_error(shapes):
    scope = jax.export.SymbolicScope()
    query, key = (shape(*jax.export.symbolic_shape(text, scope=scope)) for text in shapes)
    with pytest.raises(UnsupportedError, match="only the batch size may be symbolic") as caught:
        export(ATTENTION, query, key, key)
    assert "one for the longest sequence" in str(caught.value)


@pytest.mark.parametrize("lengths", [jnp.array([5, 6]), np.array([5, 6])], ids=["jax", "numpy"])
def test_lengths_do_not_hide_the_error_of_a_symbolic_length(lengths):
    operand, qkv = (
        shape(*jax.export.symbolic_shape(text)) for text in ("2, t, 4, 8", "2, t, 3, 4, 8")
    )
    packed = functools.partial(
        jax_memeff.dot_product_attention_packed, key_value_seq_lengths=lengths
    )
    padded = functools.partial(ATTENTION, key_value_seq_lengths=lengths)
    for function, operands in ((padded, (operand,) * 3), (packed, (qkv,))):
        with pytest.raises(UnsupportedError, match="only the batch size may be symbolic"):
            export(function, *operands)


def test_block_masks_of_a_symbolic_length_are_an_error():
    operand = shape(*jax.export.symbolic_shape("2, t, 4, 8"))
    with pytest.raises(UnsupportedError, match=r"may be symbolic, .* got scores \[t, t\]"):
        export(
            lambda query: ATTENTION(query, query, query, mask=DIAGONALS.blocks(query, query)),
            operand,
        )


def block_lists(query):
    lists = jnp.zeros((query.shape[0], 1, 3, 1), jnp.int32)
    return Mask.kv_blocks(lists, block_size=8)


@pytest.mark.rotating(2)
@pytest.mark.parametrize("mask", [lambda query: DIAGONALS, block_lists], ids=["function", "lists"])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_block_masks_of_a_symbolic_batch(mask, has_offsets):
    def attention(query):
        offsets = jax_memeff.Offsets(query=jnp.arange(query.shape[0])) if has_offsets else None
        blocks = mask(query).blocks(query, query, offsets)
        return ATTENTION(query, query, query, mask=blocks, offsets=offsets)

    operand = shape(*jax.export.symbolic_shape("b, 20, 4, 8"))
    query = draw(operand, {"b": 3}, 0)
    for function in (attention, gradients(attention, 0)):
        assert_same_results(export(function, operand), function, query)


@pytest.mark.parametrize("starts", [np.array([0, 4, 9]), np.array([0, -4, 9])], ids=str)
def test_starts_of_a_symbolic_number_of_tokens(starts):
    def attention(tokens):
        return VARLEN(tokens, tokens, tokens, starts, starts, 9, 9)

    operand = shape(*jax.export.symbolic_shape("t, 4, 8"))
    if starts[1] < 0:
        with pytest.raises(ValueError, match=r"cu_seqlens_q must be in \[0, t\]"):
            export(attention, operand)
        return
    assert_same_results(export(attention, operand), attention, draw(operand, {"t": 9}, 0))


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_symbolic_head_dim_is_an_error(scale):
    operand = shape(*jax.export.symbolic_shape("2, 9, 4, h"))
    with pytest.raises(UnsupportedError, match="a size is symbolic that must be static"):
        export(functools.partial(ATTENTION, scale=scale), operand, operand, operand)


@pytest.mark.parametrize("function", [jax_memeff.paged_attention, jax_memeff.append_to_pages])
@pytest.mark.parametrize(
    "text",
    ["b, 7, 16, 3, 2", "2, p, 16, 3, 2", "2, 7, s, 3, 2", "2, 7, 16, m, 2", "2, 7, 16, 3, n"],
)
def test_symbolic_sizes_of_paged_calls_are_an_error(function, text):
    scope = jax.export.SymbolicScope()
    b, pages, page_size, max_pages, heads = jax.export.symbolic_shape(text, scope=scope)
    new, pool = shape(b, 1, heads, H), shape(pages, page_size, 2, H)
    table, lengths = shape(b, max_pages, dtype=jnp.int32), shape(b, dtype=jnp.int32)
    arrays = {
        jax_memeff.paged_attention: (new, pool, pool),
        jax_memeff.append_to_pages: (pool, pool, new, new),
    }[function]
    with pytest.raises(UnsupportedError, match="paged calls need static sizes, got ") as caught:
        export(function, *arrays, table, lengths)
    assert "one for the largest" in str(caught.value)


def test_symbolic_sizes_on_cuda_are_an_error():
    (b,) = jax.export.symbolic_shape("b")
    operand = shape(b, 128, N, 64, dtype=jnp.bfloat16)
    settings: Any = {
        "platforms": ("cuda",),
        "disabled_checks": jax_memeff.export_disabled_checks(),
    }
    for function in (ATTENTION, gradients(ATTENTION, 0)):
        with pytest.raises(UnsupportedError, match=r"static sizes, got query \[b, 128, 4, 64\]"):
            export(function, operand, operand, operand, **settings)
    blockwise = functools.partial(ATTENTION, implementation="xla")
    assert export(blockwise, operand, operand, operand, **settings).platforms == ("cuda",)
    tokens = shape(99, N, 64, dtype=jnp.bfloat16)
    with pytest.raises(UnsupportedError, match=r"static sizes, got scores \[b - 1, 4, 20, 20\]"):
        export(packed, tokens, tokens, tokens, shape(b, dtype=jnp.int32), **settings)
