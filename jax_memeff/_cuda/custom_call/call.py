"""The custom call: its buffers, and its attributes with a compiled kernel for each architecture.

The call carries everything that it needs, so a program runs without the code generator: in the
process that lowered it, in another process, or after export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jax_memeff._call.operands.arrays import Operands
from jax_memeff._call.options import Options
from jax_memeff._cuda.custom_call import attributes, buffers
from jax_memeff._cuda.custom_call.buffers import Buffer
from jax_memeff._cuda.export import register_targets
from jax_memeff.codegen.problem import Direction
from jax_memeff.codegen.spec import KernelSpec


def custom_call(
    ctx: mlir.LoweringRuleContext,
    direction: Direction,
    operands: list[Buffer],
    results: list[Buffer],
    *,
    avals: Operands,
    options: Options,
    specs: dict[str, KernelSpec],
    aliased: Mapping[int, int] | None = None,
) -> Sequence[Any]:
    """The custom call; ``aliased`` maps operands that are written in place to their results."""
    register_targets()
    lower = jax.ffi.ffi_lowering(
        f"jax_memeff_{direction}",
        operand_layouts=buffers.layouts(operands),
        result_layouts=buffers.layouts(results),
        operand_output_aliases=dict(aliased or {}),
    )
    context = ctx.replace(
        avals_in=[buffer.aval for buffer in operands],
        avals_out=[buffer.aval for buffer in results],
    )
    return lower(
        context,
        *(buffer.value for buffer in operands),
        **attributes.of_call(direction, operands, results, avals, options, specs),
    )
