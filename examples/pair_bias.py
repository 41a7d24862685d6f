"""Attention with a learned pair bias, as in AlphaFold: pairs of points bias their attention.

    python examples/pair_bias.py                  # under a minute on two CPU cores
    python examples/pair_bias.py --attention jax  # the same training through jax.nn

Points lie in a square. Each row of inputs gives every point a random vector, and the target of a
point is the mean of the vectors of its neighbours. Only the pairs, features of the distance of two
points, show which points are near. As in the row attention of AlphaFold (Jumper et al., 2021,
supplement, algorithm 7) a projection of the pairs becomes a bias of the scores, one for each head,
common to all rows; it is learned through the gradient of the bias.

OUTPUT receives results.json (every loss, and the memory of one gradient by length) and
pair_bias.png. The exit status is 1 if a run of the preset's full length does not end at 30 % of
the variance of the targets; without the pairs, no model gets much below 100 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jax_memeff

BINS = 16
"""The distance of a pair is a one-hot feature of this size."""
TARGET = 0.3
"""The final loss has to be at most this share of the variance of the targets."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of the model, length of the training, and the lengths whose memory is compared."""

    rows: int
    points: int
    neighbours: float
    features: int
    heads: int
    head_dim: int
    steps: int
    learning_rate: float
    dtype: str
    lengths: tuple[int, ...]


PRESETS = {
    "tiny": Preset(8, 32, 6.0, 4, 2, 16, 250, 1e-2, "float32", (256, 1024)),
    "cpu": Preset(16, 64, 8.0, 8, 4, 32, 400, 5e-3, "float32", (256, 512, 1024)),
    "gpu": Preset(64, 512, 12.0, 16, 8, 64, 1000, 3e-3, "bfloat16", (512, 1024, 2048, 4096)),
}


# ---------------------------------------------------------------------------------------- task


def problem(key: jax.Array, preset: Preset) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs and targets ``[rows, points, features]``, and pairs ``[points, points, BINS]``.

    The pairs are one-hot distances in units of the radius within which points are neighbours, so
    that half of the bins are neighbours; a point is not its own.
    """
    place, draw = jax.random.split(key)
    places = jax.random.uniform(place, (preset.points, 2))
    radius = (preset.neighbours / (preset.points * np.pi)) ** 0.5
    distance = jnp.linalg.norm(places[:, None] - places, axis=-1) / radius
    itself = jnp.eye(preset.points, dtype=bool)
    is_near = (distance < 1) & ~itself
    inputs = jax.random.normal(draw, (preset.rows, preset.points, preset.features))
    count = jnp.maximum(is_near.sum(-1, keepdims=True), 1)
    targets = jnp.einsum("ij,rjf->rif", is_near / count, inputs)
    bins = jnp.clip((distance * BINS / 2).astype(int), 0, BINS - 2)
    return inputs, targets, jax.nn.one_hot(jnp.where(itself, BINS - 1, bins), BINS)


# --------------------------------------------------------------------------------------- model

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def memeff_attention(query, key, value, bias):
    """Attention of ``[R, L, N, H]`` arrays with a bias ``[1, N, L, L]`` through jax_memeff."""
    return jax_memeff.dot_product_attention(query, key, value, bias)


def jax_attention(query, key, value, bias):
    """Attention of the same arrays through jax.nn."""
    return jax.nn.dot_product_attention(query, key, value, bias)


ATTENTIONS: dict[str, Attention] = {"memeff": memeff_attention, "jax": jax_attention}


class RowAttention(nnx.Module):
    """Gated attention along every row, biased by the pairs."""

    def __init__(self, preset: Preset, attention: Attention, rngs: nnx.Rngs):
        dtype = jnp.dtype(preset.dtype)
        self.attention = attention
        self.heads, self.head_dim = preset.heads, preset.head_dim
        width = preset.heads * preset.head_dim
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.query_key_value_gate = linear(preset.features, 4 * width)
        self.pair_bias = linear(BINS, preset.heads)
        self.out = linear(width, preset.features)

    def __call__(self, inputs: jax.Array, pairs: jax.Array) -> jax.Array:
        rows, points, _ = inputs.shape
        projected = self.query_key_value_gate(inputs)
        projected = projected.reshape(rows, points, 4, self.heads, self.head_dim)
        query, key, value, gate = (projected[:, :, i] for i in range(4))
        bias = self.pair_bias(pairs).transpose(2, 0, 1)[None]  # for all rows
        out = self.attention(query, key, value, bias) * jax.nn.sigmoid(gate)
        return self.out(out.reshape(rows, points, -1)).astype(jnp.float32)


# ------------------------------------------------------------------------------------ training


class Trainer:
    """Parameters, optimizer state and the compiled step of one run."""

    def __init__(self, preset: Preset, attention: str, seed: int, steps: int):
        model = RowAttention(preset, ATTENTIONS[attention], nnx.Rngs(seed))
        self.graph, self.parameters = nnx.split(model, nnx.Param)
        self.preset, self.key = preset, jax.random.key(seed)
        schedule = optax.cosine_decay_schedule(preset.learning_rate, max(2, steps), 0.05)
        self.optimizer = optax.adam(schedule)
        self.state = self.optimizer.init(self.parameters)
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1))

    def _loss(self, parameters, key):
        inputs, targets, pairs = problem(key, self.preset)
        error = nnx.merge(self.graph, parameters)(inputs, pairs) - targets
        return jnp.mean(error**2) / jnp.var(targets)

    def _train_step(self, parameters, state, key):
        loss, gradients = jax.value_and_grad(self._loss)(parameters, key)
        updates, state = self.optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    def step(self, index: int) -> jax.Array:
        """One update on new points; returns its loss as a share of the variance of the targets."""
        key = jax.random.fold_in(self.key, index)
        self.parameters, self.state, loss = self._step(self.parameters, self.state, key)
        return loss

    def strengths(self) -> np.ndarray:
        """The learned bias of each bin and head, ``[BINS, heads]``."""
        kernel = nnx.merge(self.graph, self.parameters).pair_bias.kernel
        return np.asarray(kernel[...], np.float32)


def train(trainer: Trainer, steps: int) -> list[float]:
    """Run ``steps`` updates with a progress bar; returns every loss."""
    losses: list[jax.Array] = []
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f} of the variance"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=steps, loss=np.nan)
        for index in range(steps):
            losses.append(trainer.step(index))
            if (index + 1) % 10 == 0 or index + 1 == steps:
                progress.update(task, completed=index + 1, loss=float(losses[-1]))
    return [float(loss) for loss in losses]


# -------------------------------------------------------------------------------------- memory


def gradient_bytes(attention: Attention, preset: Preset, length: int) -> int:
    """Bytes that XLA plans for the gradients of one attention, besides arguments and results.

    The program is compiled for the present device, but not run.
    """

    def loss(query, key, value, bias):
        return attention(query, key, value, bias).astype(jnp.float32).sum()

    dtype = jnp.dtype(preset.dtype)
    shape = (preset.rows, length, preset.heads, preset.head_dim)
    operands = [jax.ShapeDtypeStruct(shape, dtype)] * 3
    operands.append(jax.ShapeDtypeStruct((1, preset.heads, length, length), dtype))
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*operands).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


def memory(preset: Preset) -> dict[str, list[int]]:
    """:func:`gradient_bytes` of every attention at every length, with a progress bar."""
    sizes: dict[str, list[int]] = {name: [] for name in ATTENTIONS}
    columns = (TextColumn("memory at length {task.fields[length]}"), BarColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(preset.lengths) * len(sizes), length=0)
        for length in preset.lengths:
            progress.update(task, length=length)
            for name, attention in ATTENTIONS.items():
                sizes[name].append(gradient_bytes(attention, preset, length))
                progress.advance(task)
    return sizes


# -------------------------------------------------------------------------------------- output


def plot(result: dict, strengths: np.ndarray, lengths: tuple[int, ...], path: Path) -> None:
    """Draw the losses, the learned bias by distance, and the memory by length."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    training, learned, needed = figure.subplots(1, 3)
    training.plot(result["losses"], linewidth=1, label="training loss")
    training.axhline(1, color="gray", linestyle="--", label="mean of the targets")
    training.axhline(TARGET, color="gray", linestyle=":", label="target")
    training.set(xlabel="step", ylabel="share of the variance", title=result["attention"])
    training.set_ylim(0, max(1.1, max(result["losses"])))
    training.legend()
    distances = (np.arange(BINS - 1) + 0.5) * 2 / BINS
    learned.plot(distances, strengths[:-1], "o-", markersize=3)
    learned.axvline(1, color="gray", linestyle=":")
    learned.set(xlabel="distance / radius", ylabel="bias", title="learned bias of each head")
    for name, sizes in result["gradient_bytes"].items():
        needed.loglog(lengths, np.asarray(sizes) / 2**20, "o-", label=name)
    needed.set(xlabel="points", ylabel="MiB", title="memory of the gradients of one attention")
    needed.set_xticks(lengths, [str(length) for length in lengths])
    needed.minorticks_off()
    needed.legend()
    figure.savefig(path, dpi=120)


def memory_table(sizes: dict[str, list[int]], lengths: tuple[int, ...]) -> Table:
    table = Table("points", *sizes, "ratio", title="MiB for the gradients of one attention")
    for length, memeff, jax_nn in zip(lengths, sizes["memeff"], sizes["jax"], strict=True):
        mebibytes = (f"{size / 2**20:.1f}" for size in (memeff, jax_nn))
        table.add_row(str(length), *mebibytes, f"{jax_nn / memeff:.1f}")
    return table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; the preset's name and number of steps are filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--attention", choices=sorted(ATTENTIONS), default="memeff")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: by platform")
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("pair_bias_output"))
    options = parser.parse_args(arguments)
    options.preset = options.preset or ("gpu" if jax.default_backend() == "gpu" else "cpu")
    options.steps = PRESETS[options.preset].steps if options.steps is None else options.steps
    if options.steps < 1:
        parser.error(f"--steps: expected at least 1, got {options.steps}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train, compare memory, write the files; returns the exit status."""
    options = parse(arguments)
    preset = PRESETS[options.preset]
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    trainer = Trainer(preset, options.attention, options.seed, options.steps)
    losses = train(trainer, options.steps)
    sizes = memory(preset)
    # Every step has new points, so the last losses are those of unseen problems.
    final = float(np.mean(losses[-10:]))
    setting = {name: value for name, value in vars(options).items() if name != "output"}
    result = {
        **setting,
        "losses": losses,
        "final_loss": final,
        "lengths": preset.lengths,
        "gradient_bytes": sizes,
        "seconds": time.perf_counter() - began,
    }
    (options.output / "results.json").write_text(json.dumps(result) + "\n")
    plot(result, trainer.strengths(), preset.lengths, options.output / "pair_bias.png")
    Console().print(memory_table(sizes, preset.lengths))
    print(f"final loss {final:.3f} of the variance of the targets")
    met = final <= TARGET
    if not met:
        print(f"target missed: expected at most {TARGET}, got {final:.3f}")
    print(json.dumps({name: value for name, value in result.items() if name != "losses"}))
    return 0 if met or options.steps < preset.steps else 1


if __name__ == "__main__":
    sys.exit(main())
