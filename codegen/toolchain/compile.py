"""Source to fatbin, through the cache.

A kernel of a few KB becomes a cubin of several hundred KB, because the default execution space
turns the constants of the libraries' namespaces into symbols. nvFatbin compresses it to a tenth,
and the driver loads the result directly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jax_memeff.codegen import emit
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import (
    descriptors,
    headers,
    nvrtc,
    prebuilt,
    program_cache,
    progress,
    resources,
)
from jax_memeff.codegen.toolchain.resources import Resource


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel ready to be loaded.

    ``image`` is a compressed fatbin, ``names`` the entry points in launch order, ``resources`` what
    ptxas reported for each (for PTX on the GPUs that it is named after), ``warnings`` its remarks
    about lost performance, ``seconds`` the time this call took, and ``cached`` whether the image
    came out of the cache.
    """

    image: bytes
    names: tuple[str, ...]
    resources: tuple[Resource, ...]
    warnings: tuple[str, ...]
    log: str
    seconds: float
    cached: bool


def compile(spec: KernelSpec, arch: str) -> Compiled:
    """Compile ``spec`` for ``arch`` (``"sm_90a"``), or take it from the cache.

    A terminal shows a line meanwhile (``progress.py``). Raises ``CompileError`` if the compiler
    rejects the source, or cannot be run.
    """
    arguments = source(spec, arch)
    if (found := lookup_source(*arguments)) is not None:
        return found
    with progress.line(f"jax_memeff compiles {spec.name} for {arch}"):
        return _compile_and_store(*arguments)


def lookup(spec: KernelSpec, arch: str) -> Compiled | None:
    """The kernel that ``compile`` would find in the cache, or None."""
    return lookup_source(*source(spec, arch))


def loss(spec: KernelSpec, arch: str) -> str | None:
    """Why no other process finds a kernel that was compiled here; None if one does."""
    return program_cache.current().loss(_key(*source(spec, arch)))


@descriptors.explained()
def key(spec: KernelSpec, arch: str) -> str:
    """A digest of what the compiled kernel depends on: source, headers, compiler and options.

    For a kernel of the archive that ``JAX_MEMEFF_KERNELS`` names it is a digest of the kernel.
    """
    arguments = source(spec, arch)
    payload = prebuilt.get(*arguments)
    return _key(*arguments) if payload is None else hashlib.sha256(payload).hexdigest()


def source(spec: KernelSpec, arch: str) -> tuple[str, str, tuple[str, ...]]:
    """The arguments that the functions below take to compile ``spec`` for ``arch``."""
    return emit.source(spec), arch, tuple(entry.name for entry in spec.entry_points)


def compile_source(source: str, arch: str, names: Sequence[str]) -> Compiled:
    """Compile CUDA C++ with the options and headers of every kernel; ``names`` are its kernels."""
    if (found := lookup_source(source, arch, names)) is not None:
        return found
    return _compile_and_store(source, arch, names)


@descriptors.explained()
def lookup_source(source: str, arch: str, names: Sequence[str]) -> Compiled | None:
    """The kernel that ``compile_source`` would find in an archive or in the cache, or None."""
    start = time.perf_counter()
    # The archive first: it needs no compiler, while the key of the cache contains its version.
    payload = prebuilt.get(source, arch, names)
    if payload is None:
        payload = program_cache.current().get(_key(source, arch, names))
    if payload is None:
        return None
    return _unpack(payload, tuple(names), start)


@descriptors.explained()
def compile_uncached(source: str, arch: str, names: Sequence[str]) -> Compiled:
    """Like ``compile_source``, but neither reads nor fills the cache."""
    start = time.perf_counter()
    code, log = nvrtc.compile(source, arch, names[0])
    return Compiled(
        image=nvrtc.fatbin(code, arch, names[0]),
        names=tuple(names),
        resources=tuple(resources.parse(log, names)),
        warnings=tuple(resources.warnings(log)),
        log=resources.without_times(log),
        seconds=time.perf_counter() - start,
        cached=False,
    )


@descriptors.explained()
def store(source: str, arch: str, names: Sequence[str], compiled: Compiled) -> None:
    """Put into the cache what ``compile_uncached`` returned for these arguments."""
    program_cache.current().put(_key(source, arch, names), _pack(compiled))


def _compile_and_store(source: str, arch: str, names: Sequence[str]) -> Compiled:
    compiled = compile_uncached(source, arch, names)
    store(source, arch, names, compiled)
    return compiled


def _key(source: str, arch: str, names: Sequence[str]) -> str:
    """A hash of all that the image depends on; headers enter as a digest of their contents."""
    parts = (
        source,
        arch,
        *names,
        repr(nvrtc.OPTIONS),
        *nvrtc.FATBIN_OPTIONS,
        nvrtc.version(),
        headers.digest().hex(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def write_archive(path: Path, kernels: Mapping[tuple[KernelSpec, str], Compiled]) -> None:
    """Write kernels to an archive that ``JAX_MEMEFF_KERNELS`` may name, by spec and architecture.

    Raises ``OSError`` if the file cannot be written.
    """
    prebuilt.write(
        path,
        {source(*job): _pack(compiled) for job, compiled in kernels.items()},
        compiler={**headers.versions(), "nvrtc": nvrtc.version()},
    )


def _pack(compiled: Compiled) -> bytes:
    meta = {
        "image_bytes": len(compiled.image),
        "resources": compiled.resources,
        "warnings": compiled.warnings,
        "log": compiled.log,
    }
    return json.dumps(meta).encode() + b"\n" + compiled.image


def _unpack(payload: bytes, names: tuple[str, ...], start: float) -> Compiled | None:
    """The argument of ``_pack``, or None if ``payload`` does not have its structure."""
    meta, _, image = payload.partition(b"\n")
    try:
        fields = json.loads(meta)
        found = tuple(Resource(*values) for values in fields["resources"])
        warnings, log, size = tuple(fields["warnings"]), fields["log"], fields["image_bytes"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    numbers = [size, *(number for resource in found for number in resource[1:])]
    are_typed = all(isinstance(text, str) for text in (log, *warnings))
    if not are_typed or not all(isinstance(number, int) for number in numbers):
        return None
    if not image or len(image) != size or any(resource.name not in names for resource in found):
        return None
    return Compiled(image, names, found, warnings, log, time.perf_counter() - start, cached=True)
