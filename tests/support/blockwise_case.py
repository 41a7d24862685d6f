"""Calls of the blockwise path: their operands, and the compiled forward and backward."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._blockwise import forward as blockwise
from jax_memeff._call import dropout
from jax_memeff._call.mask import Mask
from jax_memeff._call.offsets import Position
from jax_memeff._call.operands import NeedsGrad, Operands
from jax_memeff._call.options import Options
from jax_memeff._call.scaling import Scaling

ALL = NeedsGrad(query=True, key=True, value=True, bias=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Sizes are small, and blocks are smaller, so that there are several."""

    B: int = 2
    T: int = 37
    S: int = 65
    N: int = 4
    K: int = 2
    H: int = 8
    Hv: int = 12
    dtype: str = "float32"
    mask: Callable[["Case", np.random.Generator], Mask] | None = None
    bias: tuple[str, ...] | None = None
    """The letters of "BNTS" whose dims are full."""
    bias_dtype: str | None = None
    masked_bias: bool = False
    soft_cap: float | None = None
    rate: float = 0.0
    scale: float | None = None
    position: tuple[int, int] | None = None
    dlse: bool = True


def lengths(case: Case, rng: np.random.Generator) -> Mask:
    return Mask.lengths(query=np.array([20, case.T]), key=np.array([case.S, 33]))


def segments(case: Case, rng: np.random.Generator) -> Mask:
    query_ids = np.sort(rng.integers(-1, 3, (case.B, case.T)))
    return Mask.segments(query_ids, rng.integers(-1, 3, (case.B, case.S)))


def boolean(*shape: str):
    def make(case: Case, rng: np.random.Generator) -> Mask:
        return Mask.boolean(rng.random([getattr(case, dim) if dim else 1 for dim in shape]) < 0.5)

    return make


def every_mask(case: Case, rng: np.random.Generator) -> Mask:
    mask = Mask.causal("bottom_right") & Mask.window(None, 30) & lengths(case, rng)
    return mask & segments(case, rng) & Mask.boolean(rng.random((case.T, case.S)) < 0.9)


EVERYTHING = Case(
    mask=every_mask, bias=("B", "N", "T", "S"), masked_bias=True, soft_cap=2.0, rate=0.3
)


def make(case: Case) -> tuple[Any, Options, Any, Any]:
    """Makes operands, options, and the cotangents of out and lse."""
    rng = np.random.default_rng(7)

    def normal(*shape: int, dtype: str = case.dtype) -> Any:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    bias = None
    if case.bias is not None:
        shape = [getattr(case, dim) if dim else 1 for dim in case.bias]
        bias = normal(*[1] * (4 - len(shape)), *shape, dtype=case.bias_dtype or case.dtype)
        if case.masked_bias:
            bias[rng.random(bias.shape) < 0.3] = -np.inf
    mask = Mask() if case.mask is None else case.mask(case, rng)
    position = case.position and Position(*(jnp.int32(x) for x in case.position))
    operands = Operands(
        normal(case.B, case.T, case.N, case.H),
        normal(case.B, case.S, case.K, case.H),
        normal(case.B, case.S, case.K, case.Hv),
        bias,
        mask.canonical(case.B, case.T, case.S),
        dropout.state(jax.random.key(11), case.B, case.N) if case.rate else None,
        position or None,
    )
    scale = 1 / max(case.H, 1) ** 0.5 if case.scale is None else case.scale
    options = Options(Scaling(scale, case.soft_cap), dropout_threshold=dropout.threshold(case.rate))
    dlse = normal(case.B, case.T, case.N) if case.dlse else None
    return operands, options, normal(case.B, case.T, case.N, case.Hv), dlse


# These tests spend most of their time on compilation.
UNOPTIMISED = {"xla_backend_optimization_level": 0}


@jax.jit(static_argnames=("options", "needs_grad"), compiler_options=UNOPTIMISED)
def both(operands, options, dout, dlse, needs_grad=ALL):
    out, lse = blockwise.forward(operands, options)
    return out, lse, blockwise.backward(operands, options, out, lse, dout, dlse, needs_grad)


def run(operands, options, dout, dlse, needs_grad=ALL):
    wide = operands.query.dtype == np.float64
    with jax.enable_x64(wide), jax.numpy_rank_promotion("raise"):
        return both(operands, options, dout, dlse, needs_grad)
