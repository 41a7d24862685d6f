"""Runs the kernels on the CPU, through the whole library.

``install()`` makes this process a machine with a GPU that is emulated: programs for JAX's CPU
client are lowered to the custom calls of the kernels, g++ compiles the kernels' source against
``include/`` (another ``memeff/arch/``), and the host library finds a driver that runs them on
fibers. See CONTRIBUTING.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.interpreters import mlir

from jax_memeff import _ffi
from jax_memeff._cuda import lowering as cuda
from jax_memeff._op import primitives
from jax_memeff.codegen import arch as architectures
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler

from . import build


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
    return compiler.Compiled(
        image=os.fsencode(build.library_of(spec)),
        names=tuple(entry.name for entry in spec.entry_points),
        resources=(),
        warnings=(),
        log="",
        seconds=0.0,
        cached=False,
    )


def announce(runs: Iterable[Any]) -> None:
    """Kernels of these runs (``run.kernels()``) are compiled several at a time from now on."""
    build.announce(spec for run in runs for spec in run.kernels())


_lowered: dict[Any, jax.stages.Lowered] = {}


def lower_together(lower: Callable[..., jax.stages.Lowered], calls: Iterable[tuple]) -> None:
    """Calls ``lower`` with each of ``calls``; kernels of all programs are compiled at once."""
    with build.together():
        for call in calls:
            if (lower, call) not in _lowered:
                _lowered[lower, call] = lower(*call)


def lowered(lower: Callable[..., jax.stages.Lowered], *call: Any) -> jax.stages.Lowered:
    """``lower(*call)``, which :func:`lower_together` may have called before."""
    return _lowered.get((lower, call)) or lower(*call)


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
    image = os.fsencode(build.kernel_library("kernels", source))
    library, kernel, error = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p()
    driver.cuLibraryLoadData(ctypes.byref(library), image, None, None, 0, None, None, 0)
    driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode())
    launched = _LaunchConfig(sizes=(1, 1, 1, threads, 1, 1, shared_bytes))
    if driver.cuLaunchKernelEx(ctypes.byref(launched), kernel, None, None):
        driver.cuGetErrorName(0, ctypes.byref(error))
        raise RuntimeError((error.value or b"").decode())


@functools.cache
def _driver() -> ctypes.CDLL:
    library = build.driver()
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver.emulator_proxy.restype = ctypes.c_void_p
    driver.emulator_proxy.argtypes = [ctypes.c_void_p]
    return driver


def _pointer(capsule: Any) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, None)


def _capsule(pointer: int) -> Any:
    return jax.ffi.pycapsule(ctypes.c_void_p(pointer))
