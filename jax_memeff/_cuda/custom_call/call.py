"""The custom call: a table of architectures with compressed images, entry points and launch
constants, and the names of its buffers.

The call carries everything that it needs, so a program runs without the code generator: in the
process that lowered it, in another process, or after export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jax_memeff._cuda.custom_call import buffers, description
from jax_memeff._cuda.custom_call.buffers import Buffer
from jax_memeff._cuda.export import register_targets
from jax_memeff.codegen.problem import Direction
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler


def custom_call(
    ctx: mlir.LoweringRuleContext,
    direction: Direction,
    operands: list[Buffer],
    results: list[Buffer],
    *,
    specs: dict[str, KernelSpec],
    divisors: Mapping[str, int],
    aliased: Mapping[int, int] | None = None,
    **numbers: Any,
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
    attributes = {
        "operands": description.names(operands, divisors),
        "operand_types": description.types(operands),
        "results": description.names(results, divisors),
        "result_types": description.types(results),
        "kernels": _images(specs, [*operands, *results]),
        **numbers,
    }
    return lower(
        context,
        *(buffer.value for buffer in operands),
        **attributes,
        seal=description.seal(direction, attributes),
    )


def _images(specs: dict[str, KernelSpec], arrays: list[Buffer]) -> dict[str, Any]:
    """The attribute ``kernels``: an image of each architecture."""
    images: dict[str, Any] = {"archs": ",".join(specs)}
    for arch, spec in specs.items():
        code = compiler.compile(spec, arch).image
        images[arch] = description.sealed_image(spec, arch, code, arrays)
    return images
