"""Pack several arrays into one, so that they need one transfer.

Transfers overlap the kernels of a step. By default XLA keeps only one transfer in flight, so of
several transfers only one would overlap, and the devices would wait for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def pack(tree: Any) -> jax.Array:
    """The elements of all arrays, concatenated; as raw bits if the dtypes differ.

    >>> pack({"key": jnp.arange(2), "value": jnp.arange(4).reshape(2, 2)}).tolist()
    [0, 1, 0, 1, 2, 3]
    >>> pack([jnp.zeros(4, "bfloat16"), jnp.zeros(3, "float32")])
    Array([0, 0, 0, 0, 0], dtype=uint32)
    """
    leaves = jax.tree.leaves(tree)
    unit = _unit(leaves)
    return jnp.concatenate([_in_units(leaf.ravel(), unit) for leaf in leaves])


def unpack(packed: jax.Array, like: Any) -> Any:
    """The inverse of :func:`pack`; ``like`` is a tree of the same shapes and dtypes.

    >>> tree = {"key": jnp.arange(2), "value": jnp.ones((1, 3), "bfloat16")}
    >>> jax.tree.map(lambda x, y: bool((x == y).all()), unpack(pack(tree), tree), tree)
    {'key': True, 'value': True}
    """
    leaves, structure = jax.tree.flatten(like)
    first, found = 0, []
    for leaf in leaves:
        last = first + leaf.size * leaf.dtype.itemsize // packed.dtype.itemsize
        part = lax.slice_in_dim(packed, first, last)
        found.append(_in_units(part, leaf.dtype).reshape(leaf.shape))
        first = last
    return jax.tree.unflatten(structure, found)


def _unit(leaves: Sequence[jax.Array]) -> Any:
    """A dtype in which the bits of every array can be read."""
    dtypes = {leaf.dtype for leaf in leaves}
    if len(dtypes) == 1:
        return dtypes.pop()
    size = math.gcd(4, *(leaf.size * leaf.dtype.itemsize for leaf in leaves))
    return jnp.dtype(f"uint{8 * size}")


def _in_units(x: jax.Array, dtype: Any) -> jax.Array:
    """The bits of a flat array as a flat array of another dtype."""
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize < dtype.itemsize:
        x = x.reshape(-1, dtype.itemsize // x.dtype.itemsize)
    return lax.bitcast_convert_type(x, dtype).ravel()
