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

from jax_memeff.codegen.arch import of_capability

_MOST_PROCESSES = 12  # each has a CUDA context of half a GiB


class Precompilation:
    """Starts to compile the kernels of ``peers`` for ``cells``; without a GPU it does nothing."""

    def __init__(self, cells: Sequence[Cell], peers: Sequence[Peer]):
        self._futures: list[Future] = []
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
        for cell, peer in itertools.product(cells, selected):
            if not peer.missing(cell):
                for backward in _directions(cell, peer):
                    self._futures.append(self._pool.submit(_compile, peer.name, cell, backward))

    def wait(self, progress: Progress) -> None:
        """Waits for all compilations. Failures are ignored, because they recur later."""
        for future in progress.track(self._futures, description="compiling kernels"):
            future.exception()
        if self._futures:
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


def _compile(name: str, cell: Cell, backward: bool) -> None:
    peer = PEERS[name]
    if peer.framework == "torch":
        torch_programs.compile_alone(peer, cell, backward)
        return
    arrays = jax.eval_shape(lambda: cell_inputs.adapt(cell_inputs.make(cell), peer, cell))
    function = jax_programs.one_call(peer.attention(cell), backward)
    jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",))
