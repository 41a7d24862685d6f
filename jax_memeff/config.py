"""Environment variables, parsed here and nowhere else. They are read at each call.

==========================  ====================================================================
``JAX_MEMEFF_ARCHS``        architectures to compile for, such as ``sm_80,sm_90a``, or
                            ``compute_80`` for PTX; by default those of the local CUDA devices
``JAX_MEMEFF_CACHE_DIR``    where compiled kernels are kept; by default
                            ``$XDG_CACHE_HOME/jax_memeff``, else ``~/.cache/jax_memeff``
``JAX_MEMEFF_KERNELS``      an archive of compiled kernels, which is searched before the cache;
                            ``python -m jax_memeff build --output`` writes one
``JAX_MEMEFF_PROGRESS``     ``0``: a terminal shows no line while a kernel is compiled
==========================  ====================================================================

``platformdirs`` would name the default directory, but it trusts ``HOME``: an empty one gives
``/.cache``, and a missing home directory gives a directory called ``~`` below the current one.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from jax_memeff.codegen import arch as architectures


def archs() -> tuple[str, ...]:
    """The architectures of ``JAX_MEMEFF_ARCHS``, without repeats; empty if it is not set.

    Raises ``ValueError`` naming the variable if an entry is not the name of an architecture.

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


def cache_dir() -> Path | None:
    """The directory of compiled kernels, an absolute path; it need not exist, nor be writable.

    None if no variable names one and there is no home directory. Raises ``ValueError`` naming the
    variable if it begins with the ``~`` of an unknown user, or is relative to a working directory
    that does not exist.
    """
    if chosen := os.environ.get("JAX_MEMEFF_CACHE_DIR"):
        return _expanded(chosen, "JAX_MEMEFF_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("~"):
        return _expanded(base, "XDG_CACHE_HOME") / "jax_memeff"
    if os.path.isabs(base):  # the XDG specification ignores relative paths
        return Path(base) / "jax_memeff"
    home = _home()
    return None if home is None else home / ".cache" / "jax_memeff"


def kernel_archive() -> Path | None:
    """The file that ``JAX_MEMEFF_KERNELS`` names, an absolute path; it need not exist.

    Raises ``ValueError`` naming the variable if it begins with the ``~`` of an unknown user, or is
    relative to a working directory that does not exist.
    """
    chosen = os.environ.get("JAX_MEMEFF_KERNELS")
    return _expanded(chosen, "JAX_MEMEFF_KERNELS") if chosen else None


def progress() -> bool:
    """Whether a terminal shows compilations of kernels; ``JAX_MEMEFF_PROGRESS=0`` turns it off.

    Raises ``ValueError`` naming the variable if its value is neither 0 nor 1.
    """
    text = os.environ.get("JAX_MEMEFF_PROGRESS") or "1"
    if text not in ("0", "1"):
        raise ValueError(f"expected JAX_MEMEFF_PROGRESS to be 0 or 1, got {text!r}")
    return text == "1"


def _expanded(path: str, variable: str) -> Path:
    """``path`` made absolute, with ``~`` and ``~user`` replaced by home directories."""
    first, slash, rest = path.partition("/")
    if first == "~":
        home = _home()
        path = path if home is None else f"{home}{slash}{rest}"
    elif first.startswith("~"):
        path = os.path.expanduser(path)
    if path.startswith("~"):
        raise ValueError(
            f"expected {variable} to be a path, got {path!r}, and {first!r} has no home directory: "
            "set it to an absolute path"
        )
    try:
        return Path(path).absolute()
    except OSError as error:
        raise ValueError(
            f"expected {variable} to be an absolute path, because the working directory "
            f"cannot be used ({error.strerror}), got {path!r}"
        ) from error


def _home() -> Path | None:
    """``HOME``, else what the user database says; None if neither is a home directory."""
    if os.path.isabs(home := os.environ.get("HOME", "")):
        return Path(home)
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container may run under a user id that has no name
        return None
    # Accounts without a home directory have "/", below which nothing may be created.
    return Path(home) if os.path.isabs(home) and home != "/" else None
