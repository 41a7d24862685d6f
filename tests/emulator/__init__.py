"""Runs the kernels on the CPU, through the whole library.

``install()`` makes this process a machine with a GPU that is emulated: programs for JAX's CPU
client are lowered to the custom calls of the kernels, g++ compiles the kernels' source against
``include/`` (another ``memeff/arch/``), and the host library finds a driver that runs them on
fibers. See CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.interpreters import mlir

from jax_memeff import _ffi, config
from jax_memeff._cuda import lowering as cuda
from jax_memeff._op import primitives
from jax_memeff.codegen import arch as architectures
from jax_memeff.codegen import emit
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import headers

_HERE = Path(__file__).parent
_OPTIONS = ["-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
_PRECOMPILED = "emulator/precompiled.h"
_KERNEL_OPTIONS = [
    # Each kernel has a Config of its own, and constants of the same name in all of them.
    "-fno-gnu-unique",
    *("-O1", "-w", "-Wno-psabi", "-fno-strict-aliasing", "-include", _PRECOMPILED),
    # A misaligned access ends the kernel with a signal.
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
]
_DRIVER_OPTIONS = ["-O3", "-g1", "-Wall", "-Wextra", "-Wl,-soname,libcuda.so.1", "-ldl", "-pthread"]


def install() -> None:
    """Replaces the lowering of this process's CPU programs by that to emulated kernels."""
    driver = _driver()  # libcuda.so.1 is found from now on, because it is loaded already
    compiler.compile = compile
    jax.local_devices(backend="cpu")  # a client that starts later refuses types
    jax.ffi.register_ffi_type("jax_memeff_call", _ffi.call_type(), platform="cpu")
    for name, stages in _ffi.targets().items():
        handlers = {
            "instantiate": stages["instantiate"],
            "execute": _capsule(driver.emulator_proxy(_pointer(stages["execute"]))),
        }
        jax.ffi.register_ffi_target(name, handlers, platform="cpu", api_version=1)
    cuda.register_targets = lambda: None
    mlir.register_lowering(primitives.attention_fwd_p, cuda.lower_forward, platform="cpu")
    mlir.register_lowering(primitives.attention_bwd_p, cuda.lower_backward, platform="cpu")


def configure(arch: str, *, multiprocessors: int = 3, seed: int = 0) -> None:
    """The machine from now on; a program that was compiled before keeps its kernels.

    Blocks run on ``multiprocessors`` at a time, one on each. ``seed`` orders their warps, and says
    which asynchronous copies and products take effect at once and which as late as possible.
    """
    os.environ["JAX_MEMEFF_ARCHS"] = arch
    capability = architectures.capability(arch)
    _driver().emulator_configure(capability, multiprocessors, ctypes.c_uint64(seed))
    jax.clear_caches()


def compile(spec: KernelSpec, arch: str) -> compiler.Compiled:
    """As ``codegen.compile.compile``; the image is the path of a library."""
    del arch
    names = tuple(entry.name for entry in spec.entry_points)
    exports = "\n".join(f"EMULATOR_KERNEL({name})" for name in names)
    sources = {f"{spec.name}.cc": f"{emit.source(spec)}\n{exports}\n"}
    library = _kernel_library(spec.name, sources)
    return compiler.Compiled(
        image=os.fsencode(library),
        names=names,
        resources=(),
        warnings=(),
        log="",
        seconds=0.0,
        cached=False,
    )


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``: grid, block and shared bytes, and neither a stream nor attributes."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def launch(source: str, name: str, *, threads: int, shared_bytes: int) -> None:
    """Runs one block of a kernel without parameters, of ``EMULATOR_KERNEL(name)`` in ``source``.

    Raises ``RuntimeError`` saying what failed.
    """
    driver = _driver()
    image = os.fsencode(_kernel_library("kernels", {"kernels.cc": source}))
    library, kernel, error = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p()
    driver.cuLibraryLoadData(ctypes.byref(library), image, None, None, 0, None, None, 0)
    driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode())
    launched = _LaunchConfig(sizes=(1, 1, 1, threads, 1, 1, shared_bytes))
    if driver.cuLaunchKernelEx(ctypes.byref(launched), kernel, None, None):
        driver.cuGetErrorName(0, ctypes.byref(error))
        raise RuntimeError((error.value or b"").decode())


@functools.cache
def _driver() -> ctypes.CDLL:
    sources = {file.name: file.read_text() for file in sorted(_HERE.glob("src/*"))}
    directories = _directories(str(Path(jaxlib.__file__).parent / "include"))
    library = _compiled("libcuda.so", sources, _DRIVER_OPTIONS, directories)
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver.emulator_proxy.restype = ctypes.c_void_p
    driver.emulator_proxy.argtypes = [ctypes.c_void_p]
    return driver


def _kernel_library(name: str, sources: dict[str, str]) -> Path:
    """Compiles kernels. CuTe's headers, which take two of three seconds, are precompiled."""
    directories = [_precompiled_headers(), *_directories(str(headers.own_include_dir()))]
    return _compiled(f"{name}.so", sources, _KERNEL_OPTIONS, directories, headers.digest())


@functools.cache
def _precompiled_headers() -> str:
    """The directory in which g++ finds ``emulator/precompiled.h.gch`` before the header itself."""
    # g++ takes a precompiled header only with the options that it was made with.
    options = [option for option in _KERNEL_OPTIONS if option not in ("-include", _PRECOMPILED)]
    source = {"precompiled.h": f'#include "{_PRECOMPILED}"\n'}
    header = _compiled("precompiled.gch", source, ["-x", "c++-header", *options], _directories())
    directory = header.with_suffix("")
    link = directory / f"{_PRECOMPILED}.gch"
    link.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another process was first
        os.link(header, link)
    return str(directory)


def _directories(*own: str) -> list[str]:
    """Where g++ finds headers; ``memeff/arch/`` of the emulator hides that of the GPU."""
    return [str(_HERE / "include"), *own, *headers.include_dirs()]


def _compiled(
    name: str,
    sources: dict[str, str],
    options: list[str],
    directories: Sequence[str],
    digest: bytes = b"",
) -> Path:
    """What g++ makes of files of these texts, found or made in the cache.

    ``digest`` is of headers that change beside CuTe's and the emulator's.
    """
    cache = (config.cache_dir() or Path(tempfile.gettempdir()) / "jax_memeff") / "emulator"
    cache.mkdir(parents=True, exist_ok=True)
    own = [file.read_bytes() for file in sorted(_HERE.glob("include/**/*")) if file.is_file()]
    parts = [repr((sources, options, headers.versions())).encode(), digest, *own]
    stem, _, suffix = name.partition(".")
    digest_of_all = hashlib.sha256(b"|".join(parts)).hexdigest()[:16]
    result = cache / f"{stem}-{digest_of_all}.{suffix}"
    if not result.exists():
        with tempfile.TemporaryDirectory(dir=cache) as work:
            for file, text in sources.items():
                (Path(work) / file).write_text(text)
            files = [file for file in sources if file != "machine.h"]
            includes = [f"-I{directory}" for directory in directories]
            command = ["g++", *_OPTIONS, *includes, *options, *files, "-o", result.name]
            subprocess.run(command, cwd=work, check=True)
            (Path(work) / result.name).replace(result)
    return result


def _pointer(capsule: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, None)


def _capsule(pointer: int) -> Any:
    return jax.ffi.pycapsule(ctypes.c_void_p(pointer))
