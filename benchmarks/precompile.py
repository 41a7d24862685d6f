"""Compiles the kernels of cells in parallel processes, into the disk caches of the measurement.

In one process NVRTC and PyTorch's compiler compile only one kernel at a time.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor

import inputs as cell_inputs
import jax
import jax_programs
import torch_programs
from cells import Cell
from peers import PEERS, Peer
from rich.progress import Progress
from timing import Failure, first_line

from jax_memeff.codegen.arch import of_capability

_MOST_PROCESSES = 12  # each has a CUDA context of half a GiB


class Precompilation:
    """Starts to compile the kernels of ``peers`` for ``cells``; without a GPU it does nothing."""

    def __init__(self, cells: Sequence[Cell], peers: Sequence[Peer]):
        self._futures: dict[tuple[Peer, Cell, bool], Future] = {}
        selected = [peer for peer in peers if peer.compiles]
        if jax.default_backend() not in ("gpu", "cuda") or not selected:
            return
        major, minor = jax.devices()[0].compute_capability.split(".")
        processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
        self._pool = ProcessPoolExecutor(
            processes,
            multiprocessing.get_context("spawn"),
            _start,
            (of_capability(int(major), int(minor)),),
        )
        # JAX first: its programs are compiled while PyTorch's kernels are.
        selected.sort(key=lambda peer: peer.framework)
        for peer, cell in itertools.product(selected, cells):
            if not peer.missing(cell):
                for backward in _directions(cell, peer):
                    job = self._pool.submit(_compile, peer.name, cell, backward)
                    self._futures[peer, cell, backward] = job

    def wait(self, progress: Progress, framework: str) -> None:
        """Waits for the kernels of the peers of a framework."""
        own = [job for (peer, _, _), job in self._futures.items() if peer.framework == framework]
        for future in progress.track(own, description=f"compiling kernels ({framework})"):
            future.exception()
        if self._futures and all(future.done() for future in self._futures.values()):
            self._pool.shutdown()

    def failure(self, peer: Peer, cell: Cell, backward: bool) -> Failure | None:
        """Why PyTorch cannot compile a cell, which takes long to find out a second time.

        The failures of JAX recur when its programs are compiled.
        """
        if peer.framework != "torch" or (peer, cell, backward) not in self._futures:
            return None
        future = self._futures[peer, cell, backward]
        return None if future.exception() else future.result()


def _directions(cell: Cell, peer: Peer) -> tuple[bool, ...]:
    """In JAX forward+backward compiles everything: both directions use the same forward kernel."""
    if not cell.gradients:
        return (False,)
    return (True,) if peer.framework == "jax" else (False, True)


def _start(arch: str) -> None:
    """Keeps JAX off the GPU in this process, and keeps PyTorch from starting more processes."""
    jax.config.update("jax_platforms", "cpu")
    os.environ["JAX_MEMEFF_ARCHS"] = arch
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _compile(name: str, cell: Cell, backward: bool) -> Failure | None:
    peer = PEERS[name]
    if peer.framework == "torch":
        try:
            torch_programs.compile_alone(peer, cell, backward)
        except Exception as error:
            # A process without others beside it has more memory, so it will try again.
            is_final = type(error).__name__ != "OutOfMemoryError"
            return Failure(first_line(error)) if is_final else None
        return None
    arrays = jax.eval_shape(lambda: cell_inputs.adapt(cell_inputs.make(cell), peer, cell))
    function = jax_programs.one_call(peer.attention(cell), backward)
    jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",))
    return None
