"""Tries a wheel under the installed JAX: the host module, and the function on a CPU.

Run it outside of the clone, so that it imports the installed package.
"""

import importlib
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

import jax_memeff

# A module that does not declare otherwise turns on the GIL of a free-threaded Python.
is_gil_enabled = getattr(sys, "_is_gil_enabled", lambda: True)
before = is_gil_enabled()
_ffi = importlib.import_module("jax_memeff._ffi")
assert is_gil_enabled() == before

# This only queues the targets for CUDA, because a CPU has no such platform.
jax_memeff.register_targets()

# A runtime that is older than the headers of the module refuses its handlers when they are
# registered. Registering them for the CPU shows it. The backend must exist before, and the type
# must be registered before the handlers.
jax.devices("cpu")
jax.ffi.register_ffi_type("jax_memeff_call_on_cpu", _ffi.call_type(), platform="cpu")
for name, stages in _ffi.targets().items():
    jax.ffi.register_ffi_target(f"{name}_on_cpu", stages, platform="cpu", api_version=1)

query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 70, 4, 16))


def loss(attention):
    def function(query, key, value):
        return jnp.sum(jnp.sin(attention(query, key, value, is_causal=True)))

    return jax.jit(jax.value_and_grad(function, (0, 1, 2)))


ours = loss(jax_memeff.dot_product_attention)(query, key, value)
theirs = loss(jax.nn.dot_product_attention)(query, key, value)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)

mask = jax_memeff.Mask.window(20, 0) & jax_memeff.Mask.lengths(key=jnp.array([70, 40]))
out, lse = jax.vmap(
    lambda q: jax_memeff.dot_product_attention(
        q,
        key,
        value,
        mask=mask,
        dropout_rate=0.25,
        dropout_key=jax.random.key(1),
        return_residual=True,
    )
)(query[None])
assert out.shape == (1, 2, 70, 4, 16) and lse.dtype == jnp.float32
# The derivatives of functions use different primitives in different versions of JAX.
gain = jnp.linspace(0.5, 2.0, 4)


def with_function(gain):
    def score_mod(score, b, h, q, k):
        return 3 * jnp.tanh(score * gain[h] / 3) + jnp.log2(1.0 + jnp.abs(q - k))

    return jnp.sum(jax_memeff.dot_product_attention(query, key, value, score_mod=score_mod) ** 2)


def by_definition(gain):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / 4 * gain[:, None, None]
    distance = jnp.abs(jnp.arange(70)[:, None] - jnp.arange(70))
    weights = jax.nn.softmax(3 * jnp.tanh(scores / 3) + jnp.log2(1.0 + distance))
    return jnp.sum(jnp.einsum("bnts,bsnh->btnh", weights, value) ** 2)


both = (jax.jit(jax.value_and_grad(function))(gain) for function in (with_function, by_definition))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), *both)
installed = [f"{name} {version(name)}" for name in ("jax-memeff", "jax", "jaxlib")]
print("works:", ", ".join(installed))
