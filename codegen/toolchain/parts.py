"""Finds the parts of the CUDA toolchain that a compilation needs: headers and libraries.

Wheels come first, because their versions are the ones that pyproject.toml asks for. They are found
along ``sys.path`` with ``importlib.metadata``: ``cuda.pathfinder`` searches only the interpreter's
own site-packages, so it would miss ``pip install --target`` and environments on ``PYTHONPATH`` and
use the system's CUDA toolkit instead. It finds what has no wheel: in conda environments, in
CUDA_PATH or CUDA_HOME, and in the usual directories of a system.

There are two sets of wheels, for CUDA 12 and CUDA 13, with different names and directories. The
version of ``cuda.bindings``, which calls the libraries, selects one set; a part of the other set
is never used, so both may be installed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from jax_memeff import config
from jax_memeff.codegen.toolchain import descriptors
from jax_memeff.errors import CompileError

WHEEL = "wheel"

_importing = threading.Lock()


def _renew_lock() -> None:
    global _importing
    _importing = threading.Lock()


# A forked child has only the forking thread: a lock that another thread held is never released.
os.register_at_fork(after_in_child=_renew_lock)


class Wheel(NamedTuple):
    """A distribution, and the ``directory`` in which it has ``file``."""

    name: str
    directory: str
    file: str


class Part(NamedTuple):
    """Something to find: its names in cuda.pathfinder and in messages, and its two wheels."""

    name: str
    title: str
    cuda12: Wheel
    cuda13: Wheel

    @property
    def wheel(self) -> Wheel:
        """The wheel for the CUDA version of this process."""
        return self.cuda12 if cuda_major() == 12 else self.cuda13


class Found(NamedTuple):
    """A part and its place: the include directory, or the path of the library.

    ``via`` is ``WHEEL``, or how cuda.pathfinder found it, such as "conda" or "CUDA_PATH";
    ``version`` is the wheel's, and None without one.
    """

    part: Part
    path: Path
    via: str
    version: str | None


_CUTLASS = Wheel("nvidia-cutlass", "cutlass_library/source/include", "cutlass/version.h")
CUTLASS = Part("cutlass", "CUTLASS", _CUTLASS, _CUTLASS)
CUDART = Part(
    "cudart",
    "CUDA headers",
    Wheel("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/include", "cuda_runtime_api.h"),
    Wheel("nvidia-cuda-runtime", "nvidia/cu13/include", "cuda_runtime_api.h"),
)
CCCL = Part(
    "cccl",
    "CCCL",
    Wheel("nvidia-cuda-cccl-cu12", "nvidia/cuda_cccl/include", "cuda/std/__cccl/version.h"),
    Wheel("nvidia-cuda-cccl", "nvidia/cu13/include/cccl", "cuda/std/__cccl/version.h"),
)
NVRTC = Part(
    "nvrtc",
    "NVRTC",
    Wheel("nvidia-cuda-nvrtc-cu12", "nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"),
    Wheel("nvidia-cuda-nvrtc", "nvidia/cu13/lib", "libnvrtc.so.13"),
)
NVFATBIN = Part(
    "nvfatbin",
    "nvFatbin",
    Wheel("nvidia-nvfatbin-cu12", "nvidia/nvfatbin/lib", "libnvfatbin.so.12"),
    Wheel("nvidia-nvfatbin", "nvidia/cu13/lib", "libnvfatbin.so.13"),
)

HEADERS = (CUTLASS, CUDART, CCCL)
LIBRARIES = (NVRTC, NVFATBIN)


@functools.cache
def cuda_major() -> int:
    """12 or 13: the CUDA version of cuda.bindings, else the one of JAX's plugin, else 13."""
    if (bindings := _installed("cuda-bindings")) is not None:
        return 12 if bindings.startswith("12.") else 13
    return 12 if _installed("jax-cuda12-plugin") and not _installed("jax-cuda13-plugin") else 13


def install(major: int | None = None) -> str:
    """The command that installs every part for a CUDA version, by default that of this process.

    It brings no JAX for CUDA, which takes 4.6 GB and compiles no kernel.
    """
    return install_extra("nvrtc-cu12" if (major or cuda_major()) == 12 else "nvrtc")


def install_extra(extra: str) -> str:
    """The command that installs an extra of this package, from the clone if it comes from one.

    pip notes in direct_url.json what it installed that has no index (PEP 610).
    """
    try:
        noted = importlib.metadata.distribution("jax-memeff").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        noted = None
    origin = json.loads(noted or "{}")
    if (directory := origin.get("dir_info")) is None:
        return f'pip install "jax-memeff[{extra}]"'
    clone = unquote(urlsplit(origin["url"]).path)
    editable = "-e " if directory.get("editable") else ""
    return f'pip install {editable}"{clone}[{extra}]"'


@functools.cache
def headers(part: Part) -> Found | None:
    """The include directory of ``part``, or None if it is not found."""
    if found := _in_wheels(part):
        return found._replace(path=found.path.parents[part.wheel.file.count("/")])
    found = import_("cuda.pathfinder").locate_nvidia_header_directory(part.name)
    return None if found is None else Found(part, Path(found.abs_path), found.found_via, None)


@functools.cache
def library(part: Part) -> Found:
    """Load the library ``part`` into this process, so that cuda.bindings uses it.

    Raises ``CompileError`` naming the command that installs it, if it is not found or does not
    load.
    """
    wheel = _in_wheels(part)
    pathfinder = import_("cuda.pathfinder")
    try:
        if wheel is not None and not _is_loaded(part.wheel.file):
            # NVRTC 13.0 looks its builtins up by name, not in its own directory.
            for builtins in wheel.path.parent.glob(f"lib{part.name}-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            ctypes.CDLL(str(wheel.path))
        loaded = pathfinder.load_nvidia_dynamic_lib(part.name)
    except (pathfinder.DynamicLibNotFoundError, OSError) as error:
        descriptors.require_one()
        raise missing([part], str(error)) from None
    if wheel is not None and os.path.samefile(wheel.path, loaded.abs_path):
        return wheel
    via = "this process" if loaded.was_already_loaded_from_elsewhere else loaded.found_via
    return Found(part, Path(loaded.abs_path), via, None)


def all_found() -> dict[Part, Found | None]:
    """Every part, and where it is: None for one that is not found."""
    found: dict[Part, Found | None] = {}
    for part in (*LIBRARIES, *HEADERS):
        try:
            found[part] = library(part) if part in LIBRARIES else headers(part)
        except CompileError:
            found[part] = None
    return found


@functools.cache
def warn_of_mixture() -> None:
    """Warn once if some parts are wheels and others are not: their versions may not match."""
    found = [place for place in all_found().values() if place is not None]
    # No toolkit contains CUTLASS, so its wheel beside a whole toolkit is not a mixture.
    toolkit = [place for place in found if place.part is not CUTLASS]
    others = [place for place in toolkit if place.via != WHEEL]
    if others and len(others) < len(toolkit):
        wheels = " ".join(place.part.wheel.name for place in others)
        warnings.warn(
            "kernels are compiled by parts of different CUDA installations: "
            + ", ".join(f"{p.part.title} from {p.path} ({p.via})" for p in others)
            + "; the others are wheels. To have one installation: "
            + f"{install()} (it brings {wheels})",
            RuntimeWarning,
            stacklevel=2,
        )


def missing(parts: list[Part], detail: str = "") -> CompileError:
    """The error for parts that are not found: what was searched, and the command that helps."""
    titles = ", ".join(part.title for part in parts)
    lines = [f"error: {titles} not found{f': {detail}' if detail else ''}"]
    places = {f"searched {place}": value for place, value in searched().items()}
    wheels = ", ".join(part.wheel.name for part in parts)
    return CompileError(
        "\n".join(lines),
        places,
        f"Kernels are compiled on this machine and need {titles} (wheels: {wheels}): {install()}"
        f"{_or_archive()}",
    )


def _or_archive() -> str:
    """The advice to name an archive of kernels, or the reason why the named one did not help."""
    if (path := config.kernel_archive()) is None:
        return ". Or name an archive of compiled kernels in JAX_MEMEFF_KERNELS"
    return f". The archive {path} does not have this kernel"


def searched() -> dict[str, str]:
    """The places that are searched for parts, in this order, by name, with their current values."""
    path = [entry for entry in python_path() if os.path.isdir(entry or ".")]
    variables = ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME")
    return {
        "sys.path": os.pathsep.join(path),
        **{name: os.environ.get(name) or "not set" for name in variables},
        "system": "the dynamic linker's path, /usr/local/cuda",
    }


def python_path() -> list[str]:
    """The entries of ``sys.path`` that Python's import uses. It ignores a ``Path``, for example."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def import_(name: str) -> ModuleType:
    """A module of the cuda-python packages, imported when first needed.

    Only one thread imports at a time: while one imports cuda.core, which swaps itself for the
    module of a CUDA version, another would get it without its names. Raises ``CompileError`` if it
    is not installed.
    """
    try:
        with _importing:
            return importlib.import_module(name)
    except ImportError as error:
        descriptors.require_one()
        raise CompileError(
            f"error: {name} was not found: {error}",
            {"searched sys.path": searched()["sys.path"]},
            f"Kernels are compiled on this machine and need it: {install()}{_or_archive()}",
        ) from error


def _in_wheels(part: Part) -> Found | None:
    """The first wheel along ``sys.path`` that has the file; ``path`` is that of the file."""
    name, directory, file = part.wheel
    descriptors.require_one()
    for wheel in importlib.metadata.distributions(name=name):
        path = Path(str(wheel.locate_file(f"{directory}/{file}")))
        if path.is_file():
            return Found(part, path, WHEEL, wheel.version)
    return None


def _installed(distribution: str) -> str | None:
    """The version of the first distribution of this name along ``sys.path``; None without one."""
    descriptors.require_one()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_loaded(soname: str) -> bool:
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True
