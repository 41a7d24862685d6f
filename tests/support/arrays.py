"""Arrays for tests, made without compiling a program.

Test modules make their arrays at import, in each process that collects tests. jax.random, jnp.zeros
and jnp.asarray compile a program for each shape; jax.device_put does not.
"""

from typing import Any

import jax
import numpy as np


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    """Standard normal numbers."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(drawn.astype(dtype))


def zeros(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.zeros(shape, jax.numpy.dtype(dtype)))


def changed(array: jax.Array, place: Any, value: float) -> jax.Array:
    """The array with another value at a place, as ``array.at[place].set(value)``."""
    copy = np.array(array)
    copy[place] = value
    return jax.device_put(copy)
