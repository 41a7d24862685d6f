"""Problems for the tests of the code generator."""

from typing import Any

from jax_memeff.codegen.features import BIAS
from jax_memeff.codegen.problem import Problem

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


def access(spec):
    """The way in which kernels read a bias."""
    assert spec[BIAS] is not None
    return spec[BIAS].access


def is_large(spec):
    return "large_dim" in spec.kernel.stem
