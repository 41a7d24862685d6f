"""Reshapes of tokens and pools, whose heads may be sharded over explicit mesh axes.

JAX does not derive the sharding of these reshapes. Only leading dims change, which are not sharded.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import PartitionSpec


def with_leading(name: str, x: jax.Array, count: int, dims: tuple[int, ...]) -> jax.Array:
    """``x`` with other leading dims.

    Args:
        name: of the array, in messages.
        x: the array.
        count: the number of its leading dims that are replaced.
        dims: those that replace them.

    Raises:
        ValueError: one of the replaced dims is sharded over an explicit mesh axis.
    """
    aval = jax.typeof(x)
    spec = aval.sharding.spec
    shape = (*dims, *x.shape[count:])
    if all(axes is None for axes in spec):
        return x.reshape(shape)
    if any(axes is not None for axes in spec[:count]):
        raise ValueError(
            f"{name} of shape {x.shape} is sharded as {spec}: over explicit mesh axes only the "
            "heads may be sharded; give every device sequences of its own inside jax.shard_map"
        )
    kept = PartitionSpec(*[None] * len(dims), *spec[count:])
    return lax.reshape(x, shape, out_sharding=aval.sharding.update(spec=kept))
