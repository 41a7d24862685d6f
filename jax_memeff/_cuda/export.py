"""Programs that run elsewhere: the safety checks of ``jax.export``, and registering handlers."""

from __future__ import annotations

import functools

import jax
from jax import export


def export_disabled_checks() -> list[export.DisabledSafetyCheck]:
    """The ``disabled_checks`` of ``jax.export.export`` for programs with our CUDA kernels.

    JAX refuses to export custom calls whose compatibility it does not know. Ours carry their
    kernels, and the installed package decodes them: run an exported program with the version of
    jax-memeff that exported it. Another version raises an error if it cannot decode the call.

    >>> import os, jax, jax.numpy as jnp, jax_memeff
    >>> os.environ["JAX_MEMEFF_ARCHS"] = "sm_90a"  # there may be no GPU here
    >>> operand = jax.ShapeDtypeStruct((2, 128, 8, 64), jnp.bfloat16)
    >>> exported = jax.export.export(
    ...     jax.jit(jax_memeff.dot_product_attention),
    ...     platforms=["cuda"],
    ...     disabled_checks=jax_memeff.export_disabled_checks(),
    ... )(operand, operand, operand)
    >>> exported.platforms, exported.out_avals[0].shape
    (('cuda',), (2, 128, 8, 64))
    >>> del os.environ["JAX_MEMEFF_ARCHS"]
    """
    from jax_memeff._ffi import targets

    return [export.DisabledSafetyCheck.custom_call(name) for name in targets()]


@functools.cache
def register_targets() -> None:
    """Register our custom calls with XLA, in a process that runs a program it did not lower.

    Lowering a call for CUDA registers them too, so only a process that deserializes a program needs
    this, before it runs the program. Repeated calls are harmless. No GPU or compiler is needed.

    >>> import jax_memeff
    >>> jax_memeff.register_targets()
    """
    from jax_memeff._ffi import call_type, targets

    jax.ffi.register_ffi_type("jax_memeff_call", call_type(), platform="CUDA")
    for name, stages in targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA", api_version=1)
