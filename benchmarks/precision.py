"""Errors of attention and of its peers: ``python benchmarks/precision.py --help``.

Each implementation computes the same inputs once, and float64 gives the reference. ``report.py``
summarizes them in docs/guide/precision.md. This file also measures other versions of jax-memeff
than the one beside it, so that it can compare them: it uses only what the package exports.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from programs.peers import OURS, Peer, peers
from programs.precompile import Precompilation
from reporting import precision_table
from rich.console import Console
from rich.progress import Progress

import jax_memeff

FEATURES: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "dropout": {"dropout": 0.1},
    "groups": {"key_heads": 1, "causal": True},
    "packed": {"causal": True},
}
"""Features that have cells of their own, at the head dims below."""
FEATURE_DIMS = (64, 128)
RESULTS = ("out", "dq", "dk", "dv", "dbias")
"""In the order of ``jax_programs.one_call``."""


def cells(
    head_dims: Sequence[int],
    lengths: Sequence[int],
    dtypes: Sequence[str],
    features: Sequence[str] = (),
) -> list[Cell]:
    """Cells with four heads. PyTorch's memory-efficient kernel has no groups.

    >>> [cell.name for cell in cells([64], [96], ["float32"])]
    ['hd64 B1 N4 T96 float32', 'hd64 B1 N4 T96 float32 causal']
    >>> [cell.name for cell in cells([], [96], ["bfloat16"], ["groups"])]
    ['hd64 B1 N4/1 T96 causal', 'hd128 B1 N4/1 T96 causal']
    """

    def cell(dtype: str, dim: int, length: int, key_heads: int = 4, **fields: Any) -> Cell:
        return Cell("precision", 1, length, length, 4, key_heads, dim, dim, dtype=dtype, **fields)

    found = [
        cell(dtype, dim, length, causal=causal)
        for dtype, dim, length, causal in itertools.product(
            dtypes, head_dims, lengths, (False, True)
        )
    ]
    for dtype, dim, length, name in itertools.product(dtypes, FEATURE_DIMS, lengths, features):
        parts = (length // 2, length // 3, length - length // 2 - length // 3)
        sequences = parts if name == "packed" else None
        found.append(cell(dtype, dim, length, sequences=sequences, **FEATURES[name]))
    return found


def reference(cell: Cell, inputs: Inputs) -> dict[str, np.ndarray]:
    """Output, logsumexp and gradients in float64 by their definition, in the layout of the inputs.

    With ``S = Q K^T / sqrt(H) + bias``, ``P = softmax(S)`` and ``Z`` the dropout, 0 or
    ``1 / (1 - rate)``: ``O = (P * Z) V``, ``dV = (P * Z)^T dO``, ``dP = Z * (dO V^T)``,
    ``dS = P * (dP - rowsum(P * dP))``, which is the gradient of the bias,
    ``dQ = dS K / sqrt(H)``, ``dK = dS^T Q / sqrt(H)``
    (Dao et al. 2022, FlashAttention, appendix B.2).
    """

    def heads(array: jax.Array) -> jax.Array:
        return jnp.asarray(array, jnp.float64).swapaxes(1, 2)  # [B, N, T, H]

    def of_key_heads(array: jax.Array) -> jax.Array:
        """The sums over the query heads of each key head."""
        return array.reshape(cell.batch, cell.key_heads, -1, *array.shape[2:]).sum(2)

    keep: Any = 1.0 if inputs.dropout_key is None else kept(cell, inputs.dropout_key)
    with jax.enable_x64(True):
        query, key, value, cotangent = map(heads, inputs[:4])
        key, value = (x.repeat(cell.heads // cell.key_heads, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5
        scores = scale * query @ key.swapaxes(-1, -2)
        if inputs.bias is not None:
            scores += jnp.asarray(inputs.bias, jnp.float64)
        scores = jnp.where(valid(cell), scores, -jnp.inf)
        maxima = scores.max(-1, keepdims=True)
        probabilities = jnp.exp(scores - maxima)
        sums = probabilities.sum(-1, keepdims=True)
        probabilities /= sums
        gradient = keep * (cotangent @ value.swapaxes(-1, -2))
        gradient = probabilities * (gradient - (probabilities * gradient).sum(-1, keepdims=True))
        dropped = keep * probabilities

        found = {
            "out": dropped @ value,
            "dq": scale * gradient @ key,
            "dk": of_key_heads(scale * gradient.swapaxes(-1, -2) @ query),
            "dv": of_key_heads(dropped.swapaxes(-1, -2) @ cotangent),
            "lse": (maxima + jnp.log(sums))[..., 0],
        }
        exact = {name: np.asarray(array.swapaxes(1, 2)) for name, array in found.items()}
        if inputs.bias is not None:
            exact["dbias"] = np.asarray(gradient.sum(0, keepdims=True))
        return exact


def valid(cell: Cell) -> np.ndarray:
    """The pairs of a row and a column that a cell with a causal mask or packed sequences has."""
    lengths = cell.sequences or (cell.query_length,)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    found = ids[:, None] == ids
    return np.tril(found) if cell.causal else found


def kept(cell: Cell, dropout_key: jax.Array) -> np.ndarray:
    """The factors of dropout in this library: 0, or ``1 / (1 - rate)``."""
    state = jax_memeff.dropout.state(dropout_key, cell.batch, cell.heads)
    threshold = jax_memeff.dropout.threshold(cell.dropout)
    sizes = cell.query_length, cell.key_length
    keep = np.asarray(jax_memeff.dropout.keep_mask(state, threshold, 0, 0, *sizes))
    return keep / (1 - jax_memeff.dropout.realised_rate(cell.dropout))


def results(peer: Peer, cell: Cell, inputs: Inputs) -> dict[str, jax.Array]:
    """The results of one call, the logsumexp only of this library; raises whatever the peer
    raises.
    """
    if names := peer.missing(cell):
        raise NotImplementedError(f"has no argument for {', '.join(names)}")
    if peer.prescaled:
        raise NotImplementedError("has no scale, so its gradients are those of other inputs")
    if peer.name in OURS:
        return jax.jit(with_logsumexp(peer, cell))(cell_inputs.adapt(inputs, peer, cell))
    if cell.dropout:
        raise NotImplementedError("drops other elements")
    if peer.framework == "jax":
        function = jax.jit(jax_programs.one_call(peer.attention(cell), backward=True))
        found = function(cell_inputs.adapt(inputs, peer, cell))
    else:
        found = torch_programs.results_of_one_call(peer, cell, inputs)
    return dict(zip(RESULTS, found, strict=False))


def with_logsumexp(peer: Peer, cell: Cell):
    """A function of ``Inputs``: what ``jax_programs.one_call`` returns, and the logsumexp."""
    attention = peer.attention(cell, return_residual=True)

    def call(inputs: Inputs) -> dict[str, jax.Array]:
        operands = inputs.differentiable()
        out, pullback, lse = jax.vjp(
            lambda operands: attention(inputs._replace(**operands)), operands, has_aux=True
        )
        (gradients,) = pullback(inputs.cotangent)
        found = (out, *(gradients[name] for name in operands))
        return {**dict(zip(RESULTS, found, strict=False)), "lse": lse}

    return call


def errors(found: dict[str, jax.Array], want: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """The relative error in the Frobenius norm and the largest absolute error of each result.

    >>> errors({"out": np.array([3.0, 4.5])}, {"out": np.array([3.0, 4.0])})
    {'out': {'frobenius': 0.1, 'largest': 0.5}}
    """
    measured = {}
    for name, exact in want.items():
        if name not in found:
            continue
        difference = np.asarray(found[name], np.float64) - exact
        measured[name] = {
            "frobenius": float(np.linalg.norm(difference) / np.linalg.norm(exact)),
            "largest": float(abs(difference).max()),
        }
    return measured


def measure(cell: Cell, selected: Sequence[Peer]) -> dict[str, Any]:
    """The errors of each peer, or the reason why it has none."""
    inputs = jax.block_until_ready(cell_inputs.make(cell))
    want = reference(cell, inputs)
    records: dict[str, Any] = {}
    for peer in selected:
        try:
            records[peer.name] = errors(results(peer, cell, inputs), want)
        except Exception as error:
            records[peer.name] = {"error": first_line(error)}
    return records


def _arguments() -> argparse.Namespace:
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
    parser.add_argument(
        "--features",
        nargs="+",
        default=[],
        choices=FEATURES,
        help="also measure cells with these, at head dims 64 and 128",
    )
    parser.add_argument(
        "--arch", help="run the kernels of another architecture, such as compute_80, as PTX"
    )
    parser.add_argument("--output", type=Path, help="default: results/<device>-precision.json")
    parser.add_argument("--commit", help="our commit, if the checkout has no git")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("TODAY", "OTHER"),
        help="measure nothing: print our errors of two files beside each other",
    )
    return parser.parse_args()


def main() -> None:
    # By default JAX reserves three quarters of the device's memory, and torch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = _arguments()
    console = Console(soft_wrap=True, markup=False)
    if options.compare:
        today, other = (json.loads(path.read_text()) for path in options.compare)
        console.print(precision_table.comparison(today, other))
        return
    if options.arch:
        os.environ["JAX_MEMEFF_ARCHS"] = options.arch
    document: dict[str, Any] = {
        **machine.facts(options.commit),
        **({"arch": options.arch} if options.arch else {}),
        "peers": {peer.name: peer.label for peer in options.peers},
        "precision": [],
    }
    kind = f"{options.arch}-precision" if options.arch else "precision"
    path = options.output or documents.default_path(str(document["device"]["name"]), kind)
    selected = cells(options.head_dims, options.lengths, options.dtypes, options.features)
    of_jax = [peer for peer in options.peers if peer.framework == "jax"]
    with Progress(console=console) as progress:
        Precompilation(selected, of_jax).wait(progress, "jax")
        # Threads compile several programs at a time. PyTorch's calls do not run beside others.
        threads = min(8, os.cpu_count() or 1) if of_jax == options.peers else 1
        with ThreadPoolExecutor(threads) as pool:
            measured = pool.map(functools.partial(measure, selected=options.peers), selected)
            for cell, records in progress.track(
                zip(selected, measured, strict=True), total=len(selected), description="measuring"
            ):
                document["precision"].append({"name": cell.name, "results": records})
                documents.write(path, document)
    console.print(precision_table.text(document))


if __name__ == "__main__":
    main()
