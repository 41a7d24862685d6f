"""Compiles the driver and the kernels of the emulated machine with g++.

``JAX_MEMEFF_CACHE_DIR`` keeps results under a digest of everything that they depend on. If several
processes ask for a result, a lock lets one of them build it.

g++ spends half of its time for a kernel on templates of CuTe that other kernels of the same main
loop instantiate, too. Kernels that are known beforehand are therefore compiled a dozen at a time:
those that are announced, and those of programs that are lowered before the first one runs. A link
for each kernel names the library that has it, so another run, which may plan other dozens, compiles
no kernel again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jaxlib

from jax_memeff import config
from jax_memeff.codegen import emit
from jax_memeff.codegen.kernels import KERNELS
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import headers

from .translation_unit import joined, preamble

TOGETHER = 12
"""Kernels in one run of g++. Twice as many save nothing more per kernel, and the first waits
longer.
"""

_HERE = Path(__file__).parent
_OPTIONS = ["-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
_PRECOMPILED = "emulator/precompiled.h"
_KERNEL_OPTIONS = [
    # Each kernel has its own Config, whose constants have the same names in all kernels.
    "-fno-gnu-unique",
    # Compiling takes far longer than running. -O1 would take a third to a half more for a dozen
    # kernels, which would run no faster.
    *("-Og", "-w", "-Wno-psabi", "-fno-strict-aliasing", "-include", _PRECOMPILED),
    # Else g++ computes functions of constants itself, with other last bits than the math library.
    "-frounding-math",
    # Makes a misaligned access end the kernel with a signal.
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
]
_DRIVER_OPTIONS = [
    "-O2",
    "-fno-semantic-interposition",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Wl,-soname,libcuda.so.1",
    "-ldl",
    "-pthread",
]

_announced: dict[str, tuple[str, ...]] = {}
"""From the text of a kernel to the texts that are compiled with it."""

_awaited: list[KernelSpec] | None = None
"""Kernels whose libraries :func:`together` compiles at its end; None outside of it."""


def driver() -> Path:
    """The emulated ``libcuda.so.1``.

    g++ gets its files in one translation unit. One at a time, with optimization at the end, they
    take twice as long.
    """
    sources = {file.name: file.read_text() for file in sorted(_HERE.glob("src/*"))}
    files = [name for name in sources if name.endswith(".cc")]
    sources["libcuda.cc"] = "".join(f'#include "{name}"\n' for name in files)
    directories = _directories(str(Path(jaxlib.__file__).parent / "include"))
    version = importlib.metadata.version("jaxlib").encode()  # XLA's API changes with it
    return _compiled("libcuda.so", sources, _DRIVER_OPTIONS, directories, version)


def announce(specs: Iterable[KernelSpec]) -> None:
    """Plans which kernels to compile together when the first of them is asked for."""
    groups: dict[str, dict[str, str]] = {}
    for spec in specs:
        text = _text(spec)
        groups.setdefault(preamble(text), {})[spec.name] = text
    for texts in groups.values():
        ordered = [texts[name] for name in sorted(texts)]
        count = -(-len(ordered) // TOGETHER)
        for first in range(count):
            batch = tuple(
                ordered[first * len(ordered) // count : (first + 1) * len(ordered) // count]
            )
            _announced.update(dict.fromkeys(batch, batch))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Compiles the kernels that are asked for inside at the end, several at a time.

    Inside, :func:`library_of` returns the names of libraries that do not exist yet.
    """
    global _awaited
    _awaited = awaited = []
    try:
        yield
    finally:
        _awaited = None
    announce(awaited)
    for spec in awaited:
        library_of(spec)


def library_of(spec: KernelSpec) -> Path:
    """A library with the entry points of ``spec``, and perhaps those of other kernels."""
    text = _text(spec)
    if _link(text).exists():
        return _link(text)
    if _awaited is not None:
        _awaited.append(spec)
        return _link(text)
    batch = [other for other in _announced.get(text, (text,)) if not _link(other).exists()]
    library = kernel_library(f"{spec.kernel.stem.rpartition('/')[2]}_batch", joined(batch))
    for other in batch:
        link = _link(other)
        unique = link.with_suffix(f".{os.getpid()}")
        unique.symlink_to(library)
        unique.replace(link)
    return library


def _link(text: str) -> Path:
    """Links a name for a kernel to a library, whichever kernels were compiled with it."""
    return _result("kernel.link", {"kernel.cc": text}, _KERNEL_OPTIONS, headers.digest())


def kernel_library(name: str, source: str) -> Path:
    """Compiles kernels. Headers would take three of four seconds, so they are precompiled."""
    directories = [_precompiled_headers(), *_directories(*map(str, headers.own_include_dirs()))]
    sources = {f"{name}.cc": source}
    return _compiled(f"{name}.so", sources, _KERNEL_OPTIONS, directories, headers.digest())


def _text(spec: KernelSpec) -> str:
    entries = spec.entry_points
    exports = [f"EMULATOR_KERNEL({entry.name})\n" for entry in entries]
    clusters = [entry for entry in entries if entry.cluster > 1]
    exports += [f"EMULATOR_CLUSTER({entry.name}, {entry.cluster})\n" for entry in clusters]
    return f"{emit.source(spec)}\n{''.join(exports)}"


def _precompiled_headers() -> str:
    """The directory in which g++ finds ``emulator/precompiled.h.gch`` before the header itself."""
    # Hazard: g++ silently ignores a precompiled header that was made with other options.
    options = [option for option in _KERNEL_OPTIONS if option not in ("-include", _PRECOMPILED)]
    names = [_PRECOMPILED, *(kernel.device_file for kernel in KERNELS)]
    source = {"precompiled.h": "".join(f'#include "{name}"\n' for name in names)}
    header = _compiled(
        "precompiled.gch",
        source,
        ["-x", "c++-header", *options],
        _directories(*map(str, headers.own_include_dirs())),
        headers.digest(),
    )
    _remove_precompiled_before(header)
    directory = header.with_suffix("")
    link = directory / f"{_PRECOMPILED}.gch"
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another process was first
        os.link(header, link)
    return str(directory)


def _remove_precompiled_before(header: Path) -> None:
    """Removes precompiled headers that were not used for an hour: each takes 180 MB, and a change
    of any header makes another. g++ works without one, so a running process loses only time.
    """
    os.utime(header)
    for other in header.parent.glob("precompiled-*.gch"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if other.stat().st_mtime < time.time() - 3600:
                other.unlink()
                shutil.rmtree(other.with_suffix(""), ignore_errors=True)


def _directories(*own: str) -> list[str]:
    """Where g++ finds headers; ``memeff/arch/`` of the emulator hides that of the GPU."""
    return [str(_HERE / "include"), *own, *headers.include_dirs()]


def _result(name: str, sources: dict[str, str], options: list[str], digest: bytes = b"") -> Path:
    """The path in the cache of what g++ makes of files with these texts.

    ``digest`` covers the headers that may change besides CuTe's and the emulator's.
    """
    cache = (config.cache_dir() or Path(tempfile.gettempdir()) / "jax_memeff") / "emulator"
    cache.mkdir(parents=True, exist_ok=True)
    parts = [repr((sources, options, headers.versions())).encode(), digest, *_own_headers()]
    stem, _, suffix = name.partition(".")
    return cache / f"{stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.{suffix}"


@functools.cache
def _own_headers() -> tuple[bytes, ...]:
    return tuple(file.read_bytes() for file in sorted(_HERE.glob("include/**/*")) if file.is_file())


def _compiled(
    name: str,
    sources: dict[str, str],
    options: list[str],
    directories: Sequence[str],
    digest: bytes = b"",
) -> Path:
    """Write files with these texts, and compile the last one by g++; it may include the others.

    Returns:
        The result, from the cache if it is there.
    """
    result = _result(name, sources, options, digest)
    if result.exists():
        return result
    with _lock(result), tempfile.TemporaryDirectory(dir=result.parent) as work:
        if not result.exists():
            for file, text in sources.items():
                (Path(work) / file).write_text(text)
            *_, main = sources
            includes = [f"-I{directory}" for directory in directories]
            command = ["g++", *_OPTIONS, *includes, *options, main, "-o", result.name]
            subprocess.run(command, cwd=work, check=True)
            (Path(work) / result.name).replace(result)
    return result


@contextlib.contextmanager
def _lock(result: Path) -> Iterator[None]:
    with open(result.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
