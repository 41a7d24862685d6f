"""Programs of the PyTorch peers: many calls captured in one CUDA graph."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from programs.cells import Cell
from programs.inputs import Inputs, adapt
from programs.peers import Peer

_WARM_UP_CALLS = 3


class Tensors(NamedTuple):
    """The operands as ``[B, N, T, H]`` views of the memory of JAX's ``[B, T, N, H]`` arrays."""

    query: Any
    key: Any
    value: Any
    cotangent: Any
    bias: Any
    table: Any = None

    def differentiable(self) -> list[Any]:
        operands = (self.query, self.key, self.value, self.bias, self.table)
        return [operand for operand in operands if operand is not None]


def tensors(inputs: Inputs, backward: bool) -> Tensors:
    """Zero-copy views of ``inputs``; leaves that require gradients if ``backward``."""
    torch = importlib.import_module("torch")

    def view(array: jax.Array, transposed: bool = True):
        tensor = torch.from_dlpack(array)
        return (tensor.transpose(1, 2) if transposed else tensor).detach()

    views = Tensors(
        *map(view, inputs[:4]),
        bias=None if inputs.bias is None else view(inputs.bias, transposed=False),
        table=None if inputs.table is None else view(inputs.table, transposed=False),
    )
    for operand in views.differentiable() if backward else ():
        operand.requires_grad_()
    return views


class TorchProgram:
    """``calls`` eager PyTorch calls, replayed from a CUDA graph.

    Capturing fixes the memory of every temporary and removes PyTorch's host time, as compilation
    does for the JAX peers. ``function`` returns a tuple of tensors for ``operands``.
    """

    def __init__(
        self,
        function: Callable[[Any], tuple[Any, ...]],
        operands: Any,
        calls: int,
        deterministic: bool = False,
    ):
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        self.calls = calls
        self._torch = torch
        # The mode at the time of the capture counts; other peers set their own.
        torch.use_deterministic_algorithms(deterministic)
        self._operands = operands  # the graph holds addresses but does not keep tensors alive
        side_stream = torch.cuda.Stream()
        with warnings.catch_warnings(record=True) as refusals:
            # SDPA gives the reasons for a refusal in warnings, not in its exception.
            warnings.simplefilter("always")
            try:
                with torch.cuda.stream(side_stream):
                    for _ in range(_WARM_UP_CALLS):
                        function(operands)
                torch.cuda.synchronize()
            except RuntimeError as error:
                said = [str(refusal.message).split("(Triggered")[0] for refusal in refusals]
                # Join the refusal and its reasons in one line.
                raise RuntimeError(" ".join(f"{error} {' '.join(said)}".split())) from error
            self._graph = torch.cuda.CUDAGraph()
            # Threads of JAX must not invalidate the capture.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                # Each call writes memory of its own, as in JAX: results that fit in L2 would never
                # be written to DRAM if the next call overwrote them.
                self._results = [function(operands) for _ in range(calls)]
        torch.cuda.synchronize()

    def launch(self) -> None:
        self._graph.replay()

    def wait(self) -> None:
        self._torch.cuda.synchronize()

    def results(self) -> list[jax.Array]:
        """The output, then the gradients in the order of ``Tensors``, as JAX arrays."""
        return to_jax(self._results[-1])


def of_cell(peer: Peer, cell: Cell, inputs: Inputs, calls: int, backward: bool) -> TorchProgram:
    """``calls`` calls of a peer."""
    operands = tensors(jax.block_until_ready(adapt(inputs, peer, cell)), backward)
    function = one_call(peer.attention(cell), backward)
    return TorchProgram(function, operands, calls, peer.deterministic)


def one_call(attention: Any, backward: bool):
    """A function of ``Tensors``: the output, and the gradients of every differentiable operand."""
    torch = importlib.import_module("torch")

    def forward(operands: Tensors):
        with torch.no_grad():
            return (attention(operands),)

    def forward_and_backward(operands: Tensors):
        out = attention(operands)
        gradients = torch.autograd.grad(out, operands.differentiable(), operands.cotangent)
        return (out.detach(), *gradients)

    return forward_and_backward if backward else forward


def results_of_one_call(peer: Peer, cell: Cell, inputs: Inputs) -> list[jax.Array]:
    """The output and the gradients, as JAX arrays."""
    torch = importlib.import_module("torch")
    # PyTorch and JAX have streams of their own.
    operands = tensors(jax.block_until_ready(adapt(inputs, peer, cell)), backward=True)
    results = to_jax(one_call(peer.attention(cell), backward=True)(operands))
    torch.cuda.synchronize()
    return results


def compile_alone(peer: Peer, cell: Cell, backward: bool) -> None:
    """One call on random operands, which fills PyTorch's caches of compiled code on disk."""
    torch = importlib.import_module("torch")

    def random(length: int, heads: int, dim: int) -> Any:
        shape = cell.batch, length, heads, dim
        return torch.randn(shape, device="cuda").to(getattr(torch, cell.dtype)).transpose(1, 2)

    queries, keys = (cell.query_length, cell.heads), (cell.key_length, cell.key_heads)
    operands = Tensors(
        random(*queries, cell.head_dim),
        random(*keys, cell.head_dim),
        random(*keys, cell.value_dim),
        random(*queries, cell.value_dim),
        bias=None,
        table=torch.randn(cell.heads, 2 * cell.query_length, device="cuda")
        if cell.function == "table"
        else None,
    )
    for operand in operands.differentiable() if backward else ():
        operand.requires_grad_()
    one_call(peer.attention(cell), backward)(operands)
    torch.cuda.synchronize()


def to_jax(results: tuple[Any, ...]) -> list[jax.Array]:
    """The results of ``one_call`` in JAX's layout; ``[B, N, T, H]`` arrays are transposed."""
    turned = [tensor.transpose(1, 2) for tensor in results[:4]] + list(results[4:])
    return [jax.dlpack.from_dlpack(tensor.detach().contiguous()) for tensor in turned]


def free_memory() -> None:
    """Returns PyTorch's cached memory to the device, so that JAX can use it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.empty_cache()
