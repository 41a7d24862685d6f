"""Runs the kernels on the CPU, through the whole library.

``install()`` turns this process into a machine with an emulated GPU: programs for JAX's CPU client
are lowered to the custom calls of the kernels, g++ compiles the kernels' source against
``include/`` (which has its own ``memeff/arch/``), and the host library finds a driver that runs
them on fibers. See CONTRIBUTING.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import one_context
from jax.interpreters import mlir

from jax_memeff import _ffi
from jax_memeff._cuda import custom_call
from jax_memeff._op import primitives
from jax_memeff.codegen import arch as architectures
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler

from . import build


def install() -> None:
    """Lowers the CPU programs of this process to emulated kernels from now on."""
    one_context.share()
    driver = _driver()  # loads libcuda.so.1, so dlopen finds it from now on
    compiler.compile = compile
    jax.local_devices(backend="cpu")  # hazard: a client that starts later refuses the types
    jax.ffi.register_ffi_type("jax_memeff_call", _ffi.call_type(), platform="cpu")
    for name, stages in _ffi.targets().items():
        handlers = {
            "instantiate": stages["instantiate"],
            "execute": _capsule(driver.emulator_proxy(_pointer(stages["execute"]))),
        }
        jax.ffi.register_ffi_target(name, handlers, platform="cpu", api_version=1)
    custom_call.register_targets = lambda: None
    for primitive, kernels, in_jax in (
        (primitives.attention_fwd_p, primitives._cuda_forward, primitives._blockwise_forward),
        (primitives.attention_bwd_p, primitives._cuda_backward, primitives._blockwise_backward),
        (primitives.attention_tangent_p, primitives._cuda_tangent, primitives.tangent_in_jax),
    ):
        mlir.register_lowering(primitive, _by_implementation(kernels, in_jax), platform="cpu")


def _by_implementation(kernels: Callable[..., Any], in_jax: Callable[..., Any]) -> Any:
    """The kernels, unless a call asks for the blockwise path, as on a GPU."""
    plain = mlir.lower_fun(in_jax, multiple_results=True)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        is_plain = params["options"].implementation == "xla"
        return (plain if is_plain else kernels)(ctx, *operands, **params)

    return lower


def configure(arch: str, *, multiprocessors: int = 3, seed: int = 0) -> None:
    """Sets up the machine. A program that was compiled before keeps its kernels.

    ``multiprocessors`` blocks run at a time. ``seed`` orders their warps, and decides which
    asynchronous copies and products take effect at once and which as late as possible.
    """
    os.environ["JAX_MEMEFF_ARCHS"] = arch
    capability = architectures.capability(arch)
    _driver().emulator_configure(capability, multiprocessors, ctypes.c_uint64(seed))
    jax.clear_caches()


def compile(spec: KernelSpec, arch: str) -> compiler.Compiled:
    """As ``codegen.toolchain.compile.compile``, but the image is the path of a library."""
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
    """Plans to compile the kernels of these runs (``run.kernels()``) several at a time."""
    build.announce(spec for run in runs for spec in run.kernels())


_lowered: dict[Any, jax.stages.Lowered] = {}


def lower_together(lower: Callable[..., jax.stages.Lowered], calls: Iterable[tuple]) -> None:
    """Calls ``lower`` with each of ``calls`` and compiles the kernels of all programs together."""
    with build.together():
        for call in calls:
            if (lower, call) not in _lowered:
                _lowered[lower, call] = lower(*call)


def lowered(lower: Callable[..., jax.stages.Lowered], *call: Any) -> jax.stages.Lowered:
    """The result of ``lower(*call)``, which :func:`lower_together` may have computed already."""
    return _lowered.get((lower, call)) or lower(*call)


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` with grid, block and shared bytes, but no stream or attributes."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def launch(source: str, name: str, *, blocks: int = 1, threads: int, shared_bytes: int) -> None:
    """Runs blocks of the kernel ``EMULATOR_KERNEL(name)`` in ``source``, without parameters.

    Raises ``RuntimeError`` with the reason if it fails.
    """
    driver = _driver()
    image = os.fsencode(build.kernel_library("kernels", source))
    library, kernel, error = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_char_p()
    driver.cuLibraryLoadData(ctypes.byref(library), image, None, None, 0, None, None, 0)
    driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode())
    launched = _LaunchConfig(sizes=(blocks, 1, 1, threads, 1, 1, shared_bytes))
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
