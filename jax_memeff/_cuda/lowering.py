"""Lowering rules of the primitives on CUDA: the kernels of a call, its buffers, one custom call.

A tangent without a kernel is lowered to plain JAX. ``python -m jax_memeff explain --direction
tangent`` lists the reasons against each kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import mlir

from jax_memeff._blockwise import derivatives as blockwise
from jax_memeff._call import divisors, sinks
from jax_memeff._call.operands import (
    NeedsGrad,
    array_of,
    gradients_needed,
    named_arrays,
    needs_grad_of,
)
from jax_memeff._call.options import Options
from jax_memeff._cuda import (
    buffers,
    few_rows,
    fixed_point_sums,
    functions,
    paged_calls,
    selection,
)
from jax_memeff._cuda.buffers import ROW_STATISTICS, Buffer
from jax_memeff._cuda.custom_call import custom_call
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.errors import UnsupportedError


def lower_forward(ctx: mlir.LoweringRuleContext, *values: Any, tree: Any, options: Options):
    """Lowering rule of ``attention_fwd`` on CUDA."""
    types, operands = jax.tree.unflatten(tree, ctx.avals_in), jax.tree.unflatten(tree, values)
    if types.mask.key_lists:
        return _lower_lists(ctx, *values, types=types, options=options)
    if split := few_rows.split_of(types, options):
        return _lower_converted(
            ctx, values, types, split.convert, options, split.rows_shape, split.merged
        )
    return _lower_parts(ctx, types, operands, options)


def _lower_lists(ctx: mlir.LoweringRuleContext, *values: Any, types: Any, options: Options):
    """A call with lists of keys, as one without."""
    other = selection.without_lists(types, options, None)
    shapes = [aval.shape for aval in ctx.avals_out]

    def finish(*results: jax.Array) -> list[jax.Array]:
        return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]

    return _lower_converted(
        ctx,
        values,
        types,
        lambda given: other.convert(given)[0],
        other.options,
        other.operands.query.shape[:3] if other.in_pages else shapes[1],
        finish,
    )


def _lower_converted(
    ctx: mlir.LoweringRuleContext,
    values: Sequence[Any],
    types: Any,
    convert: Callable[[Any], Any],
    options: Options,
    rows: Sequence[int],
    finish: Callable[..., Any],
):
    """A forward by another one.

    Args:
        ctx: that of the primitive.
        values: the arrays of the call.
        types: their types, as operands.
        convert: the operands of the other call from those of this one.
        options: of the other call.
        rows: the shape of the other call's logsumexp.
        finish: the results of this call from those of the other one.
    """
    structure = jax.tree.structure(types)
    context, operands = _lowered(
        ctx, lambda *leaves: convert(jax.tree.unflatten(structure, leaves)), values
    )
    own = jax.tree.unflatten(jax.tree.structure(operands), context.avals_in)
    results = [ShapedArray((*rows, *aval.shape[3:]), aval.dtype) for aval in ctx.avals_out]
    outputs = _lower_parts(context.replace(avals_out=results), own, operands, options)
    return _lowered(ctx.replace(avals_in=results), finish, outputs)[1]


def _lowered(
    ctx: mlir.LoweringRuleContext, function: Callable[..., Any], values: Sequence[Any]
) -> tuple[mlir.LoweringRuleContext, Any]:
    """The results of a JAX function, and a context with their types as ``avals_in``.

    Args:
        ctx: has the types of ``values`` as ``avals_in``.
        function: of arrays; it may return any pytree.
        values: its arguments.
    """
    avals, structure = jax.tree.flatten(jax.eval_shape(function, *ctx.avals_in))
    avals = [ShapedArray(aval.shape, aval.dtype) for aval in avals]
    lower = mlir.lower_fun(lambda *x: jax.tree.leaves(function(*x)), multiple_results=True)
    leaves = lower(ctx.replace(avals_out=avals), *values)
    return ctx.replace(avals_in=avals), jax.tree.unflatten(structure, leaves)


def _lower_parts(ctx: mlir.LoweringRuleContext, types: Any, operands: Any, options: Options):
    """The custom calls of a forward: two for a mixed batch."""
    results: Sequence[Any] = ()
    for part in paged_calls.parts_of(types):
        replaced = paged_calls.sequence_buffers(ctx, part, operands)
        results = _lower_forward(ctx, part.types, operands, options, replaced, results)
    return results


def _lower_forward(
    ctx: mlir.LoweringRuleContext,
    types: Any,
    operands: Any,
    options: Options,
    replaced: Mapping[str, Buffer],
    filled: Sequence[Any],
):
    """One call.

    Args:
        ctx: that of the primitive.
        types: the types of the operands.
        operands: the arrays.
        options: those of the primitive.
        replaced: buffers instead of those of ``operands``, by the names of the latter.
        filled: the results of an earlier call, which this one updates in place; none by default.
    """
    avals = buffers.separate(types)
    specs = selection.kernels(avals, options, needs_grad=None)
    inputs = buffers.operand_buffers(ctx, types, operands, options, replaced)
    inputs += buffers.block_mask_buffers(ctx, avals, operands, options.divisors, specs)
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
        results,
        avals=avals,
        options=options,
        specs=specs,
        aliased=aliased,
    )
    if not options.row_maxima:
        return found

    def of_rows_with_keys(logsumexp: jax.Array, row_maxima: jax.Array) -> jax.Array:
        # The kernels do not write the maxima of rows beyond the lengths.
        return jnp.where(logsumexp == -jnp.inf, -jnp.inf, row_maxima)

    out, *rows = found
    row_maxima = buffers.computed(ctx, "row_maxima", of_rows_with_keys, ctx.avals_out[1:], rows)
    return [out, rows[0], row_maxima.value]


def lower_backward(
    ctx: mlir.LoweringRuleContext,
    *leaves: Any,
    tree: Any,
    options: Options,
    needs_grad: NeedsGrad,
    in_jax: Callable[..., Sequence[jax.Array]],
):
    """Lowering rule of ``attention_bwd`` on CUDA. ``in_jax`` is the same function of the leaves in
    plain JAX, for lists of keys without a kernel.
    """
    types = jax.tree.unflatten(tree, ctx.avals_in)[0]
    if types.mask.key_lists:
        static: Any = {"tree": tree, "options": options, "needs_grad": needs_grad}
        if selection.kernels_of_primitive(ctx.avals_in, **static):
            return _lower_gradients_of_lists(ctx, *leaves, **static)
        return mlir.lower_fun(in_jax, multiple_results=True)(ctx, *leaves)
    return _lower_gradients(ctx, *leaves, tree=tree, options=options, needs_grad=needs_grad)


def _lower_gradients(
    ctx: mlir.LoweringRuleContext, *leaves: Any, tree: Any, options: Options, needs_grad: NeedsGrad
):
    """The gradients from kernels, and those of captured arrays that XLA computes."""
    types = jax.tree.unflatten(tree, ctx.avals_in)[0]
    names = gradients_needed(types, needs_grad)
    avals = dict(zip(names, ctx.avals_out, strict=True))
    summed = functions.gradients_in_kernels(buffers.separate(types), options, needs_grad)

    def split(in_kernels: bool) -> NeedsGrad:
        captured = (
            needed and (index in summed) == in_kernels
            for index, needed in enumerate(needs_grad.captured)
        )
        others = needs_grad if in_kernels else NeedsGrad(False, False, False, False)
        return others._replace(captured=tuple(captured))

    gradients = {}
    for part, lower in ((split(True), _lower_kernels), (split(False), _lower_captured_gradients)):
        if part.names:
            part_names = gradients_needed(types, part)
            context = ctx.replace(avals_out=[avals[name] for name in part_names])
            results = lower(context, *leaves, tree=tree, options=options, needs_grad=part)
            gradients |= dict(zip(part_names, results, strict=True))
    return [gradients[name] for name in names]


def _lower_gradients_of_lists(
    ctx: mlir.LoweringRuleContext, *leaves: Any, tree: Any, options: Options, needs_grad: NeedsGrad
):
    """The gradients of a call with lists of keys, from kernels for the call without."""
    types = jax.tree.unflatten(tree, ctx.avals_in)[0]
    other = selection.without_lists(types, options, needs_grad)
    assert other.needs_grad is not None

    def converted(*leaves: jax.Array) -> Any:
        operands, *of_rows = jax.tree.unflatten(tree, leaves)
        if other.in_pages:
            # [B, T, N, ...] has its elements in the order of [1, B * T * lists, heads of a list,
            # ...].
            rows = other.operands.query.shape[:3]
            of_rows = [None if x is None else x.reshape(*rows, *x.shape[3:]) for x in of_rows]
        return other.convert(operands)[0], *of_rows

    context, values = _lowered(ctx, converted, leaves)
    own_names = gradients_needed(other.operands, other.needs_grad)
    own_types = []
    for name in own_names:
        array = array_of(other.operands, name)
        own = divisors.gradient_shape(name, array.shape, other.operands, other.options.divisors)
        own_types.append(ShapedArray(own, array.dtype))
    of_kernels = _lower_gradients(
        context.replace(avals_out=own_types),
        *jax.tree.leaves(values),
        tree=jax.tree.structure(values),
        options=other.options,
        needs_grad=other.needs_grad,
    )
    names = gradients_needed(types, needs_grad)
    shapes = [aval.shape for aval in ctx.avals_out]

    def finished(*arrays: jax.Array) -> list[jax.Array]:
        operands, out, lse, dout, dlse = jax.tree.unflatten(tree, arrays[: len(leaves)])
        gradients = dict(zip(own_names, arrays[len(leaves) :], strict=True))
        if "sinks" in names and "sinks" not in gradients:
            delta = sinks.delta(out, dout, dlse)
            gradients["sinks"] = sinks.gradient(operands, options, lse, delta)
        return [gradients[name].reshape(x) for name, x in zip(names, shapes, strict=True)]

    every = ctx.replace(avals_in=[*ctx.avals_in, *own_types])
    return _lowered(every, finished, [*leaves, *of_kernels])[1]


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
    specs = selection.kernels(avals, options, needs_grad=needs_grad)
    inputs = buffers.operand_buffers(ctx, types, operands, options)
    inputs += buffers.block_mask_buffers(ctx, avals, operands, options.divisors, specs)
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
        of_leaves = functools.partial(fixed_point_sums.scale, tree=tree, options=options)
        scale = buffers.computed(ctx, "captured_scale", of_leaves, ctx.avals_in, leaves)
        inputs.append(scale)
    results = custom_call(
        ctx,
        "backward",
        [
            *inputs,
            *(Buffer(*buffer) for buffer in named if buffer[1] is not None),
        ],
        gradients,
        avals=avals,
        options=options,
        specs=specs,
    )

    # XLA computes the gradient of the sinks from the delta that the kernels write.
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
            rounded = functools.partial(
                fixed_point_sums.rounded, shape=aval.shape, dtype=aval.dtype
            )
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
                sums = ShapedArray(fixed_point_sums.sums_shape(aval.shape), jnp.int32)
            found.append(Buffer(f"{name.replace('.', '')}_gradient", sums))
        else:
            found.append(Buffer(f"{name}_gradient", aval))
    return found


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
    inputs = buffers.operand_buffers(ctx, types, operands, options)
    inputs += buffers.block_mask_buffers(ctx, avals, operands, options.divisors, specs)
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
    return custom_call(ctx, "tangent", inputs, results, avals=avals, options=options, specs=specs)


def kernels(
    avals: Sequence[Any], *, tree: Any, options: Options, archs: Sequence[str] = ()
) -> dict[str, KernelSpec] | None:
    """The kernel for each architecture; None if one of them has no kernel for this call."""
    operands, _, _, tangents = jax.tree.unflatten(tree, avals)
    if operands.mask.key_lists:
        return None
    needs_grad = needs_grad_of(operands, named_arrays(tangents))
    try:
        return selection.kernels(
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
