"""Lowering of ``attention_tangent``: to a kernel if there is one, else to plain JAX.

``python -m jax_memeff explain --direction tangent`` lists the reasons against each kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from jax_memeff._blockwise import derivatives as blockwise
from jax_memeff._call.operands.gradients import named_arrays, needs_grad_of
from jax_memeff._call.options import Options
from jax_memeff._cuda import selection
from jax_memeff._cuda.custom_call import buffers
from jax_memeff._cuda.custom_call.buffers import ROW_STATISTICS, Buffer
from jax_memeff._cuda.custom_call.call import custom_call
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.errors import UnsupportedError


def lower_tangent(ctx: mlir.LoweringRuleContext, *leaves: Any, tree: Any, options: Options):
    """Lowering rule of ``attention_tangent`` on CUDA."""
    specs = kernels(ctx.avals_in, tree=tree, options=options)
    if specs is None:

        def in_jax(*arrays: jax.Array) -> Sequence[jax.Array]:
            operands, out, lse, tangents = jax.tree.unflatten(tree, arrays)
            return blockwise.tangent(operands, options, out, lse, tangents)

        return mlir.lower_fun(in_jax, multiple_results=True)(ctx, *leaves)
    types, out_aval, lse_aval, tangent_types = jax.tree.unflatten(tree, ctx.avals_in)
    operands, out, lse, tangents = jax.tree.unflatten(tree, leaves)
    avals = buffers.separate(types)
    inputs = buffers.of_operands(ctx, types, operands, options)
    inputs += buffers.of_block_masks(ctx, avals, operands, options.divisors, specs)
    inputs += [
        Buffer("out", out_aval, out),
        Buffer("logsumexp", lse_aval, lse, ROW_STATISTICS),
    ]
    arrays = named_arrays(tangents)
    inputs += [
        Buffer(_buffer_name(name), aval, arrays[name])
        for name, aval in named_arrays(tangent_types).items()
    ]
    out_type, lse_type = ctx.avals_out
    results = [
        Buffer("out_tangent", out_type),
        Buffer("logsumexp_tangent", lse_type, layout=ROW_STATISTICS),
    ]
    found = custom_call(
        ctx,
        "tangent",
        inputs,
        [*results, *buffers.of_workspaces(avals, options, specs)],
        avals=avals,
        options=options,
        specs=specs,
    )
    return found[: len(results)]


def kernels(
    avals: Sequence[Any], *, tree: Any, options: Options, archs: Sequence[str] = ()
) -> dict[str, KernelSpec] | None:
    """The kernel for each architecture; None if one of them has no kernel for this call."""
    operands, _, _, tangents = jax.tree.unflatten(tree, avals)
    needs_grad = needs_grad_of(operands, named_arrays(tangents))
    try:
        return selection.of_types(
            buffers.separate(operands), options, needs_grad, archs, is_tangent=True
        )
    except UnsupportedError:
        return None


def digest(avals: Sequence[Any], *, tree: Any, options: Options) -> bytes:
    """A digest that changes with a call's kernels; it is the same for all calls in plain JAX."""
    specs = kernels(avals, tree=tree, options=options)
    return b"" if specs is None else selection.digest_of([specs])


def _buffer_name(name: str) -> str:
    """The name of the buffer of an operand's tangent."""
    parts = ("query", "key", "value") if name == "query_key_value" else (name,)
    return "+".join(f"{part}_tangent" for part in parts)
