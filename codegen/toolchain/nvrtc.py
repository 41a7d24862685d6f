"""The compiler itself: NVRTC from CUDA C++ to machine code or PTX, and nvFatbin to a fatbin.

NVRTC is called through ``cuda.core``, which is imported when a kernel is first compiled.

Precompiled headers do not pay off: one takes 475 MB on disk for each architecture, needs twice
NVRTC's default heap (``nvrtcSetPCHHeapSize``) and 6 s to create, and saves 1.2 s per kernel.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping

from jax_memeff.codegen import arch as archs
from jax_memeff.codegen.toolchain import descriptors, headers, parts
from jax_memeff.errors import CompileError

OPTIONS = {
    "std": "c++17",
    "device_as_default_execution_space": True,
    # CCCL generates templates for type lists of up to 16 types, and of up to 10 under nvcc. With
    # 16, NVRTC's preprocessor takes 1 of the 4.5 s of a kernel; with 10, it takes 0.01 s.
    "define_macro": ("_CCCL_META_UNROLL_LIMIT", "10"),
    "ptxas_options": ["-v"],
}
FATBIN_OPTIONS = ("-64", "-compress-all", "-compress-mode=size")

_WRONG_CCCL = (
    "CUTLASS before 4.7 does not compile with the CCCL of CUDA 13.2 or newer (3.2 and up): "
    "pip install 'nvidia-cuda-cccl<13.2'"
)
_WRONG_ARCH = (
    "This NVRTC does not know the architecture: check JAX_MEMEFF_ARCHS, or install a newer "
    "nvidia-cuda-nvrtc for a newer GPU"
)
_WRONG_ARCH_OF_CUDA_12 = (
    "NVRTC 12.9, the last of CUDA 12, does not know the architecture: check JAX_MEMEFF_ARCHS; "
    "newer GPUs need CUDA 13: "
)
_BUG = (
    "The whole log is in the `log` attribute of this error. Please report it to jax_memeff "
    "together with the versions above"
)


def compile(source: str, arch: str, name: str) -> tuple[bytes, str]:
    """Machine code of ``source`` for ``arch``, or PTX if it is virtual; and the compiler's log.

    Messages call the source ``name``. Raises ``CompileError`` if NVRTC rejects it or is missing.
    """
    parts.library(parts.NVRTC)
    core = parts.import_("cuda.core")
    _require_one_cuda()
    options = core.ProgramOptions(
        name=name,
        arch=arch.replace("compute_", "sm_"),
        include_path=[*map(str, headers.own_include_dirs()), *headers.include_dirs()],
        **OPTIONS,
    )
    parts.warn_of_mixture()
    log = io.StringIO()
    try:
        program = core.Program(source, "c++", options=options)
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's NVRTCError is not a public name
        # The text is "6: NVRTC_ERROR_COMPILATION, compilation log:", an empty line, and the log.
        status, _, tail = _text(str(error)).partition("compilation log:")
        log_text, found = tail.strip() or f"error: {status.strip()}", versions()
        raise CompileError(log_text, found, _advice(log_text, found)) from error
    return _ptx(program) if archs.is_virtual(arch) else code, _text(log.getvalue())


def fatbin(code: bytes, arch: str, name: str) -> bytes:
    """A compressed fatbin that holds ``code``, which ``compile`` returned for ``arch``."""
    parts.library(parts.NVFATBIN)
    nvfatbin = parts.import_("cuda.bindings.nvfatbin")
    handle = nvfatbin.create(list(FATBIN_OPTIONS), len(FATBIN_OPTIONS))
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


def version() -> str:
    """The version of NVRTC, with the patch release if it is a wheel; "not found" without one."""
    try:
        found = parts.library(parts.NVRTC)
        _, major, minor = parts.import_("cuda.bindings.nvrtc").nvrtcVersion()
    except (CompileError, RuntimeError):
        return "not found"
    return found.version or f"{major}.{minor}"


def versions() -> dict[str, str]:
    """The parts of the toolchain and their versions; "not found" for what is absent.

    The version of a part that is not a wheel is followed by its location: "13.0, in
    /usr/local/cuda/include".
    """
    found = {"driver": _driver_version(), parts.NVRTC.title: version()}
    try:
        of_headers = headers.versions()
    except CompileError:
        of_headers = {}
    for part in (parts.CUDART, parts.CCCL, parts.CUTLASS):
        found[part.title] = of_headers.get(part.name, "not found")
    for part, place in parts.all_found().items():
        if place is not None and place.via != parts.WHEEL and part.title in found:
            found[part.title] += f", in {place.path}"
    return found


@functools.cache
def _require_one_cuda() -> None:
    """Raise ``CompileError`` unless NVRTC and the headers have the CUDA version of cuda.bindings.

    The process may have loaded an NVRTC before, or CUDA_PATH may name a toolkit of another version.
    """
    major = str(parts.cuda_major())
    found = {parts.NVRTC.title: version(), parts.CUDART.title: headers.versions()["cudart"]}
    if wrong := [title for title, number in found.items() if number.split(".")[0] != major]:
        are = " and ".join(f"{title} is of version {found[title]}" for title in wrong)
        raise CompileError(
            f"error: cuda.bindings is for CUDA {major}, and {are}",
            versions(),
            f"All parts must be for one CUDA version: {parts.install()}, or install the "
            "cuda-bindings of the other one",
        )


def _ptx(program) -> bytes:
    """The PTX of a compiled program: cuda.core compiles to PTX only if it finds a driver."""
    nvrtc = parts.import_("cuda.bindings.nvrtc")
    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    text = bytes(size)
    nvrtc.nvrtcGetPTX(program.handle, text)
    return text


def _advice(log: str, found: Mapping[str, str]) -> str:
    if descriptors.IN_LOGS in log:
        return descriptors.advice()
    if "--gpu-architecture" in log:
        if parts.cuda_major() == 12:
            return _WRONG_ARCH_OF_CUDA_12 + parts.install_extra("cuda13")
        return _WRONG_ARCH
    if _number(found["CCCL"]) >= (3, 2) and _number(found["CUTLASS"]) < (4, 7):
        return _WRONG_CCCL
    return _BUG


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition(",")[0].split(".") if part.isdigit())


def _driver_version() -> str:
    try:
        _, number = parts.import_("cuda.bindings.driver").cuDriverGetVersion()
    except (CompileError, RuntimeError):
        return "not found"
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def _text(log: str) -> str:
    # NVRTC pads its logs with NUL bytes.
    return log.replace("\0", "").strip()
