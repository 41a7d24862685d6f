"""The host library passes arrays of a feature to its kernel in a table.

A toy kernel plays a feature: it adds ``sinks[b, n]``, which a vmap broadcasts, to ``totals``.
"""

from __future__ import annotations

import os
import types
from typing import Any

import emulator
import jax
import jax.numpy as jnp
import numpy as np
from emulator import build
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_memeff._cuda import custom_call
from jax_memeff._cuda.buffers import Buffer
from jax_memeff.codegen import emit
from jax_memeff.codegen.launch import CapturedArray, EntryPoint, Grid
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import select
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Sizes

B, T, N, H = 6, 5, 4, 8
ELEMENTS, DIVISOR = 2, 3

SOURCE = """
#include <memeff/core/common.cuh>

struct Config {
  static constexpr bool kBroadcastBatch = true;
  static constexpr int kSinksArray = 0;
  static constexpr int kTotalsArray = 1;
};

CUTE_DEVICE void add_sinks(memeff::ForwardParams const& params) {
  auto const& sinks = memeff::feature_array(params, Config::kSinksArray);
  auto const& totals = memeff::feature_array(params, Config::kTotalsArray);
  long long const batch = blockIdx.x / params.shape.query_heads;
  long long const head = blockIdx.x % params.shape.query_heads;
  long long const own = memeff::element_of<Config>(sinks, int(batch)) * sinks.strides[0];
  float const sink = static_cast<float const*>(sinks.data)[own + head * sinks.strides[1]];
  static_cast<float*>(totals.data)[batch * totals.strides[0] + head * totals.strides[1]] +=
      sink + 100 * float(sinks.sizes[1]);
}

extern "C" __global__ void toy(
    const __grid_constant__ memeff::WithArrays<memeff::ForwardParams> params) {
  if (threadIdx.x == 0) add_sinks(params);
}
EMULATOR_KERNEL(toy)
"""
SINKS = CapturedArray("sinks")
TOTALS = CapturedArray("totals", zeroed=True)


def toy_spec() -> Any:
    return types.SimpleNamespace(
        kernel=types.SimpleNamespace(workspaces=lambda spec, sizes, multiprocessors: ()),
        tile=types.SimpleNamespace(query=T, key=T, blocks_per_sm=1),
        alignment=4,
        entry_points=(EntryPoint("toy", 32, 0, Grid(lambda sizes: sizes.batch * sizes.heads)),),
        tensor_maps=(),
        captured_arrays=(SINKS, TOTALS),
        params_fields=(),
    )


def toy_attributes(code: bytes, operands: list[Buffer], results: list[Buffer]) -> dict[str, Any]:
    sizes = Sizes(batch=B, queries=T, keys=T, heads=N, key_heads=N, head_dim=H, value_dim=H)
    names = custom_call.names_of([*operands, *results])
    kernel = custom_call.kernel_attributes(toy_spec(), "sm_80", code, names, sizes, ())
    found = {
        "direction": "forward",
        **custom_call.buffer_attributes(operands, results, {"sinks": DIVISOR}),
        "sizes": np.array([B, T, T, N, N, H, H, 0, 0], np.int32),
        "scale": np.ones(4, np.float32),
        "windows": np.full(4, custom_call.UNBOUNDED, np.int32),
        "bias_alignment": np.int32(1),
    }
    return custom_call.sealed(found, {"sm_80": kernel})


def run_toy(sinks_dtype: str = "float32") -> Any:
    """Runs in the process of ``machine``. Returns the totals, or the text of an error."""
    emulator.configure("sm_80")
    library = build.kernel_library("toy", SOURCE)
    shape = ShapedArray((B, T, N, H), jnp.dtype("float32"))
    named = {
        "query": shape,
        "key": shape,
        "value": shape,
        "sinks": ShapedArray((ELEMENTS, N), jnp.dtype(sinks_dtype)),
    }
    results = {
        "out": shape,
        "logsumexp": ShapedArray((B, T, N), jnp.dtype("float32")),
        "totals": ShapedArray((B, N), jnp.dtype("float32")),
    }
    operands = [Buffer(name, aval) for name, aval in named.items()]
    outs = [Buffer(name, aval) for name, aval in results.items()]
    found = toy_attributes(os.fsencode(library), operands, outs)
    # ``jax.ffi.ffi_call`` takes no arrays in dictionaries of dictionaries.
    toy = Primitive("toy")
    toy.multiple_results = True
    toy.def_abstract_eval(lambda *_: list(results.values()))
    lowering = jax.ffi.ffi_lowering("jax_memeff_forward")
    mlir.register_lowering(toy, lambda ctx, *arrays: lowering(ctx, *arrays, **found))
    values = [jnp.zeros(shape.shape)] * 3 + [jnp.arange(ELEMENTS * N, dtype="float32")]
    values[3] = values[3].reshape(ELEMENTS, N)
    try:
        return np.asarray(jax.jit(toy.bind)(*values)[2])
    except Exception as error:  # XLA's errors have several types and cannot be pickled
        return str(error)


def test_a_table_passes_arrays_that_the_host_library_does_not_know(machine):
    totals = machine.submit(run_toy).result()
    sinks = np.arange(ELEMENTS * N, dtype=np.float32).reshape(ELEMENTS, N)
    own = np.arange(B) // DIVISOR % ELEMENTS
    # Results begin as NaN, so the sum also shows that they were zeroed.
    np.testing.assert_array_equal(totals, sinks[own] + 100 * N)


def test_types_of_captured_arrays_are_checked(machine):
    error = machine.submit(run_toy, "int32").result()
    assert "operand sinks: expected s32[2,4], got f32[2,4]" in error


def test_the_source_says_where_the_arrays_are(monkeypatch):
    problem = Problem("forward", "bf16", 64, 64, "sm_80")
    spec = select(problem)
    plain = emit.source(spec)
    monkeypatch.setattr(KernelSpec, "captured_arrays", (SINKS, TOTALS))
    source = emit.source(spec)
    assert "kSinksArray = 0;" in source and "kTotalsArray = 1;" in source
    assert "(const __grid_constant__ memeff::WithArrays<memeff::ForwardParams> params) {" in source
    assert "Array" not in plain
