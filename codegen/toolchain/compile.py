"""Source to fatbin, through the cache, and what the log of ``ptxas -v`` says of the kernels.

A kernel of a few KB becomes a cubin of several hundred KB, because the default execution space
turns the constants of the libraries' namespaces into symbols. nvFatbin compresses it to a tenth,
and the driver loads the result directly.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_memeff.codegen import emit
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import (
    descriptors,
    headers,
    nvrtc,
    prebuilt,
    program_cache,
    progress,
)

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_TIMES = re.compile(r"^ptxas info\s*: Compile time = .*\n?", re.MULTILINE)
# The family of ptxas remarks about lost performance, such as serialized WGMMA.
_WARNING = re.compile(r"\(?C75\d\d\)?")


class Resource(NamedTuple):
    """Per-thread registers and spilled bytes of one kernel, and its static shared memory."""

    name: str
    registers: int
    spill_store: int
    spill_load: int
    shared_bytes: int


def parse(log: str, names: Sequence[str]) -> list[Resource]:
    """One ``Resource`` for each of ``names`` that the log mentions, in the order of ``names``.

    >>> log = "Compiling entry function 'k' for 'sm_80'\\nUsed 10 registers, 1024 bytes smem"
    >>> parse(log, ["k"])
    [Resource(name='k', registers=10, spill_store=0, spill_load=0, shared_bytes=1024)]
    """
    # Drop the text before the first entry; names and texts alternate after it.
    parts = _ENTRY.split(log)[1:]
    text_of = dict(zip(parts[::2], parts[1::2], strict=True))
    return [
        Resource(name, _first(_REGISTERS, text), *_spills(text), _first(_SHARED, text))
        for name in names
        if (text := text_of.get(name)) is not None
    ]


def warnings(log: str) -> list[str]:
    """The lines of the log in which ptxas reports lost performance (C75xx)."""
    return [line.strip() for line in log.splitlines() if _WARNING.search(line)]


def without_times(log: str) -> str:
    """The log without the times that ptxas took, so that equal kernels have equal logs.

    >>> without_times("ptxas info    : Compile time = 71.153 ms\\nptxas info    : 0 bytes gmem")
    'ptxas info    : 0 bytes gmem'
    """
    return _TIMES.sub("", log)


def _first(pattern: re.Pattern, text: str) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else 0


def _spills(text: str) -> tuple[int, int]:
    match = _SPILLS.search(text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


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
    if (compiled := lookup_source(*arguments)) is not None:
        return compiled
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
    if (compiled := lookup_source(source, arch, names)) is not None:
        return compiled
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
        resources=tuple(parse(log, names)),
        warnings=tuple(warnings(log)),
        log=without_times(log),
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
        resources = tuple(Resource(*values) for values in fields["resources"])
        warnings, log, size = tuple(fields["warnings"]), fields["log"], fields["image_bytes"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    numbers = [size, *(number for resource in resources for number in resource[1:])]
    are_typed = all(isinstance(text, str) for text in (log, *warnings))
    if not are_typed or not all(isinstance(number, int) for number in numbers):
        return None
    if not image or len(image) != size or any(resource.name not in names for resource in resources):
        return None
    return Compiled(
        image, names, resources, warnings, log, time.perf_counter() - start, cached=True
    )
