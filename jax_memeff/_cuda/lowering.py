"""Lowering to the kernels: problem -> code generator -> attributes of the custom call.

The custom call carries everything it needs: a table of architectures with compressed images, entry
points and launch constants, and the names of its buffers. So a program runs where it was lowered,
in another process, or after export, without the code generator.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import mlir

from jax_memeff import config
from jax_memeff._call import divisors, sinks
from jax_memeff._call.operands import (
    NeedsGrad,
    Operands,
    captured_name,
    gradients_needed,
    items,
)
from jax_memeff._call.options import Options
from jax_memeff._call.sequences import MOST_POSITIONS
from jax_memeff._call.values import require_static
from jax_memeff._cuda import (
    buffers,
    description,
    exact_sums,
    functions,
    mixed_batches,
    traced_windows,
    workspaces,
)
from jax_memeff._cuda.buffers import Buffer
from jax_memeff._cuda.export import register_targets
from jax_memeff._cuda.problem import Call, bias_alignment, problem_of
from jax_memeff.codegen import arch as architectures
from jax_memeff.codegen import strategy
from jax_memeff.codegen.features import FEATURES
from jax_memeff.codegen.problem import Direction
from jax_memeff.codegen.select import select
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.errors import UnsupportedError

# ``kUnbounded`` of ffi/include/memeff/params.h: windows are computed in 32 bits.
UNBOUNDED = 1 << 30

# Scores are multiplied by a smaller scale before a bias is added, not afterwards.
LEAST_SOFTMAX_SCALE = 1e-6

# lse is [B, T, N] for users and [B, N, T] in memory; minor to major.
ROW_STATISTICS = (1, 2, 0)


def lower_forward(ctx: mlir.LoweringRuleContext, *values: Any, tree: Any, options: Options):
    """Lowering rule of ``attention_fwd`` on CUDA."""
    types, operands = jax.tree.unflatten(tree, ctx.avals_in), jax.tree.unflatten(tree, values)
    if not (few := mixed_batches.few_queries(buffers.separate(types))):
        return _lower_forward(ctx, types, operands, options)
    results = mixed_batches.filled(ctx)
    for is_short, own in zip((True, False), mixed_batches.types_of_parts(types, few), strict=True):
        arrays = mixed_batches.operands_of_part(ctx, types, operands, few, is_short)
        results = _lower_forward(ctx, own, arrays, options, results)
    return results


def _lower_forward(
    ctx: mlir.LoweringRuleContext,
    types: Any,
    operands: Any,
    options: Options,
    filled: Sequence[Any] = (),
):
    """One call of kernels, into ``filled``, which holds the results of tokens of no sequence."""
    avals = buffers.separate(types)
    specs = kernels(avals, options, needs_grad=None)
    inputs = buffers.of_operands(ctx, types, operands, options)
    inputs += buffers.of_block_masks(ctx, avals, operands, options.divisors, specs)
    names = ("out", "logsumexp", "row_maxima")
    layouts = (None, ROW_STATISTICS, ROW_STATISTICS)
    results = [
        Buffer(name, aval, layout=layout)
        for name, aval, layout in zip(names, ctx.avals_out, layouts, strict=False)
    ]
    aliased = {len(inputs) + index: index for index in range(len(filled))}
    inputs += [
        result._replace(name=f"filled_{result.name}", value=value)
        for result, value in zip(results, filled, strict=False)
    ]
    found = custom_call(
        ctx,
        "forward",
        inputs,
        [*results, *workspace_buffers(avals, options, specs)],
        specs=specs,
        aliased=aliased,
        **scores(avals, options),
    )[: len(results)]
    if not options.row_maxima:
        return found

    def of_rows_with_keys(logsumexp: jax.Array, maxima: jax.Array) -> jax.Array:
        # The kernels do not write the maxima of rows beyond the lengths.
        return jnp.where(logsumexp == -jnp.inf, -jnp.inf, maxima)

    out, *rows = found
    maxima = buffers.computed(ctx, "row_maxima", of_rows_with_keys, ctx.avals_out[1:], rows)
    return [out, rows[0], maxima.value]


def lower_backward(
    ctx: mlir.LoweringRuleContext, *leaves: Any, tree: Any, options: Options, needs_grad: NeedsGrad
):
    """Lowering rule of ``attention_bwd`` on CUDA."""
    types = jax.tree.unflatten(tree, ctx.avals_in)[0]
    names = gradients_needed(types, needs_grad)
    avals = dict(zip(names, ctx.avals_out, strict=True))
    summed = functions.gradients_in_kernels(buffers.separate(types), options, needs_grad)

    def split(in_kernels: bool) -> NeedsGrad:
        own = (
            needed and (index in summed) == in_kernels
            for index, needed in enumerate(needs_grad.captured)
        )
        others = needs_grad if in_kernels else NeedsGrad(False, False, False, False)
        return others._replace(captured=tuple(own))

    found = {}
    for part, lower in ((split(True), _lower_kernels), (split(False), _lower_captured_gradients)):
        if part.names:
            own = gradients_needed(types, part)
            context = ctx.replace(avals_out=[avals[name] for name in own])
            results = lower(context, *leaves, tree=tree, options=options, needs_grad=part)
            found |= dict(zip(own, results, strict=True))
    return [found[name] for name in names]


def _lower_captured_gradients(ctx: mlir.LoweringRuleContext, *leaves: Any, **static: Any):
    """The gradients of captured arrays that XLA computes, tile by tile."""
    in_jax = functools.partial(functions.captured_gradients, **static)
    return mlir.lower_fun(in_jax, multiple_results=True)(ctx, *leaves)


def _lower_kernels(
    ctx: mlir.LoweringRuleContext, *leaves: Any, tree: Any, options: Options, needs_grad: NeedsGrad
):
    """The gradients that kernels compute."""
    types, *residual_avals = jax.tree.unflatten(tree, ctx.avals_in)
    operands, *residuals = jax.tree.unflatten(tree, leaves)
    avals = buffers.separate(types)
    specs = kernels(avals, options, needs_grad=needs_grad)
    inputs = buffers.of_operands(ctx, types, operands, options)
    inputs += buffers.of_block_masks(ctx, avals, operands, options.divisors, specs)
    named = zip(
        ("out", "logsumexp", "out_gradient", "logsumexp_gradient"),
        residual_avals,
        residuals,
        (None, ROW_STATISTICS, None, ROW_STATISTICS),
        strict=True,
    )
    gradients = _gradient_buffers(types, needs_grad, ctx.avals_out, residual_avals[1], options)
    scale = None
    if options.deterministic_backward and any(needs_grad.captured):
        of_leaves = functools.partial(exact_sums.scale, tree=tree, options=options)
        scale = buffers.computed(ctx, "captured_scale", of_leaves, ctx.avals_in, leaves)
        inputs.append(scale)
    results = custom_call(
        ctx,
        "backward",
        [
            *inputs,
            *(Buffer(*buffer) for buffer in named if buffer[1] is not None),
        ],
        [
            *gradients,
            *workspace_buffers(avals, options, specs),
        ],
        specs=specs,
        **scores(avals, options),
    )[: len(gradients)]

    # XLA computes the gradient of the sinks from the delta that the kernels leave.
    avals_in, arrays_tree = jax.tree.flatten((types, residual_avals[1], residual_avals[1]))

    def sinks_gradient(*arrays: jax.Array) -> jax.Array:
        operands, lse, delta = jax.tree.unflatten(arrays_tree, arrays)
        return sinks.gradient(operands, options, lse, delta)

    finished = []
    for buffer, result, aval in zip(gradients, results, ctx.avals_out, strict=True):
        if buffer.name == "delta":
            values = jax.tree.leaves((operands, residuals[1], result))
            done = buffers.computed(ctx, "sinks_gradient", sinks_gradient, avals_in, values)
            finished.append(done.value)
        elif buffer.name.startswith("captured") and scale is not None:
            rounded = functools.partial(exact_sums.rounded, shape=aval.shape, dtype=aval.dtype)
            avals_of_sums, sums = [buffer.aval, scale.aval], [result, scale.value]
            done = buffers.computed(ctx, buffer.name, rounded, avals_of_sums, sums)
            finished.append(done.value)
        elif buffer.aval.dtype != aval.dtype:
            rounded = functools.partial(lax.convert_element_type, new_dtype=aval.dtype)
            done = buffers.computed(ctx, buffer.name, rounded, [buffer.aval], [result])
            finished.append(done.value)
        else:
            finished.append(result)
    return finished


def _gradient_buffers(
    types: Any, needs_grad: NeedsGrad, avals: Sequence[Any], row_aval: Any, options: Options
) -> list[Buffer]:
    """The results of the kernels, in the order of the gradients."""
    names = gradients_needed(types, needs_grad)
    found = []
    for name, aval in zip(names, avals, strict=True):
        if name == "sinks":
            found.append(Buffer("delta", row_aval, layout=ROW_STATISTICS))
        elif name == "query_key_value":
            found.append(Buffer("query_gradient+key_gradient+value_gradient", aval))
        elif name.startswith("captured."):
            # Summed in float32 or in fixed point, and rounded once.
            sums = ShapedArray(aval.shape, jnp.float32)
            if options.deterministic_backward:
                sums = ShapedArray(exact_sums.sums_shape(aval.shape), jnp.int32)
            found.append(Buffer(f"{name.replace('.', '')}_gradient", sums))
        else:
            found.append(Buffer(f"{name}_gradient", aval))
    return found


def workspace_buffers(
    avals: Operands, options: Options, specs: dict[str, KernelSpec]
) -> list[Buffer]:
    sizes = workspaces.sizes_of(avals, options.divisors)
    return list(itertools.starmap(Buffer, workspaces.of_kernels(sizes, specs.values())))


def kernels(
    avals: Operands,
    options: Options,
    needs_grad: NeedsGrad | None,
    archs: Sequence[str] = (),
    is_tangent: bool = False,
) -> dict[str, KernelSpec]:
    """The kernel for each architecture, by default those that the program may run on."""
    require_static(
        {
            "query": avals.query.shape,
            "key": avals.key.shape,
            "value": avals.value.shape,
            "scores": avals.scores,
        },
        where="programs for CUDA have static sizes",
        remedy="export a program for each size, or pass implementation='xla'",
    )
    _require_lengths(avals)
    call = Call(avals, options, needs_grad, is_tangent)
    return {arch: kernel_of(call, arch) for arch in archs or _architectures()}


def kernels_of_call(
    avals: Sequence[Any],
    *,
    tree: Any,
    options: Options,
    needs_grad: NeedsGrad | None = None,
    archs: Sequence[str] = (),
) -> list[dict[str, KernelSpec]]:
    """The kernels of a primitive with these types and parameters, by architecture.

    A mixed batch of prompts and decode steps has two kernels for each architecture. Without
    ``archs`` the architectures are those that the program would be compiled for.

    Raises:
        UnsupportedError: as the lowering would.
    """
    operands = jax.tree.unflatten(tree, avals)
    types = buffers.separate(operands if needs_grad is None else operands[0])
    few = mixed_batches.few_queries(types)
    parts = mixed_batches.types_of_parts(types, few) if few else (types,)
    return [kernels(part, options, needs_grad, archs) for part in parts]


def digest(
    avals: Sequence[Any], *, tree: Any, options: Options, needs_grad: NeedsGrad | None = None
) -> bytes:
    """A digest that changes with the kernels of a call: their specs, sources and compiler.

    Raises:
        UnsupportedError, CompileError: as the lowering would.
    """
    return digest_of(kernels_of_call(avals, tree=tree, options=options, needs_grad=needs_grad))


def digest_of(specs: Sequence[Mapping[str, KernelSpec]]) -> bytes:
    """A digest that changes with these kernels, their sources or the compiler."""
    keys = [compiler.key(spec, arch) for own in specs for arch, spec in own.items()]
    return hashlib.sha256(repr((specs, keys)).encode()).digest()


def kernel_of(call: Call, arch: str) -> KernelSpec:
    """The kernel of a call on one architecture."""
    problem = problem_of(call, arch)
    sizes = workspaces.sizes_of(call.operands, call.options.divisors)
    return select(problem, strategy.choose(problem, sizes, strategy.MULTIPROCESSORS))


def _require_lengths(avals: Operands) -> None:
    longest = max(avals.query.shape[1], avals.key.shape[1], *avals.scores[2:])
    if longest > MOST_POSITIONS:
        raise UnsupportedError(
            [
                f"sequences have at most {MOST_POSITIONS} positions in the kernels, got {longest}",
                "pass implementation='xla', or split the sequence",
            ]
        )


def scores(avals: Operands, options: Options) -> dict[str, Any]:
    """The attributes in ffi/src/launch/call.h: ScoreScale, the windows of MaskParams, and so on."""
    scale, cap = options.scale, options.soft_cap
    log2e = math.log2(math.e)
    if options.score_function is not None:
        # Functions take the score itself; a cap is a part of them.
        prescale, softmax_scale = scale, log2e
    elif cap is not None:
        prescale, softmax_scale = scale / cap, cap * log2e
    elif scale > LEAST_SOFTMAX_SCALE:
        prescale, softmax_scale = 1.0, scale * log2e
    else:
        prescale, softmax_scale = scale * log2e, 1.0

    def bound(limit: int | None) -> int:
        # A bound beyond the largest length still counts: offsets move the diagonal by up to 2**29.
        return UNBOUNDED if limit is None else max(min(limit, UNBOUNDED), -UNBOUNDED)

    windows = [
        bound(limit)
        for window in (avals.mask.top_left, avals.mask.bottom_right)
        for limit in ((None, None) if window is None else (window.left, window.right))
    ]
    call = Call(avals, options, None)
    return {
        "scale": np.array([prescale, softmax_scale, scale, log2e / softmax_scale], np.float32),
        "windows": np.array(windows, np.int32),
        "numbers": np.array(
            [word for own in FEATURES for word in own.number_values(call)], np.int32
        ),
        "longest": np.array(_longest(avals), np.int32),
        "divisors": _divisors(avals, options),
        "bias_alignment": np.int32(bias_alignment(avals)),
    }


def _divisors(avals: Operands, options: Options) -> dict[str, int]:
    """The divisors of the buffers, by name; a buffer without an entry has 1."""
    own = options.divisors
    _, boolean = divisors.combined(avals.mask, own, avals.scores[0])
    bounds = traced_windows.buffer_names(avals.mask)
    found = {buffers.buffer_name(item, bounds): own[item.name] for item in items(avals)}
    found |= {"boolean": boolean, "bias_gradient": own.of_gradient("bias") or 1}
    gradients = {
        f"captured{index}_gradient": own.of_gradient(captured_name(index)) or 1
        for index in range(len(avals.captured))
    }
    return found | gradients


def _longest(avals: Operands) -> tuple[int, int]:
    """The longest packed sequences, which the grid is made for: at least 1, to fill the gaps."""
    if avals.sequences is None:
        return 0, 0
    return max(avals.sequences.longest_query, 1), max(avals.sequences.longest_key, 1)


def _architectures() -> tuple[str, ...]:
    """``JAX_MEMEFF_ARCHS``, else the architectures of this process's CUDA devices."""
    if chosen := config.archs():
        return chosen
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        raise UnsupportedError(
            [
                "this process has no CUDA device, so it is unknown what to compile for",
                "set JAX_MEMEFF_ARCHS, for example to sm_90a",
            ]
        ) from None
    capabilities = {tuple(map(int, device.compute_capability.split("."))) for device in devices}
    return tuple(architectures.of_capability(*capability) for capability in sorted(capabilities))


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
    """The custom call; ``aliased`` operands are written in place and become these results."""
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
