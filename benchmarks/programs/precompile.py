"""Compiles the kernels of cells in parallel processes, into the disk caches of the measurement.

In one process NVRTC and PyTorch's compiler compile only one kernel at a time.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import jax
from measuring.timing import Failure, first_line
from rich.progress import Progress

from jax_memeff.codegen.arch import of_capability
from programs import inputs as cell_inputs
from programs import jax_programs, torch_programs
from programs.cells import Cell
from programs.peers import PEERS, Peer

_MOST_PROCESSES = 12  # each has a CUDA context of half a GiB


class Processes:
    """Compile kernels for the GPU of this machine; without a GPU they do nothing."""

    def __init__(self):
        self._futures: list[Future] = []
        self._pool: ProcessPoolExecutor | None = None
        if jax.default_backend() not in ("gpu", "cuda"):
            return
        archs = os.environ.get("JAX_MEMEFF_ARCHS")
        if not archs:
            archs = of_capability(*map(int, jax.devices()[0].compute_capability.split(".")))
        self._pool = ProcessPoolExecutor(
            min(_MOST_PROCESSES, os.cpu_count() or 1),
            multiprocessing.get_context("spawn"),
            _start,
            (archs,),
        )

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future | None:
        """``function(*arguments)`` compiles kernels, in one of the processes."""
        if self._pool is None:
            return None
        self._futures.append(self._pool.submit(function, *arguments))
        return self._futures[-1]

    def wait(self, progress: Progress, futures: Sequence[Future] | None = None) -> None:
        """Waits for some futures, by default all. Failures are ignored, because they will recur."""
        waited = self._futures if futures is None else futures
        for future in progress.track(waited, description="compiling kernels"):
            future.exception()
        if self._pool is not None and all(future.done() for future in self._futures):
            self._pool.shutdown()


class Precompilation:
    """Starts to compile the kernels of ``peers`` for ``cells``; without a GPU it does nothing."""

    def __init__(self, cells: Sequence[Cell], peers: Sequence[Peer]):
        self._processes = Processes()
        self._futures: dict[tuple[Peer, Cell, bool], Future] = {}
        # JAX first: its programs are compiled while PyTorch's kernels are.
        selected = sorted((peer for peer in peers if peer.compiles), key=lambda x: x.framework)
        for peer, cell in itertools.product(selected, cells):
            if not peer.missing(cell):
                for backward in _directions(cell, peer):
                    job = self._processes.submit(compile_peer, peer.name, cell, backward)
                    if job is not None:
                        self._futures[peer, cell, backward] = job

    def wait(self, progress: Progress, framework: str) -> None:
        """Waits for the kernels of the peers of a framework."""
        own = [job for (peer, _, _), job in self._futures.items() if peer.framework == framework]
        self._processes.wait(progress, own)

    def failure(self, peer: Peer, cell: Cell, backward: bool) -> Failure | None:
        """Why PyTorch cannot compile a cell; finding this out a second time would take long.

        The failures of JAX recur when its programs are compiled.
        """
        if peer.framework != "torch" or (peer, cell, backward) not in self._futures:
            return None
        future = self._futures[peer, cell, backward]
        return None if future.exception() else future.result()


def _directions(cell: Cell, peer: Peer) -> tuple[bool, ...]:
    """In JAX, forward+backward compiles everything: both directions use the same forward kernel."""
    if not cell.gradients:
        return (False,)
    return (True,) if peer.framework == "jax" else (False, True)


def _start(archs: str) -> None:
    """Keeps JAX off the GPU in this process, and keeps PyTorch from starting more processes."""
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_MEMEFF_ARCHS"] = archs
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def compile_peer(name: str, cell: Cell, backward: bool) -> Failure | None:
    """Compile the kernels of a peer for a cell; takes a name because a peer cannot be pickled.

    Returns why PyTorch cannot compile them, if it will not try again.
    """
    peer = PEERS[name]
    if peer.framework == "torch":
        try:
            torch_programs.compile_alone(peer, cell, backward)
        except Exception as error:
            # A process that runs alone has more memory, so it will try again.
            is_final = type(error).__name__ != "OutOfMemoryError"
            return Failure(first_line(error)) if is_final else None
        return None
    arrays = jax.eval_shape(lambda: cell_inputs.adapt(cell_inputs.make(cell), peer, cell))
    lower(jax_programs.one_call(peer.attention(cell), backward), arrays)
    return None


def lower(function: Callable[..., Any], arrays: Any) -> None:
    """Compile the kernels of a function of arrays with the shapes and dtypes of ``arrays``."""
    jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",))
