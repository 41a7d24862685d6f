"""The ranges of programs compiled by g++, in boxes of elements."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import compiled_programs
import numpy as np
from compiled_programs import Case
from emulator import build

from jax_memeff.codegen.functions.operations import CPP_TYPES
from jax_memeff.codegen.functions.program import Program
from jax_memeff.codegen.functions.ranges import statements

BOX = np.dtype([(name, "i4") for name in ("batch", "h0", "h1", "q0", "q1", "k0", "k1")])

_RANGES = """
namespace memeff::function {{
extern "C" void ranges_{number}(Arrays const* given, int const (*boxes)[7], int count,
                                unsigned (*bounds)[{values}][2]) {{
  for (int i = 0; i < count; ++i) {{
    auto const [batch, h0, h1, q0, q1, k0, k1] = boxes[i];
    [&, batch = batch](Arrays const& arrays, ranges::Range<int> head, ranges::Range<int> query,
                       ranges::Range<int> key) {{
{statements}{stores}    }}(*given, {{h0, h1}}, {{q0, q1}}, {{k0, k1}});
  }}
}}
}}
"""


def boxes(count: int, seed: int) -> np.ndarray:
    """BOX [count]: of one element, of few, of long columns, and at large positions."""
    random = np.random.default_rng(seed)
    found = np.zeros(count, BOX)
    found["batch"] = random.integers(0, 4, count)
    for name, most, start in (("h", 3, 5), ("q", 4, 12), ("k", 9, 12)):
        found[f"{name}0"] = random.integers(-1 if name == "k" else 0, start, count)
        extent = np.where(random.random(count) < 0.4, 0, random.integers(0, most, count))
        found[f"{name}1"] = found[f"{name}0"] + extent
    far = random.random(count) < 0.2
    for end in ("k0", "k1"):
        found[end] += np.where(far, 2**28 - 20, 0)
    return found


def elements(box: np.void) -> np.ndarray:
    """The elements of a box: POINT [elements]."""
    sides = [range(box[f"{name}0"], box[f"{name}1"] + 1) for name in "hqk"]
    found = [(0.5, box["batch"], *place) for place in itertools.product(*sides)]
    return np.array(found, compiled_programs.POINT)


def source(program: Program, number: int) -> str:
    """C++ that computes the ranges of all values of a program."""
    stores = "".join(
        f"      bounds[i][{index}][{end}] = bits(r{index}.{name});\n"
        for index in range(len(program.values))
        for end, name in enumerate(("low", "high"))
    )
    return _RANGES.format(
        number=number, values=len(program.values), statements=statements(program), stores=stores
    )


def evaluate(cases: Sequence[Case], places: np.ndarray) -> list[list[np.ndarray]]:
    """For each program and value the bounds [boxes, 2] in the value's type."""
    texts = [source(case.program, number) for number, case in enumerate(cases)]
    path = build.kernel_library("ranges", compiled_programs.HEADER + "".join(texts))
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    found = []
    for number, case in enumerate(cases):
        values = case.program.values
        bounds = np.zeros((len(places), len(values), 2), "u4")
        with compiled_programs.passed(case) as arrays:
            function = getattr(library, f"ranges_{number}")
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in (places, bounds)]
            function(ctypes.byref(arrays), pointers[0], ctypes.c_int(len(places)), pointers[1])
        found.append([_typed(bounds[:, i], value.dtype) for i, value in enumerate(values)])
    return found


def _typed(bits: np.ndarray, dtype: str) -> np.ndarray:
    assert dtype in CPP_TYPES
    return bits.astype(bool) if dtype == "bool" else np.ascontiguousarray(bits).view(dtype)
