"""Reshapes of tokens and pools that may be sharded over explicit mesh axes.

JAX does not infer the sharding of these reshapes. Only leading dims change, and tokens are sharded
like their sequences.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import PartitionSpec


def with_leading(name: str, x: jax.Array, count: int, dims: tuple[int, ...]) -> jax.Array:
    """Reshape the leading dims of ``x``.

    Args:
        name: the name of the array in messages.
        x: the array.
        count: the number of leading dims to replace.
        dims: the new leading dims.

    Raises:
        ValueError: a replaced dim is sharded and cannot keep its sharding.
    """
    aval = jax.typeof(x)
    spec = aval.sharding.spec
    shape = (*dims, *x.shape[count:])
    if all(axes is None for axes in spec):
        return x.reshape(shape)
    first, *others = spec[:count]
    # A dim of size 1 is on an axis of size 1, which shards nothing.
    is_split = first is not None and x.shape[0] != 1
    if any(axes is not None for axes in others) or (is_split and dims[0] == 1):
        raise _refused(name, x)
    kept = PartitionSpec(first, *[None] * (len(dims) - 1), *spec[count:])
    return lax.reshape(x, shape, out_sharding=aval.sharding.update(spec=kept))


def require_whole_pages(name: str, pool: jax.Array) -> None:
    """Raise ``ValueError`` if an explicit mesh axis shards the pages of a pool."""
    if any(axes is not None for axes in jax.typeof(pool).sharding.spec[:2]):
        raise _refused(name, pool)


def _refused(name: str, x: jax.Array) -> ValueError:
    return ValueError(
        f"{name} of shape {x.shape} is sharded as {jax.typeof(x).sharding.spec}: over explicit "
        "mesh axes only sequences and heads may be sharded; give every device pages of its own "
        "inside jax.shard_map"
    )


def gathered(x: jax.Array) -> jax.Array:
    """``x`` gathered along its first dim, if an explicit mesh axis shards that dim."""
    sharding = jax.typeof(x).sharding
    if not sharding.spec or sharding.spec[0] is None:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(None, *sharding.spec[1:])))
