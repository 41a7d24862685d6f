"""The headers of a compilation: their directories, their versions, and a digest of both."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re
from pathlib import Path

from jax_memeff.codegen.toolchain import parts
from jax_memeff.codegen.toolchain.parts import CCCL, CUDART, CUTLASS, Found
from jax_memeff.errors import CompileError

_VERSION_MACROS = {
    CUTLASS: ("CUTLASS_MAJOR", "CUTLASS_MINOR", "CUTLASS_PATCH"),
    CUDART: ("CUDART_VERSION",),
    CCCL: ("CCCL_VERSION",),
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


def include_dirs() -> tuple[str, ...]:
    """The directories of CUTLASS, the CUDA runtime and CCCL, in this order, and the one above CCCL.

    With CUDA 13, CUTLASS includes CCCL as ``<cccl/cuda/std/...>``, and CCCL includes itself as
    ``<cuda/std/...>``. The directory above comes last, because in a toolkit it also has CUDA's own
    headers, perhaps of another version.

    Raises ``CompileError`` naming every part that is missing and the command that installs it.
    """
    paths = [found.path for found in _found()]
    above = [found.path.parent for found in _found() if found.path.name == CCCL.name]
    return tuple(dict.fromkeys(map(str, (*paths, *above))))


@functools.cache
def versions() -> dict[str, str]:
    """The versions that the header files themselves state, for example ``{"cutlass": "4.2.0"}``."""
    return {found.part.name: _version(found) for found in _found()}


def digest() -> bytes:
    """SHA-256 over the text of our headers and the versions of the others; no path enters it.

    The others enter with the version of their wheel, which includes the patch release that CUDA's
    macros leave out.
    """
    others = sorted(versions().items()), [found.version for found in _found()]
    return _with_own_text(repr(others).encode())


def own_digest() -> bytes:
    """SHA-256 over the names and the text of our headers."""
    return _with_own_text(b"")


def _with_own_text(first: bytes) -> bytes:
    # Read at every call, so that an old kernel is never used after a header was edited.
    own = own_include_dir()
    digest = hashlib.sha256(first)
    for file in sorted(own.rglob("*")):
        if file.is_file():
            text = file.read_bytes()
            digest.update(f"{file.relative_to(own).as_posix()} {len(text)}\n".encode())
            digest.update(text)
    return digest.digest()


@functools.cache
def _found() -> tuple[Found, ...]:
    found = {part: parts.headers(part) for part in parts.HEADERS}
    if missing := [part for part, place in found.items() if place is None]:
        raise parts.missing(missing)
    return tuple(place for place in found.values() if place is not None)


def _version(found: Found) -> str:
    file = found.path / found.part.wheel.file
    if not file.is_file():
        return "unknown"
    text = file.read_text(errors="replace")
    macros = _VERSION_MACROS[found.part]
    matches = [re.search(rf"#\s*define\s+{macro}\s+(\d+)", text) for macro in macros]
    numbers = [int(match[1]) for match in matches if match]
    if found.part is CUDART and numbers:  # 13050 is 13.5
        numbers = [numbers[0] // 1000, numbers[0] % 1000 // 10]
    if found.part is CCCL and numbers:  # 3001004 is 3.1.4, of CUDA 13.1
        numbers = [numbers[0] // 1000000, numbers[0] // 1000 % 1000, numbers[0] % 1000]
    return ".".join(map(str, numbers)) or "unknown"
