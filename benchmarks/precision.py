"""Errors of attention and of its peers: ``python benchmarks/precision.py --help``.

Each implementation computes the same inputs once, and float64 gives the reference. ``report.py``
summarizes them in docs/guide/precision.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import documents, machine
from measuring.timing import first_line
from programs import inputs as cell_inputs
from programs import jax_programs, torch_programs
from programs.cells import Cell
from programs.inputs import Inputs
from programs.peers import Peer, peers
from reporting import precision_table
from rich.console import Console


def cells(head_dims: list[int], lengths: list[int], dtypes: list[str]) -> list[Cell]:
    """Cells of one sequence with four heads. PyTorch's memory-efficient kernel has no groups.

    >>> [cell.name for cell in cells([64], [96], ["float32"])]
    ['hd64 B1 N4 T96 float32', 'hd64 B1 N4 T96 float32 causal']
    """
    return [
        Cell("precision", 1, length, length, 4, 4, dim, dim, dtype=dtype, causal=causal)
        for dtype, dim, length, causal in itertools.product(
            dtypes, head_dims, lengths, (False, True)
        )
    ]


def reference(inputs: Inputs, causal: bool) -> dict[str, np.ndarray]:
    """Output and gradients in float64 by their definition, in the layout of the inputs and in the
    order of ``jax_programs.one_call``.

    With ``S = Q K^T / sqrt(H)`` and ``P = softmax(S)``: ``dV = P^T dO``, ``dP = dO V^T``,
    ``dS = P * (dP - rowsum(P * dP))``, ``dQ = dS K / sqrt(H)``, ``dK = dS^T Q / sqrt(H)``
    (Dao et al. 2022, FlashAttention, appendix B.2).
    """

    def heads(array: jax.Array) -> jax.Array:
        return jnp.asarray(array, jnp.float64).swapaxes(1, 2)  # [B, N, T, H]

    with jax.enable_x64(True):
        query, key, value, cotangent = map(heads, inputs[:4])
        scale = query.shape[-1] ** -0.5
        scores = scale * query @ key.swapaxes(-1, -2)
        if causal:
            scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
        probabilities = jnp.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        gradient = cotangent @ value.swapaxes(-1, -2)
        gradient = probabilities * (gradient - (probabilities * gradient).sum(-1, keepdims=True))

        found = {
            "out": probabilities @ value,
            "dq": scale * gradient @ key,
            "dk": scale * gradient.swapaxes(-1, -2) @ query,
            "dv": probabilities.swapaxes(-1, -2) @ cotangent,
        }
        return {name: np.asarray(array.swapaxes(1, 2)) for name, array in found.items()}


def results(peer: Peer, cell: Cell, inputs: Inputs) -> list[jax.Array]:
    """The results of one call; raises whatever the peer raises."""
    if names := peer.missing(cell):
        raise NotImplementedError(f"has no argument for {', '.join(names)}")
    if peer.prescaled:
        raise NotImplementedError("has no scale, so its gradients are those of other inputs")
    if peer.framework == "jax":
        function = jax.jit(jax_programs.one_call(peer.attention(cell), backward=True))
        return list(function(cell_inputs.adapt(inputs, peer, cell)))
    return torch_programs.results_of_one_call(peer, cell, inputs)


def errors(found: list[jax.Array], want: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """The relative error in the Frobenius norm and the largest absolute error of each result.

    >>> errors([np.array([3.0, 4.5])], {"out": np.array([3.0, 4.0])})
    {'out': {'frobenius': 0.1, 'largest': 0.5}}
    """
    measured = {}
    for array, (name, exact) in zip(found, want.items(), strict=True):
        difference = np.asarray(array, np.float64) - exact
        measured[name] = {
            "frobenius": float(np.linalg.norm(difference) / np.linalg.norm(exact)),
            "largest": float(abs(difference).max()),
        }
    return measured


def measure(cell: Cell, selected: list[Peer]) -> dict[str, Any]:
    """The errors of each peer, or the reason why it has none."""
    inputs = jax.block_until_ready(cell_inputs.make(cell))
    want = reference(inputs, cell.causal)
    records: dict[str, Any] = {}
    for peer in selected:
        try:
            records[peer.name] = errors(results(peer, cell, inputs), want)
        except Exception as error:
            records[peer.name] = {"error": first_line(error)}
    return records


def main() -> None:
    # By default JAX reserves three quarters of the device's memory, and torch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--peers",
        type=peers,
        default="memeff_cuda,jax_cudnn,torch_efficient,torch_cudnn,fa4",
        help="as in attention.py (default: %(default)s)",
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--output", type=Path, help="default: results/<device>-precision.json")
    parser.add_argument("--commit", help="our commit, if the checkout has no git")
    options = parser.parse_args()
    document: dict[str, Any] = {
        **machine.facts(options.commit),
        "peers": {peer.name: peer.label for peer in options.peers},
        "precision": [],
    }
    path = options.output or documents.default_path(str(document["device"]["name"]), "precision")
    for cell in cells(options.head_dims, options.lengths, options.dtypes):
        document["precision"].append({"name": cell.name, "results": measure(cell, options.peers)})
        documents.write(path, document)
    Console().print(precision_table.text(document), soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
