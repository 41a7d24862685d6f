"""Problems for the tests of the code generator."""

import dataclasses
from typing import Any

from jax_memeff.codegen.features import BIAS, PACKED
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.strategy import Sizes, ceil_div

PARTS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_90a")


def problem(
    direction: Any = "forward",
    dtype: Any = "bf16",
    head_dim: int = 128,
    value_dim: int | None = None,
    arch: str = "sm_90",
    needs_grad: Any = (),
    sequence: Any = None,
    **asked: Any,
) -> Problem:
    """A problem with the features ``asked``."""
    value_dim = head_dim if value_dim is None else value_dim
    return Problem(direction, dtype, head_dim, value_dim, arch, asked, needs_grad, sequence)


SIZES = Sizes(batch=3, queries=1000, keys=700, heads=10, key_heads=5)
PACKED_SIZES = dataclasses.replace(SIZES, query_tokens=1900, key_tokens=1100)


def ctas(spec):
    """The grids of a kernel's entry points for ``SIZES``, packed if it is for packed sequences."""
    return [entry.grid.ctas(PACKED_SIZES if spec[PACKED] else SIZES) for entry in spec.entry_points]


def row_tiles(tile, packed=False):
    """The tiles of ``tile`` queries of all heads."""
    return 10 * (1900 // tile + 3 if packed else 3 * ceil_div(1000, tile))


def key_tiles(tile, packed=False):
    """The tiles of ``tile`` keys of all key heads."""
    return 5 * (1100 // tile + 3 if packed else 3 * ceil_div(700, tile))


def access(spec):
    """The way in which kernels read a bias."""
    assert spec[BIAS] is not None
    return spec[BIAS].access


def is_large(spec):
    return "large_dim" in spec.kernel.stem
