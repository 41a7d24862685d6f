"""Arrays for tests that JAX does not have to compile a program for.

Modules make their arrays when they are imported, in each process that collects tests; jax.random
and jnp.zeros compile one program for each shape there.
"""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, dtype=np.float32) -> jax.Array:
    """Standard normal numbers."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(drawn.astype(dtype))


def zeros(*shape: int, dtype=np.float32) -> jax.Array:
    return jnp.asarray(np.zeros(shape, dtype))
