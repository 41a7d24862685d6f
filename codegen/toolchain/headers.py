"""The headers of a compilation: their directories, their versions, and a digest of both."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jax_memeff.codegen.toolchain import parts
from jax_memeff.codegen.toolchain.parts import CCCL, CUDART, CUTLASS, Found
from jax_memeff.errors import CompileError

_VERSION_MACROS = {
    CUTLASS: ("CUTLASS_MAJOR", "CUTLASS_MINOR", "CUTLASS_PATCH"),
    CUDART: ("CUDART_VERSION",),
    CCCL: ("CCCL_VERSION",),
}

_HEADERS = (".cuh", ".h")

_TICK = 10**9
"""Nanoseconds: the tick of file systems that store whole seconds, the longest of all."""


def own_include_dirs() -> tuple[Path, ...]:
    """The directories of our headers, as installed with the package: of ``kernels/`` and
    ``memeff/``, the device code, and of ``memeff/params.h``, which the host library includes, too.
    """
    package = importlib.resources.files("jax_memeff")
    paths = tuple(Path(str(package / name)) for name in ("codegen", "include"))
    missing = [path for path in (paths[0] / "memeff", paths[1]) if not path.is_dir()]
    if missing:
        raise CompileError(
            f"error: the device headers of jax_memeff are not at {missing[0]}",
            {},
            "The package is not completely installed: install it again with pip.",
        )
    return paths


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
    return hashlib.sha256(repr(others).encode() + own_digest()).digest()


def own_digest() -> bytes:
    """SHA-256 over the names and the text of our headers.

    Every call looks at the files, so that an old kernel is never used after a header was edited.
    They are read again only if one has changed, because every kernel that is looked up needs this.
    """
    files = tuple(
        (str(own), file) for own in own_include_dirs() for file in sorted(_files(str(own), ()))
    )
    # Two changes within a tick of the clock have the same time.
    is_recent = any(file.changed > time.time_ns() - _TICK for _, file in files)
    return (_digest_of if is_recent else _known_digest_of)(files)


class _File(NamedTuple):
    """A file: the components of its path below the directory, and metadata that changes with its
    text.

    ``changed`` is the ctime, which only the operating system sets. The mtime would be no evidence,
    because programs that copy files set it.
    """

    name: tuple[str, ...]
    inode: int
    size: int
    changed: int


def _files(directory: str, above: tuple[str, ...]) -> Iterator[_File]:
    """The headers in a directory and below; their folders also hold Python."""
    with os.scandir(directory) as entries:
        for entry in entries:
            name = (*above, entry.name)
            if entry.name.endswith(_HEADERS) and entry.is_file():
                status = entry.stat()
                yield _File(name, status.st_ino, status.st_size, status.st_ctime_ns)
            elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, name)


def _digest_of(files: tuple[tuple[str, _File], ...]) -> bytes:
    digest = hashlib.sha256()
    for directory, file in files:
        with open(os.path.join(directory, *file.name), "rb") as stream:
            text = stream.read()
        digest.update(f"{'/'.join(file.name)} {len(text)}\n".encode())
        digest.update(text)
    return digest.digest()


_known_digest_of = functools.lru_cache(maxsize=1)(_digest_of)


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
