"""Where the parts of the CUDA toolchain are that a compilation needs: headers and libraries.

Wheels come first, because their versions are the ones that pyproject.toml asks for. They are found
along ``sys.path`` with ``importlib.metadata``: ``cuda.pathfinder`` searches the interpreter's own
site-packages only, and so passes over ``pip install --target`` and environments on ``PYTHONPATH``,
and takes a CUDA toolkit of the system instead. It finds what has no wheel: in conda environments,
in CUDA_PATH or CUDA_HOME, and in the usual directories of a system.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import os
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from jax_memeff.errors import CompileError

INSTALL = 'pip install "jax-memeff[cuda13]"'

WHEEL = "wheel"

_importing = threading.Lock()


def _renew_lock() -> None:
    global _importing
    _importing = threading.Lock()


# A child of fork has only the forking thread: a lock that another one held would never be released.
os.register_at_fork(after_in_child=_renew_lock)


class Part(NamedTuple):
    """Something to find: ``file`` below ``directory`` of a wheel.

    ``name`` is what cuda.pathfinder calls it, ``title`` what messages do.
    """

    name: str
    title: str
    wheel: str
    directory: str
    file: str


class Found(NamedTuple):
    """A part and its place: the include directory, or the path of the library.

    ``via`` is ``WHEEL``, or how cuda.pathfinder found it, such as "conda" or "CUDA_PATH";
    ``version`` is the wheel's, and None without one.
    """

    part: Part
    path: Path
    via: str
    version: str | None


CUTLASS = Part(
    "cutlass", "CUTLASS", "nvidia-cutlass", "cutlass_library/source/include", "cutlass/version.h"
)
CUDART = Part(
    "cudart", "CUDA headers", "nvidia-cuda-runtime", "nvidia/cu13/include", "cuda_runtime_api.h"
)
CCCL = Part(
    "cccl",
    "CCCL",
    "nvidia-cuda-cccl",
    "nvidia/cu13/include/cccl",
    "cuda/std/__cccl/version.h",
)
NVRTC = Part("nvrtc", "NVRTC", "nvidia-cuda-nvrtc", "nvidia/cu13/lib", "libnvrtc.so.13")
NVFATBIN = Part("nvfatbin", "nvFatbin", "nvidia-nvfatbin", "nvidia/cu13/lib", "libnvfatbin.so.13")

HEADERS = (CUTLASS, CUDART, CCCL)
LIBRARIES = (NVRTC, NVFATBIN)


@functools.cache
def headers(part: Part) -> Found | None:
    """The include directory of ``part``, or None if it is nowhere."""
    if found := _in_wheels(part):
        return found._replace(path=found.path.parents[part.file.count("/")])
    found = import_("cuda.pathfinder").locate_nvidia_header_directory(part.name)
    return None if found is None else Found(part, Path(found.abs_path), found.found_via, None)


@functools.cache
def library(part: Part) -> Found:
    """Load the library ``part`` into this process, so that cuda.bindings uses it.

    Raises ``CompileError`` naming the command that installs it if it is nowhere.
    """
    wheel = _in_wheels(part)
    if wheel is not None and not _is_loaded(part.file):
        # NVRTC 13.0 searches its builtins by name, and not beside itself.
        for builtins in wheel.path.parent.glob(f"lib{part.name}-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        ctypes.CDLL(str(wheel.path))
    pathfinder = import_("cuda.pathfinder")
    try:
        loaded = pathfinder.load_nvidia_dynamic_lib(part.name)
    except pathfinder.DynamicLibNotFoundError as error:
        raise missing([part], str(error)) from None
    if wheel is not None and os.path.samefile(wheel.path, loaded.abs_path):
        return wheel
    via = "this process" if loaded.was_already_loaded_from_elsewhere else loaded.found_via
    return Found(part, Path(loaded.abs_path), via, None)


def all_found() -> dict[Part, Found | None]:
    """Every part, and where it is: None for one that is nowhere."""
    found: dict[Part, Found | None] = {}
    for part in (*LIBRARIES, *HEADERS):
        try:
            found[part] = library(part) if part in LIBRARIES else headers(part)
        except CompileError:
            found[part] = None
    return found


@functools.cache
def warn_of_mixture() -> None:
    """Warn once if some parts are wheels and others are not: their versions may not fit."""
    found = [place for place in all_found().values() if place is not None]
    # CUTLASS is in no toolkit, so that its wheel beside a whole toolkit is no mixture.
    toolkit = [place for place in found if place.part is not CUTLASS]
    others = [place for place in toolkit if place.via != WHEEL]
    if others and len(others) < len(toolkit):
        wheels = " ".join(place.part.wheel for place in others)
        warnings.warn(
            "kernels are compiled by parts of different CUDA installations: "
            + ", ".join(f"{p.part.title} from {p.path} ({p.via})" for p in others)
            + f"; the others are wheels. To have one installation: {INSTALL} (it brings {wheels})",
            RuntimeWarning,
            stacklevel=2,
        )


def missing(parts: list[Part], detail: str = "") -> CompileError:
    """The error for parts that are nowhere: what was searched, and the command that helps."""
    titles = ", ".join(part.title for part in parts)
    lines = [f"error: {titles} not found{f': {detail}' if detail else ''}"]
    places = {f"searched {place}": value for place, value in searched().items()}
    wheels = ", ".join(part.wheel for part in parts)
    return CompileError(
        "\n".join(lines),
        places,
        f"Kernels are compiled on this machine and need {titles} (wheels: {wheels}): {INSTALL}",
    )


def searched() -> dict[str, str]:
    """The places where parts are searched, in this order: their names and what they are now."""
    path = [entry for entry in sys.path if os.path.isdir(entry or ".")]
    variables = ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME")
    return {
        "sys.path": os.pathsep.join(path),
        **{name: os.environ.get(name) or "not set" for name in variables},
        "system": "the dynamic linker's path, /usr/local/cuda",
    }


def import_(name: str) -> ModuleType:
    """A module of the cuda-python packages, imported when first needed.

    One thread at a time: while one imports cuda.core, which swaps itself for the module of a CUDA
    version, another would get it without its names. Raises ``CompileError`` if it is not installed.
    """
    try:
        with _importing:
            return importlib.import_module(name)
    except ImportError as error:
        raise CompileError(
            f"error: {name} was not found: {error}",
            {"searched sys.path": searched()["sys.path"]},
            f"Kernels are compiled on this machine and need it: {INSTALL}",
        ) from error


def _in_wheels(part: Part) -> Found | None:
    """The first wheel along ``sys.path`` that has the file; ``path`` is that of the file."""
    for wheel in importlib.metadata.distributions(name=part.wheel):
        file = Path(str(wheel.locate_file(f"{part.directory}/{part.file}")))
        if file.is_file():
            return Found(part, file, WHEEL, wheel.version)
    return None


def _is_loaded(soname: str) -> bool:
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True
