"""Compiles programs by g++ against the emulator's headers and evaluates them at some points."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from emulator import build
from random_programs import VMAP

from jax_memeff.codegen import launch
from jax_memeff.codegen.functions import emit
from jax_memeff.codegen.functions.nodes import Level, graph
from jax_memeff.codegen.functions.program import Program

DIVISOR = 3  # captured arrays have VMAP batch indices, each for three of the call
CALL_BATCH = 4
BATCH_INDEX = CALL_BATCH // DIVISOR % VMAP

POINT = np.dtype([("score", "f4"), ("batch", "i4"), ("head", "i4"), ("query", "i4"), ("key", "i4")])
_DIMS = launch.MOST_DIMS
VIEW = np.dtype(
    [("data", "u8"), ("sizes", "i8", _DIMS), ("strides", "i8", _DIMS), ("share", "u8", 2)]
)

HEADER = (
    emit.INCLUDES
    + """
namespace memeff::function {

struct Config {
  static constexpr bool kBroadcastBatch = true;
};
using Arrays = FunctionArrays<Config>;

struct Point {
  float score;
  int batch, head, query, key;
};

inline unsigned bits(float x) { return __float_as_uint(x); }
inline unsigned bits(int x) { return unsigned(x); }
inline unsigned bits(unsigned x) { return x; }
inline unsigned bits(bool x) { return x; }

template <class Function, bool kDerivatives>
void evaluate(Arrays const& arrays, Point const& p, unsigned* results, long long* offsets,
              float* read_values) {
  auto const of_head = Function::of_head(arrays, p.batch, p.head);
  auto const of_row = Function::of_row(arrays, of_head, p.query);
  auto const of_column = Function::of_column(arrays, of_head, p.key);
  auto const call = [&](auto function, auto&... more) {
    return function(arrays, of_head, of_row, of_column, p.score, p.query, p.key, more...);
  };
  results[0] = bits(call(Function::template value<Arrays>));
  if constexpr (kDerivatives) {
    results[1] = bits(call(Function::template derivative<Arrays>));
    if constexpr (Function::kFloatReads > 0) {
      float derivatives[Function::kFloatReads];
      long long read[Function::kFloatReads];
      call(Function::template read_derivatives<Arrays>, derivatives);
      call(Function::template read_offsets<Arrays>, read);
      float values[Function::kFloatReads];
      call(Function::template read_values<Arrays>, values);
      for (int i = 0; i < Function::kFloatReads; ++i) results[2 + i] = bits(derivatives[i]);
      for (int i = 0; i < Function::kFloatReads; ++i) read_values[i] = values[i];
      for (int i = 0; i < Function::kFloatReads; ++i) offsets[i] = read[i];
    }
  }
}

}  // namespace memeff::function
"""
)

# Evaluates all values of a program, besides the functions of its struct.
_PROGRAM = """
{struct}
namespace memeff::function {{
extern "C" void program_{number}(Arrays const* arrays, Point const* points, int count,
                                 unsigned* values, unsigned* results, long long* offsets,
                                 float* read_values) {{
  for (int i = 0; i < count; ++i) {{
    evaluate<Program{number}, {derivatives}>(*arrays, points[i], results + i * {results},
                                            offsets + i * {reads}, read_values + i * {reads});
    auto const [score, batch, head, query, key] = points[i];
    [&, score = score, batch = batch, head = head, query = query, key = key](Arrays const& arrays,
                                                                             unsigned* values) {{
{statements}{stores}    }}(*arrays, values + i * {values});
  }}
}}
}}
"""


class Case(NamedTuple):
    """A program, the form of its functions, and its captured arrays [VMAP, *dims]."""

    program: Program
    precise: bool
    arrays: list[np.ndarray]


class Evaluated(NamedTuple):
    """The results of a program; the first dim of each array counts the points."""

    values: np.ndarray  # uint32 [points, values]: the bits of all values of the program
    results: np.ndarray  # uint32 [points, results]
    offsets: np.ndarray  # int64 [points, float reads]
    read_values: np.ndarray  # float32 [points, float reads]


class _Arrays(ctypes.Structure):
    _fields_ = (
        ("captured", ctypes.c_void_p),
        ("literals", ctypes.c_void_p),
        ("batch", ctypes.c_int),
    )


def points(count: int, seed: int = 0) -> np.ndarray:
    """The arguments of a function at some points: POINT [count]."""
    random = np.random.default_rng(seed)
    found = np.zeros(count, POINT)
    found["score"] = random.normal(size=count) * 10.0 ** random.integers(-3, 3, count)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-41, 3e38, -1.0]
    found["score"][: len(special)] = special
    found["batch"] = random.integers(0, 4, count)
    found["head"] = random.integers(0, 5, count)
    found["query"] = random.integers(0, 12, count)
    found["key"] = random.integers(0, 12, count)
    found["key"][-2:] = [2**28, 70000]
    return found


def program_source(program: Program, number: int, precise: bool) -> str:
    """The C++ source that evaluates a program in both ways."""
    nodes = graph(program, precise=precise)
    printer = emit.Printer(nodes.nodes, frozenset())
    stores = "".join(
        f"    values[{i}] = bits({printer.name(node, Level.ELEMENT)});\n"
        for i, node in enumerate(nodes.values)
    )
    return _PROGRAM.format(
        number=number,
        struct=emit.source(program, f"Program{number}", precise=precise),
        derivatives=str(len(program.results) > 1).lower(),
        results=len(program.results),
        reads=len(nodes.offsets),
        statements=printer.statements(nodes.values, Level.ELEMENT),
        stores=stores,
        values=len(program.values),
    )


def evaluate(cases: Sequence[Case], arguments: np.ndarray) -> list[Evaluated]:
    """Compiles programs as one library and evaluates them at POINT [points]."""
    texts = [program_source(case.program, i, case.precise) for i, case in enumerate(cases)]
    path = build.kernel_library("programs", HEADER + "".join(texts))
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    return [_run(getattr(library, f"program_{i}"), case, arguments) for i, case in enumerate(cases)]


@contextlib.contextmanager
def passed(case: Case) -> Iterator[_Arrays]:
    """The captured arrays and literals of a program, as compiled functions take them."""
    views = np.zeros(len(case.arrays), VIEW)
    for view, array in zip(views, case.arrays, strict=True):
        view["data"] = array.ctypes.data
        view["sizes"][: array.ndim] = array.shape
        strides = [stride // array.itemsize for stride in array.strides]
        # As in the host library, a dim of one element has the stride 0.
        view["strides"][: array.ndim] = np.where(np.array(array.shape) == 1, 0, strides)
        view["share"] = [-(-(2**64) // (DIVISOR * VMAP)), VMAP]
    literals = np.array(emit.literal_bits(case.program), "u4")
    yield _Arrays(views.ctypes.data, literals.ctypes.data, CALL_BATCH)


def _run(function: Any, case: Case, arguments: np.ndarray) -> Evaluated:
    program = case.program
    count = len(arguments)
    reads = len(program.float_reads) if len(program.results) > 1 else 0
    found = Evaluated(
        np.zeros((count, len(program.values)), "u4"),
        np.zeros((count, len(program.results)), "u4"),
        np.zeros((count, reads), "i8"),
        np.zeros((count, reads), "f4"),
    )
    outputs = [ctypes.c_void_p(array.ctypes.data) for array in found]
    pointer = ctypes.c_void_p(arguments.ctypes.data)
    with passed(case) as arrays:
        function(ctypes.byref(arrays), pointer, ctypes.c_int(count), *outputs)
    return found
