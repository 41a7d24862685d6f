"""Runs the kernels on the CPU, through the whole library.

``install()`` makes this process a machine with a GPU that is emulated: programs for JAX's CPU
client are lowered to the custom calls of the kernels, g++ compiles the kernels' source against
``include/`` (another ``memeff/arch/``), and the host library finds a driver that runs them on
fibers. See CONTRIBUTING.md.
"""

from __future__ import annotations

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
_KERNEL_OPTIONS = [
    # Each kernel has a Config of its own, and constants of the same name in all of them.
    "-fno-gnu-unique",
    *("-O1", "-w", "-Wno-psabi", "-fno-strict-aliasing", "-include", "emulator/cuda_builtins.h"),
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
    directories = [str(headers.own_include_dir()), *headers.include_dirs()]
    library = _library(spec.name, sources, _KERNEL_OPTIONS, directories)
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
    directories = [str(headers.own_include_dir()), *headers.include_dirs()]
    image = os.fsencode(_library("kernels", {"kernels.cc": source}, _KERNEL_OPTIONS, directories))
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
    directories = [str(Path(jaxlib.__file__).parent / "include"), *headers.include_dirs()]
    library = _library("libcuda", sources, _DRIVER_OPTIONS, directories)
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver.emulator_proxy.restype = ctypes.c_void_p
    driver.emulator_proxy.argtypes = [ctypes.c_void_p]
    return driver


def _library(
    name: str, sources: dict[str, str], options: list[str], directories: Sequence[str]
) -> Path:
    """Compiles files of these texts, or finds the library of the same texts and headers."""
    directory = (config.cache_dir() or Path(tempfile.gettempdir()) / "jax_memeff") / "emulator"
    directory.mkdir(parents=True, exist_ok=True)
    own = [file.read_bytes() for file in sorted(_HERE.glob("include/**/*")) if file.is_file()]
    parts = [repr((sources, options)).encode(), headers.digest(), *own]
    library = directory / f"{name}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=directory) as work:
            for file, text in sources.items():
                (Path(work) / file).write_text(text)
            files = [file for file in sources if file.endswith(".cc")]
            includes = [f"-I{directory}" for directory in (_HERE / "include", *directories)]
            command = ["g++", *files, *_OPTIONS, *includes, *options, "-o", "library.so"]
            subprocess.run(command, cwd=work, check=True)
            (Path(work) / "library.so").replace(library)
    return library


def _pointer(capsule: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, None)


def _capsule(pointer: int) -> Any:
    return jax.ffi.pycapsule(ctypes.c_void_p(pointer))
