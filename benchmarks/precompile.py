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

import inputs as cell_inputs
import jax
import jax_programs
import torch_programs
from cells import Cell
from peers import PEERS, Peer
from rich.progress import Progress

from jax_memeff.codegen.arch import of_capability

_MOST_PROCESSES = 12  # each has a CUDA context of half a GiB


class Processes:
    """Compiles kernels for the GPU of this machine; without a GPU it does nothing."""

    def __init__(self):
        self._futures: list[Future] = []
        self._pool: ProcessPoolExecutor | None = None
        if jax.default_backend() not in ("gpu", "cuda"):
            return
        major, minor = jax.devices()[0].compute_capability.split(".")
        self._pool = ProcessPoolExecutor(
            min(_MOST_PROCESSES, os.cpu_count() or 1),
            multiprocessing.get_context("spawn"),
            _start,
            (of_capability(int(major), int(minor)),),
        )

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """``function(*arguments)`` compiles kernels, in one of the processes."""
        if self._pool is not None:
            self._futures.append(self._pool.submit(function, *arguments))

    def submit_cells(self, cells: Sequence[Cell], peers: Sequence[Peer]) -> None:
        """Compile the kernels of ``peers`` for ``cells``."""
        for cell, peer in itertools.product(cells, peers):
            if peer.compiles and not peer.missing(cell):
                for backward in _directions(cell, peer):
                    self.submit(compile_peer, peer.name, cell, backward)

    def wait(self, progress: Progress) -> None:
        """Waits for all compilations. Failures are ignored, because they recur later."""
        for future in progress.track(self._futures, description="compiling kernels"):
            future.exception()
        if self._pool is not None:
            self._pool.shutdown()


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


def compile_peer(name: str, cell: Cell, backward: bool) -> None:
    """Compile the kernels of a peer for a cell; the name is pickled, and a peer cannot be."""
    peer = PEERS[name]
    if peer.framework == "torch":
        torch_programs.compile_alone(peer, cell, backward)
        return
    arrays = jax.eval_shape(lambda: cell_inputs.adapt(cell_inputs.make(cell), peer, cell))
    lower(jax_programs.one_call(peer.attention(cell), backward), arrays)


def lower(function: Callable[..., Any], arrays: Any) -> None:
    """Compile the kernels of a function of arrays with the shapes and dtypes of ``arrays``."""
    jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",))
