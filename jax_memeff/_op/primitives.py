"""The attention primitives: their types, batching and lowering for each platform.

They take the flat leaves of a pytree, whose structure is the parameter ``tree``:

- ``attention_fwd``: ``Operands`` -> out [B, T, N, Hv], lse [B, T, N], and with
  ``Options.row_maxima`` the largest score of each row [B, T, N], which has no derivative
- ``attention_bwd``: ``(Operands, out, lse, dout, dlse | None)`` -> the gradients that
  ``needs_grad`` names, in the order of the operands' fields
- ``attention_tangent``: ``(Operands, out, lse, Gradients)``, tangents of the operands -> tangents
  of out and lse

Gradients and tangents have the whole batch even if their operand has fewer batch indices. The
gradient of a bias may be summed over batch indices (``Divisors.gradients``).

All primitives also accept ``QkvPackedOperands``, with a single gradient for query, key and value.
Differentiation rules are in ``vjp.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching, mlir

from jax_memeff import _compat as compat
from jax_memeff._blockwise import derivatives as blockwise_derivatives
from jax_memeff._blockwise import forward as blockwise
from jax_memeff._blockwise import packed as blockwise_packed
from jax_memeff._call import divisors, sinks
from jax_memeff._call.operands import (
    AnyGradients,
    AnyOperands,
    NeedsGrad,
    QkvPackedOperands,
    array_of,
    gradients_from,
    gradients_needed,
)
from jax_memeff._call.options import Options
from jax_memeff._call.values import score_dtype
from jax_memeff._compat import Primitive
from jax_memeff._op.batching import rule
from jax_memeff._sharding.automatic import by_shards
from jax_memeff.errors import UnsupportedError

attention_fwd_p = Primitive("attention_fwd")
attention_fwd_p.multiple_results = True
attention_bwd_p = Primitive("attention_bwd")
attention_bwd_p.multiple_results = True
attention_tangent_p = Primitive("attention_tangent")
attention_tangent_p.multiple_results = True


def forward(operands: AnyOperands, options: Options) -> tuple[jax.Array, ...]:
    """Output [B, T, N, Hv] in the query's dtype and logsumexp [B, T, N] (f32; f64 for f64).

    With ``options.row_maxima`` also the largest valid score of each row, typed like the logsumexp;
    it excludes sinks, and is -inf in rows without a valid score.
    """
    leaves, tree = jax.tree.flatten(operands)
    return tuple(attention_fwd_p.bind(*leaves, tree=tree, options=options))


def backward(
    operands: AnyOperands,
    options: Options,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    needs_grad: NeedsGrad,
) -> AnyGradients:
    """The needed gradients; the others are None and cost nothing."""
    leaves, tree = jax.tree.flatten((operands, out, lse, dout, dlse))
    results = attention_bwd_p.bind(*leaves, tree=tree, options=options, needs_grad=needs_grad)
    return gradients_from(results, operands, needs_grad)


def tangent(
    operands: AnyOperands,
    options: Options,
    out: jax.Array,
    lse: jax.Array,
    tangents: AnyGradients,
) -> tuple[jax.Array, jax.Array]:
    """Tangents of out and lse for tangents of the operands, which have the shapes of gradients.

    A tangent that is None is zero.
    """
    leaves, tree = jax.tree.flatten((operands, out, lse, tangents))
    dout, dlse = attention_tangent_p.bind(*leaves, tree=tree, options=options)
    return dout, dlse


def _forward_types(*avals: Any, tree: Any, options: Options) -> tuple[Any, ...]:
    operands: Any = jax.tree.unflatten(tree, avals)
    if isinstance(operands, QkvPackedOperands):
        query = compat.projection(operands.query_key_value)
        value_dim = query.shape[3]
    else:
        query, value_dim = operands.query, options.latent_dim or operands.value_dim
    lse_dtype = score_dtype(query.dtype)
    rows = query.shape[:3]
    lse = compat.leading_dims(query, rows, lse_dtype)
    row_maxima = (lse,) if options.row_maxima else ()
    return compat.leading_dims(query, (*rows, value_dim), query.dtype), lse, *row_maxima


def _backward_types(
    *avals: Any, tree: Any, options: Options, needs_grad: NeedsGrad
) -> tuple[Any, ...]:
    operands: Any = jax.tree.unflatten(tree, avals)[0]
    types = []
    for name in gradients_needed(operands, needs_grad):
        aval = array_of(operands, name)
        shape = divisors.gradient_shape(name, aval.shape, operands, options.divisors)
        types.append(compat.batched(aval, shape, avals[0]))
    return tuple(types)


def _tangent_types(*avals: Any, tree: Any, options: Options) -> tuple[Any, Any]:
    del options
    _, out, lse, _ = jax.tree.unflatten(tree, avals)
    return out.update(weak_type=False), lse.update(weak_type=False)


def _outside_loops(operands: Any) -> Any:
    """The same operands, whose bias, mask and captured arrays are not constants.

    A mask is often an array of the program itself. On the way to XLA, constants are copied into the
    body of every loop that reads them: 16 MiB for 4096 x 4096 elements, which takes seconds.
    """
    arrays = {name: getattr(operands, name) for name in ("bias", "mask", "captured")}
    # Each array has its own barrier, so that XLA drops those that are not read.
    return operands._replace(**jax.tree.map(lax.optimization_barrier, arrays))


def _blockwise_forward(*leaves: jax.Array, tree: Any, options: Options) -> Sequence[jax.Array]:
    given = _outside_loops(jax.tree.unflatten(tree, leaves))
    operands, options = divisors.with_values(given, options)
    path = blockwise if operands.sequences is None else blockwise_packed
    if operands.sinks is None:
        return path.forward(operands, options)
    accumulator = score_dtype(operands.query.dtype)
    out, lse, *row_maxima = path.forward(operands, options, accumulator)
    out, lse = sinks.joined(out, lse, *sinks.of_each_row(operands, options))
    return out.astype(operands.query.dtype), lse, *row_maxima


def _blockwise_backward(
    *leaves: jax.Array, tree: Any, options: Options, needs_grad: NeedsGrad
) -> Sequence[jax.Array]:
    given, out, lse, dout, dlse = jax.tree.unflatten(tree, leaves)
    given = _outside_loops(given)
    is_latent = options.latent_dim is not None
    operands, options = divisors.with_values(given, options)
    path = blockwise if operands.sequences is None else blockwise_packed
    in_tiles = needs_grad._replace(sinks=False)
    if is_latent:
        in_tiles = in_tiles._replace(value=needs_grad.key)
    gradients = path.backward(operands, options, out, lse, dout, dlse, in_tiles)
    if needs_grad.sinks and operands.sinks is not None:
        delta = sinks.delta(out, dout, dlse)
        gradients = gradients._replace(sinks=sinks.gradient(operands, options, lse, delta))
    three: Any = gradients[:3]
    if is_latent and needs_grad.key:
        _, key, value = three
        key = key.at[..., : value.shape[3]].add(value)
        gradients = gradients._replace(key=key, value=None)
    return [
        jnp.stack(three, 2) if name == "query_key_value" else array_of(gradients, name)
        for name in gradients_needed(given, needs_grad)
    ]


def tangent_in_jax(*leaves: jax.Array, tree: Any, options: Options) -> Sequence[jax.Array]:
    """``attention_tangent`` in JAX, which may be differentiated further."""
    operands, out, lse, tangents = jax.tree.unflatten(tree, leaves)
    operands = _outside_loops(operands)
    return blockwise_derivatives.tangent(operands, options, out, lse, tangents)


def _cuda_forward(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Sequence[Any]:
    # Imported here because it imports the code generator, which `import jax_memeff` must not.
    from jax_memeff._cuda import lowering

    return lowering.lower_forward(ctx, *operands, **params)


def _cuda_backward(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Sequence[Any]:
    from jax_memeff._cuda import lowering

    def in_jax(*leaves: jax.Array) -> Sequence[jax.Array]:
        with_gpu_tiles = {**params, "options": _with_gpu_tiles(params["options"])}
        return _blockwise_backward(*leaves, **with_gpu_tiles)

    return lowering.lower_backward(ctx, *operands, in_jax=in_jax, **params)


def _cuda_tangent(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Sequence[Any]:
    from jax_memeff._cuda import lowering

    return lowering.lower_tangent(ctx, *operands, **params)


def _with_gpu_tiles(options: Options) -> Options:
    return dataclasses.replace(options, has_gpu_tiles=True)


def _tangent_digest(avals: Sequence[Any], **params: Any) -> bytes:
    from jax_memeff._cuda import lowering

    return lowering.digest(avals, **params)


def _kernel_digest(avals: Sequence[Any], **params: Any) -> bytes:
    from jax_memeff._cuda import selection

    return selection.digest(avals, **params)


def _register(
    primitive: Primitive,
    types: Callable,
    in_jax: Callable,
    on_cuda: Callable,
    kernel_digest: Callable[..., bytes] = _kernel_digest,
) -> None:
    lower_in_jax = mlir.lower_fun(in_jax, multiple_results=True)

    def one_device(ctx, *operands, **params):
        local = ctx.replace(avals_in=[compat.local(aval) for aval in ctx.avals_in])
        return lower_in_jax(local, *operands, **params)

    default_lowering = by_shards(primitive, one_device)

    def anywhere(ctx, *operands, **params):
        if params["options"].implementation == "cuda":
            platforms = ", ".join(ctx.module_context.platforms)
            raise UnsupportedError(
                [
                    f"implementation='cuda' needs a CUDA device, got a program for: {platforms}",
                    "pass implementation=None or 'xla', or place the arguments on a CUDA device",
                ]
            )
        return default_lowering(ctx, *operands, **params)

    def cuda(lower, ctx, *operands, **params):
        # The results of empty problems are constants and need no kernel.
        empty = any(0 in aval.shape for aval in ctx.avals_in)
        if empty or params["options"].implementation == "xla":
            params["options"] = _with_gpu_tiles(params["options"])
            return default_lowering(ctx, *operands, **params)
        return lower(ctx, *operands, **params)

    primitive.def_abstract_eval(types)
    compat.compile_at_once(primitive)
    mlir.register_lowering(primitive, anywhere)
    kernels = by_shards(primitive, on_cuda, kernel_digest)
    mlir.register_lowering(primitive, functools.partial(cuda, kernels), platform="cuda")
    batching.primitive_batchers[primitive] = functools.partial(rule, primitive)


_register(
    attention_fwd_p,
    types=_forward_types,
    in_jax=_blockwise_forward,
    on_cuda=_cuda_forward,
)
_register(
    attention_bwd_p,
    types=_backward_types,
    in_jax=_blockwise_backward,
    on_cuda=_cuda_backward,
)
_register(
    attention_tangent_p,
    types=_tangent_types,
    in_jax=tangent_in_jax,
    on_cuda=_cuda_tangent,
    kernel_digest=_tangent_digest,
)
