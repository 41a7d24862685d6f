"""Environment variables, parsed here and nowhere else. They are read at each call.

==========================  ====================================================================
``JAX_MEMEFF_ARCHS``        architectures to compile for, such as ``sm_80,sm_90a``, or
                            ``compute_80`` for PTX; by default those of the local CUDA devices
``JAX_MEMEFF_CACHE_DIR``    where compiled kernels are kept; by default
                            ``$XDG_CACHE_HOME/jax_memeff``, else ``~/.cache/jax_memeff``
==========================  ====================================================================
"""

from __future__ import annotations

import os
from pathlib import Path

from jax_memeff.codegen import arch as architectures


def archs() -> tuple[str, ...]:
    """The architectures of ``JAX_MEMEFF_ARCHS``, without repeats; empty when it is not set.

    Raises ``ValueError`` naming the variable when an entry is not the name of an architecture.

    >>> os.environ["JAX_MEMEFF_ARCHS"] = "sm_80, sm_90a"
    >>> archs()
    ('sm_80', 'sm_90a')
    >>> del os.environ["JAX_MEMEFF_ARCHS"]
    """
    text = os.environ.get("JAX_MEMEFF_ARCHS", "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        try:
            architectures.capability(name)
        except ValueError as error:
            raise ValueError(
                "expected JAX_MEMEFF_ARCHS to be a comma-separated list of names such as "
                f"'sm_80,sm_90a', got {name!r} in {text!r}"
            ) from error
    return tuple(dict.fromkeys(names))


def cache_dir() -> Path:
    """The directory of compiled kernels; it need not exist, nor be writable."""
    if chosen := os.environ.get("JAX_MEMEFF_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # Without a home directory the path stays relative to "~", which nothing can create: the cache
    # is then kept in memory.
    return Path(os.path.expanduser(base)) / "jax_memeff"
