"""The custom call at run time, on a GPU: graphs, threads, devices, processes, caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff

pytestmark = pytest.mark.gpu

CAPTURE = (
    "--xla_gpu_graph_min_graph_size=1 "
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUDNN,CUSTOM_CALL,WHILE"
)


def attention(query, key, value):
    return jax_memeff.dot_product_attention(query, key, value, is_causal=True)


def loss(query, key, value):
    return jnp.sum(attention(query, key, value).astype(jnp.float32) ** 2)


def draw(seed=0, B=2, T=300, N=4, H=64):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, (B, T, N, H), jnp.bfloat16) for key in keys]


def run_python(program, **environment):
    """Runs a program in a fresh process and parses its last line, JSON."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_compiled_program_holds_our_calls():
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*draw()).compile().as_text()
    assert text is not None
    assert 'custom_call_target="jax_memeff_forward"' in text
    assert 'custom_call_target="jax_memeff_backward"' in text


def test_many_threads():
    """Several threads that compile and run at once get the results of one thread."""
    operands = draw()
    expected = jax.jit(attention)(*operands)

    def work(i):
        function = jax.jit(lambda q, k, v: attention(q, k, v) + 0 * i)
        for _ in range(20):
            out = function(*operands)
        return out

    with ThreadPoolExecutor(8) as pool:
        for out in pool.map(work, range(8)):
            assert jnp.array_equal(out, expected)


def test_every_device():
    operands = draw()
    expected = jax.jit(attention)(*operands)
    for device in jax.devices():
        out = jax.jit(attention)(*jax.device_put(operands, device))
        assert out.devices() == {device}
        assert np.array_equal(np.asarray(out), np.asarray(expected))


def test_command_buffers():
    """Captured into a CUDA graph and replayed with new data, results equal those of launches."""
    program = """
        import json, jax, jax.numpy as jnp, jax_memeff

        def loss(x, w):
            def layer(x, w):
                h = jax_memeff.dot_product_attention(x * w, x, x, is_causal=True)
                return h + x, None
            return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32))

        step = jax.jit(jax.value_and_grad(loss))
        sums = []
        for seed in range(4):
            x = jax.random.normal(jax.random.key(seed), (2, 200, 4, 64), jnp.bfloat16)
            value, grad = step(x, jnp.linspace(0.5, 1, 5, dtype=jnp.bfloat16))
            sums += [float(value), float(jnp.sum(grad.astype(jnp.float32)))]
        print(json.dumps(sums))
    """
    captured = run_python(program, XLA_FLAGS=CAPTURE)
    plain = run_python(program, XLA_FLAGS="--xla_gpu_enable_command_buffer=")
    np.testing.assert_allclose(captured, plain, rtol=2e-2)


@pytest.mark.parametrize("archs", ["compute_80", "sm_80,compute_80,compute_86"])
def test_ptx_runs_on_later_devices(archs):
    """The driver compiles the PTX of the nearest architecture."""
    program = """
        import json, jax, jax.numpy as jnp, jax_memeff
        x = jax.random.normal(jax.random.key(0), (2, 300, 4, 64), jnp.bfloat16)
        f = lambda x: jax_memeff.dot_product_attention(x, x, x, is_causal=True)
        loss = lambda x: jnp.sum(f(x).astype(jnp.float32) ** 2)
        value, grad = jax.jit(jax.value_and_grad(loss))(x)
        print(json.dumps([float(value), float(jnp.sum(jnp.abs(grad.astype(jnp.float32))))]))
    """
    expected = run_python(program)
    assert run_python(program, JAX_MEMEFF_ARCHS=archs) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(4, 200, 200), (1, 1, 200), (2, 1, 200, 200)], ids=str)
def test_sums_start_at_zero_in_command_buffers(shape, deterministic):
    """Hazard: the workspaces of a replay hold the values of the previous replay."""
    program = f"""
        import json, jax, jax.numpy as jnp, jax_memeff

        def loss(bias, x, w):
            def layer(x, w):
                h = jax_memeff.dot_product_attention(
                    x * w, x, x, bias, deterministic_backward={deterministic})
                return h + x, None
            return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2)

        step = jax.jit(jax.grad(loss, (0, 1)))
        norms = []
        for seed in range(4):
            keys = jax.random.split(jax.random.key(seed))
            bias = jax.random.normal(keys[0], {shape}, jnp.bfloat16)
            x = jax.random.normal(keys[1], (2, 200, 4, 64), jnp.bfloat16)
            gradients = step(bias, x, jnp.linspace(0.5, 1, 5, dtype=jnp.bfloat16))
            norms += [float(jnp.linalg.norm(g.astype(jnp.float32))) for g in gradients]
        print(json.dumps(norms))
    """
    captured = run_python(program, XLA_FLAGS=CAPTURE)
    plain = run_python(program, XLA_FLAGS="--xla_gpu_enable_command_buffer=")
    np.testing.assert_allclose(captured, plain, rtol=1e-2)


def test_a_second_process_compiles_nothing(tmp_path):
    """It takes the kernels from our cache and the program from JAX's persistent cache."""
    program = """
        import json, time, jax, jax.numpy as jnp
        from jax._src import monitoring
        events = []
        monitoring.register_event_listener(lambda event, **_: events.append(event))
        import jax_memeff
        from jax_memeff.codegen.toolchain import nvrtc
        compiled, real = [], nvrtc.compile
        nvrtc.compile = lambda *a: compiled.append(1) or real(*a)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        x = jnp.ones((2, 128, 4, 64), jnp.bfloat16)
        f = lambda x: jax_memeff.dot_product_attention(x, x, x).astype(jnp.float32).sum()
        step = jax.jit(jax.grad(f))
        start = time.perf_counter()
        lowered = step.lower(x)
        seconds = time.perf_counter() - start
        events.clear()
        jax.block_until_ready(lowered.compile()(x))
        hits = events.count("/jax/compilation_cache/cache_hits")
        print(json.dumps({"compiled": len(compiled), "hits": hits, "seconds": seconds}))
    """
    environment = {
        "JAX_MEMEFF_CACHE_DIR": str(tmp_path / "kernels"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
    }
    cold = run_python(program, **environment)
    warm = run_python(program, **environment)
    assert cold["compiled"] == 2 and cold["seconds"] <= 20
    assert warm["compiled"] == 0 and warm["hits"] == 1


def test_export_runs_in_another_process(tmp_path):
    """The exported program carries its kernels: the reader needs no compiler and no cache."""
    operands = draw()
    exported = jax.export.export(
        jax.jit(attention),
        disabled_checks=jax_memeff.export_disabled_checks(),
    )(*operands)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "operands.npz", *[np.asarray(x, np.float32) for x in operands])
    program = f"""
        import json, jax, numpy as np, jax.numpy as jnp
        import jax_memeff
        from jax_memeff.codegen.toolchain import compile as compiler
        compiler.compile = None
        jax_memeff.register_targets()
        program = jax.export.deserialize(open({str(tmp_path / "program")!r}, "rb").read())
        arrays = np.load({str(tmp_path / "operands.npz")!r})
        out = program.call(*[jnp.asarray(arrays[name], jnp.bfloat16) for name in arrays.files])
        print(json.dumps(float(jnp.sum(jnp.abs(out.astype(jnp.float32))))))
    """
    expected = float(jnp.sum(jnp.abs(attention(*operands).astype(jnp.float32))))
    assert run_python(program) == pytest.approx(expected, rel=1e-6)
