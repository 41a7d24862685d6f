"""Train a byte-level GPT on the source text of the Python standard library that runs it.

    python examples/train_gpt.py                  # jax_memeff: under two minutes on two CPU cores
    python examples/train_gpt.py --attention jax  # the same through jax.nn; on a GPU, its cuDNN

The model is a pre-norm causal transformer in Flax NNX with rotary positions (Su et al.,
arXiv:2104.09864) and tied embeddings, trained with AdamW. On a GPU the default is a larger model
with bfloat16 activations and float32 parameters. Seed, initial parameters and batches are equal, so
two runs differ only in their attention.

OUTPUT receives losses.json (every training loss), loss.png and sample.txt. The first two are
written at each validation, the first time after a sixth of the steps. The exit status is 1 if a run
of the preset's full length does not end 25 % below the unigram entropy.
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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from training_text import (
    VOCABULARY,
    batches,
    standard_library_text,
    unigram_entropy,
    validation_batches,
)

import jax_memeff
from jax_memeff.flax import rotary_embedding

TARGET = 0.75
"""The final validation loss has to be at most this share of the unigram entropy."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of the model and length of the training; ``expected`` is the announced duration."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    dtype: str
    validation_windows: int
    expected: str = "after a few steps"


PRESETS = {
    "tiny": Preset(2, 32, 2, 64, 8, 400, 3e-3, "float32", 8),
    "cpu": Preset(
        *(4, 128, 4, 256, 8, 250, 3e-3, "float32", 64), "under two minutes on two idle CPU cores"
    ),
    "gpu": Preset(8, 512, 8, 1024, 32, 1000, 1.5e-3, "bfloat16", 256),
}


# --------------------------------------------------------------------------------------- model

Attention = Callable[[jax.Array, jax.Array, jax.Array, float, jax.Array], jax.Array]


def memeff_attention(query, key, value, dropout_rate, dropout_key):
    """Causal attention of ``[B, T, N, H]`` arrays through jax_memeff."""
    return jax_memeff.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key if dropout_rate > 0 else None,
    )


def jax_attention(query, key, value, dropout_rate, dropout_key):
    """Causal attention of ``[B, T, N, H]`` arrays through jax.nn, which has no dropout.

    On a GPU it uses cuDNN, the fastest path of jax.nn; its default keeps all scores in memory.
    """
    del dropout_rate, dropout_key
    implementation = "cudnn" if jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


ATTENTIONS: dict[str, Attention] = {"memeff": memeff_attention, "jax": jax_attention}


class Block(nnx.Module):
    """Self-attention and a feed-forward layer, each behind a norm and added to its input."""

    def __init__(self, preset: Preset, attention: Attention, rngs: nnx.Rngs):
        dtype = jnp.dtype(preset.dtype)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        # Each layer adds two terms to the residual stream. Scaling them keeps its variance
        # constant.
        small = nnx.initializers.normal(0.5 * (preset.width * preset.layers) ** -0.5)
        self.heads = preset.heads
        self.attention = attention
        self.norm_attention = nnx.RMSNorm(preset.width, dtype=dtype, rngs=rngs)
        self.qkv = linear(preset.width, 3 * preset.width)
        self.out = linear(preset.width, preset.width, kernel_init=small)
        self.norm_feed_forward = nnx.RMSNorm(preset.width, dtype=dtype, rngs=rngs)
        self.up = linear(preset.width, 4 * preset.width)
        self.down = linear(4 * preset.width, preset.width, kernel_init=small)

    def __call__(self, x: jax.Array, dropout_rate: float, dropout_key: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        qkv = qkv.reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (qkv[:, :, i] for i in range(3))
        query, key = (rotary_embedding(x, jnp.arange(length)) for x in (query, key))
        out = self.attention(query, key, value, dropout_rate, dropout_key)
        x = x + self.out(out.reshape(batch, length, width))
        return x + self.down(jax.nn.gelu(self.up(self.norm_feed_forward(x))))


class GPT(nnx.Module):
    """A causal language model over bytes: int32 ``[B, T]`` to float32 logits ``[B, T, 256]``."""

    def __init__(self, preset: Preset, attention: Attention, rngs: nnx.Rngs):
        dtype = jnp.dtype(preset.dtype)
        init = nnx.initializers.normal(preset.width**-0.5)
        self.embed = nnx.Embed(
            VOCABULARY, preset.width, dtype=dtype, embedding_init=init, rngs=rngs
        )
        self.blocks = nnx.List([Block(preset, attention, rngs) for _ in range(preset.layers)])
        self.norm = nnx.RMSNorm(preset.width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, dropout_rate: float, dropout_key: jax.Array) -> jax.Array:
        # A product with one-hot vectors, because the gradient of a lookup would add all rows of a
        # batch to the 256 rows of the table one by one.
        embedding = jnp.asarray(self.embed.embedding, self.embed.dtype)
        x = jax.nn.one_hot(tokens, VOCABULARY, dtype=self.embed.dtype) @ embedding
        for layer, block in enumerate(self.blocks):
            x = block(x, dropout_rate, jax.random.fold_in(dropout_key, layer))
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


# ------------------------------------------------------------------------------------ training


class Trainer:
    """Parameters, optimizer state and the compiled steps of one run."""

    def __init__(self, preset: Preset, attention: str, seed: int, steps: int, dropout: float):
        model = GPT(preset, ATTENTIONS[attention], nnx.Rngs(seed))
        self.graph, self.parameters = nnx.split(model, nnx.Param)
        self.dropout = dropout
        self.key = jax.random.key(seed)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, preset.learning_rate, max(1, steps // 20), max(2, steps), preset.learning_rate / 20
        )
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
        )
        self.state = self.optimizer.init(self.parameters)
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1))
        self._loss = jax.jit(functools.partial(self._mean_loss, dropout=0.0))

    def _mean_loss(self, parameters, tokens, key, dropout):
        model = nnx.merge(self.graph, parameters)
        logits = model(tokens[:, :-1], dropout, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def _train_step(self, parameters, state, tokens, key):
        loss, gradients = jax.value_and_grad(self._mean_loss)(parameters, tokens, key, self.dropout)
        updates, state = self.optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    def step(self, index: int, tokens: np.ndarray) -> jax.Array:
        """One update; returns its loss, still on the device."""
        key = jax.random.fold_in(self.key, index)
        self.parameters, self.state, loss = self._step(self.parameters, self.state, tokens, key)
        return loss

    def validate(self, text: np.ndarray, preset: Preset) -> float:
        """Mean loss over the validation windows, in nats per byte."""
        windows = validation_batches(text, preset.batch, preset.context, preset.validation_windows)
        sums = [self._loss(self.parameters, w, self.key) * len(w) for w in windows]
        return float(sum(sums)) / preset.validation_windows

    def sample(self, prompt: bytes, length: int, temperature: float = 0.7) -> str:
        """Continue ``prompt`` byte by byte until the text has ``length`` bytes."""
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(prompt)] = list(prompt)

        def extend(position, carry):
            tokens, key = carry
            key, draw = jax.random.split(key)
            # The model is causal: it does not see the zeros at this position and after it.
            logits = nnx.merge(self.graph, parameters)(tokens, 0.0, draw)[0, position - 1]
            byte = jax.random.categorical(draw, logits / temperature)
            return tokens.at[0, position].set(byte), key

        parameters = self.parameters
        generate = jax.jit(lambda t, k: jax.lax.fori_loop(len(prompt), length, extend, (t, k))[0])
        return bytes(np.asarray(generate(tokens, self.key))[0].tolist()).decode(
            errors="backslashreplace"
        )


ESTIMATE_AFTER = 10
"""Steps after which the remaining time is printed; the bar shows it on terminals only."""


def train(
    trainer: Trainer,
    preset: Preset,
    steps: int,
    seed: int,
    on_validation: Callable[[dict], object] = lambda result: None,
) -> dict:
    """Run ``steps`` updates with a progress bar; returns losses, validation losses and timing.

    ``on_validation`` is called after each validation, with these values for the steps so far.
    """
    train_text, validation_text = standard_library_text()
    stream = batches(train_text, preset.batch, preset.context, seed)
    every = -(-steps // 6)
    losses: list[jax.Array] = []
    validation = [(0, trainer.validate(validation_text, preset))]
    seconds = 0.0

    def result() -> dict:
        trained = (len(losses) - 1) * preset.batch * preset.context
        return {
            "losses": [float(loss) for loss in losses],
            "validation": validation,
            "final_validation_loss": validation[-1][1],
            "unigram_entropy": unigram_entropy(validation_text),
            "tokens_per_second": trained / max(seconds, 1e-9),
            "training_bytes": int(train_text.size),
            "validation_bytes": int(validation_text.size),
        }

    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  validation {task.fields[validation]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=steps, loss=np.nan, validation=validation[0][1], rate=0)
        start = time.perf_counter()
        for index in range(steps):
            losses.append(trainer.step(index, next(stream)))
            if index == 0:
                # The clock starts after the first step, because compilation is not throughput.
                losses[0].block_until_ready()
                start = time.perf_counter()
            if (index + 1) % 10 == 0 or index + 1 == steps:
                loss = float(losses[-1])
                elapsed = seconds + time.perf_counter() - start
                rate = index * preset.batch * preset.context / elapsed
                progress.update(task, completed=index + 1, loss=loss, rate=rate)
                if index + 1 == ESTIMATE_AFTER < steps:
                    left = elapsed / index * remaining_steps(preset, steps, every)
                    progress.console.print(f"expected: {left:.0f} seconds more at this rate")
            if (index + 1) % every == 0 or index + 1 == steps:
                losses[-1].block_until_ready()
                seconds += time.perf_counter() - start
                validation.append((index + 1, trainer.validate(validation_text, preset)))
                progress.update(task, validation=validation[-1][1])
                on_validation(result())
                start = time.perf_counter()
    return result()


def remaining_steps(preset: Preset, steps: int, every: int) -> float:
    """The cost of the steps after the estimate and of all validations, in training steps.

    A validation window costs a third of a training window, which also has a backward.
    """
    validation = -(-steps // every) * preset.validation_windows / preset.batch / 3
    return steps - ESTIMATE_AFTER + validation


# -------------------------------------------------------------------------------------- output


def plot(result: dict, title: str, path: Path) -> None:
    """Draw training and validation loss against the unigram entropy."""
    losses = np.asarray(result["losses"])
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, losses.size + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.6, linewidth=1, label="training loss")
    axes.plot(*zip(*result["validation"], strict=True), "o-", color="tab:red", label="validation")
    entropy = result["unigram_entropy"]
    axes.axhline(entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.axhline(TARGET * entropy, color="gray", linestyle=":", label=f"{TARGET:.0%} of it")
    axes.set(xlabel="step", ylabel="nats per byte", title=title)
    axes.set_ylim(0, max(losses.max(), result["validation"][0][1]) * 1.05)
    axes.legend()
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; the preset's name and number of steps are filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--attention", choices=sorted(ATTENTIONS), default="memeff")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: by platform")
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dropout", type=float, default=0.0, help="of the attention probabilities; memeff only"
    )
    parser.add_argument("--output", type=Path, default=Path("train_gpt_output"))
    options = parser.parse_args(arguments)
    options.preset = options.preset or ("gpu" if jax.default_backend() == "gpu" else "cpu")
    options.steps = PRESETS[options.preset].steps if options.steps is None else options.steps
    if options.steps < 1:
        parser.error(f"--steps: expected at least 1, got {options.steps}")
    if options.dropout > 0 and options.attention == "jax":
        parser.error("--dropout needs --attention memeff: jax.nn's attention has no dropout")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train, report, write the files; returns the exit status."""
    options = parse(arguments)
    preset = PRESETS[options.preset]
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    trainer = Trainer(preset, options.attention, options.seed, options.steps, options.dropout)
    count = sum(leaf.size for leaf in jax.tree.leaves(trainer.parameters))
    print(f"{count:,} parameters, preset {options.preset}, attention {options.attention}")
    expected = preset.expected if options.steps == preset.steps else Preset.expected
    print(f"{options.steps} steps, expected time: {expected}", flush=True)
    setting = {name: value for name, value in vars(options).items() if name != "output"}
    title = f"byte-level GPT on the standard library, {options.attention} attention"

    def save(result: dict) -> dict:
        """Write the losses so far and their curve; returns all that is known."""
        result = {**setting, **result, "seconds": time.perf_counter() - began}
        plot(result, title, options.output / "loss.png")
        (options.output / "losses.json").write_text(json.dumps(result) + "\n")
        return result

    result = train(trainer, preset, options.steps, options.seed, save)
    sample = trainer.sample(b"def ", preset.context)
    (options.output / "sample.txt").write_text(sample + "\n", encoding="utf-8")
    result = save(result)

    final, entropy = result["final_validation_loss"], result["unigram_entropy"]
    met = final <= TARGET * entropy
    print(f"\n--- sample ---\n{sample}\n--------------")
    print(f"unigram entropy       {entropy:.4f} nats per byte")
    print(f"validation loss       {final:.4f} nats per byte, {1 - final / entropy:.1%} below it")
    print(f"throughput            {result['tokens_per_second']:,.0f} tokens per second")
    if not met:
        print(f"target missed: expected at most {TARGET * entropy:.4f}, got {final:.4f}")
    listed = ("losses", "validation")
    print(json.dumps({name: value for name, value in result.items() if name not in listed}))
    return 0 if met or options.steps < preset.steps else 1


if __name__ == "__main__":
    sys.exit(main())
