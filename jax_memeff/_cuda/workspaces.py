"""The sizes of a call, and its workspaces, which are fixed before the device is known.

Each workspace is large enough for the kernels of every architecture of the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
from jax.core import ShapedArray

from jax_memeff._call.divisors import gradient_shape
from jax_memeff._call.operands.arrays import Operands
from jax_memeff._call.options import Divisors
from jax_memeff.codegen.launch import Workspace
from jax_memeff.codegen.sizes import Sizes
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import MULTIPROCESSORS


def sizes_of(avals: Operands, divisors: Divisors) -> Sizes:
    """The sizes of a call for the code generator."""
    batch, heads, queries, keys = avals.scores
    _, query_tokens, _, head_dim = avals.query.shape
    _, key_tokens, key_heads, _ = avals.key.shape
    packed = avals.sequences is not None
    bias_gradient = (1, 1)
    if avals.bias is not None:
        bias_gradient = gradient_shape("bias", avals.bias.shape, avals, divisors)[:2]
    return Sizes(
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        value_dim=avals.value_dim,
        query_tokens=query_tokens if packed else None,
        key_tokens=key_tokens if packed else None,
        bias_gradient=(bias_gradient[0], bias_gradient[1]),
    )


def of_kernels(sizes: Sizes, specs: Iterable[KernelSpec]) -> Iterator[tuple[str, ShapedArray]]:
    """Names and types of the workspaces of a call (ffi/include/memeff/params.h)."""
    largest: dict[str, Workspace] = {}
    for spec in specs:
        for workspace in spec.kernel.workspaces(spec, sizes, MULTIPROCESSORS):
            other = largest.get(workspace.name, workspace)
            shape = tuple(map(max, zip(workspace.shape, other.shape, strict=True)))
            largest[workspace.name] = workspace._replace(shape=shape)
    for workspace in largest.values():
        if math.prod(workspace.shape):
            yield workspace.name, ShapedArray(workspace.shape, jnp.dtype(workspace.dtype))
