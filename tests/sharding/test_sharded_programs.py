"""The programs of sharded calls: their kernels, their cache keys, and their export."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from sharding_case import DATA, ON_BOTH, TENSOR, B, H, K, N, T, loss, mesh_of, projections, put

from jax_memeff import UnsupportedError, dot_product_attention
from jax_memeff._blockwise import forward as blockwise
from jax_memeff._sharding import automatic as partitioning
from jax_memeff.codegen.toolchain import compile as compiler

HOST = jax.devices("cpu")[:8]


def lowered_for_cuda(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def cuda_program(monkeypatch):
    """Lowers sharded attention for CUDA without compiling kernels."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80")
    fake = compiler.Compiled(b"", (), (), (), "", 0.0, True)
    monkeypatch.setattr(compiler, "compile", lambda spec, arch: fake)

    def program(axis_type, dtype=jnp.bfloat16, **arguments):
        jax.clear_caches()
        mesh = mesh_of(axis_type, HOST)
        operands = [put(mesh, jnp.zeros((B, T, N, 64), dtype), *ON_BOTH)] * 3
        return lowered_for_cuda(functools.partial(dot_product_attention, **arguments), *operands)

    return program


def test_explicit_programs_hold_the_kernel_of_local_shapes(cuda_program):
    text = cuda_program(AxisType.Explicit)
    assert "CustomSPMDPartitioning" not in text  # so that JAX's cache and export work
    assert re.search(r"custom_call @jax_memeff_forward.*tensor<1x16x2x64xbf16>", text)
    assert text == cuda_program(AxisType.Explicit)


def test_only_automatic_sharding_uses_a_partitioning_rule():
    """A single device needs no rule, and neither does a call inside ``shard_map``."""
    operands = projections()
    sharded = [put(mesh_of(AxisType.Auto, HOST), x, *ON_BOTH) for x in operands]
    local = jax.shard_map(
        dot_product_attention,
        mesh=mesh_of(AxisType.Auto, HOST),
        in_specs=ON_BOTH,
        out_specs=ON_BOTH,
    )
    programs = ((dot_product_attention, operands), (local, sharded))
    for function, arrays in (*programs, (dot_product_attention, sharded)):
        text = jax.jit(function).lower(*arrays).as_text()
        is_two_kernel = function is dot_product_attention and arrays is sharded
        assert ("CustomSPMDPartitioning" in text) == is_two_kernel


def test_automatic_sharding_lowers_for_local_shapes(monkeypatch):
    """Kernels are chosen for the shapes of one device."""
    shapes, forward = [], blockwise.forward

    def recorded(operands, options):
        shapes.append((operands.query.shape, operands.key.shape))
        return forward(operands, options)

    monkeypatch.setattr(blockwise, "forward", recorded)
    jax.clear_caches()
    operands = [put(mesh_of(AxisType.Auto, HOST), x, *ON_BOTH) for x in projections()]
    jax.jit(dot_product_attention).lower(*operands).compile()
    batch = B // DATA
    assert shapes == [((batch, T, N // TENSOR, H), (batch, T, K // TENSOR, H))]


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
                *(put(mesh_of(axis_type, HOST), x, *ON_BOTH) for x in projections())
            )


def test_explicit_programs_can_be_exported(assert_close):
    operands = projections()
    sharded = [put(mesh_of(AxisType.Explicit, HOST), array, *ON_BOTH) for array in operands]
    exported = jax.export.export(jax.jit(dot_product_attention))(*sharded)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.nr_devices == 8
    assert_close(jax.jit(loaded.call)(*sharded), dot_product_attention(*operands))


def test_saved_results_are_not_computed_again():
    mesh = mesh_of(AxisType.Explicit, HOST)
    operands = [put(mesh, array, *ON_BOTH) for array in projections()]
    policy = jax.checkpoint_policies.save_only_these_names("jax_memeff_out", "jax_memeff_lse")
    saved = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(*operands)
    assert str(saved).count("attention_fwd[") == 1
    again = jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(*operands)
    assert str(again).count("attention_fwd[") == 2


def test_partitioned_programs_have_no_stack_frames():
    """XLA looks them up in the table of the call's module, and may loop forever."""
    sharded = [put(mesh_of(AxisType.Auto, HOST), x, *ON_BOTH) for x in projections()]
    config: Any = jax.config
    limit = "jax_traceback_in_locations_limit"
    before = getattr(config, limit)  # 0 in tests: no frames at all
    config.update(limit, 10)
    try:
        text = jax.jit(dot_product_attention).lower(*sharded).compile().as_text() or ""
    finally:
        config.update(limit, before)
    program = "tmp_xla_computation|custom_partitioning"
    of_program = rf'op_name="[^"]*(?:{program})[^"]*" stack_frame_id=(\d+)'
    assert len(set(re.findall(of_program, text))) == 1  # that of the call
