"""Source to fatbin: NVRTC through ``cuda.core``, compressed by nvFatbin, cached on disk.

``cuda.core`` is imported when a kernel is first compiled. A kernel of a few KB is a cubin of
several hundred KB, because the default execution space turns the constants of the libraries'
namespaces into symbols; nvFatbin takes it to a tenth, and the driver loads the result as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import io
import json
import threading
import time
from collections.abc import Mapping, Sequence
from types import ModuleType

from jax_memeff.codegen import arch as archs
from jax_memeff.codegen import emit
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import headers, program_cache, resources
from jax_memeff.codegen.toolchain.resources import Resource
from jax_memeff.errors import CompileError

_IMPORTING = threading.Lock()

_OPTIONS = {
    "std": "c++17",
    "device_as_default_execution_space": True,
    "ptxas_options": ["-v"],
}
_FATBIN_OPTIONS = ["-64", "-compress-all", "-compress-mode=size"]

_WRONG_CCCL = (
    "CUTLASS before 4.7 does not compile with the CCCL of CUDA 13.2 or newer (3.2 and up): "
    "pip install 'nvidia-cuda-cccl<13.2'"
)
_WRONG_ARCH = (
    "This NVRTC does not know the architecture: check JAX_MEMEFF_ARCHS, or install a newer "
    "nvidia-cuda-nvrtc for a newer GPU"
)
_BUG = (
    "The whole log is in the `log` attribute of this error. Please report it to jax_memeff "
    "together with the versions above"
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel ready to be loaded.

    ``image`` is a compressed fatbin, ``names`` the entry points in launch order, ``resources`` what
    ptxas reported for each (for PTX on the GPUs that it is named after), ``warnings`` its remarks
    about lost performance, ``seconds`` the time this call took, and ``cached`` whether the image
    was found and not compiled.
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

    Raises ``CompileError`` when the compiler refuses the source, or cannot be run.
    """
    names = tuple(entry.name for entry in spec.entry_points)
    return compile_source(emit.source(spec), arch, names)


def compile_source(source: str, arch: str, names: Sequence[str]) -> Compiled:
    """Compile CUDA C++ with the options and headers of every kernel; ``names`` are its kernels."""
    if (found := lookup_source(source, arch, names)) is not None:
        return found
    start = time.perf_counter()
    code, log = _nvrtc(source, arch, names[0])
    compiled = Compiled(
        image=_fatbin(code, arch, names[0]),
        names=tuple(names),
        resources=tuple(resources.parse(log, names)),
        warnings=tuple(resources.warnings(log)),
        log=log,
        seconds=time.perf_counter() - start,
        cached=False,
    )
    program_cache.current().put(_key(source, arch), _pack(compiled))
    return compiled


def lookup(spec: KernelSpec, arch: str) -> Compiled | None:
    """What ``compile`` would find in the cache, or None."""
    names = tuple(entry.name for entry in spec.entry_points)
    return lookup_source(emit.source(spec), arch, names)


def lookup_source(source: str, arch: str, names: Sequence[str]) -> Compiled | None:
    """What ``compile_source`` would find in the cache, or None."""
    start = time.perf_counter()
    key = _key(source, arch)  # first, because it reports what is not installed
    payload = program_cache.current().get(key)
    if payload is None:
        return None
    return _unpack(payload, tuple(names), time.perf_counter() - start)


def remember(spec: KernelSpec, arch: str, compiled: Compiled) -> None:
    """Keep in memory what another process compiled, and has stored on disk if it could."""
    key = _key(emit.source(spec), arch)
    program_cache.current().put(key, _pack(compiled), to_disk=False)


def key(spec: KernelSpec, arch: str) -> str:
    """A digest of what the compiled kernel depends on: source, headers, compiler and options."""
    return _key(emit.source(spec), arch)


def versions() -> dict[str, str]:
    """The parts of the toolchain and their versions; "not found" for what is absent."""
    found = {"driver": _driver_version(), "NVRTC": _nvrtc_version()}
    try:
        parts = headers.versions()
    except CompileError:
        parts = {}
    for part, title in (("cudart", "CUDA headers"), ("cccl", "CCCL"), ("cutlass", "CUTLASS")):
        found[title] = parts.get(part, "not found")
    return found


def _options(arch: str, name: str, include_path: list[str]):
    real = arch.replace("compute_", "sm_")
    return _import("cuda.core").ProgramOptions(
        name=name, arch=real, include_path=include_path, **_OPTIONS
    )


def _key(source: str, arch: str) -> str:
    """What the image depends on, hashed; include paths enter as the digest of their contents."""
    parts = (
        source,
        arch,
        repr(_OPTIONS),
        *_FATBIN_OPTIONS,
        _nvrtc_version(),
        headers.digest().hex(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _nvrtc(source: str, arch: str, name: str) -> tuple[bytes, str]:
    _require_nvrtc()
    # The name is what messages call the file.
    options = _options(arch, name, [str(headers.own_include_dir()), *headers.include_dirs()])
    log = io.StringIO()
    try:
        program = _import("cuda.core").Program(source, "c++", options=options)
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's NVRTCError is not a public name
        # The text is "6: NVRTC_ERROR_COMPILATION, compilation log:", an empty line, and the log.
        status, _, tail = _text(str(error)).partition("compilation log:")
        log_text, parts = tail.strip() or f"error: {status.strip()}", versions()
        raise CompileError(log_text, parts, _advice(log_text, parts)) from error
    return _ptx(program) if archs.is_virtual(arch) else code, _text(log.getvalue())


def _ptx(program) -> bytes:
    """The PTX of a compiled program: cuda.core compiles to PTX only where it finds a driver."""
    nvrtc = _import("cuda.bindings.nvrtc")
    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    text = bytes(size)
    nvrtc.nvrtcGetPTX(program.handle, text)
    return text


def _fatbin(code: bytes, arch: str, name: str) -> bytes:
    nvfatbin = _import("cuda.bindings.nvfatbin")
    try:
        handle = nvfatbin.create(_FATBIN_OPTIONS, len(_FATBIN_OPTIONS))
    except _import("cuda.pathfinder").DynamicLibNotFoundError as error:
        raise _missing("nvFatbin", error) from None
    try:
        number = arch.partition("_")[2]
        if archs.is_virtual(arch):
            nvfatbin.add_ptx(handle, code, len(code), number, name, "")
        else:
            nvfatbin.add_cubin(handle, code, len(code), number, name)
        image = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, image)
    finally:
        nvfatbin.destroy(handle)
    return bytes(image)


def _import(name: str) -> ModuleType:
    """A module of the cuda-python packages, imported when first needed.

    One thread at a time: while one imports cuda.core, which swaps itself for the module of a CUDA
    version, another would get it without its names.
    """
    try:
        with _IMPORTING:
            return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name, error) from error


def _require_nvrtc() -> None:
    try:
        _import("cuda.bindings.nvrtc").nvrtcVersion()
    except _import("cuda.pathfinder").DynamicLibNotFoundError as error:
        raise _missing("NVRTC", error) from None


def _advice(log: str, parts: Mapping[str, str]) -> str:
    if "--gpu-architecture" in log:
        return _WRONG_ARCH
    if _number(parts["CCCL"]) >= (3, 2) and _number(parts["CUTLASS"]) < (4, 7):
        return _WRONG_CCCL
    return _BUG


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _missing(part: str, error: Exception) -> CompileError:
    return CompileError(
        f"error: {part} was not found: {error}",
        {},
        f"Kernels are compiled on this machine and need it: {headers.INSTALL}",
    )


def _nvrtc_version() -> str:
    try:
        _, major, minor = _import("cuda.bindings.nvrtc").nvrtcVersion()
    except (CompileError, RuntimeError):
        return "not found"
    return f"{major}.{minor}"


def _driver_version() -> str:
    try:
        _, number = _import("cuda.bindings.driver").cuDriverGetVersion()
    except (CompileError, RuntimeError):
        return "not found"
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def _text(log: str) -> str:
    # NVRTC pads its logs with NUL bytes.
    return log.replace("\0", "").strip()


def _pack(compiled: Compiled) -> bytes:
    meta = {
        "resources": compiled.resources,
        "warnings": compiled.warnings,
        "log": compiled.log,
    }
    return json.dumps(meta).encode() + b"\n" + compiled.image


def _unpack(payload: bytes, names: tuple[str, ...], seconds: float) -> Compiled:
    meta, image = payload.split(b"\n", 1)
    fields = json.loads(meta)
    return Compiled(
        image=image,
        names=names,
        resources=tuple(Resource(*values) for values in fields["resources"]),
        warnings=tuple(fields["warnings"]),
        log=fields["log"],
        seconds=seconds,
        cached=True,
    )
