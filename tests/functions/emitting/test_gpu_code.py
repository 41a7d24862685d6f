"""Sources of programs, compiled by NVRTC, which needs no GPU."""

from __future__ import annotations

import pytest
from example_programs import SOURCES, TABLE
from random_programs import programs

from jax_memeff.codegen.functions import emit
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import nvrtc

pytest.importorskip("cuda.core", reason="needs the cuda13 or nvrtc extra")

MOST_ARRAYS = 4

HEADER = (
    emit.INCLUDES
    + """
struct Config {
  static constexpr bool kBroadcastBatch = true;
};

struct Given {
  memeff::ArrayView arrays[4];
  unsigned const* literals;
  float* results;
  int const* sizes;  // batches, heads
};

// Each thread has a row, and loops over columns, as in a kernel.
template <class Function, bool kDerivatives, bool kMask>
CUTE_DEVICE void evaluate(Given const& given) {
  using namespace memeff::function;
  int const batch = blockIdx.x % given.sizes[0], head = blockIdx.x / given.sizes[0];
  FunctionArrays<Config> const arrays{given.arrays, given.literals, batch};
  auto const of_head = Function::of_head(arrays, batch, head);
  int const query = threadIdx.x;
  if constexpr (kMask) {
    auto const valid =
        Function::range(arrays, batch, {head, head + 1}, {query, query + 3}, {query, query + 15});
    given.results[8192 + query] = valid.low + valid.high;
  }
  auto const of_row = Function::of_row(arrays, of_head, query);
  for (int key = 0; key < 16; ++key) {
    auto const of_column = Function::of_column(arrays, of_head, key);
    float& score = given.results[query * 16 + key];
    auto const value = Function::value(arrays, of_head, of_row, of_column, score, query, key);
    if constexpr (kDerivatives) {
      float sum = Function::derivative(arrays, of_head, of_row, of_column, score, query, key);
      if constexpr (Function::kFloatReads > 0) {
        float derivatives[Function::kFloatReads];
        long long offsets[Function::kFloatReads];
        Function::read_derivatives(arrays, of_head, of_row, of_column, score, query, key,
                                   derivatives);
        Function::read_offsets(arrays, of_head, of_row, of_column, score, query, key, offsets);
        CUTE_UNROLL
        for (int i = 0; i < Function::kFloatReads; ++i) sum += derivatives[i] * offsets[i];
      }
      given.results[4096 + query * 16 + key] = sum;
    }
    score = value;
  }
}
"""
)

KERNEL = """
extern "C" __global__ void {name}(const __grid_constant__ Given given) {{
  evaluate<memeff::function::{struct}, {derivatives}, {mask}>(given);
}}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_functions_need_no_local_memory(arch):
    """They have no spills, local arrays or stack: all arrays are indexed by constants."""
    cases = [program for program, _ in SOURCES.values()] + programs(12, seed=7)
    text, names = HEADER, []
    for number, program in enumerate(cases):
        struct, name = f"Program{number}", f"program_{number}"
        assert len(program.arrays) <= MOST_ARRAYS
        text += emit.source(program, struct, precise=number % 2 == 0)
        derivatives = str(len(program.results) > 1).lower()
        mask = str(program.values[program.results[0]].dtype == "bool").lower()
        text += KERNEL.format(name=name, struct=struct, derivatives=derivatives, mask=mask)
        names.append(name)
    compiled = compiler.compile_source(text, arch, names)
    assert len(compiled.resources) == len(names)
    assert compiled.log.count(" bytes stack frame") == len(names)
    assert compiled.log.count(" 0 bytes stack frame, 0 bytes spill stores") == len(names)


STAGED = """
struct Staged : memeff::function::FunctionArrays<Config> {
  template <int kRead>
  CUTE_DEVICE float read(float) const {
    return 0.5f;
  }
};

extern "C" __global__ void staged(const __grid_constant__ Given given) {
  using Function = memeff::function::Program;
  memeff::function::FunctionArrays<Config> const arrays{given.arrays, given.literals, 0};
  auto const of_head = Function::of_head(arrays, 0, blockIdx.x);
  auto const of_row = Function::of_row(arrays, of_head, threadIdx.x);
  auto const of_column = Function::of_column(arrays, of_head, threadIdx.y);
  Staged const elements{arrays};
  float& score = given.results[threadIdx.x];
  score = Function::value(elements, of_head, of_row, of_column, score, threadIdx.x, threadIdx.y);
}
"""


def test_a_staged_read_loads_nothing():
    """If a kernel has staged a read, its index, address and load are compiled away."""
    source = emit.source(TABLE, "Program", precise=False)
    plain = STAGED.replace("return 0.5f;", "return FunctionArrays::read<kRead>(value);")
    plain = plain.replace("read(float)", "read(float value)")
    loads = []
    for kernel in (STAGED, plain):
        code, _ = nvrtc.compile(HEADER + source + kernel, "compute_80", "staged")
        loads.append(code.decode().count("ld.global.nc.u16"))
    assert loads == [0, 1]
