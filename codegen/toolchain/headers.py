"""Where the headers of a compilation are, and a digest of what they say."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re
from pathlib import Path

from jax_memeff.errors import CompileError

INSTALL = 'pip install "jax-memeff[cuda13]"'

# The name of a part in cuda.pathfinder, and the file and the macros that state its version.
_VERSION_MACROS = {
    "cutlass": ("cutlass/version.h", ("CUTLASS_MAJOR", "CUTLASS_MINOR", "CUTLASS_PATCH")),
    "cudart": ("cuda_runtime_api.h", ("CUDART_VERSION",)),
    "cccl": ("cuda/std/__cccl/version.h", ("CCCL_VERSION",)),
}


def own_include_dir() -> Path:
    """The directory that holds ``memeff/``, as installed with the package."""
    path = Path(str(importlib.resources.files("jax_memeff") / "include"))
    if not path.is_dir():
        raise CompileError(
            f"error: the device headers of jax_memeff are not at {path}",
            {},
            "The package is not completely installed: install it again with pip.",
        )
    return path


@functools.cache
def include_dirs() -> tuple[str, str, str]:
    """The directories of CUTLASS, the CUDA runtime and CCCL, in this order.

    Raises ``CompileError`` naming every part that is missing and the command that installs it.
    """
    try:
        from cuda import pathfinder
    except ImportError as error:
        raise CompileError(
            f"error: cuda.pathfinder cannot be imported: {error}",
            {},
            f"It finds the CUDA headers: {INSTALL}",
        ) from error
    found = {part: pathfinder.find_nvidia_header_directory(part) for part in _VERSION_MACROS}
    if missing := [part for part, directory in found.items() if directory is None]:
        raise CompileError(
            f"error: no headers were found for {', '.join(missing)} (site-packages, conda, "
            "CUDA_HOME and system directories were searched)",
            {part: str(directory) for part, directory in found.items() if directory},
            f"Kernels are compiled on this machine and need them: {INSTALL}",
        )
    return tuple(str(found[part]) for part in _VERSION_MACROS)  # pyright: ignore[reportReturnType]


@functools.cache
def versions() -> dict[str, str]:
    """The versions that the header files themselves state, for example ``{"cutlass": "4.2.0"}``."""
    return {
        part: _version(Path(directory) / file, macros)
        for (part, (file, macros)), directory in zip(
            _VERSION_MACROS.items(), include_dirs(), strict=True
        )
    }


def digest() -> bytes:
    """SHA-256 over the text of our headers and the versions of the others; no path enters it.

    Our headers are read at every call, so that an edited header never meets an old kernel.
    """
    own = own_include_dir()
    digest = hashlib.sha256(repr(sorted(versions().items())).encode())
    for file in sorted(own.rglob("*")):
        if file.is_file():
            text = file.read_bytes()
            digest.update(f"{file.relative_to(own).as_posix()} {len(text)}\n".encode())
            digest.update(text)
    return digest.digest()


def _version(file: Path, macros: tuple[str, ...]) -> str:
    if not file.is_file():
        return "unknown"
    text = file.read_text(errors="replace")
    found = [re.search(rf"#\s*define\s+{macro}\s+(\d+)", text) for macro in macros]
    numbers = [int(number[1]) for number in found if number]
    if macros == ("CUDART_VERSION",) and numbers:  # 13050 is 13.5
        numbers = [numbers[0] // 1000, numbers[0] % 1000 // 10]
    if macros == ("CCCL_VERSION",) and numbers:  # 3001004 is 3.1.4, of CUDA 13.1
        numbers = [numbers[0] // 1000000, numbers[0] // 1000 % 1000, numbers[0] % 1000]
    return ".".join(map(str, numbers)) or "unknown"
